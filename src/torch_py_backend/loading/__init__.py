"""Finds the model file and loads it: one loader for each artifact type, with its weights."""
