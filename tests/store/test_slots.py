"""The slot life cycle as a state machine, against a model that is a plain dictionary."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from apexk.store.slots import slots_of

EXPERTS, CAPACITY = 7, 4


class Life(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.slots = slots_of(1, CAPACITY, shared=False)[0]
        self.truth: dict[int, tuple[int, str]] = {}  # expert -> (slot, "loading" | "ready")

    @rule(expert=st.integers(0, EXPERTS - 1), slot=st.integers(0, CAPACITY - 1))
    def begin(self, expert, slot):
        if expert in self.truth or any(s == slot for s, _ in self.truth.values()):
            with pytest.raises(RuntimeError):
                self.slots.begin(expert, slot, expert)
        else:
            self.slots.begin(expert, slot, expert)
            self.truth[expert] = (slot, "loading")

    @rule(expert=st.integers(0, EXPERTS - 1), action=st.sampled_from(["land", "abandon", "evict"]))
    def change(self, expert, action):
        wanted = "ready" if action == "evict" else "loading"
        if self.truth.get(expert, (0, None))[1] != wanted:
            with pytest.raises(RuntimeError, match=str(expert)):
                getattr(self.slots, action)(expert)
            return
        slot, _ = self.truth[expert]
        returned = getattr(self.slots, action)(expert)
        if action == "land":
            self.truth[expert] = (slot, "ready")
        else:
            assert returned == slot
            del self.truth[expert]

    @rule(done=st.sets(st.integers(0, EXPERTS - 1)))
    def settle(self, done):
        """Of the copies under way, those whose event (here: the expert) is done have landed."""
        self.slots.settle(done.__contains__)
        self.truth |= {e: (slot, "ready") for e, (slot, state) in self.truth.items() if state == "loading" and e in done}

    @invariant()
    def agrees(self):
        assert self.slots.resident() == {e for e, (_, state) in self.truth.items() if state == "ready"}
        assert self.slots.loading() == {e for e, (_, state) in self.truth.items() if state == "loading"}
        assert self.slots.writing(range(EXPERTS)) == sorted(self.slots.loading()), "each one's event"
        assert set(self.slots.free()) == set(range(CAPACITY)) - {s for s, _ in self.truth.values()}
        assert self.slots.free_count == CAPACITY - len(self.truth)
        assert all(self.slots.slot_of(e) == s and self.slots[s].expert == e for e, (s, _) in self.truth.items())


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLife = Life.TestCase
