"""apexk runs Mixture-of-Experts models whose experts do not fit on the GPU.

    handle = apexk.swap(model, apexk.ApexConfig(policy="apex", pool=12))
    ...                     # model.generate(...) as before
    handle.restore()

Importing this package imports neither torch nor Triton and starts nothing; names are loaded at first use.
"""

import importlib

__version__ = "0.1.0"

_WHERE = {
    "ApexConfig": "apexk.config",
    "Handle": "apexk.hf.handle",
    "UnsupportedModel": "apexk.hf.inspect",
    "load": "apexk.hf.loader.load",
    "popularity": "apexk.hf.popularity",
    "register": "apexk.hf.implementation",
    "restore": "apexk.hf.swap",
    "swap": "apexk.hf.swap",
}
__all__ = ["__version__", *_WHERE]


def __getattr__(name):
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'apexk' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
