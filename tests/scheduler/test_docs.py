"""docs/schedule.md: every Python block runs, and prints what stands below it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "schedule.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def printed(page: str) -> list[tuple[str, str | None, str]]:
    """(code, the output on the page or None, what it prints) of each block, run one after another."""
    names: dict[str, object] = {"__name__": "page"}
    found = []
    for match in BLOCK.finditer(page):
        code, expected = match.groups()
        line = page[: match.start()].count("\n") + 2
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), names)
        found.append((code, expected, output.getvalue()))
    return found


def test_the_page_prints_what_it_shows():
    blocks = printed(PAGE.read_text())

    assert len(blocks) >= 8
    for code, expected, output in blocks:
        assert (expected or "").rstrip("\n") == output.rstrip("\n"), code
