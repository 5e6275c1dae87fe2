"""Fig. 5 to 7, Tables 2 and 3: the paper's results."""

from __future__ import annotations

from statistics import fmean

from apexk.paper.measure import APEX, PASS_TOKENS, Get
from apexk.paper.motivation import G0
from apexk.paper.rows import PaperRow, check, number, statement

BASELINES = ("fiddler_static", "post_fetch", "mixtral_offloading")
#: what is held against Apex at every pool: the paper's baselines and other published methods
PUBLISHED = (*BASELINES, "fiddler_original", "llamacpp_static32", "hybrimoe", "freetoken_q", "dali")
BATCHES = (1, 8, 16, 24, 32)
BUDGETS = (0.5, 0.75, 1.0, 1.25, 1.5)
EA_RATES, APEX_RATES = "ea_only(cost=rates)", "apex(cost=rates, waves=false)"
OTHERS = "no timing data of this model: costs scaled by expert bytes"


def table3(get: Get) -> list[PaperRow]:
    """The ablation, at batch 16 and pool 64, with the orders that must hold."""
    none, sa, ea, rates, apex = (get(p) for p in ("no_assign", "sa_only", EA_RATES, APEX_RATES, APEX))
    post, mixtral = get("post_fetch"), get("mixtral_offloading")
    speed = "tokens_per_s"
    rows = [number("table3", "table3.none.tput", none[speed]), number("table3", "derived.table3.sa.tput", sa[speed]),
            number("table3", "derived.table3.ea.tput", ea[speed]), number("table3", "table3.apex.tput", apex[speed]),
            number("table3", "table3.apex.tput", rates[speed], "rates")]
    for name, m in (("none", none), ("sa", sa), ("ea", ea)):
        rows.append(number("table3", f"table3.{name}.cpu", m["cpu_path_ms_per_layer"]))
        rows.append(number("table3", f"table3.{name}.gpu", m["gpu_path_ms_per_layer"]))
    rows.append(number("table3", "table3.apex.crit", max(rates["cpu_path_ms_per_layer"], rates["gpu_path_ms_per_layer"])))
    for id, a, b in (("table3.sa.gain", sa, none), ("table3.ea.gain", ea, none), ("table3.apex.gain_none", apex, none),
                     ("table3.apex.gain_sa", apex, sa), ("table3.apex.gain_ea", apex, ea)):
        rows.append(number("table3", id, gain(a[speed], b[speed])))
    rows.append(number("table3", "derived.postfetch.min", post[speed]))
    for id, pairs in (
        ("order: none < Post-Fetch < EA < Apex, rates", [none, post, ea, rates]), ("order: SA < Apex, affine", [sa, apex]),
        ("order: Mixtral-Offloading < none", [mixtral, none]),
    ):  # fmt: skip
        values = [m[speed] for m in pairs]
        rows.append(check("table3", id, " < ".join(f"{v:.1f}" for v in values), "rising", all(a < b for a, b in zip(values, values[1:], strict=False))))
    return rows


def pools(get: Get) -> list[PaperRow]:
    """Apex is the best published method at every pool, and every method that keeps experts gains from a larger one."""
    rows, speeds = [], {}
    for pool in (32, 64, 96):
        for policy in (*PUBLISHED, "sa_only", EA_RATES, APEX):
            speeds[policy, pool] = get(policy, pool)["tokens_per_s"]
        best = max(PUBLISHED, key=lambda p: speeds[p, pool])
        text = f"apex {speeds[APEX, pool]:.1f}, {best} {speeds[best, pool]:.1f}"
        rows.append(check("pools", f"pool {pool}: Apex best of all published", text, "apex", speeds[APEX, pool] >= speeds[best, pool]))
    for policy in (*PUBLISHED, "sa_only", EA_RATES, APEX):
        values = [speeds[policy, pool] for pool in (32, 64, 96)]
        rows.append(check("pools", f"{policy} gains from the pool", " < ".join(f"{v:.1f}" for v in values), "rising", values[0] < values[1] < values[2]))
    return rows


