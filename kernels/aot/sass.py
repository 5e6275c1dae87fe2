"""Counting instructions in disassembled machine code: the whole kernel, and its hottest loop."""

import re
from collections import Counter
from dataclasses import dataclass, field

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*(?:\.[A-Za-z0-9_]+)*)([^;]*);")
TENSOR_CORE = re.compile(r"^(HMMA|HGMMA|IMMA|IGMMA|QMMA|QGMMA|OMMA|DMMA|BMMA|UTC\w*MMA)\b")
TMA_LOADS = ("UTMALDG", "UBLKCP")
ARITHMETIC = ("FFMA", "HFMA2", "FADD", "FMUL")


@dataclass
class Counts:
    """Instructions by kind; `loads`, `copies` (global to shared) and `stores` by width in bits."""

    instructions: int = 0
    mma: Counter = field(default_factory=Counter)
    ffma: int = 0
    loads: Counter = field(default_factory=Counter)
    copies: Counter = field(default_factory=Counter)
    stores: Counter = field(default_factory=Counter)
    tma: int = 0
    ldmatrix: int = 0
    local: int = 0
    atomics: int = 0

    def add(self, op):
        head = op.split(".")[0]
        self.instructions += 1
        if TENSOR_CORE.match(op):
            self.mma[".".join(op.split(".")[:2]) if head in ("HGMMA", "QGMMA", "HMMA") else head] += 1
        elif head in ("FFMA", "FFMA2"):
            self.ffma += 1
        elif head == "LDG":
            self.loads[width(op)] += 1
        elif head == "LDGSTS":
            self.copies[width(op)] += 1
        elif head == "STG":
            self.stores[width(op)] += 1
        elif head in TMA_LOADS:
            self.tma += 1
        elif head in ("LDSM", "LDSMT"):
            self.ldmatrix += 1
        elif head in ("LDL", "STL"):
            self.local += 1
        elif head in ("RED", "REDG", "ATOM", "ATOMG", "ATOMS"):
            self.atomics += 1


def width(op) -> int:
    """Bits that one thread moves."""
    for bits in (128, 96, 64):
        if f".{bits}" in op:
            return bits
    if re.search(r"\.[US]16\b", op):
        return 16
    return 8 if re.search(r"\.[US]8\b", op) else 32


def count(text) -> tuple[Counts, Counts]:
    """(all instructions, those of the hottest loop) of a disassembly."""
    instructions = [(int(m.group(1), 16), m.group(2), m.group(3)) for m in INSTRUCTION.finditer(text)]
    first, last = _hottest_loop(instructions)
    return _tally(instructions), _tally(instructions[first:last])


def _tally(instructions) -> Counts:
    counts = Counts()
    for _, op, _ in instructions:
        counts.add(op)
    return counts


def _hottest_loop(instructions):
    """Index range of the innermost loop with most tensor-core work, else most loads, else most arithmetic.

    A loop is a backward branch. Those with none of the three are waits on a barrier and would hide the real one.
    """
    place = {address: index for index, (address, _, _) in enumerate(instructions)}
    loops = []
    for index, (_, op, rest) in enumerate(instructions):
        target = re.search(r"0x([0-9a-f]+)", rest) if op.startswith("BRA") else None
        start = place.get(int(target.group(1), 16)) if target else None
        if start is not None and start < index:
            loops.append((start, index + 1))

    def weight(loop):
        ops = [op for _, op, _ in instructions[slice(*loop)]]
        return (
            sum(bool(TENSOR_CORE.match(op)) for op in ops),
            sum(op.startswith(("LDG", *TMA_LOADS)) for op in ops),
            sum(op.startswith(ARITHMETIC) for op in ops),
        )

    loops = [loop for loop in loops if any(weight(loop))]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return max(inner, key=weight, default=(0, 0))
