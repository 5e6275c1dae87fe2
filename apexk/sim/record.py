"""Records the routing of a swapped model as a trace.

    recorder = Recorder(requests=8, experts=32, model="tiny")
    handle.engine.recorder = recorder
    model.generate(...)
    trace.write(recorder.trace(dataset="..."), "a.trace.npz")
"""

from __future__ import annotations

import numpy as np

from apexk.sim.trace import DECODE, PREFILL, SCHEMA, Trace


class Recorder:
    """Collects every layer's exact routing, and the following layers' routers on this layer's input as the predictions: as many
    as the model's policy looks ahead.

    `requests` is the batch size: row r*n+j of a pass is token j of request r, padding included, as the engine runs it.
    """

    def __init__(self, requests: int, experts: int, model: str):
        if requests < 1:
            raise ValueError(f"requests is {requests}; wanted the batch size")
        self.requests, self.experts, self.model = requests, experts, model
        self._passes: list[dict] = []
        self._seen = 0  # tokens of each request so far

    def __call__(self, at, rows, routers) -> None:
        """Called by the engine at each layer's routing event, with tensors in `rows`."""
        if at.layer == 0:
            self._passes.append({"phase": PREFILL if at.phase == "prefill" else DECODE, "ids": [], "weights": [], "guess": [], "guessed": [], "far": {}})
        if not self._passes:
            return  # recording began in the middle of a pass
        now = self._passes[-1]
        now["ids"].append(_array(rows.topk_ids, np.int16))
        now["weights"].append(_array(rows.topk_weights, np.float16))
        if at.layer == 0:
            now["guess"].append(np.full_like(now["ids"][0], -1))
            now["guessed"].append(np.zeros_like(now["weights"][0]))
        if routers:
            ids, weights = routers[0](rows.x)
            now["guess"].append(_array(ids, np.int16))
            now["guessed"].append(_array(weights, np.float16))
        for number, router in enumerate(routers[1:]):
            ids, weights = router(rows.x)
            now["far"][number, at.layer + 2 + number] = _array(ids, np.int16), _array(weights, np.float16)

    def trace(self, *, dataset: str = "", licence: str = "") -> Trace:
        """What was recorded, whole passes only. Raises ValueError if there is none, or the rows do not divide by `requests`."""
        layers = max((len(p["ids"]) for p in self._passes), default=0)
        whole = [p for p in self._passes if len(p["ids"]) == layers]
        if not whole:
            raise ValueError("nothing was recorded: run the model with the recorder in place")
        names = ("ids", "weights", "guess", "guessed", "ahead", "ahead_weights", "step", "request", "position", "phase")
        parts: dict[str, list[np.ndarray]] = {k: [] for k in names}
        far = max((number + 1 for p in whole for number, _ in p["far"]), default=0)
        seen = 0
        for number, one in enumerate(whole):
            tokens = one["ids"][0].shape[0]
            if tokens % self.requests:
                raise ValueError(f"a pass of {tokens} rows does not divide into {self.requests} requests")
            length = tokens // self.requests
            for key in ("ids", "weights", "guess", "guessed"):
                parts[key].append(np.stack(one[key], 1))
            ahead = np.full((tokens, far, *parts["ids"][-1].shape[1:]), -1, np.int16)
            ahead_weights = np.zeros(ahead.shape, np.float16)
            for (distance, layer), (ids, weights) in one["far"].items():
                ahead[:, distance, layer], ahead_weights[:, distance, layer] = ids, weights
            parts["ahead"].append(ahead)
            parts["ahead_weights"].append(ahead_weights)
            parts["step"].append(np.full(tokens, number, np.int32))
            parts["request"].append(np.repeat(np.arange(self.requests, dtype=np.int32), length))
            parts["position"].append(np.tile(np.arange(seen, seen + length, dtype=np.int32), self.requests))
            parts["phase"].append(np.full(tokens, one["phase"], np.uint8))
            seen += length
        joined = {key: np.concatenate(value) for key, value in parts.items()}
        meta = {"schema": SCHEMA, "model": self.model, "experts": self.experts, "top_k": joined["ids"].shape[2], "layer_ids": list(range(layers)),
                "dataset": dataset, "seed": None, "generator": None, "licence": licence}
        return Trace(joined["ids"], joined["step"], joined["request"], joined["position"], joined["phase"], meta, joined["weights"],
                     joined["guess"], joined["guessed"], **({"ahead_experts": joined["ahead"], "ahead_weights": joined["ahead_weights"]} if far else {}), source=f"recorded from {self.model}")


def _array(tensor, dtype) -> np.ndarray:
    return tensor.detach().cpu().float().numpy().astype(dtype)
