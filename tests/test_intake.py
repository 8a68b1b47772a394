"""Intake by itself: waves, what an arrival holds, what is present, and how a wait for room ends. No loop takes part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.runtime.scenes import PATIENCE_S, Beside, wait_until, within
from zoff_async.bucket import Entry, pack
from zoff_async.cpu_ops import ADAMW
from zoff_async.device import HostDevice
from zoff_async.errors import GradientError
from zoff_async.gradient import GradientStandIn
from zoff_async.intake import Arrival, Intake, check_gradient
from zoff_async.state import BucketState


class Receiver:
    """Notes what intake tells, in order; an arrival as ``(bucket, wave, positions, adds)``."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.arrivals: list[Arrival] = []

    def wave_opened(self, wave: int) -> None:
        self.told.append(f"wave {wave}")

    def waited_for_room(self, start_s: float, end_s: float) -> None:
        self.told.append("waited")

    def arrived(self, arrival: Arrival) -> None:
        self.arrivals.append(arrival)
        self.told.append((arrival.bucket.index, arrival.wave, tuple(arrival.positions), tuple(arrival.adds)))

    def check(self) -> None:
        return None

    def wait_gradients_unread(self) -> None:
        self.told.append("unread")

    def squares(self, piece: Tensor, out: np.ndarray) -> None:
        out[:] = float(piece.double().square().sum())

    def take(self) -> list[Any]:
        told, self.told = self.told, []
        return told


class Bench:
    """A model whose parameters report to an intake: bucket 0 holds d and c, bucket 1 holds b and a (8 bytes each)."""

    def __init__(self, bound_bytes: int = 1 << 30) -> None:
        self.parameters = {name: nn.Parameter(torch.ones(2)) for name in "abcd"}
        entries = [Entry(p, name, i, 0) for i, (name, p) in enumerate(self.parameters.items())]
        self.states = [BucketState(bucket, ADAMW) for bucket in pack(entries, 16, 100)]
        self.entries = {entry.name: entry for entry in entries}
        self.receiver = Receiver()
        self.device = HostDevice()
        self.intake = Intake(self.states, self.device, self.receiver, bound_bytes)
        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(self.intake.accumulated)

    def backward(self, names: str, factor: float = 1.0) -> None:
        sum((self.parameters[name] * factor).sum() for name in names).backward()

    def land(self) -> None:
        """Do what the lanes do: the gradients go into the store, in the order of their arrival."""
        arrivals, self.receiver.arrivals = self.receiver.arrivals, []
        for arrival in arrivals:
            state = self.states[arrival.bucket.index]
            store = state.ready_store(torch.float32)
            for position, gradient, add, factor in zip(
                arrival.positions, arrival.gradients, arrival.adds, arrival.factors, strict=True
            ):
                piece = arrival.bucket.entries[position].view(store)
                piece.copy_(piece * factor + gradient if add else gradient)
                state.squares[position] = float(piece.double().square().sum())
            if arrival.gradients:
                self.intake.copied(arrival.nbytes)
                self.intake.landed(arrival.bucket.index)

    def gradient(self, name: str) -> list[float]:
        return self.intake.gradient(self.entries[name]).tolist()


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.device.close()


def test_a_backward_is_one_wave_and_every_bucket_arrives_in_it(bench):
    bench.backward("abcd")

    told = bench.receiver.take()
    assert told[0] == "wave 0"
    assert sorted(told[1:]) == [(0, 0, (0, 1), (False, False)), (1, 0, (0, 1), (False, False))]
    assert all(type(p.grad) is GradientStandIn for p in bench.parameters.values())


def test_a_bucket_arrives_as_soon_as_it_is_full():
    """Its gradients are handed over while backward is still running, in the order in which they came."""
    bench = Bench()
    order: list[int] = []
    x = bench.parameters["a"].sum()
    x.register_hook(lambda _: order.append(len(bench.receiver.arrivals)))
    ((x * bench.parameters["c"] * bench.parameters["d"]).sum() + bench.parameters["b"].sum()).backward()

    assert order == [1]
    bench.device.close()


def test_unused_parameters_leave_their_places_empty(bench):
    bench.backward("bd")
    assert bench.receiver.take() == ["wave 0", (0, 0, (0,), (False,)), (1, 0, (0,), (False,))]

    assert [state.present.tolist() for state in bench.states] == [[True, False], [True, False]]
    assert bench.parameters["a"].grad is None


def test_a_bucket_without_any_gradient_arrives_with_nothing(bench):
    bench.backward("cd")

    assert bench.receiver.take() == ["wave 0", (0, 0, (0, 1), (False, False)), (1, 0, (), ())]


def test_a_second_backward_is_a_second_wave_that_adds(bench):
    bench.backward("abcd")
    bench.receiver.take()
    bench.backward("abcd", 2.0)

    told = bench.receiver.take()
    assert told[0] == "wave 1"
    assert sorted(told[1:]) == [(0, 1, (0, 1), (True, True)), (1, 1, (0, 1), (True, True))]
    bench.land()
    assert bench.gradient("a") == [3.0, 3.0]


