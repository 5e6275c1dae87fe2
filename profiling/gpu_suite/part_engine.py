"""The swapped model: the plain model's tokens (`engine`), and its own times over a longer run (`e2e`)."""

from __future__ import annotations

import importlib.util

from .part_kernels import build_native
from .pieces import Context, Skip, piece


@piece("engine")
def same_tokens(context: Context) -> dict:
    """Every policy gives the plain model's greedy tokens, with few slots and with one for each expert."""
    numbers = {}
    for pool in (2, 32):
        result = _demo(context, prompts=2, new_tokens=6, pool=pool)
        assert result["tokens_identical"], f"pool {pool}: {result['identical_prompts']} of {result['prompts']} prompts agree"
        numbers[f"pool {pool}"] = f"{result['prompts']} prompts agree under {', '.join(result['policies'])}"
    return numbers


@piece("e2e")
def decode_times(context: Context) -> dict:
    """Decode ms a step and tokens/s of each policy; modelled when virtual."""
    result = _demo(context, prompts=4, new_tokens=16)
    assert result["tokens_identical"], f"{result['identical_prompts']} of {result['prompts']} prompts agree"
    rows = result["policies"].items()
    return {"times": result["times"], **{f"{name}, {key}": row[key] for name, row in rows for key in ("tpot_ms", "tokens_per_s")}}


def _demo(context: Context, **options) -> dict:
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    build_native()
    from apexk.config import DEVICES
    from apexk.demo.run import run

    if not context.virtual:
        if "cuda" not in DEVICES:
            raise Skip(f"this version has no CUDA device yet; there are {', '.join(DEVICES)}")
        options["device"] = "cuda"
    return run(hardware=context.hardware, **options)
