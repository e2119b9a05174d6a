"""Loaders: one for each artifact type, with weights and device maps.

A loader calls the model only to learn whether an AOTInductor package takes a single row.
"""