def test_a_gradient_that_was_cleared_is_replaced_and_the_others_are_added_to(bench):
    bench.backward("abcd")
    bench.parameters["b"].grad = None
    bench.backward("abcd", 2.0)
    bench.land()

    assert (bench.gradient("a"), bench.gradient("b")) == ([3.0, 3.0], [2.0, 2.0])


def test_after_a_step_the_next_gradient_opens_wave_zero_again(bench):
    bench.backward("abcd")
    bench.intake.complete_step()
    bench.intake.new_step()
    bench.receiver.take()
    bench.backward("a")

    assert bench.receiver.take() == ["wave 0", (1, 0, (1,), (True,)), (0, 0, (), ())]


def test_a_step_without_backward_lets_every_bucket_arrive_with_nothing(bench):
    bench.intake.complete_step()

    assert bench.receiver.take() == [(0, 0, (), ()), (1, 0, (), ())]


def test_gradients_that_were_set_by_hand_are_taken_in_and_none_means_none(bench):
    bench.backward("abcd")
    bench.receiver.take()
    bench.parameters["a"].grad = torch.full((2,), 5.0)
    bench.parameters["c"].grad = None
    bench.intake.adopt()
    bench.intake.complete_step()
    bench.land()

    assert bench.gradient("a") == [5.0, 5.0]
    assert bench.states[0].present.tolist() == [True, False]
    assert type(bench.parameters["a"].grad) is GradientStandIn
    with pytest.raises(GradientError) as caught:
        bench.gradient("c")
    assert str(caught.value) == "'c' has no gradient now: call backward first"


def test_a_gradient_that_is_dropped_before_its_bucket_is_full_never_leaves(bench):
    """In a hook of the user's: c is thrown away while d has not come yet."""
    dropped: list[bool] = []

    def drop(parameter: Tensor) -> None:
        parameter.grad = None
        bench.intake.drop(bench.entries["c"])
        dropped.append(True)

    bench.parameters["c"].register_post_accumulate_grad_hook(drop)
    bench.backward("c")

    assert dropped == [True]
    assert [told for told in bench.receiver.take() if told[0] == 0] == [(0, 0, (), ())]


def test_a_scale_is_kept_as_a_factor_and_used_once(bench):
    bench.backward("abcd")
    bench.land()
    bench.parameters["a"].grad.mul_(0.5)
    assert bench.states[1].factor.tolist() == [1.0, 0.5]
    assert bench.gradient("a") == [0.5, 0.5]
    assert bench.intake.norm(bench.entries["a"]) == pytest.approx(0.5 * 2**0.5)

    bench.backward("abcd")
    bench.land()
    assert bench.gradient("a") == [1.5, 1.5]
    assert bench.states[1].factor.tolist() == [1.0, 1.0]


def test_a_write_waits_until_no_update_reads_and_replaces_the_values(bench):
    bench.backward("abcd")
    bench.land()
    bench.receiver.take()
    bench.parameters["a"].grad.add_(torch.tensor([1.0, 2.0]))

    assert "unread" in bench.receiver.take()
    assert bench.gradient("a") == [2.0, 3.0]
    assert bench.states[1].squares.tolist() == [2.0, 13.0]


def test_zeros_are_noted_and_read_as_zeros(bench):
    bench.backward("abcd")
    bench.land()
    bench.parameters["a"].grad.zero_()

    assert bench.gradient("a") == [0.0, 0.0]
    assert bench.intake.norm(bench.entries["a"]) == 0.0
    bench.backward("abcd", 2.0)
    bench.land()
    assert bench.gradient("a") == [2.0, 2.0]


class TestAdamInsideBackward:
    @pytest.fixture
    def declared(self) -> Any:
        bench = Bench()
        bench.intake.max_waves = 1
        yield bench
        bench.device.close()

    def test_an_undeclared_backward_is_refused_before_anything_arrives(self, declared):
        declared.backward("abcd")
        declared.receiver.take()
        with pytest.raises(GradientError) as caught:
            declared.backward("a")

        assert str(caught.value) == (
            "'a' got a gradient in backward number 2 of the step, and Adam runs inside number 1: declare "
            "OffloadConfig(backwards_per_step=...), or use policy='overlap'"
        )
        assert declared.receiver.take() == []

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            (lambda gradient: gradient.mul_(0.5), "scaled"),
            (lambda gradient: gradient.zero_(), "zeroed"),
            (lambda gradient: gradient.add_(1.0), "written"),
        ],
    )
    def test_gradients_that_adam_has_read_cannot_be_changed(self, declared, change, word):
        declared.backward("abcd")
        declared.land()
        with pytest.raises(GradientError) as caught:
            change(declared.parameters["a"].grad)

        assert str(caught.value) == (
            f"the gradient of 'a' cannot be {word}: Adam runs inside backward; use policy='overlap' for clipping, "
            "loss scaling and edits of gradients"
        )

    def test_a_gradient_that_was_replaced_after_backward_is_refused(self, declared):
        declared.backward("abcd")
        declared.parameters["b"].grad = torch.ones(2)
        with pytest.raises(GradientError) as caught:
            declared.intake.refuse_replaced()

        assert str(caught.value) == (
            "p.grad of 'b' was replaced after backward, and Adam has run inside backward: use policy='overlap' to set "
            "gradients by hand"
        )


