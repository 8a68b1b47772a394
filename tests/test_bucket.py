"""Packing: who shares a bucket, in which order, and where each element lies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zoff_async.bucket import Entry, pack


def entries(*sizes: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[Entry]:
    """One a size, in registration order, their dtypes in turn."""
    return [
        Entry(torch.nn.Parameter(torch.zeros(size, dtype=dtypes[i % len(dtypes)])), f"p{i}", i, i % 2)
        for i, size in enumerate(sizes)
    ]


def names(buckets: list) -> list[list[str]]:
    return [[entry.name for entry in bucket.entries] for bucket in buckets]


def test_buckets_are_filled_in_reverse_registration_order():
    """Backward yields the last layers first, so they are bucket 0."""
    assert names(pack(entries(10, 10, 10, 10, 10), 80, 100)) == [["p4", "p3"], ["p2", "p1"], ["p0"]]


def test_an_entry_larger_than_a_bucket_has_its_own():
    assert names(pack(entries(1, 100, 1, 1), 16, 100)) == [["p3", "p2"], ["p1"], ["p0"]]


def test_a_bucket_of_one_byte_holds_one_entry():
    assert names(pack(entries(3, 2, 1), 1, 100)) == [["p2"], ["p1"], ["p0"]]


def test_each_dtype_fills_its_own_open_bucket():
    """A model of bf16 matrices and fp32 norms is not cut into tiny pieces."""
    mixed = entries(10, 10, 10, 10, dtypes=(torch.float32, torch.bfloat16))

    buckets = pack(mixed, 1000, 100)
    assert names(buckets) == [["p3", "p1"], ["p2", "p0"]]
    assert [bucket.dtype for bucket in buckets] == [torch.bfloat16, torch.float32]
    assert [bucket.nbytes for bucket in buckets] == [40, 80]


def test_places_and_chunks():
    (bucket,) = pack(entries(5, 0, 7), 1000, 5)

    assert [(e.name, e.position, e.start) for e in bucket.entries] == [("p2", 0, 0), ("p1", 1, 7), ("p0", 2, 7)]
    assert bucket.bounds.tolist() == [0, 7, 7, 12]
    assert bucket.chunks == 3
    assert [bucket.chunk(i) for i in range(3)] == [(0, 5), (5, 10), (10, 12)]
    assert bucket.groups.tolist() == [0, 1, 0]


def test_a_bucket_without_elements_still_has_a_chunk():
    (bucket,) = pack(entries(0), 1000, 5)

    assert (bucket.numel, bucket.chunks, bucket.chunk(0)) == (0, 1, (0, 0))


def test_views_are_pieces_of_the_flat_range_in_the_parameters_shapes():
    shaped = [
        Entry(torch.nn.Parameter(torch.zeros(shape)), str(shape), i, 0) for i, shape in enumerate([(), (2, 3), (4,)])
    ]
    (bucket,) = pack(shaped, 1000, 100)
    flat = torch.arange(bucket.numel, dtype=torch.float32)

    views = bucket.views(flat)
    assert [tuple(view.shape) for view in views] == [(4,), (2, 3), ()]
    assert torch.equal(torch.cat([view.reshape(-1) for view in views]), flat)
    assert all(view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for view in views)


def test_further_buckets_are_numbered_on():
    assert [bucket.index for bucket in pack(entries(1, 1, 1), 1, 1, first_index=7)] == [7, 8, 9]


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=30),
    bucket_bytes=st.integers(1, 300),
    chunk_numel=st.integers(1, 60),
)
def test_every_element_lies_in_exactly_one_place(sizes, bucket_bytes, chunk_numel):
    """Whatever the sizes: nothing is lost, chunks tile the buckets, and only single entries exceed the size."""
    made = entries(*sizes, dtypes=(torch.float32, torch.float16))
    buckets = pack(made, bucket_bytes, chunk_numel)

    assert sorted(entry.index for bucket in buckets for entry in bucket.entries) == list(range(len(sizes)))
    for bucket in buckets:
        assert len(bucket.entries) == 1 or bucket.nbytes <= bucket_bytes
        tiles = [bucket.chunk(i) for i in range(bucket.chunks)]
        assert [start for start, _ in tiles] == [0, *(stop for _, stop in tiles[:-1])]
        assert tiles[-1][1] == bucket.numel
        assert all(e.start == sum(o.numel for o in bucket.entries[:i]) for i, e in enumerate(bucket.entries))
        assert [e.index for e in bucket.entries] == sorted((e.index for e in bucket.entries), reverse=True)


@pytest.mark.parametrize("edit", ["no_grad", "data", "replaced", "moved"])
def test_an_edit_of_the_weights_is_noticed_where_the_version_or_address_tells(edit):
    """A write counts a version; a new tensor has another address. Writes through .data count nothing."""
    entry = Entry(torch.nn.Parameter(torch.ones(3)), "p", 0, 0)
    assert not entry.weights_edited()
    with torch.no_grad():
        if edit == "no_grad":
            entry.parameter.mul_(2)
        elif edit == "data":
            entry.parameter.data.mul_(2)
        elif edit == "replaced":
            entry.parameter.data = torch.zeros(3)
        else:
            entry.parameter.share_memory_()

    assert entry.weights_edited() == (edit != "data")
    entry.note_weights()
    assert not entry.weights_edited()


def test_our_own_write_is_no_edit_and_a_suspicion_is_one():
    entry = Entry(torch.nn.Parameter(torch.ones(3)), "p", 0, 0)
    entry.expect_write()
    with torch.no_grad():
        entry.parameter.copy_(torch.zeros(3))
    assert not entry.weights_edited()

    entry.suspect()
    assert entry.weights_edited()
