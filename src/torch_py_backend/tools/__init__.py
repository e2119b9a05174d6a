"""What the commands do: init, check, tune, bench, profile, pack.

Used by `cli` only.
"""
