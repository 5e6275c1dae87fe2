"""Times of one arm on one workload: the prompt's pass, then steps that are fed a fixed trace of tokens.

Every arm sees the same tokens, whatever it would have chosen itself. Times are the wall clock's; on a virtual device they
are the modelled clock's, taken from the sums that apexk keeps, and said to be modelled.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import nn

from apexk.hf.handle import Handle


@dataclass
class Sample:
    """ms of each part of one run."""

    prefill_ms: float
    step_ms: list[float] = field(default_factory=list)


class Clock:
    """ms between two ticks: modelled, or of the wall after the GPU has finished."""

    def __init__(self, handle: Handle | None, device: torch.device):
        self.modelled = handle is not None and handle.info()["modelled"]
        self._handle, self._device = handle, device
        self._last = self._now()

    def tick(self) -> float:
        now = self._now()
        passed, self._last = now - self._last, now
        return passed

    def _now(self) -> float:
        if self.modelled:
            return sum(phase["step_ms"] for phase in self._handle.summary().values())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() * 1e3


@torch.inference_mode()
def run(model: nn.Module, batch: dict[str, torch.Tensor], trace: torch.Tensor, handle: Handle | None = None) -> Sample:
    """One pass over the prompts and one step for each column of `trace` `[B, N]`."""
    device = model.get_input_embeddings().weight.device
    mask = batch["attention_mask"].to(device)
    ids, trace = batch["input_ids"].to(device), trace.to(device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    clock = Clock(handle, device)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    sample = Sample(clock.tick())
    position = positions[:, -1:]
    for step in range(trace.shape[1]):
        mask, position = torch.cat([mask, mask.new_ones(len(mask), 1)], 1), position + 1
        name = "cache" if hasattr(out, "cache") else "past_key_values"  # its new name and its old one
        out = model(input_ids=trace[:, step : step + 1], attention_mask=mask, position_ids=position, use_cache=True, **{name: out[name]})
        sample.step_ms.append(clock.tick())
    return sample


@torch.inference_mode()
def greedy_trace(model: nn.Module, batch: dict[str, torch.Tensor], new_tokens: int) -> torch.Tensor:
    """What the plain model answers, `[B, new_tokens]`: the trace that every arm is fed."""
    out = model.generate(**batch, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    return out[:, batch["input_ids"].shape[1] :]


def percentiles(values: list[float]) -> dict[str, float]:
    """p10, p50 and p90 of at least one value."""
    found = torch.quantile(torch.tensor(values, dtype=torch.float64), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    return dict(zip(("p10", "p50", "p90"), found.tolist(), strict=True))


def figures(samples: list[Sample], batch: int, prompt_tokens: int) -> dict:
    """What a table shows: TTFT and TPOT in ms as percentiles over repeats and steps, and tokens/s from their medians."""
    ttft = percentiles([s.prefill_ms for s in samples])
    found = {"ttft_ms": ttft, "prefill_tokens_per_s": 1e3 * prompt_tokens / ttft["p50"] if ttft["p50"] else None}
    steps = [ms for s in samples for ms in s.step_ms]
    if steps:
        tpot = percentiles(steps)
        found |= {"tpot_ms": tpot, "decode_tokens_per_s": 1e3 * batch / tpot["p50"] if tpot["p50"] else None}
    return found
