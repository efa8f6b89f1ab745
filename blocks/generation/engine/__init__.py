"""An engine for many requests: pool of states, schedule, prefix reuse. Single batches are in the parent folder."""
