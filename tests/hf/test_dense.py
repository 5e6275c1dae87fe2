"""Linear layers in the CPU kernels, with device "cpu": as right as the library's own, and gone without a trace."""

import copy
import io
import pickle

import pytest
import torch
from hf_models import assert_as_before, snapshot, tiny
from torch import nn

import apexk
from apexk.hf.dense import DenseForward
from apexk.testing.tiny import CONFIGS
from apexk.testing.tiny import tiny as family

CPU = apexk.ApexConfig(device="cpu")
IDS = torch.randint(0, 64, (2, 19), generator=torch.Generator().manual_seed(1))


def made(dtype=torch.bfloat16, **changes):
    torch.manual_seed(0)
    return tiny(**changes).to(dtype)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids).logits


def replaced(model) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), DenseForward)}


def linears(model) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is nn.Linear}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids", [IDS, IDS[:1, :1], IDS[:, :3], IDS.repeat(8, 2)], ids=["38 tokens", "one", "6", "304"])
def test_no_further_from_float32_than_the_unpatched_model(dtype, ids):
    model = made(dtype)
    plain = logits(model, ids)
    with apexk.swap(model, CPU) as handle:
        assert replaced(model) == linears(model) and handle.info()["config"]["dense_layers"] == len(linears(model)) == 9
        ours = logits(model, ids)
    exact = logits(made(dtype).float(), ids)
    assert (ours.float() - exact).norm() <= 1.2 * (plain.float() - exact).norm()
    assert torch.allclose(ours, plain, rtol=0, atol=8 * torch.finfo(dtype).eps * plain.abs().max().item())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_families(model_type):
    """Shared experts, gates of one row, biases, routers that are linear layers, states."""
    model = family(model_type).bfloat16()
    exact = logits(copy.deepcopy(model).float())
    plain = logits(model)
    with apexk.swap(model, CPU):
        assert "lm_head" in replaced(model) and len(replaced(model)) > 4
        ours = logits(model)
    # of most tokens: where two experts are as good as chosen, a token may go either way in 16 bits
    far = [(one.float() - exact).norm(dim=-1).median() for one in (ours, plain)]
    assert far[0] <= 1.3 * far[1]


def test_restored_to_the_last_bit():
    model = made()
    before, keys, plain = snapshot(model), list(model.state_dict()), logits(model)
    with apexk.swap(model, CPU):
        logits(model)
    assert_as_before(model, before, keys)
    assert torch.equal(logits(model), plain)
    with apexk.swap(model, CPU):
        apexk.restore(model)
    assert_as_before(model, before, keys)


def test_a_failed_swap_leaves_no_layer_replaced(monkeypatch):
    """Wherever it fails: before, in the middle of and after the layers."""
    model = made()
    before, keys, plain = snapshot(model), list(model.state_dict()), logits(model)
    for failing in range(9):
        with monkeypatch.context() as patch:
            patch.setattr(DenseForward, "__init__", failing_at(failing, DenseForward.__init__))
            with pytest.raises(MemoryError):
                apexk.swap(model, CPU)
        assert_as_before(model, before, keys)
    assert torch.equal(logits(model), plain)


def failing_at(number, init):
    count = iter(range(number + 1))

    def fails(self, *arguments):
        if next(count) == number:
            raise MemoryError("no more")
        init(self, *arguments)

    return fails


@pytest.mark.parametrize("config", [apexk.ApexConfig(device="cpu", dense="torch"), apexk.ApexConfig(device="cpu", arithmetic="same"), apexk.ApexConfig()],
                         ids=["torch", "same", "virtual"])
def test_left_to_torch(config):
    model = made()
    with apexk.swap(model, config) as handle:
        assert not replaced(model) and handle.info()["config"]["dense_layers"] == 0


def test_float32_layers_are_left_alone():
    model = made(torch.float32)
    model.lm_head.bfloat16()
    with apexk.swap(model, CPU):
        assert replaced(model) == {"lm_head"}


