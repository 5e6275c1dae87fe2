"""What in a run deserves a look, each with the number that says so and what to do."""

from __future__ import annotations

from apexk.timeline import Recording

from .layers import lines_of
from .tables import MS

IDLE_SHARE, OVERHEAD_SHARE, USED_SHARE = 0.05, 0.02, 0.3  # below these nothing is said
LEAST_SPECULATIVE = 20  # copies, before their use says anything
MOST_SPREAD_NS = 50_000


def findings(recording: Recording) -> list[str]:
    """One sentence each, the costly ones first."""
    lines = lines_of(recording)
    windows = sum(line.critical_ns for line in lines)
    seen = recording.header.get("profile", {})
    found = []
    if seen.get("pageable_copies"):
        found.append(f"{seen['pageable_copies']} expert copies ({seen['pageable_bytes'] / 2**20:.1f} MiB) come from memory that is not pinned: "
                     "they are staged by the driver and block; pin the host store")  # fmt: skip
    if seen.get("syncs_in_layers"):
        found.append(f"{seen['syncs_in_layers']} times the host waits for the device inside a layer, beside the routing's own read-back: "
                     f"{seen['sync_ns'] / MS:.3f} ms in all")  # fmt: skip
    if seen and not seen.get("operations"):
        windows = 0  # no device was seen, so nobody can tell whether it worked
    idle = sum(line.idle_ns for line in lines)
    if windows and idle > IDLE_SHARE * windows:
        found.append(f"in {100 * idle / windows:.0f} % of the windows nobody works, neither GPU, channel nor CPU: the host is late ({idle / MS:.3f} ms in all)")
    wall = sum(line.exposed_wall_ns for line in lines)
    if windows and wall > IDLE_SHARE * windows:
        found.append(f"in {100 * wall / windows:.0f} % of the windows exact copies run and both others wait: fewer transfers or a larger pool would help")
    speculative, used = sum(line.n_spec for line in lines), sum(line.spec_used for line in lines)
    if speculative >= LEAST_SPECULATIVE and not seen and used < USED_SHARE * speculative:
        found.append(f"{used} of {speculative} speculative copies were used in their layer: predictions are off, or copies come too late")
    span = max((line.end_ns for line in lines), default=0) - min((line.start_ns for line in lines), default=0)
    if span and seen.get("overhead_ns", 0) > OVERHEAD_SHARE * span:
        found.append(f"the tool itself took {seen['overhead_ns'] / MS:.3f} ms, {100 * seen['overhead_ns'] / span:.0f} % of the run: times are too long by up to that")
    return found + _lost(seen)


def _lost(seen: dict) -> list[str]:
    """What the profile does not hold."""
    found = []
    if "from_timeline" in seen and seen["clock_spread_ns"] > MOST_SPREAD_NS:
        found.append(f"the clocks of profile and timeline agree to {seen['clock_spread_ns'] / 1e3:.0f} us only: overlaps of {', '.join(seen['from_timeline'])} are that vague")
    if seen.get("no_call"):
        found.append(f"{seen['no_call']} of {seen['operations']} operations on the device have no call that launched them (dropped events, or a capture that began too late): "
                     "they are missing below")  # fmt: skip
    if seen.get("open_ranges"):
        found.append(f"{seen['open_ranges']} ranges have no end (the capture stopped inside them) and are left out")
    if seen.get("moved_ranges"):
        found.append(f"{seen['moved_ranges']} ranges end on another thread than they began on and are left out")
    if seen.get("outside"):
        found.append(f"{seen['outside']} operations lie before the first pass, behind the last, or come from other threads, and are left out")
    return found
