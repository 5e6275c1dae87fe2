"""Random models for tests and for trying things out: tiny ones of every family, and real shapes at reduced depth."""

import importlib

_WHERE = {"random_model": "apexk.testing.real", "shapes": "apexk.testing.shapes"}
__all__ = list(_WHERE)


def __getattr__(name):
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'apexk.testing' has no attribute {name!r}")
