"""Loads a checkpoint whose experts are larger than they should ever be twice: straight from the files into the host store."""
