"""A plug-in for deltazoo: the backend "prefix" and the mixer "fading_deltanet"."""
