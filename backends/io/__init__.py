"""Errors, frozen configs, YAML text, output paths and progress reports. Nothing here computes or knows a spec."""
