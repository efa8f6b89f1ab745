"""What every mixer is built on: Mixer, DeltaMixer, states, sequences, configs and layer patterns."""
