"""Child processes, private files and locks, instance status. Imports no torch."""
