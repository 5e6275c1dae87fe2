"""`apexk plan MODEL`: how FlexGen, MoE-Lightning and CoX-MoE would run a model for throughput: batches, and what lies where."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace

from apexk.arguments import whole, words
from apexk.bench.named import check_shape
from apexk.cli import DONE, LACKING
from apexk.cli.flags import memory
from apexk.cli.progress import gib, table
from apexk.outputs import out_file, write_json
from apexk.sim import popularity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a local folder with config.json, or a known shape such as qwen3.5-35b-a3b")
    parser.add_argument("--systems", type=words, default="flexgen,moe_lightning,cox_moe", help="comma-separated (default: all three)")
    parser.add_argument("--machine", default="a6000", help="whose roofs, from data sheets: a6000, a6000-amx (default: a6000)")
    parser.add_argument("--gpu-memory", type=memory, metavar="BYTES", help="such as 24GiB (default: the machine's)")
    parser.add_argument("--host-memory", type=memory, metavar="BYTES", help="such as 128GiB (default: the machine's)")
    parser.add_argument("--prompt", type=whole(), default=512, help="tokens of a request's prompt (default: 512)")
    parser.add_argument("--new", type=whole(), default=128, help="tokens that it generates (default: 128)")
    parser.add_argument("--most", type=whole(), default=1024, help="requests at once, at most (default: 1024)")
    parser.add_argument("--popularity", metavar="FILE", help="of the model: what a stratum of popular experts covers (default: all equally popular)")
    parser.add_argument("--attention-on-cpu", action="store_true", help="let CoX-MoE plan attention on the CPU, which apexk does not run")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), help="of the weights (default: the configuration's)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that lies in the folder")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write every figure here")


def run(args: argparse.Namespace) -> int:
    from apexk.planners import MACHINES, PLANNERS, Load, NoRoom

    unknown = [name for name in args.systems if name not in PLANNERS]
    if unknown or args.machine not in MACHINES:
        what, there = (unknown[0], PLANNERS) if unknown else (args.machine, MACHINES)
        raise ValueError(f"there is no planner or machine {what!r}; there are {', '.join(there)}")
    sizes = {"gpu_bytes": args.gpu_memory, "host_bytes": args.host_memory}
    machine = replace(MACHINES[args.machine], **{name: size for name, size in sizes.items() if size is not None})
    load = Load(args.prompt, args.new)
    check_shape(args.model)
    if args.popularity:
        popularity.read(args.popularity)

    import torch

    model = model_of(args.model, args.dtype and getattr(torch, args.dtype), args.trust_remote_code, load.longest)
    if args.popularity:
        model = replace(model, popularity=shares_of(args.popularity, model.layers, model.experts))
    choices, refused = [], []
    for name in args.systems:
        more = {"attention_on_cpu": True} if name == "cox_moe" and args.attention_on_cpu else {}
        try:
            choices.append(PLANNERS[name](model, machine, load, args.most, **more))
        except NoRoom as error:
            refused.append(str(error))
    print("\n".join([*([show(model, machine, load, choices)] if choices else []), *refused]))
    if args.json:
        write_json(args.json, {"schema": "apexk.plan/1", "model": asdict(model), "machine": asdict(machine), "load": asdict(load),
                               "choices": [asdict(c) for c in choices], "refused": refused, "modelled": True})  # fmt: skip
    return DONE if choices else LACKING


def model_of(name: str, dtype, trust_remote_code: bool, tokens: int):
    """A planner's view of a model, from its configuration; the cache as the library's own holds it after `tokens` tokens."""
    from apexk.fit.fit import quiet, subject
    from apexk.hf.kv import kv_bytes
    from apexk.planners import Model

    with quiet():
        about = subject(name, dtype, trust_remote_code)
        experts, block = about.experts, about.block
        cache = kv_bytes(about.model, experts, 1, tokens) / tokens
    return Model(about.name, len(experts.blocks), experts.experts, experts.topk, experts.hidden, block.payload_bytes, about.dense, cache)


def shares_of(path: str, layers: int, experts: int) -> list[float]:
    """Shares of a layer's load by expert, most popular first, mean of all layers."""
    counts = popularity.read(path, layers=layers, experts=experts).counts
    rows = [[n / (sum(row) or 1) for n in sorted(row, reverse=True)] for row in counts]
    return [sum(column) / layers for column in zip(*rows, strict=True)]


def show(model, machine, load, choices) -> str:
    """The plans as a person reads them."""
    rows = [["system", "requests", "micro-batch", "shares", "GPU ms", "CPU ms", "link ms", "tokens/s", "GPU memory", "host memory"]]
    for c in choices:
        times = [f"{1e3 * c.seconds[lane]:.2f}" if lane in c.seconds else "-" for lane in ("gpu", "cpu", "link")]
        shares = ", ".join(f"{name} {value:g}" for name, value in c.shares.items())
        rows.append([c.system, str(c.batch), str(c.micro_batch), shares, *times, f"{c.tokens_per_s:.0f}", gib(round(sum(c.gpu.values()))), gib(round(sum(c.host.values())))])
    head = (f"{model.name} on {machine.name} ({machine.source}; {gib(round(machine.gpu_bytes))} of GPU memory), requests of {load.prompt} + {load.new} tokens; "
            "ms a layer in decode")  # fmt: skip
    return "\n".join([head, "", table(rows), "", "rooflines: a bound to choose by, neither measured nor a forecast"])

