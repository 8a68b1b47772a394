"""Masters and moments: what an update cuts a bucket into, edits taken over, stores widened, state moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zoff_async.bucket import Entry, pack
from zoff_async.cpu_ops import ADAMW
from zoff_async.state import BucketState, Segment


def state_of(*sizes: int, groups: tuple[int, ...] = (0,), dtype: torch.dtype = torch.float32) -> BucketState:
    """One bucket; entry i, in the bucket's own order, has ``sizes[i]`` elements of value i."""
    reversed_sizes = list(enumerate(sizes))[::-1]
    made = [
        Entry(torch.nn.Parameter(torch.full((size,), float(i), dtype=dtype)), f"p{i}", number, groups[i % len(groups)])
        for number, (i, size) in enumerate(reversed_sizes)
    ]
    (bucket,) = pack(made, 1 << 30, 1 << 30)
    return BucketState(bucket, ADAMW)


def test_masters_begin_as_the_weights_and_moments_as_zeros():
    state = state_of(2, 3, dtype=torch.bfloat16)

    assert state.master.tolist() == [0, 0, 1, 1, 1]
    assert state.master.dtype is torch.float32
    assert [moment.tolist() for moment in state.moments] == [[0] * 5] * 2
    assert state.nbytes == {"master": 20, "moments": 40, "gradients": 0}


SEGMENTS = {
    "all alike": ({}, [Segment(0, 10, 0, 1, 1.0)]),
    "a group between": (
        {"groups": (0, 1, 0)},
        [Segment(0, 2, 0, 1, 1.0), Segment(2, 5, 1, 1, 1.0), Segment(5, 10, 0, 1, 1.0)],
    ),
    "a count": ({"counts": (4, 4, 7)}, [Segment(0, 5, 0, 5, 1.0), Segment(5, 10, 0, 8, 1.0)]),
    "a factor": ({"factor": (1, 0.5, 0.5)}, [Segment(0, 2, 0, 1, 1.0), Segment(2, 10, 0, 1, 0.5)]),
    "absent in the middle": ({"present": (1, 0, 1)}, [Segment(0, 2, 0, 1, 1.0), Segment(5, 10, 0, 1, 1.0)]),
    "absent at the ends": ({"present": (0, 1, 0)}, [Segment(2, 5, 0, 1, 1.0)]),
    "none": ({"present": (0, 0, 0)}, []),
}


@pytest.mark.parametrize("name", SEGMENTS)
def test_an_update_is_cut_where_something_changes(name):
    """Entries of 2, 3 and 5 elements."""
    given, wanted = SEGMENTS[name]
    state = state_of(2, 3, 5, groups=given.get("groups", (0,)))
    state.counts[:] = given.get("counts", 0)
    present = np.array(given.get("present", (1, 1, 1)), dtype=np.bool_)
    factor = np.array(given.get("factor", (1, 1, 1)), dtype=np.float64)

    assert list(state.segments(present, factor)) == wanted


def test_an_entry_without_elements_has_no_segment():
    state = state_of(0, 2, groups=(0, 1))

    assert list(state.segments(np.ones(2, dtype=np.bool_), np.ones(2))) == [Segment(0, 2, 1, 1, 1.0)]


def test_a_store_is_widened_and_never_narrowed():
    state = state_of(3, dtype=torch.bfloat16)
    assert state.ready_store(torch.bfloat16).dtype is torch.bfloat16
    state.ready_store(torch.bfloat16).fill_(1.5)

    assert state.ready_store(torch.float32).tolist() == [1.5] * 3
    assert state.ready_store(torch.bfloat16).dtype is torch.float32


def test_zeros_that_were_noted_are_written_where_a_gradient_is_present():
    state = state_of(2, 2)
    state.ready_store(torch.float32).fill_(3)
    state.squares[:] = 18
    state.present[:] = (True, True)
    state.zeroed[:] = (True, False)
    state.set_zeros()

    assert state.ready_store(torch.float32).tolist() == [0, 0, 3, 3]
    assert state.squares.tolist() == [0, 18]
    assert not state.zeroed.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_edited_elements_are_taken_over_and_the_others_keep_their_digits(dtype):
    state = state_of(4, dtype=dtype)
    (entry,) = state.bucket.entries
    fine = torch.tensor([1.0001, 2.0001, float("nan"), -0.0])
    state.master.copy_(fine)
    with torch.no_grad():
        entry.parameter.copy_(fine)
        entry.parameter[1] = 5.0
    assert state.adopt_weights(entry, dtype) == 1

    assert state.master[0] == fine[0]
    assert state.master[1] == 5.0
    assert state.master[2].isnan()
    assert not entry.weights_edited()
    assert state.adopt_weights(entry, dtype) == 0


def test_a_cast_of_the_model_is_no_edit():
    """bf16 weights cast to fp32 keep the master's digits; those that were edited after the cast do not."""
    state = state_of(3, dtype=torch.bfloat16)
    (entry,) = state.bucket.entries
    state.master.copy_(torch.tensor([1.0001, 2.0001, 3.0001]))
    entry.parameter.data = state.master.to(torch.bfloat16).to(torch.float32)
    entry.parameter.data[2] = 3.1

    assert state.adopt_weights(entry, torch.bfloat16) == 1
    assert state.master.tolist() == torch.tensor([1.0001, 2.0001, 3.1]).tolist()


def test_state_moves_to_another_bucket_with_all_that_belongs_to_it():
    old = state_of(2, 3)
    old.master.copy_(torch.arange(5.0))
    old.moments[0].copy_(torch.arange(5.0) + 10)
    old.ready_store(torch.float32).copy_(torch.arange(5.0) + 20)
    old.counts[:] = (3, 4)
    old.squares[:] = (7, 8)
    old.present[:] = (False, True)
    old.factor[:] = (1, 0.5)
    entry = old.bucket.entries[1]
    position, start = entry.position, entry.start
    (bucket,) = pack([entry], 1 << 30, 1 << 30)
    new = BucketState(bucket, ADAMW)
    new.take_over(entry, old, position, start)

    assert new.master.tolist() == [2, 3, 4]
    assert new.moments[0].tolist() == [12, 13, 14]
    assert new.ready_store(torch.float32).tolist() == [22, 23, 24]
    assert (new.counts.tolist(), new.squares.tolist(), new.present.tolist(), new.factor.tolist()) == (
        [4],
        [8],
        [True],
        [0.5],
    )
