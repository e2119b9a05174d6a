"""The work of the commands init, check, tune, bench, profile, pack and export-compiled."""
