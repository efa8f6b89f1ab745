"""Generation: decoding, sampling and text completion."""
