"""Trained predictors, `apexk.predictor/1`: what a layer will be asked for, from what the layers before and the steps before were asked for.

A trace holds no hidden states, so neither does a predictor ask for any: its inputs are token loads, which a policy sees in a
simulation and in a model alike. A load becomes its *lift*, 0 where an expert has the mean load:

    lift(n) = log((n + 1/2) / (tokens * topk / E + 1/2))

Both kinds give each expert's chance to be one of a token's top-k, `p = sigmoid(z)`; `tokens * p` is the expected load.

linear, from the loads x of the layer `distance` before:

    z[l] = at[l,0] + at[l,1]*standing[l] + at[l,2]*router + at[l,3]*last + at[l,4]*recent + (lift(x) @ down[l]) @ up[l]

`standing` is the training split's popularity as a lift, `router` the later layer's own router asked early (lift of the loads
that it names; 0 where there is none), `last` the layer's lift in the step before, `recent` its mean over the steps before
(weight 1/5 of the newest).

recurrent, a gated unit (GRU, in torch's order of gates: reset, update, new) that runs over an expert's steps, the same for every expert:

    z[l] = at[l,0] + at[l,1]*standing[l] + at[l,2]*router + at[l,3]*last + at[l,4]*recent + state @ out

One file, `.npz`: `meta` (JSON: schema, kind, model, layers, experts, top_k, distance, trained) and the float32 arrays of `ARRAYS`. The only
file of this room that uses numpy: a matrix of 256 experts is too much for plain Python between two layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from apexk.inputs import reading
from apexk.outputs import writing

from .types import ModelShape

if TYPE_CHECKING:
    import numpy as np

SCHEMA = "apexk.predictor/1"
KEEP = 0.8  # of `recent`, a step
LARGEST = 1e6  # value of an array
#: kind -> array -> axes: layers L, experts E, rank R of the bottleneck, state H, 5 coefficients, gates 3H
ARRAYS = {
    "linear": {"at": "L5", "standing": "LE", "down": "LER", "up": "LRE"},
    "recurrent": {"at": "L5", "standing": "LE", "w_in": "G", "w_state": "GH", "b_in": "G", "b_state": "G", "out": "H"},
}
DISTANCES = {"linear": 2, "recurrent": 1}  # layers between what is known and what is predicted


class Predictor:
    """A trained predictor and what it remembers of a run. Made by `read`; `reset` begins a run."""

    def __init__(self, meta: dict, arrays: Mapping[str, np.ndarray], source: str = "memory"):
        self.meta, self.arrays, self.source = meta, dict(arrays), source
        _validate(self)
        self.kind, self.layers, self.experts, self.distance = meta["kind"], meta["layers"], meta["experts"], meta["distance"]

    def require(self, shape: ModelShape) -> None:
        """Raises ValueError unless it was trained for models of this shape."""
        if (self.layers, self.experts, self.meta["top_k"]) != (shape.layers, shape.experts, shape.topk):
            raise ValueError(f"predictor {self.source} is for {self.layers} layers of {self.experts} experts, {self.meta['top_k']} a token ({self.meta['model']}), "
                             f"the model has {shape.layers} of {shape.experts}, {shape.topk} a token")

    def reset(self, topk: int) -> None:
        """Forgets every step."""
        import numpy as np

        self.topk = topk
        self.last, self.recent = (np.zeros((self.layers, self.experts), np.float32) for _ in range(2))
        if self.kind == "recurrent":
            self.state = np.zeros((self.layers, self.experts, len(self.arrays["out"])), np.float32)

    def learn(self, layer: int, loads: Mapping[int, int]) -> None:
        """A layer's loads of a finished step."""
        lift = self._lift(loads, sum(loads.values()) / self.topk)
        self.last[layer] = lift
        self.recent[layer] = KEEP * self.recent[layer] + (1 - KEEP) * lift
        if self.kind == "recurrent":
            self.state[layer] = gated(self.arrays, self.state[layer], lift)

    def chances(self, layer: int, tokens: float, router: Mapping[int, int] | None, seen: Mapping[int, int] | None = None) -> np.ndarray:
        """Each expert's chance `[E]` to be one of a token's top-k in `layer`, of a step of `tokens` tokens.

        `router` are the loads that the layer's own router names, `seen` the loads of the layer `distance` before (linear only).
        """
        import numpy as np

        a = self.arrays
        at = a["at"][layer]
        z = at[0] + at[1] * a["standing"][layer] + at[3] * self.last[layer] + at[4] * self.recent[layer]
        if router is not None:
            z = z + at[2] * self._lift(router, tokens)
        if self.kind == "linear":
            z = z + (self._lift(seen, tokens) @ a["down"][layer]) @ a["up"][layer]
        else:
            z = z + self.state[layer] @ a["out"]
        return 1 / (1 + np.exp(-z))

    def _lift(self, loads: Mapping[int, int], tokens: float) -> np.ndarray:
        import numpy as np

        counts = np.zeros(self.experts, np.float32)
        counts[list(loads)] = list(loads.values())
        return lift(counts, tokens, self.topk)


