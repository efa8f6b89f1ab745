"""Floor 3: the command line. Every command parses, calls one library function and prints."""
