"""Names and hooks of other libraries around our operators and models: flash-linear-attention and transformers.

Nothing here is imported by the layers below, and another library is imported only by the module that serves it.
"""
