"""Planners: layer times by hand, the best of the grid against brute force, memory, refusals with the numbers."""

import itertools
from dataclasses import replace

import pytest

from apexk.planners import PLANNERS, Load, Machine, Model, NoRoom, cox_moe, flexgen, moe_lightning
from apexk.planners.cox_moe import choice as strata
from apexk.planners.flexgen import choice as tuple_
from apexk.planners.model import GIB, activations, active
from apexk.planners.moe_lightning import choice as point

MODEL = Model("toy", layers=4, experts=8, topk=2, hidden=16, expert_bytes=1e6, dense_bytes=8e6, kv_bytes=4e3)
MACHINE = Machine("toy", gpu_bytes=60e6, host_bytes=1e9, gpu_bps=1e9, gpu_flops=1e12, cpu_bps=1e8, cpu_flops=1e10, link_bps=1e8)
LOAD = Load(prompt=10, new=20)


def test_active_experts_by_enumeration():
    """Two of four experts a token, every pair equally likely, three tokens: the mean count over all 6**3 draws."""
    pairs = list(itertools.combinations(range(4), 2))
    counts = [len({e for pair in drawn for e in pair}) for drawn in itertools.product(pairs, repeat=3)]
    assert active([0.25] * 4, 2, 3) == pytest.approx(sum(counts) / len(counts))
    assert active([0.5, 0.5], 2, 7) == 2


def test_flexgen_layer_by_hand():
    """Half the weights, all cache and rows on the GPU, 2 micro-batches of 1. Link: 4 experts of 1e6 over 1e8/s = 40 ms.

    GPU, each micro-batch: dense 2e6 / 1e9 = 2 ms, cache 1 * 20 tokens * 1e3 / 1e9 = 0.02 ms, 2 experts of 1e6 / 1e9 = 2 ms.
    """
    found = tuple_(MODEL, MACHINE, LOAD, 1, 2, 0.5, 1.0, 1.0)
    assert found.seconds["link"] == pytest.approx(40e-3)
    assert found.seconds["gpu"] == pytest.approx(2 * (2e-3 + 0.02e-3 + 2e-3))
    assert found.tokens_per_s == pytest.approx(2 / (4 * 40e-3))
    assert found.gpu["experts"] == 4 * 4e6 and found.gpu["two layers under way"] == 8e6 and found.gpu["cache"] == pytest.approx(2 * 30 * 4e3)
    assert found.host == {"experts": 32e6, "cache": 0.0, "activations": 0.0}


def test_moe_lightning_layer_by_hand():
    """Attention on the CPU: cache 2 * 20 * 1e3 bytes over 1e8/s = 0.4 ms; link: all weights 80 ms and 4 rows of 32 bytes a token."""
    found = point(MODEL, MACHINE, LOAD, 1, 2, 0.0, 1.0)
    assert found.seconds["cpu"] == pytest.approx(0.4e-3)
    assert found.seconds["link"] == pytest.approx((8e6 + 4 * 2 * 32) / 1e8)
    assert found.seconds["gpu"] == pytest.approx(2 * (2e-3 + 2e-3)) and found.gpu["cache"] == 0 and found.host["cache"] == 2 * 30 * 4e3


def test_cox_moe_layer_by_hand():
    """Half of the experts on each side, equally popular: one token's 2 rows use 1 expert of each. CPU 1e6 / 1e8 = 10 ms."""
    found = strata(MODEL, MACHINE, LOAD, 1, 1, 4, 0.0)
    assert found.seconds["cpu"] == pytest.approx(10e-3)
    assert found.seconds["gpu"] == pytest.approx(2e-3 + 0.02e-3 + 1e-3)
    assert found.seconds["link"] == pytest.approx(2 * 32 / 1e8)
    apart, together = (strata(MODEL, MACHINE, LOAD, 64, 8, 4, 0.0, coalesced) for coalesced in (False, True))
    assert apart.seconds["cpu"] > 5 * together.seconds["cpu"], "eight times the weights are read for the same rows, nearly"
    popular = replace(MODEL, popularity=[0.4, 0.3, 0.1, 0.1, 0.05, 0.03, 0.01, 0.01])
    assert strata(popular, MACHINE, LOAD, 8, 8, 2, 0.0).seconds["cpu"] < strata(MODEL, MACHINE, LOAD, 8, 8, 2, 0.0).seconds["cpu"]


@pytest.mark.parametrize("name", PLANNERS)
def test_the_best_that_fits(name):
    """Against every point of the grid, made here."""
    tenths, quarters, sizes = [n / 10 for n in range(11)], [n / 4 for n in range(5)], range(9)
    grid = {
        "flexgen": [tuple_(MODEL, MACHINE, LOAD, b, n, w, c, r) for b in (1, 2, 4, 8) for n in (1, 2, 4, 8) if b * n <= 8
                    for w in tenths for c in quarters for r in (0.0, 1.0)],
        "moe_lightning": [point(MODEL, MACHINE, LOAD, b, n, w, a) for b in (1, 2, 4, 8) for n in (1, 2, 4, 8) if b * n <= 8 for w in tenths for a in (0.0, 1.0)],
        "cox_moe": [strata(MODEL, MACHINE, LOAD, batch, b, c, 0.0) for batch in (1, 2, 4, 8) for b in (1, 2, 4, 8) if b <= batch for c in sizes],
    }[name]  # fmt: skip
    fitting = [c for c in grid if sum(c.gpu.values()) <= MACHINE.gpu_bytes and sum(c.host.values()) <= MACHINE.host_bytes]
    found = PLANNERS[name](MODEL, MACHINE, LOAD, 8)
    assert 0 < len(fitting) and found in fitting
    assert found.tokens_per_s == max(c.tokens_per_s for c in fitting)


@pytest.mark.parametrize("name", PLANNERS)
def test_more_memory_is_never_slower(name):
    speeds = [PLANNERS[name](MODEL, replace(MACHINE, gpu_bytes=size), LOAD, 16).tokens_per_s for size in (25e6, 40e6, 60e6, 90e6)]
    assert speeds == sorted(speeds)


@pytest.mark.parametrize("name", PLANNERS)
def test_what_cannot_fit_is_refused_with_the_numbers(name):
    with pytest.raises(NoRoom, match=r"smallest, 1 request\(s\), needs .* GiB \(dense 0\.01.* of GPU memory, of 0\.00 GiB"):
        PLANNERS[name](MODEL, replace(MACHINE, gpu_bytes=1e6), LOAD, 8)
    with pytest.raises(NoRoom, match="host memory, of 0.01 GiB"):
        PLANNERS[name](MODEL, replace(MACHINE, host_bytes=0.01 * GIB), LOAD, 8)


def test_attention_on_the_cpu_only_where_it_is_asked_for():
    slow = replace(MACHINE, gpu_bps=1e7)  # a GPU so slow that it would pay
    assert cox_moe(MODEL, slow, LOAD, 8).shares["attention on the CPU"] == 0
    assert cox_moe(MODEL, slow, LOAD, 8, attention_on_cpu=True).tokens_per_s >= cox_moe(MODEL, slow, LOAD, 8).tokens_per_s
    assert {flexgen(MODEL, MACHINE, LOAD, 8).system, moe_lightning(MODEL, MACHINE, LOAD, 8).system} == {"flexgen", "moe_lightning"}


def test_activations_hold_the_largest_pass():
    """3 prompts of 10 tokens with 8 words of 16 values of 2 bytes each, and 5 tokens' hidden states."""
    assert activations(MODEL, LOAD, 3, 5) == 3 * 10 * 8 * 16 * 2 + 5 * 16 * 2
