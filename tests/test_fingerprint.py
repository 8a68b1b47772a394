"""The fingerprint changes with every edit, and with nothing else."""

from __future__ import annotations

import pytest
import torch

from zoff_async.fingerprint import fingerprint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 4, 5, 7, 1000, 70_001, 4 * (1 << 16) + 3])
def test_equal_weights_have_one_fingerprint_wherever_they_lie(numel, dtype):
    weights = torch.randn(numel).to(dtype)
    shifted = torch.zeros(numel + 1, dtype=dtype)[1:]
    shifted.copy_(weights)
    assert fingerprint(shifted) == fingerprint(weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 2, 3, 5, 64, 70_001])
def test_one_changed_element_is_seen_at_every_place(numel, dtype):
    weights = torch.randn(numel).to(dtype)
    before = fingerprint(weights)
    for place in {0, numel // 2, numel - 1}:
        edited = weights.clone()
        edited[place] += 1
        assert fingerprint(edited) != before


def test_rows_that_change_places_are_seen():
    weights = torch.randn(300, 700)
    assert fingerprint(weights.flip(0)) != fingerprint(weights)


def test_a_block_that_changes_places_with_another_is_seen():
    blocks = torch.randn(2, 1 << 17)  # a block of words each
    assert fingerprint(blocks.flip(0).contiguous()) != fingerprint(blocks)


def test_a_change_of_sign_is_seen_even_of_zero():
    weights = torch.zeros(9)
    assert fingerprint(-weights) != fingerprint(weights)


def test_strides_do_not_matter():
    weights = torch.randn(5, 7)
    assert fingerprint(weights.t().contiguous().t()) == fingerprint(weights)
