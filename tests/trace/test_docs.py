"""docs/timeline.md: every ``zoff`` command on the page prints what stands below it."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from zoff_async.trace.commands import add_parser, run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "timeline.md").read_text()
BLOCKS = re.findall(r"^```console\n\$ zoff (.*?)\n(.*?)^```\n", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("command", "expected"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_page_shows_what_the_command_prints(command, expected, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command)
    if "-o" in arguments:
        pytest.importorskip("matplotlib")
        picture = tmp_path / Path(arguments[arguments.index("-o") + 1]).name
        expected = expected.replace(arguments[arguments.index("-o") + 1], str(picture))
        arguments[arguments.index("-o") + 1] = str(picture)
    parser = argparse.ArgumentParser(prog="zoff")
    add_parser(parser.add_subparsers())

    assert run(parser.parse_args(arguments)) == 0
    assert capsys.readouterr().out == expected


def test_the_page_has_commands_of_every_kind_and_its_picture():
    assert {command.split()[1] for command, _ in BLOCKS} == {"plot", "summary", "diff", "check"}
    assert (ROOT / "docs" / "timeline.png").read_bytes()[:4] == b"\x89PNG"
