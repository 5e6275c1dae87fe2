"""`ApexConfig` and its like: a number that makes no sense is refused when it is given, with what came and what is wanted."""

import math
from dataclasses import fields

import pytest

from apexk.bench.plan import Plan
from apexk.config import ApexConfig
from apexk.fit.fit import fit

NEVER = (-1, True, False, math.nan, math.inf, -math.inf, -0.5, "x", [], (), b"1", object())
#: numeric field -> what it may not be besides, what it may be
NUMBERS = {
    "pool": ((0.0, 1.5, "-1", "8 Gib"), (0, 3, "3", 0.5, "0.5", "8GiB", None)),
    "context_tokens": ((0, 0.5, 2.0, None, "3", 1 << 31), (1, 32_768)),
    "part_tokens": ((0, 0.5, 2.0, None, "3", 1 << 31), (1, 2048)),
    "threads": ((0, 0.5, 2.0, "3", 1 << 31), (1, None)),
    "seed": ((0.5, 2.0, None, "3", 1 << 31), (0, 7)),
    "gpus": ((0, 0.5, 2.0, "3", 1 << 31), (1, 4, None)),
    "rate_ema": ((0, 1.5, "0.5"), (0.5, 1, None)),
    "forgetting": ((0, 1.5, "0.5"), (0.5, 1, None)),
    "utility_decay": ((1.5, "0.5"), (0, 0.5, 1, None)),
}


def test_the_table_has_every_numeric_field():
    assert {f.name for f in fields(ApexConfig) if "int" in f.type or "float" in f.type} == {*NUMBERS, "popularity"}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_such_number_is_refused(name):
    never, may = NUMBERS[name]
    for value in (*NEVER, *never):
        with pytest.raises((ValueError, TypeError)) as refused:
            ApexConfig(**{name: value})
        assert f"{name} is {value!r}" in str(refused.value), "what came"
        assert any(word in str(refused.value) for word in ("wanted", "must lie in")), "what is wanted"
    for value in may:
        ApexConfig(**{name: value})


@pytest.mark.parametrize("counts", [[], [[]], [[True]], [[math.nan]], [[math.inf]], [[-1]], [["1"]], [[1], [1, 2]], "ab", 5, [5]], ids=repr)
def test_what_is_no_popularity_is_refused(counts):
    with pytest.raises(ValueError, match=r"popularity .* wanted \[layers\]\[experts\]"):
        ApexConfig(popularity=counts)


@pytest.mark.parametrize("value", [0, -1, True, 0.5, 2.0, math.nan, math.inf, "3", None], ids=repr)
def test_fit_and_plans_of_benchmarks_refuse_too(value):
    for name in ("context", "batch", "gpu_bytes"):
        if (name, value) != ("gpu_bytes", None):
            with pytest.raises(ValueError, match=f"{name} is .*wanted"):
                fit(None, **{name: value})
    for given in ({"batches": [value]}, {"lengths": [value]}, {"repeats": value}, {"beams": value}, *([{"new_tokens": value}, {"seed": value}] if value != 0 or value is False else [])):
        with pytest.raises(ValueError, match="wanted"):
            Plan(**({"batches": [1], "lengths": [1], "new_tokens": 1} | given))


#: field that is one of some words -> what it may be; `evict` and `cost` may also stand in the policy's parentheses
WORDS = {
    "device": "virtual", "transfer": "copy_engine", "payload": "plain", "hardware": "a6000-paper", "arithmetic": "reference", "dense": "kernels", "policy": "apex",
    "cost": "rates", "evict": "lru", "resident_first": False, "in_flight": "abort", "prefetch_protects": "in_use", "pool_scope": "layer",
}  # fmt: skip


def test_the_table_has_every_word():
    assert {f.name for f in fields(ApexConfig)} == {*WORDS, *NUMBERS, "popularity", "timeline"}


@pytest.mark.parametrize("name", WORDS)
def test_a_word_that_stands_for_nothing_is_refused_at_once_with_those_that_do(name):
    ApexConfig(**{name: WORDS[name]})
    given = [{name: "best"}, *([{"policy": f"apex({name}=best)"}] if name in ("cost", "evict") else [])]
    for wrong in given:
        with pytest.raises(ValueError, match="'?best'?") as refused:
            ApexConfig(**wrong)
        assert str(WORDS[name]) in str(refused.value)
    if name == "evict":  # known, but to a replay alone
        with pytest.raises(ValueError, match="there are utility"):
            ApexConfig(evict="belady")
