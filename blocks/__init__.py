"""Floor 2: residual blocks, patterns, stacks, language models, states and generation."""
