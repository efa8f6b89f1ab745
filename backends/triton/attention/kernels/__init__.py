"""Flash attention kernels: tiles and the online softmax, then one phase per file."""
