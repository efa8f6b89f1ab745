"""The delta rule with momentum: two coupled states that pass from chunk to chunk."""
