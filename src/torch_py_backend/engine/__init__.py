"""The path of a batch through a loaded model, and what happens when a call fails."""
