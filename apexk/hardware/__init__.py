"""Hardware files: what work costs on a machine, measured or fitted, as JSON (schema `apexk.hardware/1`, milliseconds).

A file holds cost lines for the CPU path (`c0 + a*experts + b*pairs`), exact copies (`s0 + t1*copies`), speculative copies
(`s_sp + t1` each), the GPU's grouped FFN (`g0 + g1*experts + g2*pairs`; a second launch in the same layer pays `g_wave`
in place of `g0`), and the dense part of a layer (`o_att` before the router, `o_post` after the merge). `kappa` is
measured layer time over path time; what exceeds 1 is shown as an operation of its own, `unattributed`. A file may have
what several GPUs pay to send rows to one another before a layer's merge (`exchange`: `e0 + e1` each pair that moves).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path

SCHEMA = "apexk.hardware/1"
MOST_MS = 1e7  # of any one cost: hours, and still exact in integer nanoseconds
_HERE = Path(__file__).resolve().parent
#: settings that a hardware file may override, with what it may say
OVERRIDES = {
    "utility_decay": float,
    "rate_ema": float,
    "in_flight": ("abort", "finish"),
    "prefetch_protects": ("predicted", "in_use"),
    "resident_first": bool,
}


@dataclass(frozen=True)
class CpuCosts:
    c0: float
    a: float
    b: float
    fixed_when_empty: bool


@dataclass(frozen=True)
class LinkCosts:
    s0: float
    t1: float
    s_sp: float


@dataclass(frozen=True)
class GpuCosts:
    g0: float
    g1: float
    g2: float
    g_wave: float


@dataclass(frozen=True)
class LayerCosts:
    o_att: float
    o_post: float
    kappa: float


@dataclass(frozen=True)
class ExchangeCosts:
    e0: float
    e1: float


@dataclass(frozen=True)
class Hardware:
    """One machine's costs in milliseconds; `source` is the file it was read from. `exchange` may be missing (None)."""

    name: str
    about: str
    model: dict
    cpu: CpuCosts
    link: LinkCosts
    gpu: GpuCosts
    layer: LayerCosts
    overrides: dict
    source: str
    exchange: ExchangeCosts | None = None

    def cpu_ms(self, experts: int, pairs: int) -> float:
        if experts == 0 and not self.cpu.fixed_when_empty:
            return 0.0
        return self.cpu.c0 + self.cpu.a * experts + self.cpu.b * pairs

    def gpu_ms(self, experts: int, pairs: int, first: bool) -> float:
        """One launch of the grouped FFN over slots; `first` in its layer or a later wave."""
        fixed = self.gpu.g0 if first else self.gpu.g_wave
        return fixed + self.gpu.g1 * experts + self.gpu.g2 * pairs

    def copy_ms(self, speculative: bool, first: bool) -> float:
        """One expert over the link. Exact copies of a layer share one set-up, paid by the `first`."""
        if speculative:
            return self.link.s_sp + self.link.t1
        return self.link.t1 + (self.link.s0 if first else 0.0)


def names() -> list[str]:
    """Names of the hardware files that ship with apexk."""
    return sorted(p.stem for p in _HERE.glob("*.json"))


