"""Which providers a run times, and how many times as long as ours the others take.

Cases of one operation, device, dtype and shape compete. Their repeats alternate within one run, so that what the machine
does meanwhile meets all of them; `ratio_vs` of a row of ours holds, for each other provider, its median over ours.
"""

import importlib.util

from .registry import Case

#: shorter names -> providers, of which a case's device has one
ALIASES = {
    "torch": ("torch", "torch-loop"),
    "loop": ("torch-loop",),
    "grouped_mm": ("torch-grouped-mm",),
    "f32": ("torch-fp32",),
    "fp32": ("torch-fp32",),
}
#: providers that are packages of their own, here only if they can be imported
PACKAGES = ("vllm", "sglang")


def is_ours(provider: str) -> bool:
    return provider == "triton" or provider.startswith("cpu-")


def importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def choose(cases: list[Case], names: list[str]) -> tuple[list[Case], list[str]]:
    """(our cases and those of the named providers, packages that are named but not importable).

    ValueError for a name that nothing has, with all that may be said, and for one that none of these cases has.
    """
    providers = {case.provider for case in cases if not is_ours(case.provider)}
    known = sorted({*providers, *PACKAGES, *ALIASES, *(provider for those in ALIASES.values() for provider in those)})
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ValueError(f"--against: {', '.join(wrong)} not known here; known: {', '.join(known)}; or a git revision")
    there = [name for name in known if name in PACKAGES or providers & {*ALIASES.get(name, (name,))}]
    absent = [name for name in names if name not in there]
    if absent:
        raise ValueError(f"--against: none of these cases has {', '.join(absent)}; they have {', '.join(there)}; a pattern that names one provider leaves out the others'")
    wanted = {provider for name in names for provider in ALIASES.get(name, (name,))}
    missing = [name for name in names if name in PACKAGES and not importable(name)]
    return [case for case in cases if is_ours(case.provider) or case.provider in wanted], missing


def competitors(cases: list[Case]) -> list[list[Case]]:
    """Cases by what they compute, in order of first appearance."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(f"{case.op} {case.device} {case.dtype} {case.shape}", []).append(case)
    return list(groups.values())


def add_ratios(rows: list[dict]) -> None:
    """`ratio_vs` of the rows of one group: above 1 where ours takes less time; empty in the others' rows."""
    others = {row["provider"]: row["p50_ns"] for row in rows if not is_ours(row["provider"])}
    for row in rows:
        row["ratio_vs"] = {name: p50 / row["p50_ns"] for name, p50 in others.items()} if is_ours(row["provider"]) else {}
