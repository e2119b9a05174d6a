"""Everything between a config and READY: the engine is built, and warmed up."""
