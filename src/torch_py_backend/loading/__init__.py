"""Finds the model file and loads it: one loader for each artifact type, with its weights.

A loader calls the model only to learn whether an AOTInductor package takes a single row.
"""
