"""A trace file reads back as it was written; one that cannot be read says why in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.hand import PIECES, plan, recorded, span, timeline
from zoff_async.errors import TraceError, ZoffError
from zoff_async.trace import Clock, Timeline, Wait
from zoff_async.trace.chrome import document
from zoff_async.trace.own_part import FORMAT


def written(tmp_path, found: Timeline, name: str = "trace.json"):
    path = tmp_path / name
    found.save(path)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_timeline_reads_back_whole(tmp_path, name):
    source = replace(
        timeline("in_backward"),
        waits=(Wait("weights", 1, 1.0, 2.5), Wait("room", None, 3.0, 4.0)),
        facts={"policy": "in_backward", "workers": 2, "gated": True, "scale": 0.5},
    )

    assert Timeline.load(written(tmp_path, source, name)) == source


def test_real_times_read_back_to_the_nanosecond(tmp_path):
    source = recorded(
        span("d2h:0", "d2h", 98765.123456789, 98765.2, step=7, nbytes=200),
        span("norm", "cpu", 98765.3, 98765.3, step=7),
        of=plan(),
    )
    source = replace(source, clock=Clock(1_700_000_000_123_456_789, 98765.0))
    found = Timeline.load(written(tmp_path, source))

    assert [(s.action, s.lane, s.step, s.bytes) for s in found.spans] == [
        (s.action, s.lane, s.step, s.bytes) for s in source.spans
    ]
    for ours, theirs in zip(found.spans, source.spans, strict=True):
        assert ours.start_s == pytest.approx(theirs.start_s, abs=1.1e-9)
        assert ours.end_s == pytest.approx(theirs.end_s, abs=1.1e-9)
    assert found.clock is not None
    assert abs(found.clock.wall_ns_at(98765.0) - 1_700_000_000_123_456_789) < 100


def test_plans_of_several_steps_are_written_once_and_found_again(tmp_path):
    source = timeline(steps=3)
    source = replace(source, plans={0: plan("serial"), 1: source.plans[1], 2: source.plans[1]})
    path = written(tmp_path, source)

    assert len(json.loads(path.read_text())["zoff_async"]["plans"]) == 2
    assert Timeline.load(path).plans == source.plans


def test_a_node_of_the_users_own_loses_its_coroutine_and_nothing_else(tmp_path):
    async def run(action, step):
        """Never called here."""

    edited = plan().add("ema", after="adam", run=run)
    found = Timeline.load(written(tmp_path, recorded(span("ema", "cpu", 0, 1), of=edited)))

    assert found.plans[0] == replace(edited, node_runs=())


def test_an_empty_timeline_reads_back(tmp_path):
    assert Timeline.load(written(tmp_path, Timeline(()))) == Timeline(())


def refusal(path) -> str:
    with pytest.raises(TraceError) as caught:
        Timeline.load(path)
    text = str(caught.value)
    assert "\n" not in text
    assert isinstance(caught.value, ZoffError)
    return text


def test_an_empty_file_is_told(tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(b"")

    assert refusal(path) == f"trace {str(path)!r} is empty: the run that wrote it has not got so far"


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_told(tmp_path, name, share):
    path = written(tmp_path, timeline(), name)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])

    assert "is cut off" in refusal(path)


@given(st.integers(1, 2000))
def test_a_file_cut_off_anywhere_is_told_in_one_line(tmp_path_factory, end):
    path = tmp_path_factory.mktemp("cut") / "trace.json"
    data = json.dumps(document(recorded(span("norm", "cpu", 0, 1)))).encode()
    path.write_bytes(data[: min(end, len(data) - 1)])

    assert "is cut off" in refusal(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"traceEvents": []}', "is of another program (it has no 'zoff_async' part)"),
        ('[{"ph": "X", "name": "a", "ts": 0, "dur": 1}]', "is of another program"),
        ("step,seconds\n1,0.5\n", "is no trace: "),
        ("null", "is of another program"),
    ],
)
def test_a_foreign_file_is_told(tmp_path, content, message):
    path = tmp_path / "trace.json"
    path.write_text(content)

    assert message in refusal(path)


def test_a_picture_is_no_trace(tmp_path):
    path = tmp_path / "step.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff\xfe")

    assert refusal(path) == f"trace {str(path)!r} is no trace: it is not text"


def test_a_file_of_a_later_version_is_told(tmp_path):
    path = written(tmp_path, timeline())
    content = json.loads(path.read_text())
    content["zoff_async"]["format"] = FORMAT + 1
    path.write_text(json.dumps(content))

    assert refusal(path) == (
        f"trace {str(path)!r} has format {FORMAT + 1}, this version reads up to {FORMAT}: use the zoff_async that "
        "wrote it, or a newer one"
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "one", "has format 'one'"),
        ("plans", ["nonsense"], "is damaged"),
        ("steps", {"0": 9}, "is damaged"),
        ("pieces", 3, "is damaged"),
        ("waits", [["step"]], "is damaged"),
        ("base_s", None, "is damaged"),
    ],
)
def test_a_damaged_part_is_told_in_one_line(tmp_path, key, value, message):
    path = written(tmp_path, timeline())
    content = json.loads(path.read_text())
    content["zoff_async"][key] = value
    path.write_text(json.dumps(content))

    assert message in refusal(path)


def test_a_damaged_slice_is_told_in_one_line(tmp_path):
    path = written(tmp_path, timeline())
    path.write_text(path.read_text().replace('"name": "adam:1.0"', '"name": "Adam 1.0"'))

    assert "is damaged: cannot read action 'Adam 1.0'" in refusal(path)


def test_a_file_that_is_not_there_is_the_systems_own_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Timeline.load(tmp_path / "none.json")


def test_pieces_read_back(tmp_path):
    assert Timeline.load(written(tmp_path, timeline())).pieces == PIECES
