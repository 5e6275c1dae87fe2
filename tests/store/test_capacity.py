"""Forms of the pool's size, by hand-made arithmetic; what does not exist or fit is refused with the numbers."""

import pytest

from apexk.store.capacity import Capacity, PoolSize, Room, parse, resolve

GIB, MIB = 2**30, 2**20


@pytest.mark.parametrize(("value", "wanted"), [
    (None, PoolSize()), ("auto", PoolSize()), (0, PoolSize(slots=0)), (12, PoolSize(slots=12)), ("12", PoolSize(slots=12)),
    ("8GiB", PoolSize(bytes=8 * GIB)), ("1.5 GB", PoolSize(bytes=1_500_000_000)), ("512MiB", PoolSize(bytes=512 * MIB)),
    ("0.5", PoolSize(share=0.5)), (0.25, PoolSize(share=0.25)), ("1.0", PoolSize(share=1.0)),
])  # fmt: skip
def test_forms(value, wanted):
    assert parse(value) == wanted


@pytest.mark.parametrize("value", [-1, True, 1.5, "0.0", "-3", "8 gib", "lots", "8GiB/s", 0.0, [4], "1.5"])
def test_other_forms_are_refused(value):
    with pytest.raises(ValueError, match="wanted a number of slots per layer"):
        parse(value)


def test_bytes_and_shares_become_whole_slots():
    """40 layers x 6 MiB = 240 MiB for one slot a layer."""
    assert resolve(parse("1GiB"), 40, 256, 6 * MIB).slots == 4  # 4 x 240 = 960
    assert resolve(parse("960MiB"), 40, 256, 6 * MIB).slots == 4
    assert resolve(parse("959MiB"), 40, 256, 6 * MIB).slots == 3
    assert resolve(parse("900GiB"), 40, 256, 6 * MIB).slots == 256, "no more slots than experts"
    assert resolve(parse("0.5"), 40, 256, 6 * MIB, room=Room(10 * GIB)).slots == 21  # 5120 / 240


def test_slots_that_a_policy_adds_are_paid_for():
    assert resolve(parse("960MiB"), 40, 256, 6 * MIB, extra=lambda slots: 2).slots == 2
    assert resolve(parse("960MiB"), 40, 256, 6 * MIB, extra=lambda slots: slots).slots == 2


def test_automatic_leaves_room_and_says_so():
    room = Room(24 * GIB, {"KV cache of 32768 tokens": 3 * GIB, "activations": GIB})
    found = resolve(parse("auto"), 40, 256, 6 * MIB, room=room)
    assert found.slots == 85  # 20 GiB = 20480 MiB, / 240
    assert found.arithmetic == (
        "24.00 GiB free - 3.00 GiB KV cache of 32768 tokens - 1.00 GiB activations = "
        "20.00 GiB / 40 layers / 6.00 MiB a slot = 85 slots a layer of 256 experts"
    )
    tight = resolve(parse(None), 40, 256, 6 * MIB, room=Room(4 * GIB, {"activations": 4 * GIB}))
    assert tight.slots == 0 and "every expert runs on the CPU" in tight.arithmetic
    assert resolve(parse(None), 40, 30, 6 * MIB) == Capacity(7, "a quarter of 30 experts, at least one")


@pytest.mark.parametrize(("pool", "room", "says"), [
    (300, None, "pool is 300 slots per layer, but a layer has 256 experts"),
    (64, Room(10 * GIB), r"does not fit: 64 slots a layer x 40 layers x 6.00 MiB = 15.00 GiB, but 10.00 GiB of device memory are free, enough for 42"),
    ("11GiB", Room(10 * GIB), "pool is 11.00 GiB, but 10.00 GiB of device memory are free"),
    ("0.5", None, "modelled"),
])  # fmt: skip
def test_refusals(pool, room, says):
    with pytest.raises(ValueError, match=says):
        resolve(parse(pool), 40, 256, 6 * MIB, room=room)