def load(name_or_path: str | Path) -> Hardware:
    """Reads and checks a hardware file, by the name of one that ships or by path.

    Raises ValueError with the file, the field, what came and what is allowed.
    """
    text = str(name_or_path)
    if text in names():
        path = _HERE / f"{text}.json"
    else:
        path = Path(name_or_path)
        if path.suffix != ".json" or not path.is_file():
            raise ValueError(f"no hardware file {text!r}: name one of {', '.join(names())}, or give the path of a .json file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"hardware file {path}: not readable as JSON ({error})") from error
    return _from_dict(data, str(path))


def changed(machine: Hardware, name: str, value: float) -> Hardware:
    """`machine` with one constant replaced, named as "cpu.c0". Raises ValueError as `load` does."""
    section, _, key = name.partition(".")
    part = getattr(machine, section, None)
    if type(part) not in (CpuCosts, LinkCosts, GpuCosts, LayerCosts, ExchangeCosts) or type(getattr(part, key, None)) not in (int, float):
        raise ValueError(f"hardware has no constant {name!r}; name one as cpu.c0, link.s0, link.t1, layer.kappa, ...")
    if wrong := _wrong(name, value):
        raise ValueError(f"{name} is {str(value)[:40]}, wanted {wrong}")
    return replace(machine, **{section: replace(part, **{key: value})})


def with_payload(machine: Hardware, ratio: float) -> Hardware:
    """`machine` where a copy moves `ratio` of an expert's bytes and its weights are dequantised behind it, before the copy counts
    as landed: `t1` becomes `ratio*t1 + (1 + ratio)*g1`. `g1` is what reading an expert once costs the file's GPU; dequantising
    reads `ratio` of that and writes the rest. Set-up stays as it is."""
    model = machine.model
    if "bytes_per_expert" in model:
        model = model | {"bytes_per_expert": round(ratio * model["bytes_per_expert"])}
    return replace(machine, model=model, link=replace(machine.link, t1=ratio * machine.link.t1 + (1 + ratio) * machine.gpu.g1))


def _wrong(name: str, value: object) -> str | None:
    """What is wanted instead of the number `value`, None where it is good."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "layer.kappa":
        return None if number and 1 <= value <= 1000 else "1 to 1000 (layer time over path time)"
    return None if number and 0 <= value <= MOST_MS else f"a number of milliseconds from 0 to {MOST_MS:.0e}"


def _from_dict(data, source: str) -> Hardware:
    def fail(what: str):
        raise ValueError(f"hardware file {source}: {what}")

    if not isinstance(data, dict):
        fail(f"a JSON object is wanted, got {type(data).__name__}")
    if data.get("schema") != SCHEMA:
        fail(f"schema is {data.get('schema')!r}, wanted {SCHEMA!r}")
    if data.get("unit") != "ms":
        fail(f"unit is {data.get('unit')!r}, wanted 'ms'")
    if not isinstance(data.get("name"), str) or not data["name"]:
        fail("name is missing")

    def part(key: str, cls):
        section = data.get(key)
        if not isinstance(section, dict):
            fail(f"section {key!r} is missing")
        wanted = {f.name: f.type for f in fields(cls)}
        unknown, missing = sorted(section.keys() - wanted), sorted(wanted.keys() - section.keys())
        if unknown or missing:
            fail(f"section {key!r}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
        for field, kind in wanted.items():
            value = section[field]
            if kind == "bool":
                if not isinstance(value, bool):
                    fail(f"{key}.{field} is {value!r}, wanted true or false")
            elif wrong := _wrong(f"{key}.{field}", value):
                fail(f"{key}.{field} is {str(value)[:40]}, wanted {wrong}")
        return cls(**section)

    if not isinstance(data.get("model", {}), dict):
        fail("model is no object")
    overrides = data.get("overrides", {})
    if not isinstance(overrides, dict):
        fail("overrides is no object")
    for key, value in overrides.items():
        if key not in OVERRIDES:
            fail(f"overrides.{key} is unknown; known: {', '.join(OVERRIDES)}")
        kind = OVERRIDES[key]
        good = value in kind if isinstance(kind, tuple) else type(value) in ((int, float) if kind is float else (kind,))
        if kind is float:
            good = good and 0 <= value <= 1
        if not good:
            wanted = " or ".join(kind) if isinstance(kind, tuple) else {bool: "true or false", float: "a number from 0 to 1"}[kind]
            fail(f"overrides.{key} is {value!r}, wanted {wanted}")
    return Hardware(
        name=data["name"],
        about=str(data.get("about", "")),
        model=dict(data.get("model") or {}),
        cpu=part("cpu", CpuCosts),
        link=part("link", LinkCosts),
        gpu=part("gpu", GpuCosts),
        layer=part("layer", LayerCosts),
        overrides=dict(overrides),
        source=source,
        exchange=part("exchange", ExchangeCosts) if "exchange" in data else None,
    )