class TestRoom:
    """Buckets of 16 bytes, 16 bytes of room."""

    @pytest.fixture
    def tight(self) -> Any:
        bench = Bench(bound_bytes=16)
        yield bench
        bench.intake.fail(None)
        bench.device.close()

    def test_a_hook_waits_until_a_copy_is_done(self, tight):
        running = Beside(lambda: tight.backward("abcd"))
        wait_until(lambda: tight.intake.slot_waits == 1)
        assert not running.over.is_set()
        tight.intake.copied(16)
        running.result()

        assert "waited" in tight.receiver.told
        assert tight.intake.slot_waits == 1

    def test_a_hook_stops_waiting_when_nothing_is_under_way(self, tight):
        running = Beside(lambda: tight.backward("abcd"))
        wait_until(lambda: tight.intake.slot_waits == 1)
        tight.intake.set_stalled(True)

        running.result()

    def test_a_hook_stops_waiting_when_a_step_has_failed(self, tight):
        running = Beside(lambda: tight.backward("abcd"))
        wait_until(lambda: tight.intake.slot_waits == 1)
        tight.intake.fail(RuntimeError("elsewhere"))

        running.result()

    def test_a_reader_stops_waiting_when_a_step_has_failed(self, tight):
        within(PATIENCE_S, lambda: tight.backward("ab"))
        reading = Beside(lambda: tight.intake.wait_landed(tight.entries["a"]))
        assert not reading.over.wait(0.05)
        tight.intake.fail(RuntimeError("elsewhere"))

        reading.result()

    def test_after_recovery_nothing_is_held_or_under_way(self, tight):
        running = Beside(lambda: tight.backward("abcd"))
        wait_until(lambda: tight.intake.slot_waits == 1)
        tight.intake.fail(RuntimeError("elsewhere"))
        running.result()
        tight.intake.fail(None)
        tight.intake.drop_all()
        tight.receiver.take()
        within(PATIENCE_S, lambda: tight.backward("ab"))

        assert tight.receiver.take() == ["wave 0", (1, 0, (0, 1), (False, False)), (0, 0, (), ())]


class TestArrival:
    def arrival(self) -> Arrival:
        entries = [Entry(nn.Parameter(torch.ones(2)), name, i, 0) for i, name in enumerate("abcdef")]
        (bucket,) = pack(entries, 1 << 20, 100)
        return Arrival(bucket, 0)

    def test_members_are_sorted_together(self):
        arrival = self.arrival()
        for position, add, factor in ((3, True, 0.5), (0, False, 1.0), (4, True, 0.5)):
            arrival.put(position, torch.full((2,), float(position)), add=add, factor=factor)
        arrival.sort()

        assert arrival.positions == [0, 3, 4]
        assert [gradient[0].item() for gradient in arrival.gradients] == [0.0, 3.0, 4.0]
        assert (arrival.adds, arrival.factors) == ([False, True, True], [1.0, 0.5, 0.5])
        assert arrival.nbytes == 24

    def test_neighbours_that_are_treated_alike_are_one_run(self):
        arrival = self.arrival()
        for position, add, factor in ((0, False, 1.0), (1, False, 1.0), (2, True, 1.0), (3, True, 0.5), (5, True, 0.5)):
            arrival.put(position, torch.ones(2), add=add, factor=factor)

        assert arrival.runs() == [(0, 2, False, 1.0), (2, 3, True, 1.0), (3, 4, True, 0.5), (5, 6, True, 0.5)]

    def test_a_member_can_be_taken_out_again(self):
        arrival = self.arrival()
        arrival.put(1, torch.ones(2), add=False, factor=1.0)
        arrival.put(2, torch.ones(2), add=False, factor=1.0)
        arrival.remove(1)

        assert not arrival.holds(1)
        assert arrival.holds(2)
        assert (arrival.positions, arrival.nbytes) == ([2], 8)


def test_a_sparse_gradient_is_refused_by_name():
    entry = Entry(nn.Parameter(torch.ones(2)), "table", 0, 0)
    with pytest.raises(GradientError) as caught:
        check_gradient(entry, torch.ones(2).to_sparse())

    assert str(caught.value) == (
        "'table' has a sparse gradient (torch.sparse_coo): this optimizer updates dense parameters only; use "
        "sparse=False "
        "in the embedding, or leave the parameter to torch.optim.SparseAdam"
    )
