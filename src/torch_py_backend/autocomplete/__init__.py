"""Completes the inputs and outputs that config.pbtxt lacks, by runs of the model."""
