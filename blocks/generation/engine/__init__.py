"""An engine that decodes many requests at once: state pool, schedule, prefix reuse. Single batches are in the parent."""
