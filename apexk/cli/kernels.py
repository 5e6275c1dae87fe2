"""`apexk kernels`: whether the kernels are right, what they look like, how fast they are. `apexk kernels triton --check --help`
shows a part's own arguments."""

from __future__ import annotations

import argparse
import importlib

#: room -> mode -> (module with `main(argv) -> exit code`, what it does)
MODES = {
    "cpu": {
        "check": ("apexk.kernels.bench.check_cpu", "compare every instruction set of this machine with the float64 reference"),
        "bench": ("apexk.kernels.bench.run", "check, then time beside torch, against measured roofs"),
        "busy": ("apexk.kernels.bench.busy_cpu", "how much slower calls get while two other processes compute"),
    },
    "cuda": {
        "aot": ("apexk.kernels.cuda.gate", "compile with nvcc for named GPUs: registers, spills, width of reads and stores"),
    },
    "triton": {
        "check": ("apexk.kernels.bench.check", "compare every Triton kernel with its reference, on the GPU or in the interpreter"),
        "aot": ("apexk.kernels.aot.gate", "compile for named GPUs: registers, spills, shared memory, SASS counts"),
        "roofline": ("apexk.kernels.bench.static_roofline", "bytes and operations issued over the fewest possible, counted"),
        "bench": ("apexk.kernels.bench.run", "check, then time against measured roofs (needs a GPU)"),
        "ncu": ("apexk.profiling.capture", "one case (--case NAME) under Nsight Compute"),
    },
}
#: the same by a shorter name
PARTS = {
    "bench": ("apexk.kernels.bench.run", "check, then time any benchmark case against measured roofs"),
    "aot": MODES["triton"]["aot"],
    "once": ("apexk.kernels.bench.once", "run one benchmark case a few times, for a profiler"),
    "plot": ("apexk.profiling.roofline", "draw benchmark rows under their measured roofs (needs matplotlib)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    lines = [f"{name}: {text}" for name, (_, text) in PARTS.items()]
    lines += [f"{room} --{mode}: {text}" for room, modes in MODES.items() for mode, (_, text) in modes.items()]
    parser.add_argument("part", choices=[*PARTS, *MODES], help="; ".join(lines))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="the part's own arguments; --help shows them")


def run(args: argparse.Namespace) -> int:
    if args.part in PARTS:
        return importlib.import_module(PARTS[args.part][0]).main(args.rest)
    modes = MODES[args.part]
    if set(args.rest) & {"-h", "--help"} and not any(f"--{mode}" in args.rest for mode in modes):
        print("\n".join([f"usage: apexk kernels {args.part} MODE ...\n", *(f"  --{mode:10}{text}" for mode, (_, text) in modes.items()),
                         f"\n`apexk kernels {args.part} --{next(iter(modes))} --help` shows a mode's own arguments"]))
        return 0
    asked = [mode for mode in modes if f"--{mode}" in args.rest]
    if len(asked) != 1:
        raise ValueError(f"apexk kernels {args.part} wants one of {', '.join('--' + mode for mode in modes)}")
    rest = [word for word in args.rest if word != f"--{asked[0]}"]
    if asked == ["bench"]:
        named = any(word.startswith("cpu_") for word in rest)
        rest = [*rest, "--device", "cuda"] if args.part == "triton" else rest if named else ["cpu_ffn/*/bf16/qwen3-64/*", *rest]
    main = importlib.import_module(modes[asked[0]][0]).main
    if asked == ["ncu"]:
        from apexk.kernels.bench.once import one_case

        return main(rest, device_of=lambda name: one_case(name).device)
    return main(rest)
