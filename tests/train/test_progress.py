"""Progress on a terminal and without one."""

from __future__ import annotations

from zoff_async.train import progress
from zoff_async.train.progress import Silent, describe, watching


def test_the_figures_of_a_step_in_one_line():
    assert describe(1.25, 12345.6, 0.5) == "loss 1.2500     12,346 tokens/s  host work hidden  50%"
    assert describe(1.25, 12345.6, None) == "loss 1.2500     12,346 tokens/s"


def test_without_a_terminal_there_are_about_ten_lines_on_standard_error(capsys):
    with watching("offloaded", first=0, last=25, quiet=False) as watch:
        for step in range(1, 26):
            if watch.wants_step(step):
                watch.show(step, 2.0, 100.0, None)

    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert len(lines) == 14
    assert lines[0] == "offloaded  step      1/25  loss 2.0000        100 tokens/s"
    assert lines[-1] == "offloaded  step     25/25  loss 2.0000        100 tokens/s"


def test_quiet_without_a_terminal_is_silent(capsys):
    with watching("offloaded", first=0, last=3, quiet=True) as watch:
        assert isinstance(watch, Silent)
        assert not watch.wants_step(3)
        watch.show(3, 2.0, 100.0, None)

    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_there_is_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with watching("offloaded", first=2, last=5, quiet=True) as watch:
        watch.show(5, 2.0, 100.0, 0.75)

    out, err = capsys.readouterr()
    assert out == ""
    assert "5/5" in err
    assert "host work hidden  75%" in err


def test_a_bar_is_not_drawn_more_often_than_it_can_be_read(monkeypatch):
    """Between two drawings nothing is asked for, except the last step."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    now_s = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    with watching("offloaded", first=0, last=9, quiet=False) as watch:
        assert watch.wants_step(1)
        watch.show(1, 2.0, 100.0, None)
        assert not watch.wants_step(2)
        assert watch.wants_step(9)
        now_s[0] += progress.REFRESH_S
        assert watch.wants_step(3)
