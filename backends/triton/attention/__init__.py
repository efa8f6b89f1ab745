"""Flash kernels of softmax attention with forget gates (FoX) and with Householder matrices (PaTH)."""