def test_layers_that_are_something_else_are_left_alone():
    class Own(nn.Linear):
        pass

    model = made()
    attention = model.model.layers[0].self_attn
    attention.q_proj.__class__ = Own
    attention.k_proj.forward = lambda x: nn.functional.linear(x, attention.k_proj.weight)  # as another library's
    attention.v_proj.weight = nn.Parameter(attention.v_proj.weight.detach().T.contiguous().T)
    foreign = attention.k_proj.forward
    with apexk.swap(model, CPU):
        assert linears(model) - replaced(model) == {f"model.layers.0.self_attn.{name}" for name in ("k_proj", "v_proj")}
        assert "model.layers.0.self_attn.q_proj" not in replaced(model)
    assert vars(attention.k_proj)["forward"] is foreign


def test_a_forward_that_was_replaced_meanwhile_stays():
    model = made()
    head = model.lm_head
    handle = apexk.swap(model, CPU)
    mine = head.forward = lambda x: x
    handle.restore()
    assert head.forward is mine


def test_hooks_run():
    model, seen = made(), []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    plain = logits(model)
    with apexk.swap(model, CPU):
        ours = logits(model)
    assert len(seen) == 2 and seen[0] == seen[1]
    assert torch.allclose(ours, plain, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_have_the_librarys_own_forward(again):
    model = made()
    plain = logits(model)
    with apexk.swap(model, CPU):
        copied = again(model)
        assert not replaced(copied) and torch.equal(logits(copied), plain)
        with apexk.swap(copied, CPU):
            assert replaced(copied) == replaced(model)
    file = io.BytesIO()
    torch.save(copied, file)
    assert torch.equal(logits(torch.load(io.BytesIO(file.getvalue()), weights_only=False)), plain)


def test_written_and_exchanged_weights_are_seen():
    model, other = made(), made()
    nn.init.normal_(other.lm_head.weight)
    wanted = logits(other)
    with apexk.swap(model, CPU):
        logits(model)
        model.load_state_dict(other.state_dict())
        loaded = logits(model)
        model.lm_head.weight.data = torch.zeros_like(model.lm_head.weight)
        assert not logits(model).any()
        model.lm_head.weight.data = other.lm_head.weight.data.T.contiguous().T
        transposed = logits(model)
        model.lm_head.weight = nn.Parameter(other.lm_head.weight.detach().clone())
        exchanged = logits(model)
    assert torch.allclose(loaded, wanted, rtol=0, atol=0.02 * wanted.abs().max().item())
    assert torch.equal(exchanged, loaded) and torch.allclose(transposed, loaded, rtol=0, atol=0.01 * wanted.abs().max().item())


@pytest.fixture
def head():
    """A swapped model's last layer, with what torch gives for some rows."""
    model = made()
    with apexk.swap(model, CPU):
        yield model.lm_head, torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3)).bfloat16()


def test_where_a_gradient_may_be_wanted_torch_computes_it(head):
    layer, x = head
    layer(x).sum().backward()
    assert torch.equal(layer.weight.grad[0], x.float().sum((0, 1)).bfloat16())
    layer.requires_grad_(False)
    x.requires_grad_()
    layer(x).sum().backward()
    assert torch.equal(x.grad, nn.functional.linear(torch.ones(2, 5, 64).bfloat16(), layer.weight.T))
    assert not layer(x.detach()).requires_grad


def test_what_does_not_fit_is_torchs(head):
    """The same values, bit for bit, and the same errors as the layer itself has."""
    layer, x = head
    own = type(layer).forward
    with torch.no_grad():
        for rows in (x[0, 0], x[:0], nn.Parameter(x)):
            assert torch.equal(layer(rows), own(layer, rows))
        with torch.autocast("cpu", torch.float16):
            assert layer(x).dtype == torch.float16
        assert layer(x.to("meta")).is_meta
        for wrong in (x[..., :31], x.float()):
            with pytest.raises(Exception) as theirs:  # noqa: B017
                own(layer, wrong)
            with pytest.raises(type(theirs.value)):
                layer(wrong)


