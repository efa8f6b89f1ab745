"""Errors, frozen configs, YAML text, output paths and progress reports. Nothing here computes or depends on a spec."""
