"""The demo's GPT."""

from __future__ import annotations

import pytest
import torch

from zoff_async.train.model import GPT, SIZES, GPTConfig, build_model, parameter_groups

CONFIG = GPTConfig(layers=2, heads=2, width=16, context=8)
CPU = torch.device("cpu")


def build(seed: int = 0, dtype: torch.dtype = torch.float32, **options: bool) -> GPT:
    return build_model(CONFIG, seed=seed, dtype=dtype, device=CPU, **options)


def some_bytes() -> torch.Tensor:
    return torch.randint(0, 256, (3, 8))


def test_a_byte_is_predicted_from_the_bytes_before_it_only():
    model, tokens = build(), some_bytes()
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 256

    before, after = model(tokens), model(changed)

    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_the_head_is_the_embedding():
    """A byte that is not in the input still gets a gradient in its embedding: the head's."""
    model = build()
    tokens = torch.zeros((1, 8), dtype=torch.int64)

    model.loss(tokens, tokens).backward()

    assert not any("head" in name for name, _ in model.named_parameters())
    assert model.token.weight.grad[200].abs().sum() > 0


def test_an_untrained_model_knows_nothing():
    """Its loss is that of a uniform guess among 256 bytes."""
    loss = build().loss(some_bytes(), some_bytes())

    assert loss.dtype == torch.float32
    assert abs(loss.item() - 5.545) < 0.05


def test_the_weights_are_a_function_of_the_seed():
    torch.manual_seed(7)
    first = build(seed=3).state_dict()
    again, other = build(seed=3).state_dict(), build(seed=4).state_dict()

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token.weight"], other["token.weight"])


def test_building_leaves_the_users_random_numbers_alone():
    state = torch.get_rng_state()
    build()
    assert torch.equal(torch.get_rng_state(), state)


def test_bf16_weights_are_the_fp32_ones_rounded_once():
    fp32, bf16 = build().state_dict(), build(dtype=torch.bfloat16).state_dict()

    assert all(torch.equal(bf16[name], fp32[name].bfloat16()) for name in fp32)


def test_recomputed_activations_change_no_bit():
    tokens, targets = some_bytes(), some_bytes()
    plain, recomputing = build(), build(recompute=True)

    losses = [model.loss(tokens, targets) for model in (plain, recomputing)]
    for loss in losses:
        loss.backward()

    assert torch.equal(*losses)
    for left, right in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_matrices_decay_and_norms_do_not():
    model = build()
    matrices, norms = parameter_groups(model, 0.1)

    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for _, p in matrices["params"]} == {2}
    assert len(matrices["params"]) + len(norms["params"]) == len(list(model.parameters()))


def test_the_sizes_go_from_a_toy_to_a_full_accelerator():
    counts = {}
    for name, size in SIZES.items():
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in GPT(size.config()).parameters())

    assert list(counts.values()) == sorted(counts.values())
    assert counts["tiny"] < 1e6
    assert 80e9 < 2 * counts["50b"] < 139 * 2**30


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError) as caught:
        GPTConfig(layers=1, heads=3, width=16, context=8)

    assert str(caught.value) == "width must be a multiple of heads, got width=16, heads=3"


def test_a_shape_of_nothing_is_refused():
    with pytest.raises(ValueError) as caught:
        GPTConfig(layers=0, heads=1, width=16, context=8)

    assert str(caught.value) == "layers must be at least 1, got 0"
