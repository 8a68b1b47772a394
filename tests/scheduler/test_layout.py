"""Layouts: defaults, and what is refused."""

from __future__ import annotations

import pytest

from zoff_async.scheduler import Layout


def test_gradients_come_in_bucket_order_and_the_forward_reads_the_other_way_round():
    layout = Layout(chunks=(2, 1, 3))

    assert (layout.buckets, layout.backward_order, layout.forward_order) == (3, (0, 1, 2), (2, 1, 0))


def test_the_forward_order_follows_a_given_backward_order():
    assert Layout(chunks=(1, 1, 1), backward_order=(1, 0, 2)).forward_order == (2, 0, 1)


def test_lists_are_taken_and_kept_as_tuples():
    layout = Layout(chunks=[2, 1], bucket_bytes=[10, 20])  # type: ignore[arg-type]

    assert hash(layout) == hash(Layout(chunks=(2, 1), bucket_bytes=(10, 20)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunks": ()}, "chunks is empty: a layout needs at least one bucket"),
        ({"chunks": (1, 0)}, "chunks[1] is 0: every bucket needs at least one chunk"),
        ({"chunks": (1,), "slots": 0}, "slots is 0: at least 1 is needed"),
        ({"chunks": (1,), "workers": 0}, "workers is 0: at least 1 is needed"),
        ({"chunks": (1,), "backwards": 0}, "backwards is 0: at least 1, or None for any number"),
        (
            {"chunks": (1, 1), "backward_order": (0, 0)},
            "backward_order is (0, 0): it must name each of the buckets 0 to 1 once",
        ),
        (
            {"chunks": (1, 1), "forward_order": (1, 2)},
            "forward_order is (1, 2): it must name each of the buckets 0 to 1 once",
        ),
        (
            {"chunks": (1, 1), "bucket_bytes": (4,)},
            "bucket_bytes has 1 entries for 2 buckets: give one for each, or none",
        ),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError) as caught:
        Layout(**arguments)

    assert str(caught.value) == message
