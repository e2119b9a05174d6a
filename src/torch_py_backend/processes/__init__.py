"""Child processes, private files and locks, instance status, orphan cleanup.

Imports no torch.
"""
