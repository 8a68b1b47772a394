"""Pictures: what is drawn, where, and that every format can be written."""

from __future__ import annotations

import builtins

import pytest

from tests.trace.hand import plan, recorded, span, timeline
from zoff_async.errors import ZoffError
from zoff_async.trace import Timeline
from zoff_async.trace.plot import figure, plot

pytest.importorskip("matplotlib")


def bars(axes, zorder: int) -> list[tuple[float, float]]:
    """(left, right) in milliseconds of what is drawn on one level."""
    found = [c for c in axes.collections if c.get_zorder() == zorder]
    boxes = [path.get_extents() for collection in found for path in collection.get_paths()]
    return sorted((round(box.x0, 6), round(box.x1, 6)) for box in boxes)


def rectangles(axes) -> list[tuple[float, float]]:
    return bars(axes, 2)


def outlines(axes) -> list[tuple[float, float]]:
    return bars(axes, 5)


@pytest.mark.parametrize("name", ["step.png", "step.pdf", "step.svg", "STEP.PNG"])
def test_a_picture_is_written_in_every_format_and_the_same_each_time(tmp_path, name):
    timeline().plot(tmp_path / name)
    first = (tmp_path / name).read_bytes()
    timeline().plot(tmp_path / name)

    assert first[:4] in (b"\x89PNG", b"%PDF", b"<?xm")
    if not name.endswith("svg"):  # its element names are random
        assert (tmp_path / name).read_bytes() == first


def test_a_picture_is_1200_pixels_wide(tmp_path):
    timeline().plot(tmp_path / "step.png")
    header = (tmp_path / "step.png").read_bytes()[16:24]

    assert int.from_bytes(header[:4], "big") == 1200


def test_bars_stand_at_their_times_from_the_first_shown_step():
    axes = figure(timeline(), steps=1).axes[0]

    # Step 2 begins at 26 s: forward of bucket 1 is its first second, Adam of bucket 0 is cut to what is shown.
    assert (0.0, 1000.0) in rectangles(axes)
    assert (0.0, 2000.0) in rectangles(axes)
    assert (3000.0, 4000.0) in rectangles(axes)


def test_the_critical_path_is_outlined():
    axes = figure(timeline(), steps=1).axes[0]

    assert outlines(axes) == [
        (0.0, 2000.0),
        (2000.0, 3000.0),
        (3000.0, 4000.0),
        (4000.0, 5000.0),
        (5000.0, 7000.0),
        (7000.0, 9000.0),
        (9000.0, 9500.0),
        (9500.0, 10000.0),
        (10000.0, 13000.0),
        (13000.0, 14000.0),
    ]


def test_what_stood_exposed_is_hatched():
    axes = figure(timeline(), steps=1).axes[0]
    hatched = [found for found in axes.collections if found.get_hatch() == "////"]
    exposed_ms = sum(path.get_extents().width for found in hatched for path in found.get_paths())

    assert exposed_ms == pytest.approx(1000 * (3 + 1 + 0.5 + 5 + 2))  # d2h, acc, norm, adam, h2d


def test_rows_steps_and_runs_are_named():
    drawn = figure(timeline(), steps=2)
    axes = drawn.axes[0]
    words = [text.get_text() for text in axes.texts]

    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "model\ncompute",
        "gradients to host\nd2h",
        "host cores\ncpu",
        "weights to device\nh2d",
    ]
    assert {" step 1: 14 s", " step 2: 14 s", "forward", "backward", "copies", "Adam", "uploads", "waits"} <= set(words)
    assert "order-bound: the busiest lane (cpu) works 54 % of the step" in drawn.get_suptitle()


def test_a_timeline_without_a_whole_step_is_drawn_as_it_is():
    drawn = figure(recorded(span("d2h:0", "d2h", 5, 6), span("norm", "cpu", 6, 7), of=plan()))

    assert rectangles(drawn.axes[0]) == [(0.0, 1000.0), (1000.0, 2000.0)]
    assert drawn.get_suptitle() == "the last steps"


def test_a_format_that_is_none_is_refused_before_anything_is_drawn(tmp_path):
    with pytest.raises(ValueError) as caught:
        plot(timeline(), tmp_path / "step.bmp", steps=1, verdict=True)

    assert str(caught.value) == "cannot draw into 'step.bmp': its name must end in .png, .pdf, .svg"


def test_no_spans_are_refused():
    with pytest.raises(ValueError, match="the timeline has no spans"):
        figure(Timeline(()))


def test_without_matplotlib_the_way_out_is_told(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(ZoffError) as caught:
        figure(timeline())

    assert str(caught.value) == "drawing needs matplotlib: pip install 'zoff-async[plot]'"
