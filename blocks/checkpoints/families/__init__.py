"""Families of models in folders of transformers, one file per family or for its close relatives."""
