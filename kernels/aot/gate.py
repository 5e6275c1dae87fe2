"""The gate: every launch must compile for every target without spills, fit its shared memory and use the wide paths.

`main` is the entry of `apexk kernels aot`. It prints a table, one line a launch and target, then what failed and why.
"""

import os
import sys

from apexk.arguments import Parser, whole
from apexk.outputs import out_file, write_json
from apexk.workers import spread

from . import kept
from .other_triton import gate_under
from .specs import GEMMS, specs
from .table import counted, table, targets_of
from .targets import TARGETS

DEFAULT_TARGETS = (80, 86, 90)
COLUMNS = (
    "kernel", "case", "sm", "tile", "regs", "spill", "shared", "blocks", "mma", "loads", "cp.async", "KiB in flight/need",
)  # fmt: skip


def failures(report, tile) -> list[str]:
    """What is wrong with one report; empty when nothing is."""
    wrong = []
    if report.spill_bytes:
        wrong.append(f"{report.spill_bytes} bytes spilled: take a smaller tile or more warps")
    if not report.fits:
        wrong.append(f"{report.shared_bytes} bytes of shared memory, the target allows {TARGETS[report.target].block_shared_bytes}")
    if report.kernel not in GEMMS or report.note:
        return wrong
    widths = report.loop.copies + report.loop.loads
    if report.half:
        if not report.loop.mma:
            wrong.append("no tensor-core instruction in the main loop")
        elif report.target == 90 and _wide(tile) and not any("GMMA" in kind for kind in report.loop.mma):
            wrong.append(f"wgmma expected at this tile, got {counted(report.loop.mma)}")
        if not (report.loop.copies or report.loop.tma):
            wrong.append("main loop is not pipelined through cp.async")
        if report.inflight_kib < report.need_kib and tile.get("BLOCK_M") == 16:
            wrong.append(f"{report.inflight_kib} KiB in flight on an SM, memory needs {report.need_kib}")
    if set(widths) - {128}:  # of weights and of rows alike: the instructions do not say which is which
        wrong.append(f"reads of the main loop are {counted(widths)} bits wide, wanted 128 only: is the row length a multiple of 16?")
    return wrong


def _wide(tile) -> bool:
    """The tensor core's M side holds the 64 rows that wgmma wants."""
    return (tile["BLOCK_N"] if tile["SWAP_AB"] else tile["BLOCK_M"]) >= 64


def run_one(job):
    """(target, index, which) -> (label, tile, kernel, report or error text); a worker finds the launch by its index."""
    target, index, which = job
    from .compile import analyse

    spec = specs(target, which)[index]
    tile = {k: v for k, v in spec.launch.values.items() if k.startswith(("BLOCK", "SWAP"))}
    try:
        return spec.label, tile, spec.launch.kernel.__name__, analyse(spec.launch, target, spec.label)
    except Exception as error:  # noqa: BLE001 - one launch that does not compile must not hide the others
        return spec.label, tile, spec.launch.kernel.__name__, f"{type(error).__name__}: {str(error)[-300:]}"


def shape(report, tile) -> str:
    """64x128x64T w8 s3: block sizes, T where weights are on the M side, warps, stages."""
    sizes = "x".join(str(tile[k]) for k in ("BLOCK_M", "BLOCK_N", "BLOCK_K")) if "BLOCK_N" in tile else "-"
    return f"{sizes}{'T' if tile.get('SWAP_AB') else ''} w{report.warps} s{report.stages}"


def row(report, tile) -> tuple:
    part = report.loop if report.loop.instructions else report.all
    return (
        report.kernel, report.label, report.target, shape(report, tile), report.regs, report.spill_bytes,
        report.shared_bytes, report.blocks, counted(report.loop.mma), counted(part.loads), counted(part.copies),
        f"{report.inflight_kib}/{report.need_kib}" if report.inflight_kib else "-",
    )  # fmt: skip


