"""The work of the commands check, tune, bench, profile and pack.

Used by `cli` only.
"""
