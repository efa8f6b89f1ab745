"""RMS norm and its gated forms. Norms inside the fused decode step are in `decode`."""
