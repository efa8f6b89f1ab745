"""The tuner of the triton backend's launches; it checks candidates against the float64 reference."""
