"""Routing views for property tests: small layers, any residents, either cost model."""

from hypothesis import strategies as st

from apexk.policy.cost_affine import AffineCosts
from apexk.policy.cost_rates import RateCosts
from apexk.policy.types import InFlight, RouteView

positive = st.floats(0.01, 100.0)
cost = st.floats(0.0, 10.0)
rates = st.builds(RateCosts, positive, positive, positive)
affine = st.builds(AffineCosts, cost, cost, cost, cost, cost, cost, cost, cost, st.booleans())


@st.composite
def views(draw, costs=rates | affine, in_flight=True):
    experts = draw(st.integers(1, 12))
    loads = draw(st.dictionaries(st.integers(0, experts - 1), st.integers(1, 40)))
    resident = draw(st.frozensets(st.integers(0, experts - 1)))
    missed = sorted(set(loads) - resident)
    running = None
    if missed and in_flight and draw(st.booleans()):
        running = InFlight(draw(st.sampled_from(missed)), draw(st.floats(0.0, 1.0)))
    return RouteView(
        step=draw(st.integers(0, 5)),
        layer=0,
        phase=draw(st.sampled_from(("prefill", "decode"))),
        tokens=max(loads.values(), default=0),
        loads=loads,
        resident=resident,
        available=draw(st.integers(0, 12)),
        costs=draw(costs),
        in_flight=running,
        channel_wait_ms=draw(st.floats(0.0, 5.0)),
        resident_first=draw(st.booleans()),
    )
