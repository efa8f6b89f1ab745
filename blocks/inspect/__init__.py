"""Inspection: catalog, details of one entry, costs of a model, benchmarks, tuning, diagnosis and JSON Schema."""
