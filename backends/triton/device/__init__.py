"""Device functions that kernels of several families share. Kernels are in the folders of their families."""
