"""``zoff trace``: answers on standard output, bad input as exceptions that the command line turns into exit 2."""

from __future__ import annotations

import argparse
import json

import pytest

from tests.trace.hand import recorded, span, timeline
from zoff_async.errors import TraceError
from zoff_async.trace.commands import add_parser, run


@pytest.fixture
def trace(tmp_path) -> str:
    path = tmp_path / "overlap.json.gz"
    timeline(steps=5).save(path)
    return str(path)


def zoff(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="zoff")
    add_parser(parser.add_subparsers())
    return run(parser.parse_args(["trace", *arguments]))


def test_summary_prints_the_report(trace, capsys):
    assert zoff("summary", trace) == 0
    assert capsys.readouterr().out == timeline(steps=5).report().describe()


def test_summary_as_json_prints_one_object(trace, capsys):
    assert zoff("summary", trace, "--json") == 0

    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] == 14
    assert found["verdict"].startswith("order-bound")


def test_plot_writes_a_picture_and_says_where(trace, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "step.svg"

    assert zoff("plot", trace, "-o", str(picture), "--steps", "1") == 0
    assert capsys.readouterr().out == f"{picture}\n"
    assert picture.read_text().startswith("<?xml")


def test_plot_as_text_prints_the_lanes(trace, capsys):
    assert zoff("plot", trace, "--text", "--steps", "1") == 0
    assert capsys.readouterr().out == timeline(steps=5).gantt(steps=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--steps", "0"), "--steps is 0: at least one step can be drawn"), (("-o", "x.bmp"), "cannot draw into 'x.bmp'")],
)
def test_plot_refuses_what_cannot_be_drawn_before_it_runs(trace, arguments, message):
    with pytest.raises(ValueError, match=message):
        zoff("plot", trace, *arguments)


def test_diff_prints_both(trace, capsys, tmp_path):
    other = tmp_path / "serial.json"
    timeline("serial", steps=5).save(other)

    assert zoff("diff", trace, str(other)) == 0
    assert "1.25 x" in capsys.readouterr().out

    assert zoff("diff", trace, str(other), "--json") == 0
    figures = {row["name"]: row for row in json.loads(capsys.readouterr().out)["figures"]}
    assert (figures["step"]["first"], figures["step"]["second"]) == (14, 17.5)


def test_check_is_content_with_a_trace_that_keeps_its_plan(trace, capsys):
    assert zoff("check", trace) == 0
    assert capsys.readouterr().out == "65 spans of 5 steps keep their plan\n"


def test_check_fails_for_one_that_does_not(capsys, tmp_path):
    path = tmp_path / "broken.json"
    recorded(span("d2h:0", "d2h", 0, 2), span("d2h:1", "d2h", 1, 3)).save(path)

    assert zoff("check", str(path)) == 1
    assert "lane d2h of capacity 1" in capsys.readouterr().out

    assert zoff("check", str(path), "--json") == 1
    assert json.loads(capsys.readouterr().out)["spans"] == 2


@pytest.mark.parametrize("action", ["summary", "plot", "check"])
def test_a_bad_file_is_an_error_before_anything_is_printed(action, capsys, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("{}")

    with pytest.raises(TraceError, match="is of another program"):
        zoff(action, str(path))

    assert capsys.readouterr().out == ""


def test_a_trace_of_one_step_has_no_summary(tmp_path):
    path = tmp_path / "short.json"
    recorded(span("fwd:0", "compute", 0, 1)).save(path)

    with pytest.raises(ValueError, match="record at least two in a row"):
        zoff("summary", str(path))
