"""A model's files loaded into memory: one loader per artifact type, weights, device maps.

Loads, and calls the model only to probe a package's limits.
"""
