"""What forward() takes and returns as a call tree, and tensor names bound to its leaves."""
