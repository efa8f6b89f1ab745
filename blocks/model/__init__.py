"""The modules of a model: stack, layer, MLPs, losses and compilation. Their configs are in `blocks.spec`."""