def main(argv=None) -> int:
    parser = Parser(prog="apexk kernels aot", description=__doc__.split("\n\n")[0])
    parser.add_argument("--targets", type=targets_of, default=",".join(map(str, DEFAULT_TARGETS)), help="compute capabilities, 86 for 8.6")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--quick", action="store_true", help="what one model's layer launches, nothing else")
    part.add_argument("--gemms", action="store_true", help="the GEMMs of the paper's models' layers, nothing else")
    parser.add_argument("--json", type=out_file, metavar="PATH", help="write every figure here")
    parser.add_argument("--keep", action="store_true", help="write this run's figures into the kept table")
    parser.add_argument("--triton", metavar="VERSION", help="under this Triton instead of the installed one, in an environment of its own")
    parser.add_argument("-j", "--jobs", type=whole(), default=2, help="processes (default 2)")
    args = parser.parse_args(argv)
    which = "quick" if args.quick else "gemms" if args.gemms else "all"
    if args.keep and which != "all":
        parser.error(f"--keep wants the whole table, not --{which}")
    if args.triton:
        flags = [f"--{name}" for name in ("quick", "gemms", "keep") if getattr(args, name)] + (["--json", str(args.json)] if args.json else [])
        return gate_under(args.triton, ["--targets", ",".join(map(str, args.targets)), "--jobs", str(args.jobs), *flags])
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what 3.6 and 3.9 do by default; 3.10 will not
    try:
        import triton
    except ImportError:
        print("the gate compiles with Triton, which is not installed: pip install 'triton>=3.6'", file=sys.stderr)
        return 3
    results = compile_all(args.targets, which, args.jobs)
    reports = [(report, tile) for _, tile, _, report in results if not isinstance(report, str)]
    print(f"triton {triton.__version__}, ptxas " + ", ".join(sorted({f"{r.ptxas} (sm_{r.target})" for r, _ in reports})))
    print(table(COLUMNS, [row(report, tile) for report, tile in reports]))
    failed = [(label, kernel, "does not compile: " + text) for label, _, kernel, text in results if isinstance(text, str)]
    failed += [(f"sm_{r.target} {r.label}", r.kernel, text) for r, tile in reports for text in failures(r, tile)]
    failed += compare(reports, keep=args.keep, whole=which == "all")
    for label, kernel, text in failed:
        print(f"FAILED {label} {kernel}: {text}")
    print(f"{len(results)} launches on {len(args.targets)} targets, {len(failed)} failures")
    if args.json:
        write_json(args.json, [{**r.plain(), "tile": tile} for r, tile in reports])
    return 1 if failed else 0


def compare(reports, *, keep, whole) -> list[tuple]:
    """Regressions against the kept table of this Triton version; none where `keep` replaces what it says of these targets.
    With `whole` every launch in the table must have come."""
    if not reports:
        return []
    path = kept.path_of(reports[0][0].triton)
    before, now, targets = kept.load(path), {}, {report.target for report, _ in reports}
    for report, tile in reports:
        name = f"{report.kernel} {report.label} {shape(report, tile)} {report.variant}"
        assert (report.target, name) not in now, f"two launches on sm_{report.target} have the name {name!r}"
        now[report.target, name] = kept.entry(report, name)
    if keep:
        kept.save(path, [*now.values(), *(e for (target, _), e in before.items() if target not in targets)])
        return []
    if not before:
        print(f"no table is kept for Triton {reports[0][0].triton}; --keep makes one", file=sys.stderr)
        return []
    wrong = [(f"sm_{t}", name, text) for (t, name), e in now.items() for text in kept.regressions(e, before.get((t, name)))]
    gone = sorted((t, name) for t, name in before if whole and t in targets and (t, name) not in now)
    return wrong + [(f"sm_{t}", name, "in the kept table, but not launched any more: run the gate with --keep") for t, name in gone]


def compile_all(targets, which, jobs):
    """Results of every launch on every target, in order."""
    work = [(target, index, which) for target in targets for index in range(len(specs(target, which)))]
    if jobs < 2:
        return list(_told(map(run_one, work), len(work)))
    return list(_told(spread(run_one, work, jobs, fresh=True), len(work)))


def _told(results, total):
    """Progress on stderr: a full run takes minutes."""
    for done, result in enumerate(results, 1):
        if done % 20 == 0:
            print(f"{done} of {total} launches compiled", file=sys.stderr, flush=True)
        yield result
