"""What the commands do: check, tune, bench, profile, pack.

Used by `cli` only.
"""
