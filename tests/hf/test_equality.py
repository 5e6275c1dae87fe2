"""The swapped model against the unpatched one: the same tokens in FP32, the stated bound in BF16, and bitwise sameness
where both halves use the same arithmetic. Prompts are drawn by seed."""

import itertools

import pytest
import torch

import apexk
from apexk.demo import model as demo

POLICIES = ("no_assign", "sa_only", "ea_only", "apex")
POOLS = (0, 1, 4, 16, 32)
BATCHES = (1, 3, 8)
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def plain(trained):
    """Unpatched FP32 continuations by batch size; the prompts of a batch are ragged, so rows are left-padded."""
    model, tokenizer = trained()
    texts = {n: demo.prompts(n, seed=11 + n) for n in BATCHES}
    lengths = {len(ids) for ids in tokenizer(texts[8])["input_ids"]}
    assert len(lengths) > 3, "the batch is meant to be ragged"
    return {n: (texts[n], demo.generate(model, tokenizer, texts[n], NEW_TOKENS)) for n in BATCHES}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_float32_tokens_are_the_unpatched_models(trained, plain, policy, pool):
    model, tokenizer = trained()
    with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool)):
        for texts, wanted in plain.values():
            assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted)


@pytest.fixture(scope="module")
def teacher_forced(trained):
    """FP32 and BF16 logits of the unpatched models over held-out verses, and the input ids."""
    full, tokenizer = trained()
    short, _ = trained(torch.bfloat16)
    batch = tokenizer(demo.prompts(6, seed=3), return_tensors="pt", padding=True)
    with torch.no_grad():
        return batch, full(**batch).logits, short(**batch).logits.float()


@pytest.mark.parametrize(("policy", "pool"), [*itertools.product(POLICIES, (4, 16)), ("apex", 0), ("apex", 32)])
def test_bfloat16_is_no_farther_from_float32_than_the_unpatched_model(trained, teacher_forced, policy, pool):
    """Error against FP32 at most 1.1 x the plain BF16 model's own; a different argmax only where the two highest logits
    of the plain model are closer than twice the larger error."""
    model, _ = trained(torch.bfloat16)
    batch, exact, rounded = teacher_forced
    real = batch["attention_mask"].bool()
    with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool)), torch.no_grad():
        swapped = model(**batch).logits.float()
    error, own = (swapped - exact)[real], (rounded - exact)[real]
    assert error.pow(2).mean().sqrt() <= 1.1 * own.pow(2).mean().sqrt()
    flips = swapped[real].argmax(-1) != rounded[real].argmax(-1)
    top = rounded[real].topk(2).values
    bound = 2 * torch.maximum(error.abs().amax(-1), own.abs().amax(-1))
    assert ((top[:, 0] - top[:, 1])[flips] <= bound[flips]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_arithmetic_is_bitwise_equal_across_policies_and_pools(trained, dtype):
    """With the CPU kernels on both halves the orchestration itself must add nothing: one result, whatever ran where."""
    model, tokenizer = trained(dtype)
    texts = demo.prompts(3, seed=5)
    found = set()
    for policy, pool in itertools.product(POLICIES, POOLS):
        config = apexk.ApexConfig(policy=policy, pool=pool, arithmetic="same", resident_first=pool % 2 == 0)
        with apexk.swap(model, config), torch.no_grad():
            batch = tokenizer(texts, return_tensors="pt", padding=True)
            out = model.generate(**batch, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
        bits = torch.stack(out.logits).view(torch.int32 if dtype == torch.float32 else torch.int16)
        found.add((tuple(out.sequences.reshape(-1).tolist()), hash(bits.numpy().tobytes())))
    assert len(found) == 1


def test_demo_model_is_the_exported_one(trained):
    """The shipped weights are BF16: loading them as FP32 loses nothing."""
    full, short = trained()[0].state_dict(), trained(torch.bfloat16)[0].state_dict()
    assert all(torch.equal(full[name], short[name].float()) for name in full)
