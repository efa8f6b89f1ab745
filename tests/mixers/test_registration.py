"""A mixer is registered in one place, its entry point."""

import deltazoo
from deltazoo import mixers


def test_every_registered_mixer_can_be_imported() -> None:
    for name in dir(mixers):
        value = getattr(mixers, name)
        assert getattr(value, "__module__", value.__name__).startswith("deltazoo.mixers.")
    assert {"GatedDeltaNet", "GatedEFLA", "Place", "conformance", "parse"} <= set(dir(mixers))
    assert deltazoo.MixerConfig is mixers.MixerConfig
