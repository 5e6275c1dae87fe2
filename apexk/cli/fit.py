"""`apexk fit MODEL`: does it fit, with which pool, how fast would it be; before a weight is read."""

from __future__ import annotations

import argparse

from apexk import hardware
from apexk.arguments import whole
from apexk.bench.named import check_shape
from apexk.cli import DONE, LACKING
from apexk.cli.flags import memory
from apexk.cli.progress import gib, table
from apexk.outputs import out_file, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a local folder with config.json (and safetensors files, if there are any), or a known shape such as qwen3.5-35b-a3b")
    parser.add_argument("--gpu-memory", type=memory, metavar="BYTES", help="of a GPU, such as 48GiB (default: the GPU's that is here)")
    parser.add_argument("--context", type=whole(), default=8192, help="tokens a sequence (default: 8192)")
    parser.add_argument("--batch", type=whole(), default=1, help="sequences at once (default: 1)")
    parser.add_argument("--hardware", default="a6000-paper", help="name or path of the hardware file that speeds are modelled on (default: a6000-paper)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="of the weights (default: the configuration's)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that lies in the folder")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write every figure here")


def run(args: argparse.Namespace) -> int:
    check_shape(args.model)
    hardware.load(args.hardware)

    import torch

    from apexk.fit.fit import fit, quiet, subject

    with quiet():
        about = subject(args.model, args.dtype and getattr(torch, args.dtype), args.trust_remote_code)
        result = fit(about, machine=args.hardware, gpu_bytes=args.gpu_memory, context=args.context, batch=args.batch)
    if args.json:
        write_json(args.json, result)
    print(show(result))
    return DONE if result["host"].get("fits", True) else LACKING


def show(r: dict) -> str:
    """The result as a person reads it."""
    m, host, gpu, files = r["model"], r["host"], r["gpu"], r["checkpoint"]
    lines = [f"{m['name']}: {m['model_type']}, {m['moe_layers']} sparse layers of {m['experts']} experts, top-{m['topk']}, "
             f"H {m['hidden']}, I {m['intermediate']}, {m['dtype']}, {m['bytes_per_expert'] / 2**20:.2f} MiB an expert"]
    if files:
        lines.append(f"checkpoint: {gib(files['bytes'])} in {files['files']} files, {files['expert_tensors']} expert tensors stored {files['experts_stored']}"
                     + (f", {files['left_out']} tensors left out" if files["left_out"] else ""))
    lines.append(f"host memory: {gib(host['needed'])} (experts {gib(host['experts'])}, dense part {gib(host['dense'])} while loading)"
                 + (f"; {gib(host['free'])} free by {host['limited_by']}: {'fits' if host['fits'] else 'DOES NOT FIT'}" if "free" in host else ""))
    pin = r["pinning"]
    lines.append("pinned memory: " + ("no limit" if pin["limit"] is None else f"limit {gib(pin['limit'])}, {'enough' if pin['fits'] else 'not enough to pin all experts: raise `ulimit -l`'}"))
    whole = f", of {gib(gpu['bytes'])}" if gpu["bytes"] else ""
    lines.append(f"GPU memory ({gpu['source']}{whole}): dense part {gib(gpu['dense'])}, cache of {gpu['batch']} x {gpu['context']} tokens "
                 f"{gib(gpu['kv_cache'])}, expert rows {gib(gpu['expert_rows'])}, other {gib(gpu['activations_and_libraries'])}")
    policies = list(r["pools"][0]["tokens_per_s"])
    rows = [["slots a layer", "GPU memory", "fits", *(f"{name} tokens/s" for name in policies)]]
    for row in r["pools"]:
        rows.append([str(row["pool"]), gib(row["gpu_bytes"]), {True: "yes", False: "no", None: "-"}[row["fits"]],
                     *(f"{row['tokens_per_s'][name]:.1f}" for name in policies)])
    suggested = r["suggested"]
    settings = ", ".join(f"{key}={value!r}" for key, value in suggested.items() if key != "why")
    advice = f"a host with {gib(suggested['host_bytes'])} of free memory" if "host_bytes" in suggested else f"ApexConfig({settings})"
    lines += ["", table(rows), "", f"tokens/s: decode at batch {gpu['batch']}, modelled on {r['hardware']} with its costs scaled by the expert's bytes, on a generated trace",
              f"suggested: {advice}: {suggested['why']}"]
    return "\n".join(lines)
