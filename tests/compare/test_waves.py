"""Apex with waves against Apex without: no prefill is slower, a long one ends sooner, and the decode steps after it are within three
hundredths: they begin with the residents that the prefill left, which may be better or worse than those of a prefill that copied nothing."""

import itertools

import pytest

from apexk import hardware
from apexk.compare.workload import prompted
from apexk.sim.demand import demand_of
from apexk.sim.generate import PRESETS, Shape, generate
from apexk.sim.run import simulate


def speeds(demand, machine, policy, pool):
    totals = simulate(demand, machine, policy, pool, warmup=0).totals
    return [totals[phase].tokens / totals[phase].step_ms for phase in ("prefill", "decode")]


def hold_against_no_waves(preset, batch, prompt, layers, pools, gain):
    demand = demand_of(prompted(generate(preset, shape=Shape(layers=layers), batch=batch, steps=prompt + 12, seed=7), prompt))
    for name, pool in itertools.product(hardware.names(), pools):
        waves, plain = (speeds(demand, hardware.load(name), policy, pool) for policy in ("apex", "apex(waves=false)"))
        assert waves[0] >= gain * plain[0] and waves[1] >= 0.97 * plain[1], (name, pool, waves, plain)


@pytest.mark.parametrize(("batch", "prompt", "gain"), [(16, 32, 2.0), (2, 8, 0.995)])
def test_in_short(batch, prompt, gain):
    hold_against_no_waves("diverse-tokens", batch, prompt, 3, (8, 64), gain)


@pytest.mark.nightly
@pytest.mark.parametrize(("preset", "batch", "prompt"), [(p, *size) for p in PRESETS for size in ((1, 8), (4, 16), (16, 64))])
def test_at_every_pool(preset, batch, prompt):
    hold_against_no_waves(preset, batch, prompt, 6, (4, 8, 16, 32, 64, 128, 256), 0.995)
