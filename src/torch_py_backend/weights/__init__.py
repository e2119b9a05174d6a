"""One copy of the weights for all instances of a server, and weights replaced while serving."""
