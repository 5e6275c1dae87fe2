"""Small random models of every family, for tests and for trying things out."""