def gain(ours: float, other: float) -> float:
    """Percent by which `ours` exceeds `other`."""
    return 100 * (ours / other - 1)


def gains(get: Get, phase: str, model: str, batch: int = 16, budget: float = 1.0) -> float:
    """Apex over the strongest of the paper's baselines."""
    pool = round(G0[model] * budget)
    best = max(get(p, pool, batch, model, phase, full=False)["tokens_per_s"] for p in BASELINES)
    return gain(get(APEX, pool, batch, model, phase, full=False)["tokens_per_s"], best)


def by_batch(get: Get, phase: str) -> dict[str, list[float]]:
    """Model -> gains by `BATCHES`."""
    return {model: [gains(get, phase, model, batch) for batch in BATCHES] for model in G0}


def fig5(get: Get) -> list[PaperRow]:
    """Prefill gains. Pass size, prompt length and the CPU's prefill slope are not in the text, so none of this is a reproduction."""
    note = f"passes of {PASS_TOKENS} tokens a request: assumed"
    found = by_batch(get, "prefill")
    every = [g for row in found.values() for g in row]
    speed = {p: get(p, 64, 16, "qwen3_5", "prefill", full=False)["tokens_per_s"] for p in (*BASELINES, APEX)}
    order = " > ".join(sorted(speed, key=speed.get, reverse=True))
    return [number("fig5", "fig5.prefill.gain_avg", fmean(every), note=note), number("fig5", "fig5.prefill.gain_max", max(every), note=note),
            statement("fig5", "fig5.prefill.b1", f"{fmean(row[0] for row in found.values()):.1f} % at batch 1", note),
            statement("fig5", "order.prefill", order, note)]


def fig6(get: Get) -> list[PaperRow]:
    """Decode gains over three models and five batches."""
    found = by_batch(get, "decode")
    every = [g for row in found.values() for g in row]
    speed = {p: get(p, 64, 16, "qwen3_5", "decode", full=False)["tokens_per_s"] for p in (*BASELINES, APEX)}
    rows = [number("fig6", "fig6.decode.gain_avg", fmean(every), note=OTHERS), number("fig6", "fig6.decode.gain_max", max(every), note=OTHERS),
            statement("fig6", "order.decode", " > ".join(sorted(speed, key=speed.get, reverse=True)))]
    prefill = by_batch(get, "prefill")
    return rows + [number("fig6", f"gain.model.{m}", fmean([*found[m], *prefill[m]]), note="both phases" + ("" if m == "qwen3_5" else "; " + OTHERS))
                   for m in ("qwen3_next", "qwen3_5", "glm_4_5_air")]


def fig7(get: Get) -> list[PaperRow]:
    """Transfers and times of Apex at pools 32 and 96. The paper's 111 ms at 96 is below its own CPU fixed part plus Table 3's
    residual; no cost line of this family reaches it."""
    rows = []
    for pool in (32, 96):
        m, p = get(APEX, pool), get(APEX, pool, 16, "qwen3_5", "prefill", full=False)
        moved = m["exact_per_layer"] + m["speculative_per_layer"]
        rows.append(number("fig7", f"fig7.r{pool}.decode_transfers", moved, note="exact and speculative, per layer and step"))
        rows.append(number("fig7", f"fig7.r{pool}.tpot", m["ms_per_step"], note="known not to reproduce" if pool == 96 else ""))
        rows.append(number("fig7", f"fig7.r{pool}.prefill_transfers", p["exact_per_layer"] + p["speculative_per_layer"], note="pass size assumed"))
        rows.append(statement("fig7", f"fig7.r{pool}.ttft", f"{p['ms_per_step'] / 1e3:.3f} s a pass", "prompt length unknown: a pass, not a prompt"))
    return rows


def table2(get: Get) -> list[PaperRow]:
    """Gains over memory budgets of 0.5 to 1.5 x G0 at batch 16."""
    rows = []
    for phase in ("prefill", "decode"):
        every = [gains(get, phase, model, 16, budget) for model in G0 for budget in BUDGETS]
        rows.append(number("table2", f"table2.{phase}.gain_avg", fmean(every), note=OTHERS))
    return rows
