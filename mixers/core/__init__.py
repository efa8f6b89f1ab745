"""The base of every mixer: Mixer, DeltaMixer, states, sequences, configs and layer patterns."""
