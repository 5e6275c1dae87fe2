"""Fig. 1 to 3 and Table 1: what the paper measures before it proposes anything."""

from __future__ import annotations

from statistics import fmean

from apexk import hardware
from apexk.paper.measure import APEX, HARDWARE, Get
from apexk.paper.rows import PaperRow, number, statement
from apexk.sim.cells import EXPERT_BYTES, TraceSpec, demand
from apexk.sim.generate import MODELS

PURE_GPU = "fixed_p(p=256, keep=false)"
COUNTS = (0, 2, 4, 8, 12)
G0 = {"qwen3_5": 64, "qwen3_next": 56, "glm_4_5_air": 12}


def table1(get: Get) -> list[PaperRow]:
    """The models; the paper's own table is not at hand, so its facts in the text stand beside ours."""
    q, n = MODELS["qwen3_5"], MODELS["qwen3_next"]
    rows = [statement("table1", "wl.models", ", ".join(m.name for m in MODELS.values()))]
    for id, ours in (("model.qwen3_5.experts", q.experts), ("model.qwen3_5.topk", q.topk), ("model.qwen3_next.experts", n.experts),
                     ("model.qwen3_next.topk", n.topk)):
        rows.append(statement("table1", id, ours))
    rows += [statement("table1", f"pool.G0.{model}", slots) for model, slots in G0.items()]
    rows.append(statement("table1", "derived.expert_bytes", EXPERT_BYTES))
    pools = {model: round(G0[model] * MODELS[model].layers * EXPERT_BYTES[model] / 1e9, 2) for model in MODELS}
    return [*rows, statement("table1", "derived.pool_bytes", pools)]


def stages(get: Get) -> dict[str, dict[str, float]]:
    """ms per layer by paradigm: CPU path, transfer, GPU kernels, whole layer. Fig. 1's content, of which the text gives no number."""
    machine = hardware.load(HARDWARE)
    found = {}
    for label, policy, pool in (("pure GPU", PURE_GPU, 0), ("static collaboration", "no_assign", 64), ("Apex", APEX, 64)):
        m = get(policy, pool)
        p = m["exact_per_layer"]
        transfer = machine.link.t1 * p + (machine.link.s0 if p else 0.0)
        cpu = 0.0 if policy == PURE_GPU else m["cpu_path_ms_per_layer"]
        found[label] = {"CPU path": cpu, "transfer": transfer, "GPU kernels": max(0.0, m["gpu_path_ms_per_layer"] - transfer),
                        "layer": m["ms_per_step"] / 40}
    return found


def fig1(get: Get) -> list[PaperRow]:
    """Stage latency by paradigm."""
    rows = []
    for label, parts in stages(get).items():
        text = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
        rows.append(PaperRow("fig1", f"fig1.{label}", text, None, "ms/layer", "info", None, "-", "report-only", "the paper's text states no number"))
    return rows


def fig3a(get: Get) -> list[PaperRow]:
    """Activated experts by batch and the spread of their loads. The paper shows one layer; its sets are smaller than any preset gives."""
    note = "mean over layers and steps; the paper shows one layer and batch"
    rows = [number("fig3a", f"fig3a.activated.b{b}", get("no_assign", 64, b)["active_per_layer"], note=note) for b in (8, 16, 24)]
    loads = [layer.values() for step in demand(TraceSpec(batch=24, steps=8)).steps for layer in step.loads]
    for name, ours in (("min", fmean(min(n) for n in loads)), ("max", fmean(max(n) for n in loads))):
        rows.append(number("fig3a", f"fig3a.load_{name}.b24", ours, note=note))
    return rows


def fig3b(get: Get) -> list[PaperRow]:
    """Pure GPU execution: every active expert is copied."""
    machine = hardware.load(HARDWARE)
    rows = []
    for batch in (1, 32):
        m = get(PURE_GPU, 0, batch)
        transfer = machine.link.s0 + machine.link.t1 * m["exact_per_layer"]
        rows.append(number("fig3b", f"fig3b.xfer.b{batch}", transfer))
        rows.append(number("fig3b", f"fig3b.gpu.b{batch}", m["gpu_path_ms_per_layer"] - transfer))
    ratio = rows[-2].ours / rows[-1].ours if rows[-1].ours else 0.0
    return [*rows, number("fig3b", "fig3b.ratio.b32", ratio)]


def fig3c(get: Get) -> list[PaperRow]:
    """Static residency: load share and time of the CPU, at 32 and 96 residents."""
    rows = []
    for pool in (32, 96):
        m = get("no_assign", pool)
        rows.append(number("fig3c", f"fig3c.r{pool}.cpu_share", m["cpu_share"]))
        rows.append(number("fig3c", f"fig3c.r{pool}.cpu", m["cpu_path_ms_per_layer"]))
        rows.append(number("fig3c", f"fig3c.r{pool}.gpu", m["gpu_path_ms_per_layer"]))
    return rows


def fig3d(get: Get) -> list[PaperRow]:
    """64 residents and the P heaviest misses copied, not kept."""
    machine = hardware.load(HARDWARE)
    rows, speed = [], {}
    for p in COUNTS:
        m = get(f"fixed_p(p={p}, keep=false)")
        speed[p] = m["tokens_per_s"]
        rows.append(number("fig3d", f"fig3d.P{p}.cpu", m["cpu_path_ms_per_layer"]))
        note = "the paper's rise is below its own link's floor" if p > 4 else ""
        rows.append(number("fig3d", f"fig3d.P{p}.gpu", m["gpu_path_ms_per_layer"], note=note))
        if p in (2, 4):
            rows.append(number("fig3d", f"fig3d.P{p}.xfer", machine.link.s0 + machine.link.t1 * m["exact_per_layer"]))
    return [*rows, number("fig3d", "fig3d.best_P", max(speed, key=speed.get))]
