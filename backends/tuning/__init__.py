"""The tuner of the triton backend's launches; it checks against the reference, so it stands beside the backends."""
