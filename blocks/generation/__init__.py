"""Generation: decoding, sampling and text completion. States are in `mixers.core`."""
