"""Routing traces from a latent-score model, for when no recorded ones are at hand.

Score of expert e for token r in layer l at step s, all terms unit normal:

    sqrt(fp)*pop[l,e] + sqrt(fs)*shared[s,l,e] + sqrt(fr)*req[s,l,r,e] + sqrt(ft)*noise        fp+fs+fr+ft = 1

`shared` (the batch's topic) and `req` are first-order autoregressive over steps; a token takes its top-k scores. Layers
differ: the logit of fs/(fr+ft) is shifted by layer_sd*N(0,1). The next-layer prediction sees the score plus an error
common to the batch (pred_s) and one per token (pred_tok); a prediction over d layers sees d such errors, each drawn anew (an
assumption: nothing published tells how recall falls with distance for these models). Presets are fitted to the set sizes, load shares and skew
that the Apex paper's text gives; see `apexk paper fig3a` for what they give back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from apexk.sim.trace import DECODE, PREFILL, SCHEMA, Trace

PROFILE_TOKENS = 1200  # calibration tokens a layer, drawn apart from the trace


@dataclass(frozen=True)
class Routing:
    """Shares and correlations of the score's terms; see the module."""

    fp: float = 0.05
    fs: float = 0.80
    fr: float = 0.075
    ft: float = 0.075
    rho_s: float = 0.70
    rho_r: float = 0.9
    layer_sd: float = 0.7
    pred_s: float = 0.15
    pred_tok: float = 0.10

    def __post_init__(self):
        total = self.fp + self.fs + self.fr + self.ft
        if abs(total - 1) > 1e-9 or min(self.fp, self.fs, self.fr, self.ft) < 0:
            raise ValueError(f"fp + fs + fr + ft is {total:g}; wanted 1, none negative")


PRESETS = {
    "mmlu-like": Routing(),
    "sticky": Routing(rho_s=0.90),
    "diverse-tokens": Routing(fs=0.60, fr=0.175, ft=0.175),
}


@dataclass(frozen=True)
class Shape:
    """The MoE part of a model as a trace needs it."""

    name: str = "Qwen3.5-35B-A3B"
    layers: int = 40
    experts: int = 256
    topk: int = 8


#: the paper's models; layers count MoE layers
MODELS = {
    "qwen3_5": Shape(),
    "qwen3_next": Shape("Qwen3-Next-80B-A3B-Instruct", 48, 512, 10),
    "glm_4_5_air": Shape("GLM-4.5-Air", 45, 128, 8),
}


