"""A profile completed by the run's own timeline: decisions, and the rows of threads that the profiler saw no ranges of.

torch.profiler knows nothing of native threads' ranges, so copies and CPU experts that such threads run come from our
`timeline.jsonl`, which the device wrote during the same run. The clocks are laid over each other where both say when a
layer's routing was known on the host; how well that fits is kept as `clock_spread_ns`.
"""

from __future__ import annotations

from statistics import median

from apexk.timeline import Recording

from .attribution import ProfileError

#: decisions always, of these what the profile has no row of
WANTED = ("copy.exact", "copy.spec", "host.ffn", "host.rows")
LEAST_COMMON = 2  # layers, to lay the clocks over each other


def complete(profile: Recording, timeline: Recording) -> Recording:
    """The profile's rows and what they lack from `timeline`, by start. ProfileError where the two are not of one run, or
    the timeline's times are no measurements."""
    if any(row["modelled"] for row in timeline.rows):
        raise ProfileError("the timeline's times are modelled: they cannot be laid over a profile; give the timeline of a measured run")
    ours, theirs = _routed(timeline), _routed(profile)
    common = ours.keys() & theirs.keys()
    if len(common) < LEAST_COMMON:
        raise ProfileError(f"timeline and profile share {len(common)} layers by step and number; wanted at least {LEAST_COMMON} of the same run")
    apart = [theirs[at] - ours[at] for at in common]
    shift = round(median(apart))
    steps = {step for step, _ in common}
    there = {row["kind"] for row in profile.rows}
    wanted = {"plan", *WANTED} - (there - {"plan"})
    taken = [row | {"start_ns": max(0, row["start_ns"] + shift), "end_ns": max(0, row["end_ns"] + shift)}
             for row in timeline.rows if row["kind"] in wanted and row["step"] in steps]  # fmt: skip
    spread = round(median(abs(value - shift) for value in apart))
    facts = profile.header["profile"] | {"from_timeline": sorted({row["kind"] for row in taken}), "clock_spread_ns": spread}
    header = profile.header | {"config": timeline.header["config"], "model": timeline.header["model"], "profile": facts}
    return Recording(header, sorted(profile.rows + taken, key=lambda row: row["start_ns"]))


def _routed(recording: Recording) -> dict[tuple[int, int], int]:
    """(step, layer) -> when its routing was known on the host."""
    found: dict[tuple[int, int], int] = {}
    for row in recording.rows:
        if row["kind"] == "route":
            at = row["step"], row["layer"]
            found[at] = max(found.get(at, 0), row["end_ns"])
    return found