def lift(counts: np.ndarray, tokens, topk: int) -> np.ndarray:
    """`counts [..., E]` of steps of `tokens [...]` tokens -> log of load over mean load, half a token added to both; float32."""
    import numpy as np

    mean = np.asarray(tokens, np.float32)[..., None] * topk / counts.shape[-1]
    return np.log((counts + 0.5) / (mean + 0.5)).astype(np.float32)


def gated(arrays: Mapping[str, np.ndarray], state: np.ndarray, x: np.ndarray) -> np.ndarray:
    """One step of the unit: `state [..., H]`, `x [...]` -> the next state."""
    import numpy as np

    r_in, u_in, n_in = np.split(x[..., None] * arrays["w_in"] + arrays["b_in"], 3, -1)
    r_st, u_st, n_st = np.split(state @ arrays["w_state"].T + arrays["b_state"], 3, -1)
    reset, update = 1 / (1 + np.exp(-(r_in + r_st))), 1 / (1 + np.exp(-(u_in + u_st)))
    return (1 - update) * np.tanh(n_in + reset * n_st) + update * state


def active(chances: np.ndarray, tokens: float) -> float:
    """How many experts are expected to have a token, each of `tokens` tokens choosing by itself."""
    return float((1 - (1 - chances) ** tokens).sum())


def above(chances: np.ndarray, tokens: float, theta: float) -> list[int]:
    """Experts whose expected load is above `theta` times the mean of those expected to be active, heaviest first, ties by lower id."""
    limit = theta * float(chances.sum()) * tokens / max(1.0, active(chances, tokens))
    return [e for e in (-chances).argsort(kind="stable").tolist() if chances[e] * tokens > limit]


def write(predictor: Predictor, path: str | Path) -> Path:
    """Writes one `.npz`, whole or not at all."""
    import numpy as np

    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"predictor {path}: the name must end in .npz")
    with writing(path) as part, part.open("wb") as out:
        np.savez_compressed(out, meta=np.array(json.dumps(predictor.meta)), **predictor.arrays)
    return path


def read(path: str | Path, kind: str) -> Predictor:
    """Reads and checks a predictor of this kind. Raises ValueError with the file and its fault, FileNotFoundError."""
    import numpy as np

    if not isinstance(path, (str, Path)):
        raise ValueError(f"predictor is {path!r}; wanted the path of a file that `apexk train-predictor --kind {kind}` wrote")
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"predictor: there is no file {path}; `apexk train-predictor --kind {kind}` writes one")
    with reading(path, "a predictor"), np.load(path, allow_pickle=False) as data:
        found = {name: data[name] for name in data.files}
    with reading(path, "a predictor, by its meta"):
        meta = json.loads(str(found.pop("meta")))
    with reading(path, "a predictor"):
        made = Predictor(meta, found, str(path))
    if made.kind != kind:
        raise ValueError(f"predictor {path} is of kind {made.kind!r}, wanted {kind!r}: train one by `apexk train-predictor --kind {kind}`")
    return made


def _validate(made: Predictor) -> None:
    import numpy as np

    def fail(what: str):
        raise ValueError(f"predictor {made.source}: {what}")

    meta, arrays = made.meta, made.arrays
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA:
        fail(f"schema is {meta.get('schema') if isinstance(meta, dict) else meta!r}, wanted {SCHEMA!r}")
    if meta.get("kind") not in ARRAYS:
        fail(f"kind is {meta.get('kind')!r}; there are {', '.join(ARRAYS)}")
    for key in ("layers", "experts", "top_k", "distance"):
        if type(meta.get(key)) is not int or meta[key] < 1:
            fail(f"meta.{key} is {meta.get(key)!r}, wanted a whole number, at least 1")
    if meta["distance"] != DISTANCES[meta["kind"]]:
        fail(f"meta.distance is {meta['distance']}, a {meta['kind']} one looks {DISTANCES[meta['kind']]} ahead")
    if not isinstance(meta.get("model"), str):
        fail(f"meta.model is {meta.get('model')!r}, wanted a name")
    wanted = ARRAYS[meta["kind"]]
    if arrays.keys() != wanted.keys():
        fail(f"holds {', '.join(sorted(arrays)) or 'no arrays'}; wanted {', '.join(wanted)}")
    state = arrays["out"].size if "out" in arrays else 0
    rank = arrays["down"].shape[-1] if "down" in arrays and arrays["down"].ndim else 0
    sizes = {"L": meta["layers"], "E": meta["experts"], "5": 5, "R": rank, "H": state, "G": 3 * state}
    for name, axes in wanted.items():
        shape = [sizes[axis] for axis in axes]
        if list(arrays[name].shape) != shape:
            fail(f"{name} has shape {list(arrays[name].shape)}, wanted [{', '.join(axes)}] = {shape}")
        if arrays[name].dtype != np.float32:
            fail(f"{name} is {arrays[name].dtype}, wanted float32")
        if not (np.abs(arrays[name]) <= LARGEST).all():  # NaN neither
            fail(f"{name} holds what is not finite, or beyond {LARGEST:g}: sums of it would overflow")
