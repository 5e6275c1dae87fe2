"""The swapped model: the plain model's tokens by both ways of copying, and no allocation in steady state."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

from .environment import ROOT
from .part_kernels import build_native
from .pieces import Context, Skip, piece

TRANSFERS = ("copy_engine", "sm_gather")
FACTS = ("pinned_bytes", "pin_seconds", "pin_failure", "transfer", "hand_off", "pool_arithmetic")


@piece("engine")
def same_tokens(context: Context) -> dict:
    """Every policy gives the plain model's greedy tokens, with few slots and with one for each expert."""
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    build_native()
    from apexk.demo.run import run

    numbers = {}
    for pool in (2, 32):
        result = run(hardware=context.hardware, device="virtual" if context.virtual else "cuda", prompts=2, new_tokens=6, pool=pool)
        assert result["tokens_identical"], f"pool {pool}: {result['identical_prompts']} of {result['prompts']} prompts agree"
        numbers[f"pool {pool}"] = f"{result['prompts']} prompts agree under {', '.join(result['policies'])}"
    return numbers


@piece("engine")
def both_transfers(context: Context) -> dict:
    """Exact copies by a kernel that reads pinned memory: the same tokens; and what the machine made of pinning and hand-off."""
    if context.virtual:
        raise Skip("needs a CUDA device")
    build_native()
    import apexk
    from apexk.demo import model as demo

    model, tokenizer = demo.load()
    texts = demo.prompts(3)
    wanted = demo.generate(model, tokenizer, texts, 6)
    numbers = {}
    for transfer in TRANSFERS:
        with apexk.swap(model, apexk.ApexConfig(policy="ea_only", pool=6, device="cuda", transfer=transfer)) as handle:
            assert bool((demo.generate(model, tokenizer, texts, 6) == wanted).all()), f"{transfer}: other tokens"
            numbers |= {f"{transfer}, {name}": value for name, value in handle.info().items() if name in FACTS}
    return numbers


@piece("engine")
def steady_state(context: Context) -> dict:
    """Device and pinned allocations, streams and events made by decode steps after the first ones: none."""
    if context.virtual:
        raise Skip("needs a CUDA device; the fake runtime's count is a test")
    build_native()
    import apexk
    from apexk.demo import model as demo

    model, tokenizer = demo.load()
    with apexk.swap(model, apexk.ApexConfig(pool=6, device="cuda")) as handle:
        runtime = handle.engine.device.runtime
        for _ in range(2):
            demo.generate(model, tokenizer, demo.prompts(4), 24)
        before = runtime.allocations()
        demo.generate(model, tokenizer, demo.prompts(4), 24)
        made = runtime.allocations() - before
    assert made == 0, f"{made} allocations in steady state"
    return {"made": made, "before": before}


@piece("engine")
def memcheck(context: Context) -> dict:
    """`same_tokens` under compute-sanitizer, where that is installed. (torch's own stream sanitizer sees torch's events only, and ours
    are CUDA's, so it would report orders that exist.)"""
    tool = shutil.which("compute-sanitizer")
    if context.virtual or tool is None:
        raise Skip("needs a CUDA device and compute-sanitizer on PATH")
    code = "from profiling.gpu_suite.part_engine import same_tokens; from profiling.gpu_suite.pieces import Context; same_tokens(Context(False, 'cuda', 'a6000-paper'))"
    done = subprocess.run([tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return {"errors": 0}
