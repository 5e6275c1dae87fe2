"""Trains both kinds on training steps by Adam on the chance's cross entropy, `y = load / tokens`: the mean over a step's tokens and a
layer's experts of each pair's own. The last fifth of the training steps says when to stop; held-out steps are not looked at.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from apexk.policy.predictor import DISTANCES, SCHEMA, Predictor, lift
from apexk.predictors.data import Steps, features_of

CHECKED_EVERY, PATIENCE, GAIN = 10, 3, 3e-4  # training steps between two looks at the validation part, looks without (relative) gain before the end
VALIDATION = 0.2
WINDOW, ROWS = 8, 4096  # of the recurrent kind: steps that it is unrolled over, (layer, expert) rows a training step
STATE = 8  # of its unit

Say = Callable[[str], None]


def train(kind: str, steps: Sequence[Steps], model: str, *, rank: int = 64, seed: int = 0, rounds: int = 600, say: Say = lambda text: None) -> Predictor:
    """A predictor from training steps (`apexk.predictors.data.split`). Raises ValueError for a model with too few layers."""
    layers, experts, topk = *steps[0].loads.shape[1:], steps[0].topk
    distance = DISTANCES[kind]
    if layers <= distance:
        raise ValueError(f"a {kind} predictor looks {distance} layers ahead, the traces have {layers}")
    if rank < 1:
        raise ValueError(f"rank is {rank}; wanted at least 1")
    fit, check = zip(*[_cut(one) for one in steps], strict=True)
    shares = sum(one.loads.sum(0) for one in fit) / sum(float(one.tokens.sum()) for one in fit)  # [L, E], of tokens
    standing = torch.from_numpy(lift(shares * 100, 100.0, topk))  # as of a hundred tokens: an expert never seen is not impossible
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = (Linear(standing, topk, rank) if kind == "linear" else Recurrent(standing, topk)).fitted(fit, check, rounds, say)
    meta = {"schema": SCHEMA, "kind": kind, "model": model, "layers": layers, "experts": experts, "top_k": topk, "distance": distance,
            "trained": {"steps": sum(map(len, steps)), "sources": [one.source for one in steps], "seed": seed}}  # fmt: skip
    return Predictor(meta, {name: np.ascontiguousarray(value.detach().numpy(), np.float32) for name, value in made.arrays().items()})


def _cut(steps: Steps) -> tuple[Steps, Steps]:
    at = len(steps) - max(1, round(VALIDATION * len(steps)))
    return steps.part(0, at), steps.part(at, len(steps))


class Kind(nn.Module):
    """What both share: the coefficients `at` of the simple inputs, and how they are fitted."""

    def __init__(self, standing: torch.Tensor, topk: int):
        super().__init__()
        share = topk / standing.shape[1]
        at = torch.zeros(standing.shape[0], 5)
        at[:, 0], at[:, 1], at[:, 2] = math.log(share / (1 - share)), 0.5, 1.0
        self.at, self.standing = nn.Parameter(at), standing

    def simple(self, layers, router, last, recent) -> torch.Tensor:
        """`[..., E]` inputs of `layers` -> their part of z."""
        at = self.at[layers]
        return at[..., 0, None] + at[..., 1, None] * self.standing[layers] + at[..., 2, None] * router + at[..., 3, None] * last + at[..., 4, None] * recent

    def fitted(self, fit: Sequence[Steps], check: Sequence[Steps], rounds: int, say: Say):
        """Trained stage by stage, each from the best state so far by validation loss: what a stage adds must earn its place."""
        fit, check = self.prepared(fit), self.prepared(check)
        best, kept = math.inf, copy.deepcopy(self.state_dict())
        for stage, groups in enumerate(self.stages(), 1):
            self.load_state_dict(kept)
            self.mapped = stage > 1  # the bottleneck's sums are left out where they are still 0
            optimiser, since = torch.optim.AdamW(groups, weight_decay=0.0), 0
            for number in range(rounds + 1):
                if number % CHECKED_EVERY == 0:
                    with torch.no_grad():
                        loss = float(self.loss(check, whole=True))
                    since = 0 if loss < best * (1 - GAIN) else since + 1
                    if loss < best:
                        best, kept = loss, copy.deepcopy(self.state_dict())
                    if since > PATIENCE:
                        break
                    say(f"stage {stage}, round {number}, validation loss {loss:.5f}")
                self.zero_grad()
                self.loss(fit, whole=False).backward()
                optimiser.step()
        self.load_state_dict(kept)
        return self


class Linear(Kind):
    """Two layers ahead: the loads of the layer two before through a bottleneck."""

    def __init__(self, standing: torch.Tensor, topk: int, rank: int):
        super().__init__(standing, topk)
        layers, experts = standing.shape
        self.down = nn.Parameter(torch.randn(layers, experts, rank) / math.sqrt(experts))
        self.up = nn.Parameter(torch.zeros(layers, rank, experts))

    def stages(self) -> list[list[dict]]:
        simple = {"params": [self.at], "lr": 0.05}
        return [[simple], [{**simple, "lr": 0.005}, {"params": [self.down, self.up], "lr": 0.001, "weight_decay": 0.3}]]

    def prepared(self, parts: Sequence[Steps]) -> list[torch.Tensor]:
        """(x, router, last, recent, y), each `[S, L-2, E]`, layers from 2 on; x of the layers two before them."""
        ahead, found = DISTANCES["linear"], []
        for part in parts:
            f = features_of(part)
            y = part.loads / part.tokens[:, None, None]
            found.append([f.now[:, :-ahead], *(a[:, ahead:] for a in (f.router[ahead], f.last, f.recent, y))])
        return [torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*found, strict=True)]

    def loss(self, data: list[torch.Tensor], whole: bool) -> torch.Tensor:
        x, router, last, recent, y = data
        layers = torch.arange(DISTANCES["linear"], len(self.at))
        z = self.simple(layers, router, last, recent)
        if self.mapped:
            z = z + torch.einsum("slr,lre->sle", torch.einsum("sle,ler->slr", x, self.down[layers]), self.up[layers])
        return functional.binary_cross_entropy_with_logits(z, y)

    def arrays(self) -> dict[str, torch.Tensor]:
        return {"at": self.at, "standing": self.standing, "down": self.down, "up": self.up}


class Recurrent(Kind):
    """The next layer's loads: a gated unit over each expert's steps, the same for all experts."""

    def __init__(self, standing: torch.Tensor, topk: int):
        super().__init__(standing, topk)
        self.unit = nn.GRUCell(1, STATE)
        self.out = nn.Parameter(torch.zeros(STATE))

    def stages(self) -> list[list[dict]]:
        return [[{"params": self.parameters(), "lr": 0.03}]]

    def prepared(self, parts: Sequence[Steps]) -> list[tuple[torch.Tensor, ...]]:
        """By part: (now, router, last, recent, y), each `[S, L, E]`."""
        found = []
        for part in parts:
            f = features_of(part)
            found.append(tuple(torch.from_numpy(a) for a in (f.now, f.router[DISTANCES["recurrent"]], f.last, f.recent, part.loads / part.tokens[:, None, None])))
        return found

    def loss(self, data: list[tuple[torch.Tensor, ...]], whole: bool) -> torch.Tensor:
        """Of every part from its start, or of one window of a part and some (layer, expert) rows, drawn."""
        if not whole:
            long = [part for part in data if len(part[0]) > 1]
            part = long[int(torch.randint(len(long), ()))]
            first = int(torch.randint(max(1, len(part[0]) - WINDOW), ()))
            flat = part[0].shape[1] * part[0].shape[2]
            rows = torch.randperm(flat)[:ROWS]
            return self._unrolled([a[first : first + WINDOW + 1] for a in part], rows)
        return torch.stack([self._unrolled(part, None) for part in data]).mean()

    def _unrolled(self, part: Sequence[torch.Tensor], rows: torch.Tensor | None) -> torch.Tensor:
        now, router, last, recent, y = (a.flatten(1) if rows is None else a.flatten(1)[:, rows] for a in part)  # [S, rows]
        experts = self.standing.shape[1]
        rows = torch.arange(self.standing.numel()) if rows is None else rows
        at, standing = self.at[rows // experts], self.standing.flatten()[rows]
        state, losses = torch.zeros(now.shape[1], STATE), []
        for s in range(len(now)):
            z = at[:, 0] + at[:, 1] * standing + at[:, 2] * router[s] + at[:, 3] * last[s] + at[:, 4] * recent[s] + state @ self.out
            losses.append(functional.binary_cross_entropy_with_logits(z, y[s]))
            state = self.unit(now[s, :, None], state)
        return torch.stack(losses).mean()

    def arrays(self) -> dict[str, torch.Tensor]:
        unit = self.unit
        return {"at": self.at, "standing": self.standing, "w_in": unit.weight_ih[:, 0], "w_state": unit.weight_hh, "b_in": unit.bias_ih, "b_state": unit.bias_hh, "out": self.out}
