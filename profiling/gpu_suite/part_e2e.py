"""End to end on a random-weight Qwen3.5-35B-A3B: time to the first token and by token of every policy, the layers as
torch.profiler sees them, and what ranges cost. As many of its 40 layers as half of the host's memory takes; a tiny model of the same
family when virtual, where times are the modelled clock's.

The routers of random weights choose almost evenly, which is the worst case for any cache.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from .part_kernels import build_native
from .pieces import Context, Skip, piece

MODEL, FAMILY, MOE_LAYERS = "qwen3.5-35b-a3b", "qwen3_5_moe_text", 40
BATCH, PROMPT = 4, 32  # sequences, tokens of each
WARM, STEPS = 2, 12  # decode steps
KEEP_S = 60.0  # a policy starts only with so much time left on a GPU: it swaps and pins the model again
RANGES = 8  # a layer, for the cost of ranges
_models: dict[bool, tuple[torch.nn.Module, int]] = {}


@piece("e2e")
def policies(context: Context) -> dict:
    """TTFT, TPOT and hit rate of every policy over the same tokens, as long as the time lasts."""
    model, layers = _model(context)
    import apexk
    from apexk.policy import names

    numbers: dict = {"model": f"{MODEL}, random weights" if not context.virtual else f"tiny {FAMILY}, random weights", "layers": layers,
                     "times": f"modelled on {context.hardware}" if context.virtual else "measured", "batch": BATCH, "prompt tokens": PROMPT}  # fmt: skip
    asked = [name for name in names() if name != "fixed_p"]  # that one needs a count
    left, tried = [], {}
    for name in asked:
        if context.seconds_left() < (0 if context.virtual else KEEP_S):
            left.append(name)
            continue
        try:
            with apexk.swap(model, _config(context, apexk, name)) as handle:
                tried[name] = _times(context, model, handle)
        except ValueError as error:  # a policy that this pool or device does not suit
            numbers[name] = f"refused: {error}"
    return numbers | {"by policy": tried, "left out for time": ", ".join(left) or 0}


@piece("e2e")
def layers_by_torch(context: Context) -> dict:
    """A few decode steps of Apex under torch.profiler, reduced to the per-layer table; what native threads did comes from the run's
    timeline. When virtual these are the times of the emulation, which say nothing about a GPU: only that the path works."""
    model, layers = _model(context)
    import apexk
    from apexk.profiling.findings import findings
    from apexk.profiling.load import load
    from apexk.profiling.merge import complete
    from apexk.profiling.tables import layer_table, phase_totals

    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder) / "timeline.jsonl"
        recording = _traced(context, model, layers, apexk.swap(model, replace(_config(context, apexk, "apex"), timeline=timeline)), Path(folder))
        if not context.virtual:
            recording = complete(recording, load(timeline))
    totals = phase_totals(recording, "decode")
    assert totals and totals["layers"] == layers, f"the trace holds {totals and totals['layers']} of {layers} layers a step"
    slowest = max(layer_table(recording, "decode"), key=lambda row: row["window"])
    return {**totals, "slowest layer": slowest["layer"], "its window ms": slowest["window"], "findings": "; ".join(findings(recording)) or "none"}


def _traced(context: Context, model, layers: int, swapped, folder: Path):
    from apexk.device.ranged import RangedDevice, TorchRanges
    from apexk.profiling.load import load

    with swapped as handle:
        handle.engine.device = RangedDevice(handle.engine.device, TorchRanges(layers))
        _run(model, WARM)
        activities = [torch.profiler.ProfilerActivity.CPU, *([] if context.virtual else [torch.profiler.ProfilerActivity.CUDA])]
        every_thread = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(activities=activities, experimental_config=every_thread) as profiler:
            _run(model, 3)
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return load(folder / "trace.json")


@piece("e2e")
def range_cost(context: Context) -> dict:
    """What the NVTX ranges of a step of 40 layers would cost, 8 a layer, with no tool attached: the engine has none then."""
    from apexk.nvtx import Ranges

    ranges = Ranges(MOE_LAYERS)
    kinds = ("route", "submit", "copy.exact", "gpu.resident", "predict", "gpu.arrived", "combine", "layer")

    def step():
        for layer in range(MOE_LAYERS):
            for kind in kinds:
                with ranges(kind, layer, 1):
                    pass

    times = [_timed(step) for _ in range(200)]
    return {"tool attached": ranges.active, "ranges": MOE_LAYERS * len(kinds), "ms_per_step": median(times), "fastest_ms": min(times)}


def _model(context: Context):
    """(model, MoE layers); made once."""
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed")
    build_native()
    if context.virtual not in _models:
        if context.virtual:
            from apexk.testing.tiny import tiny

            model = tiny(FAMILY)
            _models[True] = model, model.config.num_hidden_layers
        else:
            from apexk.testing.real import random_model
            from apexk.testing.shapes import shapes

            shape = shapes()[MODEL]
            layers = min(shape.moe_layers, int(_host_bytes() / 2 / (shape.num_experts * shape.bytes_per_expert)))
            if layers < 1:
                raise Skip(f"half of the host's {_host_bytes() / 2**30:.0f} GiB holds no layer of {MODEL}")
            _models[False] = random_model(MODEL, layers), layers
    return _models[context.virtual]


def _config(context: Context, apexk, policy: str):
    return apexk.ApexConfig(policy=policy, device="virtual" if context.virtual else "cuda", hardware=context.hardware)


def _run(model, steps: int, handle=None):
    """ms of a prompt's pass and of `steps` steps, by the modelled clock where `handle` has one."""
    from apexk.bench.measure import run

    ids = torch.randint(1, model.config.vocab_size, (BATCH, PROMPT + steps), generator=torch.Generator().manual_seed(0))
    prompt, trace = ids[:, :PROMPT], ids[:, PROMPT:]
    return run(model, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, trace, handle)


def _times(context: Context, model, handle) -> dict:
    if not context.virtual:
        _run(model, WARM)
    sample = _run(model, STEPS, handle)
    each, decode = median(sample.step_ms), handle.summary()["decode"]
    return {"ttft_ms": sample.prefill_ms, "tpot_ms": each, "tokens_per_s": 1e3 * BATCH / each, "hit_rate": decode["hit_rate"],
            "exact_per_step": decode["exact"] / decode["steps"]}  # fmt: skip


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _timed(call) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)
