"""`bench`: every arm on every workload, the arms in turns, so that what a machine does meanwhile meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from apexk.bench.arms import Arm
from apexk.bench.measure import Sample, figures, greedy_trace, run
from apexk.bench.plan import Plan
from apexk.bench.source import Source
from apexk.bench.workload import encode, synthetic
from apexk.hf.handle import versions


def bench(source: Source, arms: Sequence[Arm], plan: Plan, say: Callable[[str], None] = print) -> dict:
    """The result, fit for JSON: a row for each workload and arm, and what is needed to read it."""
    skipped = {arm.name: arm.missing for arm in arms if arm.missing}
    arms = [arm for arm in arms if not arm.missing]
    rows = []
    for size in plan.batches:
        for length in [0] if plan.prompts is not None else plan.lengths:
            rows += _cell(source, arms, plan, size, length, say)
    return {
        "schema": "apexk.e2e/1", "model": source.name, "random_weights": source.random, "dtype": str(source.model.dtype).removeprefix("torch."),
        "new_tokens": plan.new_tokens, "repeats": plan.repeats, "beams": plan.beams, "seed": plan.seed, "threads": torch.get_num_threads(),
        "versions": versions(), "skipped": skipped, "rows": rows,
    }  # fmt: skip


def throughput(source: Source, arms: Sequence[Arm], plan: Plan, say: Callable[[str], None] = print) -> dict:
    """As `bench`, with batches doubled from the smallest until memory ends or no arm gains a twentieth: the last row of an
    arm's best batch is marked."""
    result, size, best = None, min(plan.batches), 0.0
    while True:
        try:
            found = bench(source, arms, replace(plan, batches=[size]), say)
        except (MemoryError, torch.OutOfMemoryError):
            break
        result = found if result is None else result | {"rows": result["rows"] + found["rows"]}
        gained = max(row["decode_tokens_per_s"] or 0.0 for row in found["rows"])
        if gained < 1.05 * best or size >= 4096 or (plan.prompts is not None and 2 * size > len(plan.prompts)):
            break
        best, size = gained, 2 * size
    if result is None:
        raise MemoryError(f"not even a batch of {size} fits")
    for arm in {row["arm"] for row in result["rows"]}:
        max((row for row in result["rows"] if row["arm"] == arm), key=lambda r: r["decode_tokens_per_s"] or 0.0)["best"] = True
    return result


def _cell(source: Source, arms: Sequence[Arm], plan: Plan, size: int, length: int, say: Callable[[str], None]) -> list[dict]:
    """One workload. Each turn enters every arm, warms it up by a short run, and takes one sample."""
    model, config = source.model, source.model.config.get_text_config()
    if plan.prompts is not None:
        if size > len(plan.prompts):
            raise ValueError(f"a batch of {size}, but the workload holds {len(plan.prompts)} prompts")
        batch = encode(source.tokenizer, list(plan.prompts[:size]), source.context, plan.new_tokens)
    else:
        if length + plan.new_tokens > source.context:
            raise ValueError(f"a prompt of {length} tokens and {plan.new_tokens} new ones exceed the model's context of {source.context}")
        batch = synthetic(config.vocab_size, size, length, plan.seed)
    batch = {name: tensor.repeat_interleave(plan.beams, 0) for name, tensor in batch.items()}
    say(f"batch {size}{f' x {plan.beams} beams' if plan.beams > 1 else ''}, prompt {batch['input_ids'].shape[1]}: the plain model's answer")
    trace = greedy_trace(model, batch, plan.new_tokens) if plan.new_tokens else batch["input_ids"][:, :0]
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in arms}
    about: dict[str, dict] = {}
    for turn in range(plan.repeats):
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            say(f"batch {size}, turn {turn + 1} of {plan.repeats}: {arm.name}")
            began = time.perf_counter()
            with arm.entered(model) as handle:
                entered = time.perf_counter() - began
                run(model, batch, trace[:, :2], handle)
                samples[arm.name].append(run(model, batch, trace, handle))
                info = handle.info() if handle else None
                about[arm.name] = {
                    "modelled": bool(info and info["modelled"]), "hardware": info["hardware"] if info else "this machine, measured",
                    "device": info["device"] if info else str(model.device), "pool": info["config"]["pool"] if info else None, "swap_s": round(entered, 3),
                    "decode": handle.summary()["decode"] if handle else None,
                }  # fmt: skip
    tokens = int(batch["attention_mask"].sum())
    return [{"batch": size, "prompt_length": batch["input_ids"].shape[1], "prompt_tokens": tokens, "arm": arm.name, **about[arm.name],
             **({"tpot_ms": None, "decode_tokens_per_s": None} | figures(samples[arm.name], size * plan.beams, tokens))} for arm in arms]
