"""NVTX ranges of the engine; the only importer of nvtx.

    ranges = Ranges(layers=40)
    with ranges("copy.exact", layer=7, payload=expert):
        ...

Domain `apexk`; category and words are the timeline's kinds; messages are a fixed set, `L07` for a layer and
`L07/copy.exact` for an operation in it, registered once, so that a range costs 0.3 us instead of 3. What varies (expert,
step, bytes) is the payload. Without nvtx, or with no tool attached, a range is one shared object that does nothing.

A tool assigns GPU work to the ranges of the thread that launches it, so each thread that launches makes its own `Ranges`
(a payload is set on a shared attribute just before the push) and closes a range on the thread that opened it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

try:
    import nvtx
except ImportError:
    nvtx = None

DOMAIN = "apexk"
LAYER = "layer"
# Every timeline kind, and the layer as a whole.
COLORS = {
    "route": "gray", "predict": "purple", "plan": "gray", "copy.exact": "orange", "copy.spec": "yellow",
    "gpu.resident": "blue", "gpu.arrived": "cyan", "host.rows": "lightgreen", "host.ffn": "green", "shared": "lightblue",
    "combine": "navy", "attention": "lightgray", "unattributed": "white", LAYER: "black",
}  # fmt: skip

NOTHING = nullcontext()


class Ranges:
    """Prebuilt ranges of `layers` layers. Calling it returns the context manager of one range."""

    def __init__(self, layers: int, enabled: bool = True):
        self._ranges: dict[str, list[_Range]] = {}
        domain = nvtx.get_domain(DOMAIN) if nvtx is not None and enabled else None
        for kind in COLORS:
            self._ranges[kind] = made = []
            for layer in range(layers):
                message = f"L{layer:02d}" if kind == LAYER else f"L{layer:02d}/{kind}"
                attributes = domain and domain.get_event_attributes(message, COLORS[kind], kind, 0)
                made.append(NOTHING if attributes is None else _Range(domain, attributes))

    @property
    def active(self) -> bool:
        """Whether ranges reach a tool."""
        return any(made and made[0] is not NOTHING for made in self._ranges.values())

    def __call__(self, kind: str, layer: int, payload: int = 0) -> AbstractContextManager:
        """The range of `kind` (`LAYER` or a timeline kind) in `layer`; enter it at once, with no other in between."""
        made = self._ranges[kind][layer]
        if made is not NOTHING:
            made.attributes.payload = payload
        return made


class _Range:
    """One message; may be entered again and again, also inside itself."""

    __slots__ = ("_domain", "attributes")

    def __init__(self, domain, attributes):
        self._domain, self.attributes = domain, attributes

    def __enter__(self) -> _Range:
        self._domain.push_range(self.attributes)
        return self

    def __exit__(self, *_) -> None:
        self._domain.pop_range()
