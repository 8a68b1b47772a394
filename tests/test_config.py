"""OffloadConfig: what it refuses, in whole messages, and what it derives."""

from __future__ import annotations

import dataclasses

import pytest

from zoff_async.config import OffloadConfig

REFUSED = [
    ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be at least 1, got 0"),
    ({"bucket_bytes": -5}, ValueError, "bucket_bytes must be at least 1, got -5"),
    ({"bucket_bytes": 1.5}, TypeError, "bucket_bytes must be an int of at least 1, got 1.5"),
    ({"bucket_bytes": True}, TypeError, "bucket_bytes must be an int of at least 1, got True"),
    ({"bucket_bytes": "1MB"}, TypeError, "bucket_bytes must be an int of at least 1, got '1MB'"),
    ({"chunk_numel": 0}, ValueError, "chunk_numel must be at least 1, got 0"),
    ({"chunk_numel": None}, TypeError, "chunk_numel must be an int of at least 1, got None"),
    ({"workers": 0}, ValueError, "workers must be at least 1, got 0"),
    ({"workers": -1}, ValueError, "workers must be at least 1, got -1"),
    ({"slots": 0}, ValueError, "slots must be at least 1, got 0"),
    ({"backwards_per_step": 0}, ValueError, "backwards_per_step must be at least 1, got 0"),
    ({"trace_steps": -1}, ValueError, "trace_steps must be at least 0, got -1"),
    ({"delay_warmup_steps": -1}, ValueError, "delay_warmup_steps must be at least 0, got -1"),
    ({"kernel": "cuda"}, ValueError, "kernel must be one of auto, numexpr, numba, torch, got 'cuda'"),
    ({"kernel": None}, ValueError, "kernel must be one of auto, numexpr, numba, torch, got None"),
    ({"event_loop": "trio"}, ValueError, "event_loop must be one of auto, uvloop, asyncio, got 'trio'"),
    ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite must be one of skip, raise, got 'ignore'"),
    ({"data_parallel": 1}, TypeError, "data_parallel must be True or False, got 1"),
    ({"notice_edits": "no"}, TypeError, "notice_edits must be True or False, got 'no'"),
    ({"cpu_affinity": 3}, TypeError, "cpu_affinity must be a sequence of core numbers or None, got 3"),
    ({"cpu_affinity": "01"}, TypeError, "cpu_affinity must be a sequence of core numbers or None, got '01'"),
    ({"cpu_affinity": (0, -1)}, ValueError, "cpu_affinity must be at least 0, got -1"),
    ({"cpu_affinity": (0.0,)}, TypeError, "cpu_affinity must be an int of at least 0, got 0.0"),
    (
        {"switch_interval_s": 0.0},
        ValueError,
        "switch_interval_s must be a positive number of seconds or None, got 0.0",
    ),
    (
        {"switch_interval_s": float("inf")},
        ValueError,
        "switch_interval_s must be a positive number of seconds or None, got inf",
    ),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED, ids=[str(options) for options, _, _ in REFUSED])
def test_a_value_that_cannot_be_used_is_refused_by_name(options, kind, message):
    with pytest.raises(kind) as caught:
        OffloadConfig(**options)

    assert str(caught.value) == message


def test_the_smallest_sizes_are_legal():
    OffloadConfig(bucket_bytes=1, chunk_numel=1, workers=1, slots=1, trace_steps=0, backwards_per_step=1)


def test_a_whole_number_of_seconds_is_a_number_of_seconds():
    assert OffloadConfig(switch_interval_s=1).switch_interval_s == 1


@pytest.mark.parametrize("cores", [[1, 0], range(2), iter([1, 0]), (core for core in (0, 1)), ()])
def test_cores_may_come_in_any_iterable(cores):
    """Also in one that can be read once only."""
    kept = OffloadConfig(cpu_affinity=cores).cpu_affinity

    assert kept == () or sorted(kept) == [0, 1]
    assert isinstance(kept, tuple)
    assert (kept == ()) == (cores == ())


def test_it_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().workers = 2


@pytest.mark.parametrize(
    ("total_bytes", "bucket_bytes"),
    [(0, 1 << 20), (40 << 20, 1 << 20), (400 << 20, 10 << 20), (1 << 40, 64 << 20)],
)
def test_without_a_bucket_size_a_model_is_cut_into_about_forty(total_bytes, bucket_bytes):
    assert OffloadConfig().bucket_bytes_for(total_bytes) == bucket_bytes
    assert OffloadConfig(bucket_bytes=77).bucket_bytes_for(total_bytes) == 77


def test_as_a_dict_it_makes_an_equal_one():
    config = OffloadConfig(bucket_bytes=5, cpu_affinity=(0,), device="host")

    assert OffloadConfig(**config.asdict()) == config
