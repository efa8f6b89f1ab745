"""A plug-in for deltazoo: the backend "prefix" and the mixer "decayed_deltanet"."""
