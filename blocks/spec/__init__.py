"""The model as a value: StackSpec, patterns, parsing and presets. Modules are in `blocks.model`."""