def test_rows_that_lie_apart(head):
    layer, x = head
    whole = x.repeat(1, 1, 3)
    with torch.no_grad():
        for rows in (x[0].T.contiguous().T, x[:, -1:], x[:, ::2], whole[..., 32:64], x.transpose(0, 1), x[:, None].expand(2, 3, 5, 32)):
            exact = nn.functional.linear(rows.double(), layer.weight.double())
            assert torch.allclose(layer(input=rows).double(), exact, rtol=2**-8, atol=1e-5)


def test_in_a_compiled_model_the_layers_are_the_compilers():
    """In one graph with what surrounds them, and the kernels' again outside of it."""
    model = made()
    rows = torch.randn(2, 5, 32).bfloat16()
    with torch.no_grad(), apexk.swap(model, apexk.ApexConfig(device="cpu", dense="torch")):
        wanted = logits(model)
    with torch.no_grad(), apexk.swap(model, CPU):
        head = model.lm_head
        assert torch.equal(torch.compile(head, backend="eager", fullgraph=True)(rows), nn.functional.linear(rows, head.weight))
        ours = logits(model)
        assert torch.equal(logits(torch.compile(model, backend="eager")), wanted)
        assert torch.equal(logits(model), ours) and vars(head)["forward"]._prepared is not None


def test_inference_mode_in_between():
    model = made()
    with apexk.swap(model, CPU):
        first = logits(model)
        with torch.inference_mode():
            assert torch.equal(model(input_ids=IDS).logits, first)
        assert torch.equal(logits(model), first)


class Doubled(torch.Tensor):
    """A weight that stands for twice its memory, as a quantised one stands for something else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, *rest = args
            return nn.functional.linear(x, 2 * weight.as_subclass(torch.Tensor), *rest)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("before", [True, False])
def test_a_weight_that_means_something_else_is_torchs(before):
    model = made()
    plain = logits(model)
    doubled = nn.Parameter(model.lm_head.weight.detach().as_subclass(Doubled), requires_grad=False)
    if before:
        model.lm_head.weight = doubled
    with apexk.swap(model, CPU):
        model.lm_head.weight = doubled
        assert ("lm_head" in replaced(model)) is not before
        assert torch.allclose(logits(model), 2 * plain, rtol=0.05, atol=0.05)


def test_what_stands_for_other_numbers_than_its_memory_is_torchs(head):
    layer, x = head
    own = type(layer).forward
    with torch.no_grad():
        for rows in (torch._neg_view(x), torch._efficientzerotensor(x.shape, dtype=x.dtype), x[0].to_sparse()):
            assert torch.equal(layer(rows), own(layer, rows))
        weight = layer.weight.detach().clone()
        for other in (torch._neg_view(weight), weight[:, :0]):
            layer.weight = nn.Parameter(other, requires_grad=False)
            rows = x[..., : other.shape[1]]
            assert torch.equal(layer(rows), own(layer, rows))


def test_modes_transforms_and_traces_see_torchs_own(head):
    from torch.autograd import forward_ad
    from torch.utils.flop_counter import FlopCounterMode

    layer, x = head
    layer.requires_grad_(False)
    exact = layer(x)
    own = nn.functional.linear(x, layer.weight)
    with torch.device("meta"):
        assert torch.equal(layer(x), own)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * x.numel() * layer.weight.shape[0]
    assert torch.equal(torch.func.vmap(layer)(x), torch.func.vmap(lambda rows: nn.functional.linear(rows, layer.weight))(x))
    with torch.no_grad(), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert torch.equal(tangent, nn.functional.linear(torch.ones_like(x), layer.weight))
    traced = torch.jit.trace(layer, (x,))
    assert torch.equal(traced(2 * x), nn.functional.linear(2 * x, layer.weight))
    assert torch.equal(layer(x), exact), "and the kernel again"


def test_a_copy_of_the_forward_alone_is_of_a_copy_of_the_layer(head):
    layer, x = head
    copied = copy.deepcopy(layer.forward)
    with torch.no_grad():
        assert torch.equal(copied(x), type(layer).forward(layer, x))
    assert copied.__self__ is not layer
