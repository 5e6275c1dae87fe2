"""Which of a layer's copies its kernels wait for."""

import random

import pytest

from apexk.device.base import At
from apexk.device.cuda_clock import Operation
from apexk.device.cuda_copies import last_of_all


@pytest.mark.parametrize("shuffled", range(4))
def test_the_newest_exact_copy_stands_for_all(shuffled):
    """However the experts are ordered: the channel's stream runs exact copies as they were asked for, prefetches anywhen."""
    copies = [Operation(At(0, 0, "decode"), "copy.exact", "h2d", number=number) for number in range(1, 6)]
    prefetch = Operation(At(0, 0, "decode"), "copy.spec", "h2d", number=9)
    after = [prefetch, *copies]
    random.Random(shuffled).shuffle(after)
    assert last_of_all(after) == [prefetch, copies[-1]]
    assert last_of_all(after[:1]) == after[:1] and last_of_all([]) == []
