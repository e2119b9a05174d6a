"""Building an engine from a config, and warming it up before READY."""
