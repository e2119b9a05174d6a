"""The HTTP endpoints of `serve` for probes: `app`. Imports no torch."""
