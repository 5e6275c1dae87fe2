"""What does not fit is refused by name, and `out` stays as it was."""

import pytest
import torch

from apexk.kernels.cpu import library
from apexk.kernels.cpu.ffn import HostFFN


@pytest.fixture(scope="module")
def host():
    with HostFFN(threads=1) as ffn:
        yield ffn


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one byte off: a view that torch makes from raw memory without asking."""
    raw = bytearray(tensor.numel() * tensor.element_size() + 1)
    view = torch.frombuffer(raw, dtype=tensor.dtype, offset=1, count=tensor.numel()).view(tensor.shape)
    return view.copy_(tensor)


FAULTS = {
    "x float64": (lambda c: setattr(c, "x", c.x.double()), TypeError, "x must be"),
    "x three dimensions": (lambda c: setattr(c, "x", c.x[None]), ValueError, "x must have 2 dimensions"),
    "x columns strided": (lambda c: setattr(c, "x", c.x[:, ::2]), ValueError, "must have shape"),
    "x transposed": (lambda c: setattr(c, "x", c.x.T.contiguous().T), ValueError, "contiguous rows"),
    "x misaligned": (lambda c: setattr(c, "x", unaligned(c.x)), ValueError, "multiple of its element"),
    "x not a tensor": (lambda c: setattr(c, "x", c.x.tolist()), TypeError, "x must be a tensor"),
    "blocks int32": (lambda c: setattr(c, "blocks", c.blocks.int()), TypeError, "blocks must be"),
    "block absent": (lambda c: c.blocks.__setitem__(3, 0), ValueError, "no block on this host"),
    "block misaligned": (lambda c: c.blocks.__setitem__(3, c.blocks[3] + 1), ValueError, "multiple of its element"),
    "ids float": (lambda c: setattr(c, "ids", c.ids.float()), TypeError, "topk_ids must be"),
    "ids short": (lambda c: setattr(c, "ids", c.ids[:-1]), ValueError, "topk_ids must have shape"),
    "id too large": (lambda c: c.ids.__setitem__((4, 2), 6), ValueError, "outside"),
    "id negative": (lambda c: c.ids.__setitem__((4, 2), -1), ValueError, "outside"),
    "weights bf16": (lambda c: setattr(c, "topk_weights", c.topk_weights.bfloat16()), TypeError, "topk_weights"),
    "weights strided": (lambda c: setattr(c, "topk_weights", c.topk_weights.T.contiguous().T), ValueError, "contiguous"),
    "expert too large": (lambda c: c.wanted.append(6), ValueError, "experts must be in"),
    "expert beyond 32 bits": (lambda c: c.wanted.append(2**32), ValueError, "experts must be in"),
    "expert twice": (lambda c: c.wanted.append(1), ValueError, "twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("form", ["run", "submit"])
def test_bad_input_writes_nothing(case, host, fault, form):
    one = case(5, 64, 32)
    spoil, error, message = FAULTS[fault]
    spoil(one)
    with pytest.raises(error, match=message):
        getattr(host, form)(*one.arguments(), intermediate=32)
    assert one.out.isnan().all()


@pytest.mark.parametrize("shape", [(14, 64), (15, 63), (15,)])
def test_out_of_another_shape(case, host, shape):
    one = case(5, 64, 32)
    one.out = torch.full(shape, torch.nan)
    with pytest.raises(ValueError, match="out must have"):
        one.run(host)
    assert one.out.isnan().all()


def test_unknown_activation(case, host):
    with pytest.raises(ValueError, match="relu.*there are: silu"):
        case(5, 64, 32).run(host, activation="relu")


def test_intermediate_below_one(case, host):
    one = case(5, 64, 32)
    with pytest.raises(ValueError, match="intermediate must be at least 1"):
        host.run(*one.arguments(), intermediate=0)


def test_unknown_isa_lists_what_there_is():
    with pytest.raises(ValueError, match="'mmx'.*there are:.*scalar"):
        HostFFN(isa="mmx")


def test_unavailable_isa_is_refused():
    missing = [name for name, runs in library.isa_names().items() if not runs]
    if not missing:
        pytest.skip("this machine runs every implementation")
    with pytest.raises(ValueError, match="does not offer"):
        HostFFN(isa=missing[0])


def test_environment_forces_the_isa(monkeypatch):
    monkeypatch.setenv("APEXK_CPU_ISA", "scalar")
    with HostFFN(threads=1) as ffn:
        assert ffn.isa == "scalar"
    monkeypatch.setenv("APEXK_CPU_ISA", "none-such")
    with pytest.raises(ValueError, match="none-such"):
        HostFFN(threads=1)


@pytest.mark.parametrize("threads", [0, -1])
def test_threads_below_one(threads):
    with pytest.raises(ValueError, match="threads must be at least 1"):
        HostFFN(threads=threads)
