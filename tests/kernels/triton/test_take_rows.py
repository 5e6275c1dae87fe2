"""The CPU's rows reach their place, and nothing else is read or written."""

import pytest
import torch

from apexk.kernels.triton.reference import take_rows_ref
from apexk.kernels.triton.take_rows import take_rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "width", "marks"), [
    (5, 40, [0, -1, 3, -1, 1, -1]), (1, 1030, [-1, 0, -1, -1, 2, 5]), (3, 16, [-1] * 6), (3, 16, [0] * 6),
], ids=["odd_width", "two_blocks_one_token", "none", "all"])  # fmt: skip
def test_only_marked_rows_move(tokens, width, marks, dtype, guard, rng):
    ids = torch.randint(0, 6, (tokens, 4), generator=rng).to(dtype)
    ids[0, 1] = -1
    mark = torch.tensor(marks, dtype=torch.int32)
    host, pairs = torch.randn(tokens * 4, width, generator=rng), torch.randn(tokens * 4, width, generator=rng)
    want = torch.stack([host[p] if e >= 0 and marks[e] >= 0 else pairs[p] for p, e in enumerate(ids.flatten().tolist())])
    twin = pairs.clone()
    take_rows_ref(host, ids, mark, twin)
    assert torch.equal(twin, want)
    host[(pairs == want).all(1)] = float("nan")  # rows that must not be read
    out = guard(pairs)
    take_rows(guard(host), guard(ids), guard(mark), out)
    assert torch.equal(out.cpu(), want)


def test_refusals_and_no_token(device):
    def empty(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device=device)

    ids, mark = empty(2, 2, dtype=torch.int64), empty(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"host: got shape \[3, 8\], wanted \[4, 8\]"):
        take_rows(empty(3, 8), ids, mark, empty(4, 8))
    with pytest.raises(TypeError, match="mark: got torch.int64"):
        take_rows(empty(4, 8), ids, mark.long(), empty(4, 8))
    take_rows(empty(0, 8), ids[:0], mark, empty(0, 8))
