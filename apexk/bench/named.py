"""What `--model` names, as far as it can be looked at without torch and transformers: they take seconds to load, and a slip of the pen is told at once."""

from __future__ import annotations

import json
from pathlib import Path

from apexk.inputs import reading
from apexk.testing.shapes import shape_of, shapes

DTYPES = ("float32", "bfloat16", "float16")


def check_model(name: str, *, dtype: str | None = None, layers: int | None = None, changed: bool = False) -> None:
    """Raises ValueError or FileNotFoundError, which say what there is, unless `open_model` could begin to open it."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; there are {', '.join(DTYPES)}")
    if name.startswith("random:"):
        shape_of(name.removeprefix("random:"), layers)
        return
    if layers is not None or changed:
        raise ValueError(f"layers or changes came for {name!r}, which has its own: only random:SHAPE can be changed")
    if name == "demo":
        return
    if not (Path(name) / "config.json").is_file():
        raise FileNotFoundError(f"{name}: no folder with a config.json; wanted one, or demo, or random:SHAPE (apexk fit lists shapes)")
    _check_config(Path(name) / "config.json")


def check_shape(name: str) -> None:
    """The same of what `apexk fit` and `apexk plan` take: a folder, or a shape's name alone."""
    folder = Path(name)
    if not folder.is_dir():
        if name.lower() not in shapes():
            raise ValueError(f"{name}: no such folder, and no known shape; there are {', '.join(shapes())}")
    elif not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name} holds no config.json")
    else:
        _check_config(folder / "config.json")


def _check_config(path: Path) -> None:
    with reading(path, "a model's configuration"):
        if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            raise ValueError(f"{path} holds no JSON object; wanted a model's configuration")
