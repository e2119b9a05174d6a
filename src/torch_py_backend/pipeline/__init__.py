"""What runs for each batch: stages that are chosen at load. It reads no option of a config."""
