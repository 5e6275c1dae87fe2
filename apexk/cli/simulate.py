"""`apexk simulate`: policies over routing traces on modelled hardware, without a model."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
from pathlib import Path

from apexk.arguments import once, whole, wholes, words
from apexk.cli import DONE
from apexk.cli.progress import bar, table
from apexk.config import DEFAULTS
from apexk.outputs import out_file, write_json, write_text
from apexk.sim import popularity
from apexk.sim.named import REFERENCES, check_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is routed")
    what.add_argument("--trace", action="append", default=[], metavar="PATH", help="a .trace.npz or sample:NAME; may be given again")
    what.add_argument("--preset", type=words, default="mmlu-like", help="comma-separated generator presets, if there is no --trace (default: mmlu-like)")
    what.add_argument("--model", default="qwen3_5", help="model of the generated trace: qwen3_5, qwen3_next, glm_4_5_air")
    what.add_argument("--batch", type=wholes(), default="16", help="comma-separated tokens a step (default: 16)")
    what.add_argument("--phase", default="decode", choices=("prefill", "decode"), help="of a generated trace (default: decode)")
    what.add_argument("--steps", type=whole(), default=50, help="steps, warm-up included (default: 50)")
    what.add_argument("--seeds", type=wholes(0), default="0", help="comma-separated (default: 0)")
    how = parser.add_argument_group("how it is run")
    how.add_argument("--hardware", type=words, default="a6000-paper", help="comma-separated names or paths (default: a6000-paper)")
    how.add_argument("--policy", type=words, default="no_assign,sa_only,ea_only,apex", help="comma-separated names, name(key=value), module:Class; all: every name")
    how.add_argument("--pool", type=wholes(0), default="64", help="comma-separated slots a layer (default: 64)")
    how.add_argument("--warmup", type=whole(0), default=10, help="steps that are run and not counted (default: 10)")
    how.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, e.g. resident_first=true")
    how.add_argument("--change", action="append", default=[], metavar="PART.KEY=MS", help="a hardware constant, e.g. cpu.c0=0.3")
    how.add_argument("--refit", action="store_true", help="first refit the layer offset so that no_assign gives 72.44 tokens/s at batch 16")
    how.add_argument("--scale-experts", action="store_true", help="scale costs by the model's expert bytes")
    how.add_argument("--popularity", metavar="FILE", help="first residents from this file instead of the trace's own profile")
    how.add_argument("--no-references", action="store_true", help="leave out oracle_p, foretold, belady, clairvoyant and all_resident")
    parser.add_argument("--jobs", type=whole(), default=min(2, os.cpu_count() or 1), help="processes (default: up to 2)")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write every figure here")
    parser.add_argument("--page", type=out_file, metavar="OUT", help="also write the table as Markdown, a section per trace and columns per hardware file")


def run(args: argparse.Namespace) -> int:
    config = tuple((key, value_of(text)) for key, text in map(pair, args.set))
    if unknown := [key for key, _ in config if key not in DEFAULTS]:
        raise ValueError(f"--set: a simulation has no setting {unknown[0]!r}; there are {', '.join(DEFAULTS)}")
    policies = [name for given in args.policy for name in (every_policy(dict(config)) if given == "all" else [given])]
    once("--policy", policies)
    policies += [] if args.no_references else [name for name in REFERENCES if name not in policies]
    check_named(machines=args.hardware, policies=policies, traces=args.trace, presets=args.preset, model=args.model)
    if args.popularity:
        popularity.read(args.popularity)
    if args.trace:
        check_traces(args.trace, args.popularity)

    from apexk.sim.cells import Cell, TraceSpec, run_table

    if args.trace:
        specs = [TraceSpec(path=path, steps=args.steps) for path in args.trace]
    else:
        specs = [TraceSpec(preset, args.model, batch, args.steps, args.phase)
                 for preset, batch in itertools.product(args.preset, args.batch)]
    if dict(config).get("gpus", 1) != 1 and any(name in REFERENCES for name in policies):
        raise ValueError("--set gpus: oracle_p, foretold, belady, clairvoyant and all_resident know what one GPU costs: add --no-references")
    changes = tuple(map(constant, args.change))
    cells = [
        Cell(spec, machine, policy, pool, args.refit, args.scale_experts, args.warmup, config, changes, args.popularity)
        for spec, machine, pool, policy in itertools.product(specs, args.hardware, args.pool, policies)
    ]
    rows = run_table(cells, args.seeds, jobs=args.jobs, said=bar("simulate"))
    print(show(rows))
    if args.json:
        write_json(args.json, {"schema": "apexk.simulate/1", "rows": [r.as_dict() for r in rows]})
    if args.page:
        from apexk.sim.page import page

        write_text(args.page, page(rows, command(args)))
    return DONE


def every_policy(config: dict) -> list[str]:
    """All names but those that cannot do with the settings' pool scope, which stderr tells."""
    from apexk.policy.base import SCOPES
    from apexk.policy.registry import POLICIES

    scope = config.get("pool_scope")
    left_out = [name for name in POLICIES if scope in SCOPES and scope not in POLICIES[name].pool_scopes]
    if left_out:
        print(f"apexk simulate: --policy all leaves out those that cannot do with pool_scope {scope!r}: {', '.join(left_out)}", file=sys.stderr)
    return [name for name in POLICIES if name not in left_out]


