"""The work of the commands init, check and tune."""
