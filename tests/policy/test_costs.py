"""Cost models: averages against the formula, fits against lines they must find, never a negative cost."""

import random

import pytest

from apexk.policy.cost_affine import AffineModel, Line
from apexk.policy.cost_rates import RateModel
from apexk.policy.types import CostPrior, ModelShape, Observation

SHAPE = ModelShape(layers=4, experts=64, topk=8)
PRIOR = CostPrior(c0=2.0, a=0.0, b=0.02, s0=0.66, t1=0.365, g0=0.4, g1=0.004, g2=0.001)


def test_rates_are_exponential_averages():
    model = RateModel(PRIOR, SHAPE, ema=0.25)
    start = model.costs()
    model.observe(Observation(cpu_experts=5, cpu_pairs=20, cpu_ms=2.0, copies=3, copy_ms=1.5))
    now = model.costs()
    assert now.cpu == pytest.approx(0.75 * start.cpu + 0.25 * 10.0)
    assert now.copy == pytest.approx(0.75 * start.copy + 0.25 * 2.0)
    assert now.gpu == start.gpu
    assert start.cpu_ms(4, 32) == pytest.approx(2.0 + 0.02 * 32)  # the prior, at the typical demand


@pytest.mark.parametrize("ms", [None, 0.0, 0.019])
def test_rates_skip_samples_without_meaning(ms):
    model = RateModel(PRIOR, SHAPE, ema=0.2)
    start = model.costs()
    model.observe(Observation(cpu_experts=1, cpu_pairs=1, cpu_ms=ms, gpu_experts=0, gpu_pairs=0, gpu_ms=5.0))
    assert model.costs() == start


def test_affine_starts_at_the_prior():
    costs = AffineModel(PRIOR, SHAPE, 0.995).costs()
    assert costs.cpu_ms(9, 40) == pytest.approx(2.0 + 0.02 * 40)
    assert costs.copy_ms(3) == pytest.approx(0.66 + 3 * 0.365)
    assert costs.gpu_ms(9, 40) == pytest.approx(0.4 + 0.036 + 0.04)
    assert (costs.cpu_ms(0, 0), costs.copy_ms(0), costs.gpu_ms(0, 0)) == (0.0, 0.0, 0.0)


def test_affine_keeps_the_fixed_part_when_empty_only_if_told():
    prior = CostPrior(2.0, 0.0, 0.02, 0.66, 0.365, 0.4, 0.004, 0.001, cpu_fixed_when_empty=True)
    assert AffineModel(prior, SHAPE, 0.995).costs().cpu_ms(0, 0) == 2.0


def observe_line(model, rng, c0, a, b, samples, noise=0.0):
    for _ in range(samples):
        experts = rng.randint(1, 30)
        pairs = experts + rng.randint(0, 90)
        ms = (c0 + a * experts + b * pairs) * (1.0 + rng.uniform(-noise, noise))
        model.observe(Observation(cpu_experts=experts, cpu_pairs=pairs, cpu_ms=ms))


def test_affine_finds_a_line_and_follows_a_change():
    rng, model = random.Random(1), AffineModel(PRIOR, SHAPE, 0.995)
    observe_line(model, rng, 0.3, 0.05, 0.01, samples=600, noise=0.05)
    assert model.costs().cpu_ms(10, 50) == pytest.approx(0.3 + 0.5 + 0.5, rel=0.03)
    assert model.costs().cpu_ms(1, 1) == pytest.approx(0.36, rel=0.15)
    observe_line(model, rng, 1.0, 0.10, 0.03, samples=1500, noise=0.05)
    assert model.costs().cpu_ms(10, 50) == pytest.approx(1.0 + 1.0 + 1.5, rel=0.03)


def test_one_sample_already_moves_a_wrong_prior():
    model = AffineModel(PRIOR, SHAPE, 0.995)
    model.observe(Observation(cpu_experts=16, cpu_pairs=32, cpu_ms=0.5))  # the prior says 2.64
    assert model.costs().cpu_ms(16, 32) == pytest.approx(0.5, abs=0.1)


def test_single_token_decode_stays_bounded():
    """Experts equal pairs in every sample: their split cannot be learnt and must not drift, however long the run."""
    rng, model = random.Random(2), AffineModel(PRIOR, SHAPE, 0.995)
    for _ in range(20_000):
        experts = rng.randint(1, 8)
        model.observe(Observation(cpu_experts=experts, cpu_pairs=experts, cpu_ms=0.2 + 0.1 * experts))
    costs = model.costs()
    assert costs.cpu_ms(5, 5) == pytest.approx(0.7, rel=0.02)
    assert 0.2 < costs.cpu_ms(5, 20) < 3.0


def test_what_samples_cannot_tell_stays_as_near_to_the_prior_as_they_allow():
    """Always two copies in 1.0 ms: the point of `s0 + 2*t1 = 1.0` nearest to the prior, each part in units of its own size."""
    model = AffineModel(PRIOR, SHAPE, 0.995)
    for _ in range(5000):
        model.observe(Observation(copies=2, copy_ms=1.0))
    excess = (PRIOR.s0 + 2 * PRIOR.t1 - 1.0) / (PRIOR.s0**2 + 4 * PRIOR.t1**2)
    costs = model.costs()
    assert costs.s0 == pytest.approx(PRIOR.s0 - PRIOR.s0**2 * excess, abs=0.005)
    assert costs.t1 == pytest.approx(PRIOR.t1 - 2 * PRIOR.t1**2 * excess, abs=0.005)


def test_no_coefficient_is_ever_negative():
    rng, model = random.Random(3), AffineModel(PRIOR, SHAPE, 0.98)
    for _ in range(2000):
        experts = rng.randint(1, 30)
        model.observe(
            Observation(
                cpu_experts=experts, cpu_pairs=2 * experts + rng.randint(0, 9), cpu_ms=max(0.01, 3.0 - 0.09 * experts),
                gpu_experts=experts, gpu_pairs=experts, gpu_ms=rng.uniform(0.001, 9.0),
                copies=rng.randint(1, 5), copy_ms=rng.uniform(0.001, 9.0),
            )
        )  # fmt: skip
        costs = model.costs()
        assert min(v for k, v in costs.as_dict().items() if k != "kind") >= 0
    assert costs.a == 0.0  # time falls with experts in these samples


def test_refit_without_a_negative_coefficient_is_the_restricted_optimum():
    line = Line((1.0, 1.0), (1, 1), forgetting=1.0)
    for x, y in ((1, 5.0), (2, 4.0), (3, 3.0)) * 2000:
        line.add((1, x), y)
    assert line.fit() == pytest.approx((4.0, 0.0), abs=0.01)
