"""Training and evaluation on several devices: context parallelism."""
