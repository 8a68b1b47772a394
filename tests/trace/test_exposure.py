"""Hidden and exposed seconds against the hand-computed step."""

from __future__ import annotations

import pytest

from tests.trace.hand import STEP_1, plan, recorded, span, timeline
from zoff_async.trace.exposure import exposed_time, kind_uses
from zoff_async.trace.steps import Window

STEP = [Window(1, *STEP_1)]


def test_hidden_and_exposed_seconds_of_the_hand_computed_step():
    found = {kind.kind: (kind.hidden_s, kind.exposed_s) for kind in kind_uses(timeline(), STEP)}

    assert found["d2h"] == pytest.approx((1, 3))
    assert found["acc"] == pytest.approx((0, 1))
    assert found["norm"] == pytest.approx((0, 0.5))
    assert found["adam"] == pytest.approx((1, 5))
    assert found["h2d"] == pytest.approx((0, 2))


def test_kinds_come_in_the_order_of_the_plan():
    assert [kind.kind for kind in kind_uses(timeline(), STEP)] == ["fwd", "bwd", "d2h", "acc", "norm", "adam", "h2d"]


def test_bandwidth_and_parameters_a_second_are_over_the_time_it_ran():
    found = {kind.kind: kind for kind in kind_uses(timeline(), STEP)}

    assert (found["d2h"].bytes, found["d2h"].work_s) == (800, 4)
    assert found["d2h"].bytes_per_s == 200
    assert found["adam"].numel == 400
    assert found["adam"].numel_per_s == pytest.approx(400 / 6)
    assert found["adam"].bytes_per_s is None
    assert found["norm"].numel_per_s is None


def test_actions_of_a_kind_that_run_at_once_are_exposed_once():
    found = recorded(span("adam:0.0", "cpu", 0, 4), span("adam:0.1", "cpu", 1, 3), of=plan(workers=2))
    (adam,) = kind_uses(found, [Window(0, 0, 4)])

    assert (adam.work_s, adam.exposed_s, adam.hidden_s, adam.count) == (6, 4, 0, 2)


def test_exposed_time_is_what_compute_does_not_cover():
    found = recorded(span("bwd:0", "compute", 1, 2), span("d2h:0", "d2h", 0, 3))

    assert exposed_time(found, [s for s in found.spans if s.lane == "d2h"]) == [(0, 1), (2, 3)]