def command(args: argparse.Namespace) -> str:
    """What repeats a run: every flag that is not at its default, files to write left out."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    plain = vars(parser.parse_args([]))
    given = ["apexk simulate"]
    for name, value in vars(args).items():
        if name not in plain or name in ("json", "page", "jobs") or value == plain[name]:
            continue
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            given.append(flag)
        elif name in ("trace", "set", "change"):
            given += [f"{flag} {shlex.quote(one)}" for one in value]
        else:
            given.append(f"{flag} {shlex.quote(','.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))}")
    return " ".join(given)


def show(rows) -> str:
    """The table as a person reads it; all times are modelled."""
    from apexk.sim.page import machine_name

    head = ["policy", "trace", "batch", "hardware", "pool", "tokens/s", "+-", "% clairvoyant", "CPU ms", "GPU ms", "estimate off", "exact", "spec", "hits"]
    several = any(dict(r.cell.config).get("gpus", 1) != 1 for r in rows)
    head += ["busiest GPU"] if several else []
    lines = [head]
    for r in rows:
        m, half = r.mean, r.half["tokens_per_s"]
        spec = r.cell.spec
        share = "-" if r.percent_of_clairvoyant is None else f"{r.percent_of_clairvoyant:.1f}"
        lines.append([r.cell.policy, Path(spec.path).name if spec.path else spec.preset, "-" if spec.path else str(spec.batch),
                      machine_name(r.cell.machine), str(r.cell.pool), f"{m['tokens_per_s']:.2f}", "-" if half is None else f"{half:.2f}", share,
                      f"{m['cpu_path_ms_per_layer']:.2f}", f"{m['gpu_path_ms_per_layer']:.2f}", f"{100 * m['estimate_error']:.2f} %" if m["estimate_error"] else "-", f"{m['exact_per_layer']:.2f}",
                      f"{m['speculative_per_layer']:.2f}", f"{m['hit_rate']:.3f}", *([f"x {m['gpu_imbalance']:.2f}"] if several else [])])
    speed = sorted(r.mean["layer_steps_per_s"] for r in rows)[len(rows) // 2]
    return table(lines) + f"\n\nmodelled times; estimate off: mean of |estimated longer path / taken - 1|; paths, exact and speculative copies per layer; {'busiest GPU: its pairs over the average one; ' if several else ''}{speed:.0f} layer-steps/s a process (median)"


def check_traces(paths: list[str], counts: str | None) -> None:
    """Refuses mixed models; says so on stderr where a trace's requests are also in the popularity file."""
    from apexk.sim import trace

    found = [trace.read(path) for path in paths]
    trace.require_same_model(found)
    for item in found if counts else ():
        counted = popularity.read(counts, model=str(item.meta.get("model")), layers=item.layers, experts=item.experts)
        share = popularity.overlap(counted, item)
        if share:
            print(f"apexk simulate: {share:.0%} of the requests of {item.source} are also in {counts}: not a disjoint split", file=sys.stderr)


def pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"{text!r}: wanted KEY=VALUE")
    return key.strip(), value.strip()


def constant(text: str) -> tuple[str, float]:
    """A hardware constant and its value; `apexk.hardware` checks both."""
    key, value = pair(text)
    try:
        return key, float(value)
    except ValueError:
        raise ValueError(f"--change: {key} is {value!r}, wanted a number") from None


def value_of(text: str):
    """true, false, a number, or the word itself."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:
        return text
