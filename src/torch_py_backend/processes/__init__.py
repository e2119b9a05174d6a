"""Child processes, locks between the instances of a server, instance status, orphan cleanup.

Imports no torch.
"""
