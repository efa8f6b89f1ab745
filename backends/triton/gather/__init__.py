"""A gather of small tensors over the GPUs of a host, by one kernel."""
