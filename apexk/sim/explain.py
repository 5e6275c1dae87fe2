"""One decision, explained: what was missed, what each count was estimated to take, what was chosen, measured, and best."""

from __future__ import annotations

from apexk.device import accesses
from apexk.hardware import Hardware
from apexk.policy import decision_from_dict
from apexk.policy.scan import by_load, most_copies
from apexk.sim.references import true_paths

NS = 1e6


def explain(rows: list[dict], step: int, layer: int, machine: Hardware | None) -> dict:
    """From a timeline's rows. With the hardware it was modelled on, also the true paths of every count that fits at once, and the best one.

    Raises ValueError where the timeline has no decision for the step and layer.
    """
    here = [r for r in rows if r["step"] == step and r["layer"] == layer]
    plans = [r for r in here if r["kind"] == "plan"]
    if not plans:
        steps, layers = sorted({r["step"] for r in rows}), sorted({r["layer"] for r in rows if r["kind"] == "plan"})
        known = f"there are steps {steps[0]}..{steps[-1]} and layers {layers[0]}..{layers[-1]}" if layers else "there is none at all"
        raise ValueError(f"there is no decision for step {step}, layer {layer}; {known}")
    policy, view, plan = decision_from_dict(plans[0]["decision"])
    resident, missed = by_load(view)
    late = {e for r in here if accesses.is_late(r["writes"]) for e in r["experts"]}
    routed = plans[0]["start_ns"]

    def until(*kinds: str) -> float | None:
        ends = [r["end_ns"] for r in here if r["kind"] in kinds and not accesses.is_late(r["writes"])]
        return (max(ends) - routed) / NS if ends else None

    found = {
        "policy": policy, "step": step, "layer": layer, "phase": view.phase, "tokens": view.tokens, "active": len(view.loads),
        "resident": [[e, view.loads[e]] for e in resident], "missed": [[e, view.loads[e]] for e in missed],
        "available": view.available, "channel_wait_ms": view.channel_wait_ms, "costs": view.costs.as_dict(), "memory": view.memory,
        "in_flight": None if view.in_flight is None else [view.in_flight.expert, view.in_flight.left],
        "estimates": [list(pair) for pair in plan.estimates],
        "choice": {"p": plan.transfer_count, "copied": list(plan.exact_fetch), "cpu": list(plan.cpu), "gpu": list(plan.gpu_resident),
                   "split": [list(pair) for pair in plan.split], "est_cpu_ms": plan.est_cpu_ms, "est_gpu_ms": plan.est_gpu_ms},
        "late": sorted(late),  # whose rows the next layer adds: no part of this layer's paths
        "measured": {"cpu_ms": until("host.ffn"), "gpu_ms": until("gpu.resident", "gpu.arrived"), "modelled": plans[0]["modelled"]},
    }  # fmt: skip
    if machine is not None:
        now = [e for e in missed if e not in late]
        truth = [true_paths(view, machine, resident, now, p) for p in range(min(most_copies(view, len(missed)), len(now)) + 1)]
        best = min(range(len(truth)), key=lambda p: (max(truth[p]), p))
        found["true_paths"] = [list(pair) for pair in truth]
        found["oracle"] = {"p": best, "ms": max(truth[best]), "choice_in_waves": plan.transfer_count >= len(truth)}
    return found


def show(found: dict) -> str:
    """The same for a person."""
    choice, measured = found["choice"], found["measured"]
    lines = [
        f"{found['policy']}, step {found['step']}, layer {found['layer']} ({found['phase']}): {found['tokens']} tokens on {found['active']} experts, "
        f"{len(found['resident'])} of them resident; {found['available']} slots available, channel busy for {found['channel_wait_ms']:.2f} ms",
        "missed, as ranked (expert: tokens): " + (", ".join(f"{e}: {n}" for e, n in found["missed"]) or "none"),
        "",
        "  p   estimated CPU   GPU     true CPU   GPU",
    ]
    truth = found.get("true_paths", [])
    for p in sorted({*range(max(len(found["estimates"]), min(len(truth), choice["p"] + 3))), choice["p"]}):
        guess = found["estimates"][p] if p < len(found["estimates"]) else (None, None)
        if p == choice["p"] and choice["est_cpu_ms"] is not None:
            guess = choice["est_cpu_ms"], choice["est_gpu_ms"]
        real = truth[p] if p < len(truth) else (None, None)
        marks = [m for m, hit in (("chosen", p == choice["p"]), ("oracle", "oracle" in found and p == found["oracle"]["p"])) if hit]
        lines.append(f"{p:3d}   {_ms(guess[0])} {_ms(guess[1])}   {_ms(real[0])} {_ms(real[1])}   {', '.join(marks)}".rstrip())
    for expert, pairs in choice["split"]:
        lines.append(f"expert {expert} is split: the GPU has {pairs} of its pairs, the CPU the others")
    label = "modelled" if measured["modelled"] else "measured"
    lines += ["", f"{label}: CPU {_ms(measured['cpu_ms']).strip()} ms, GPU {_ms(measured['gpu_ms']).strip()} ms; "
              f"estimated CPU {_ms(choice['est_cpu_ms']).strip()} ms, GPU {_ms(choice['est_gpu_ms']).strip()} ms"]  # fmt: skip
    if "oracle" in found:
        only = ", of the counts that fit at once; the choice ran in waves" if found["oracle"]["choice_in_waves"] else ""
        lines.append(f"oracle: p = {found['oracle']['p']}, {found['oracle']['ms']:.3f} ms{only}")
    if found["late"]:
        lines.append(f"a layer late, in none of these times: {', '.join(map(str, found['late']))}")
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return "      -" if value is None else f"{value:7.3f}"
