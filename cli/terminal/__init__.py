"""Parts of the commands: options, tables, errors, streams and completion. A command is a file beside this folder."""
