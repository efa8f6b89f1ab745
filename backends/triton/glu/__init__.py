"""The elementwise part of a gated MLP. Its matrix products are torch's."""
