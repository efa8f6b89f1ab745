"""The short convolution and its kernels. Token shifts and long convolutions are in plain torch."""
