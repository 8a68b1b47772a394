"""The contract's table names tests that exist, and every file of contract tests is in it; the examples stay short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "contract.md").read_text())
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_every_test_that_the_contract_names_exists():
    missing = []
    for file, name in NAMED:
        path = ROOT / file if file.startswith("tests/") else HERE / file
        functions = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        if name not in functions:
            missing.append(f"{file}::{name}")

    assert missing == []
    assert len(NAMED) > 60


def test_every_file_of_contract_tests_is_in_the_contract():
    files = {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name}

    assert files - {file for file, _ in NAMED} == set()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_on_a_page_and_says_how_to_run_it(path):
    text = path.read_text()

    assert len(text.splitlines()) < 60
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