def generate(preset: str | Routing = "mmlu-like", *, shape: Shape = MODELS["qwen3_5"], batch: int = 16, steps: int = 60, seed: int = 0,
             phase: str = "decode", look_ahead: int = 1, watch: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None) -> Trace:
    """`batch` tokens a step for `steps` steps. With phase "prefill" a step is one pass over `batch` new tokens.

    Each layer is predicted from the `look_ahead` layers before it; what is drawn does not depend on how many.
    `watch(popular [L, E], shared [L, E], requests [L, B, E])` is called in each step with the score's lasting parts as they
    are then, scaled as they enter the score: what nobody who only sees routing can know.
    The popularity term, the layers' differences and the calibration counts depend on `seed` alone, not on the batch.
    """
    if isinstance(preset, str):
        if preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
        name, r = preset, PRESETS[preset]
    else:
        name, r = "custom", preset
    for what, value in (("batch", batch), ("steps", steps), ("look_ahead", look_ahead)):
        if value < 1:
            raise ValueError(f"{what} is {value}; wanted at least 1")
    if phase not in ("prefill", "decode"):
        raise ValueError(f"phase is {phase!r}; there are 'prefill' and 'decode'")
    if not 1 <= shape.topk <= shape.experts or shape.experts > np.iinfo(np.int16).max:
        raise ValueError(f"top-{shape.topk} of {shape.experts} experts: wanted 1 <= top-k <= experts <= 32767")

    layers, experts, topk = shape.layers, shape.experts, shape.topk
    model = np.random.default_rng([seed, 0])
    popular = np.sqrt(r.fp, dtype=np.float32) * model.standard_normal((layers, experts), dtype=np.float32)
    own, shared_share = _layer_shares(r, model.standard_normal(layers))
    profile = _profile(popular, r, topk, model)

    draw = np.random.default_rng([seed, 1, batch, PREFILL if phase == "prefill" else DECODE])
    shared = _normal(draw, layers, experts)
    requests = _normal(draw, layers, batch, experts)
    routed = np.empty((steps, batch, layers, topk), np.int16)
    predicted = np.full((steps, batch, layers, topk), -1, np.int16)
    weights, guessed = np.empty(routed.shape, np.float16), np.zeros(routed.shape, np.float16)
    far = np.random.default_rng([seed, 2, batch, PREFILL if phase == "prefill" else DECODE])
    ahead = np.full((steps, batch, look_ahead - 1, layers, topk), -1, np.int16)
    ahead_weights = np.zeros(ahead.shape, np.float16)
    for s in range(steps):
        if s:
            shared = r.rho_s * shared + np.float32(np.sqrt(1 - r.rho_s**2)) * _normal(draw, layers, experts)
            rho = r.rho_r if phase == "decode" else 0.0  # each pass of a prefill brings new tokens
            requests = rho * requests + np.float32(np.sqrt(1 - rho**2)) * _normal(draw, layers, batch, experts)
        if watch is not None:
            watch(popular, shared_share * shared, np.sqrt(r.fr) * own * requests)
        score = popular[:, None] + (shared_share * shared)[:, None]
        score = score + np.sqrt(r.fr) * own * requests + np.sqrt(r.ft) * own * _normal(draw, layers, batch, experts)
        guess = score[1:] + r.pred_s * _normal(draw, layers - 1, 1, experts) + r.pred_tok * _normal(draw, layers - 1, batch, experts)
        routed[s], weights[s] = _top(score, topk)
        if layers > 1:
            predicted[s, :, 1:], guessed[s, :, 1:] = _top(guess, topk)
        for first in range(2, min(look_ahead, layers - 1) + 1):
            guess = guess[1:] + r.pred_s * _normal(far, layers - first, 1, experts) + r.pred_tok * _normal(far, layers - first, batch, experts)
            ahead[s, :, first - 2, first:], ahead_weights[s, :, first - 2, first:] = _top(guess, topk)

    tokens = steps * batch
    flat = (tokens, layers, topk)
    prefill = phase == "prefill"
    return Trace(
        routed_experts=routed.reshape(flat), routed_weights=weights.reshape(flat),
        predicted_experts=predicted.reshape(flat), predicted_weights=guessed.reshape(flat),
        ahead_experts=ahead.reshape(tokens, *ahead.shape[2:]) if look_ahead > 1 else None,
        ahead_weights=ahead_weights.reshape(tokens, *ahead.shape[2:]) if look_ahead > 1 else None,
        step=np.repeat(np.arange(steps, dtype=np.int32), batch),
        request=np.zeros(tokens, np.int32) if prefill else np.tile(np.arange(batch, dtype=np.int32), steps),
        position=np.arange(tokens, dtype=np.int32) if prefill else np.repeat(np.arange(steps, dtype=np.int32), batch),
        phase=np.full(tokens, PREFILL if prefill else DECODE, np.uint8),
        profile_counts=profile,
        meta={
            "schema": SCHEMA, "model": shape.name, "experts": experts, "top_k": topk, "layer_ids": list(range(layers)),
            "dataset": f"synthetic {name}", "seed": seed, "generator": {"preset": name, **asdict(r)}, "licence": "CC0-1.0",
        },
        source=f"{name} seed {seed} batch {batch}",
    )  # fmt: skip


def changed(preset: str, **values: float) -> Routing:
    """A preset with some of its numbers replaced."""
    return replace(PRESETS[preset], **values)


def _normal(draw: np.random.Generator, *shape: int) -> np.ndarray:
    return draw.standard_normal(shape, dtype=np.float32)


def _layer_shares(r: Routing, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale on the per-token terms [L,1,1], sqrt of the shared term's variance [L,1]); each layer's variances sum to 1."""
    rest = r.fr + r.ft
    if rest == 0 or r.fs == 0:
        return np.ones((len(z), 1, 1), np.float32), np.full((len(z), 1), np.sqrt(r.fs), np.float32)
    logit = np.log(r.fs / rest) + r.layer_sd * z
    fs = (r.fs + rest) / (1 + np.exp(-logit))
    own = np.sqrt((r.fs + rest - fs) / rest)
    return own.astype(np.float32)[:, None, None], np.sqrt(fs).astype(np.float32)[:, None]


def _profile(popular: np.ndarray, r: Routing, topk: int, draw: np.random.Generator) -> np.ndarray:
    layers, experts = popular.shape
    counts = np.zeros((layers, experts), np.int64)
    for layer in range(layers):
        score = popular[layer] + np.float32(np.sqrt(1 - r.fp)) * _normal(draw, PROFILE_TOKENS, experts)
        counts[layer] = np.bincount(np.argpartition(score, -topk, axis=-1)[:, -topk:].ravel(), minlength=experts)
    return counts


def _top(score: np.ndarray, topk: int) -> tuple[np.ndarray, np.ndarray]:
    """`score [L, B, E]` -> (ids, softmax weights within the top-k), both `[B, L, K]`, ids by falling score."""
    ids = np.argpartition(score, -topk, axis=-1)[..., -topk:]
    values = np.take_along_axis(score, ids, -1)
    order = np.argsort(-values, axis=-1, kind="stable")
    ids, values = np.take_along_axis(ids, order, -1), np.take_along_axis(values, order, -1)
    weights = np.exp(values - values[..., :1])
    weights /= weights.sum(-1, keepdims=True)
    return ids.swapaxes(0, 1).astype(np.int16), weights.swapaxes(0, 1).astype(np.float16)
