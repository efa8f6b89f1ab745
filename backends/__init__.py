"""The bottom layer: the update specification and the backends that compute it. It contains no nn.Module."""
