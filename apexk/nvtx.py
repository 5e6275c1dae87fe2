"""NVTX ranges of the engine; the only importer of nvtx.

    ranges = Ranges(layers=40)
    with ranges("copy.exact", layer=7, payload=expert):
        ...

Domain `apexk`; categories are the kinds below; messages are a fixed set: `prefill` or `decode` for a pass, `L07` for a
layer of it, `L07/copy.exact` for an operation in that. Each is registered once, so that a range costs 0.3 us instead of
3. What varies is the payload (`PAYLOADS`). Without nvtx, or with no tool attached, a range is one shared object that does
nothing. Native threads emit the same words through `profiling/native/apexk_nvtx.h`.

A tool assigns GPU work to the ranges of the thread that launches it, so each thread that launches makes its own `Ranges`
(a payload is set on a shared attribute just before the push) and closes a range on the thread that opened it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

try:
    import nvtx
except ImportError:
    nvtx = None

DOMAIN = "apexk"
LAYER = "layer"
SUBMIT = "submit"  # the model's thread hands experts to the CPU workers; their own range is `host.ffn`
PHASES = ("prefill", "decode")
# Every timeline kind, a pass, a layer as a whole, and the hand-over to the CPU.
COLORS = {
    "route": "gray", "predict": "purple", "plan": "gray", "copy.exact": "orange", "copy.spec": "yellow",
    "gpu.resident": "blue", "gpu.arrived": "cyan", "host.rows": "lightgreen", "host.ffn": "green", "shared": "lightblue",
    "combine": "navy", "attention": "lightgray", "unattributed": "white", LAYER: "black", SUBMIT: "green",
    "prefill": "red", "decode": "black",
}  # fmt: skip
#: what the payload of a range says
PAYLOADS = {
    "prefill": "step", "decode": "step", LAYER: "step", "route": "tokens", "predict": "tokens", "combine": "tokens",
    "copy.exact": "expert", "copy.spec": "expert", "gpu.resident": "experts", "gpu.arrived": "experts", SUBMIT: "experts",
    "host.ffn": "experts", "host.rows": "bytes",
}  # fmt: skip


class _Nothing:
    """A range without a tool. Both methods are built-in functions, the second one of any arguments and with a false result: a
    third of what `contextlib.nullcontext` costs."""

    __slots__ = ()
    __enter__ = staticmethod(bool)
    __exit__ = staticmethod("".format)


NOTHING = _Nothing()
_NOTHINGS = dict.fromkeys(COLORS, NOTHING)  # by kind, so that an unknown one is refused here too


def message(kind: str, layer: int) -> str:
    """The words of a range: `decode`, `L07` or `L07/copy.exact`."""
    if kind in PHASES:
        return kind
    return f"L{layer:02d}" if kind == LAYER else f"L{layer:02d}/{kind}"


def _silent(layers: int):
    """Ranges that reach nobody. A plain function: Python calls an instance three times as slowly."""

    def silent(kind: str, layer: int, payload: int = 0) -> _Nothing:
        return _NOTHINGS[kind]

    silent.layers, silent.active = layers, False
    return silent


class Ranges:
    """Prebuilt ranges of `layers` layers. Calling it returns the context manager of one range. `active` says whether ranges reach
    a tool; where they do not, this is a function with the same attributes."""

    active = True

    def __new__(cls, layers: int, enabled: bool = True):
        domain = nvtx.get_domain(DOMAIN) if nvtx is not None and enabled else None
        if domain is None or domain.get_event_attributes() is None:
            return _silent(layers)
        return super().__new__(cls)

    def __init__(self, layers: int, enabled: bool = True):
        self.layers = layers
        domain = nvtx.get_domain(DOMAIN)
        self._ranges = {
            kind: [_Range(domain, domain.get_event_attributes(message(kind, layer), color, kind, 0)) for layer in range(layers)]
            for kind, color in COLORS.items()
        }

    def __call__(self, kind: str, layer: int, payload: int = 0) -> AbstractContextManager:
        """The range of `kind` (one of COLORS) in `layer`; enter it at once, with no other in between."""
        made = self._ranges[kind][layer]
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
