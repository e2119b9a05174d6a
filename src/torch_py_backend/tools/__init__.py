"""The work of the commands init, check, tune, bench, profile and pack."""
