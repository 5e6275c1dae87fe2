"""The main job: plain model, swapped model under each policy, the same tokens, and what a modelled machine would take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from apexk.config import ApexConfig
from apexk.demo import model as demo_model
from apexk.hardware import load as load_hardware
from apexk.hf.handle import versions
from apexk.hf.swap import swap
from apexk.outputs import write_json

POLICIES = ("no_assign", "sa_only", "ea_only", "apex")
log = logging.getLogger("apexk.demo")


def run(out: Path | None = None, *, seed: int = 0, pool: int = 12, prompts: int = 8, new_tokens: int = 48,
        policies: Sequence[str] = POLICIES, hardware: str = "a6000-paper", device: str = "virtual", say: Callable[[str], None] = log.info) -> dict:
    """Runs the job and returns its result; with `out` also writes `timeline.jsonl` and `summary.json` there.

    The timeline is the last policy's. `say` gets a line for each long step. Times are modelled on a virtual device, and
    measured on device "cpu", which has no pool: there `pool` is taken as 0 and policies do not differ.
    """
    pool = 0 if device == "cpu" else pool
    configs = {name: ApexConfig(policy=name, pool=pool, hardware=hardware, device=device) for name in policies}
    if not configs:
        raise ValueError("no policy named; wanted at least one")
    load_hardware(hardware)
    texts = demo_model.prompts(prompts, seed)
    say("loading the trained model (float32)")
    model, tokenizer = demo_model.load()
    configs[policies[-1]].slots(model.config.num_experts)
    say("counting expert popularity on the calibration text")
    counts = demo_model.calibrate(model, tokenizer)
    say(f"generating {new_tokens} tokens for {prompts} prompts with the plain model")
    plain = demo_model.generate(model, tokenizer, texts, new_tokens)

    rows, identical = {}, torch.ones(prompts, dtype=torch.bool)
    for name in policies:
        say(f"generating with apexk, policy {name}")
        path = out / "timeline.jsonl" if out and name == policies[-1] else None
        with swap(model, replace(configs[name], popularity=counts, timeline=path)) as handle:
            swapped = demo_model.generate(model, tokenizer, texts, new_tokens)
            rows[name] = _row(handle.summary()["decode"])
        identical &= _same_rows(plain, swapped)
    about = handle.info()
    result = {
        "tokens_identical": bool(identical.all()),
        "identical_prompts": int(identical.sum()),
        "prompts": prompts,
        "tokens": demo_model.real_tokens(plain, tokenizer.eos_token_id),
        "dtype": "float32",
        "seed": seed,
        "pool": pool,
        "policies": rows,
        "times": f"modelled on hardware {about['hardware']}, timed as if each expert were that file's" if about["modelled"]
        else "measured on this machine",
        "hardware": about["hardware"],
        "device": about["device"],
        "versions": versions(),
        "continuations": [
            {"prompt": text, "continuation": tokenizer.decode(row, skip_special_tokens=True)} for text, row in zip(texts, plain, strict=True)
        ],
    }
    if out:
        write_json(out / "summary.json", result)
    return result


def _same_rows(plain: torch.Tensor, swapped: torch.Tensor) -> torch.Tensor:
    if plain.shape != swapped.shape:
        return torch.zeros(plain.shape[0], dtype=torch.bool)
    return (plain == swapped).all(1)


def _row(decode: dict) -> dict:
    """The decode phase's figures under the names that the demo shows; ms per step or layer, counts over the run."""
    return {
        "tpot_ms": decode["ms_per_step"],
        "tokens_per_s": decode["tokens_per_s"],
        "cpu_path_ms": decode["cpu_path_ms_per_layer"],
        "gpu_path_ms": decode["gpu_path_ms_per_layer"],
        "exact": decode["exact"],
        "speculative": decode["speculative"],
        "hit_rate": decode["hit_rate"],
        "wasted": decode["wasted"],
    }
