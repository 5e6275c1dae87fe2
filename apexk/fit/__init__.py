"""Whether and how a model fits this machine, before a weight is read."""
