"""What a benchmark runs. Imports no torch, so that a bad number is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PLAIN = ("eager", "batched_mm", "grouped_mm", "accelerate")


def check_plain(names: Sequence[str]) -> None:
    """Raises ValueError for a name that no arm of the library alone has."""
    for name in names:
        if name not in PLAIN:
            raise ValueError(f"no plain arm {name!r}; there are {', '.join(PLAIN)}")


@dataclass(frozen=True)
class Plan:
    """What is run: batch sizes x prompt lengths of random tokens, or batches of `prompts`; `beams` rows for each prompt."""

    batches: Sequence[int]
    lengths: Sequence[int]
    new_tokens: int
    repeats: int = 3
    beams: int = 1
    seed: int = 0
    prompts: Sequence[str] | None = None

    def __post_init__(self):
        for name, values in (("batch", self.batches), ("prompt length", self.lengths), ("repeats", [self.repeats]), ("beams", [self.beams])):
            if not values or any(type(value) is not int or value < 1 for value in values):
                raise ValueError(f"{name} is {', '.join(map(str, values)) or 'empty'}; wanted whole numbers >= 1")
        for name, value in (("new tokens", self.new_tokens), ("seed", self.seed)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name}: {value!r}; wanted a whole number, 0 or more")
