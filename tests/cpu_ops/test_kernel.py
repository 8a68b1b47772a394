"""What every kernel demands of a chunk's buffers, and what it keeps of them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.cpu_ops.reference import HYPER
from zoff_async.cpu_ops import ADAMW, make_kernel

KERNELS = ["numexpr", "numba", "torch"]


def buffers(numel: int = 4) -> dict[str, object]:
    return {
        "master": torch.zeros(numel),
        "state": (torch.zeros(numel), torch.zeros(numel)),
        "grad": torch.zeros(numel, dtype=torch.bfloat16),
        "out": torch.zeros(numel, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"grad": torch.zeros(3)},
            "tensors must have one length of at least 1, got master=4, exp_avg=4, exp_avg_sq=4, grad=3, out=4",
        ),
        (
            # A length of one would be broadcast without a word.
            {"grad": torch.zeros(1)},
            "tensors must have one length of at least 1, got master=4, exp_avg=4, exp_avg_sq=4, grad=1, out=4",
        ),
        (
            {"state": (torch.zeros(4), torch.zeros(5)), "out": None},
            "tensors must have one length of at least 1, got master=4, exp_avg=4, exp_avg_sq=5, grad=4",
        ),
        (
            {"state": (torch.zeros(4),)},
            "adamw has 2 states ('exp_avg', 'exp_avg_sq'), got 1 in state and 1 in state_out",
        ),
        (
            {"master_out": torch.zeros(4)},
            "master_out and state_out go together: give both second buffers or neither",
        ),
        (
            {"master": torch.zeros(8)[::2]},
            "master must be a flat contiguous tensor on the cpu, got shape (4,), stride (2,), device cpu; "
            "pass a view of a flat buffer",
        ),
        (
            {"grad": torch.zeros(2, 2)},
            "grad must be a flat contiguous tensor on the cpu, got shape (2, 2), stride (2, 1), device cpu; "
            "pass a view of a flat buffer",
        ),
    ],
)
def test_buffers_that_do_not_fit_are_refused_by_name(change, message):
    with pytest.raises(ValueError) as caught:
        make_kernel("numexpr", ADAMW).bind(**{**buffers(), **change})

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"master": torch.zeros(4, dtype=torch.float64)}, "master must be torch.float32, got torch.float64"),
        (
            {"state": (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16))},
            "exp_avg_sq must be torch.float32, got torch.bfloat16",
        ),
        (
            {"grad": torch.zeros(4, dtype=torch.float64)},
            "grad must be one of torch.float32, torch.bfloat16, torch.float16, got torch.float64",
        ),
        (
            {"out": torch.zeros(4, dtype=torch.int32)},
            "out must be one of torch.float32, torch.bfloat16, torch.float16, got torch.int32",
        ),
    ],
)
def test_dtypes_that_no_kernel_computes_in_are_refused_by_name(change, message):
    with pytest.raises(TypeError) as caught:
        make_kernel("numexpr", ADAMW).bind(**{**buffers(), **change})

    assert str(caught.value) == message


def test_an_empty_chunk_is_refused():
    with pytest.raises(ValueError, match="at least 1, got master=0"):
        make_kernel("numexpr", ADAMW).bind(**buffers(0))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_dropped_update_keeps_no_buffer_alive(kernel):
    """Not the thread's scratch, not the compiled objects, not a caller's frame."""
    made = make_kernel(kernel, ADAMW)
    held = buffers()
    update = made.bind(**held)
    update.run(ADAMW.scalars(**HYPER))
    dead = [weakref.ref(t) for t in (held["master"], *held["state"], held["grad"], held["out"])]
    del held, update
    gc.collect()

    assert [ref() for ref in dead] == [None] * 5
    assert made.rule is ADAMW


@pytest.mark.parametrize("kernel", KERNELS)
def test_parameters_that_require_grad_may_be_bound(kernel):
    """Autograd sees nothing of it."""
    given = buffers()
    given["master"] = torch.nn.Parameter(torch.ones(4))
    update = make_kernel(kernel, ADAMW).bind(**given)
    update.run(ADAMW.scalars(**{**HYPER, "lr": 0.1}))

    torch.testing.assert_close(given["master"].detach(), torch.full((4,), 0.99))
    assert torch.equal(given["out"], given["master"].detach().bfloat16())
