"""Decoding: one token or a draft per call, alone or fused with the parts before the update. Prefill is `chunk`."""
