"""Loaders: one for each artifact type, with weights and device maps.

A loader calls the model only to probe the limits of an AOTInductor package.
"""
