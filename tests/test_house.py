"""The rules of the house that a machine can check: who may import whom, what is public, what ships."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import zoff_async

PACKAGE = "zoff_async"
ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / PACKAGE).rglob("*.py"))

# Rooms (a folder or a file of the package) in the order in which they may know each other: a room may
# import what stands for it in MAY_IMPORT. An arrow that points up, or a room that is not here, fails.
GROUND = {"errors", "profile", "config"}
#: What moves together, and where it is held: one room in several files.
HOLDINGS = {"bucket", "fingerprint", "state", "staging", "gradient", "gate", "intake"}
#: The parts of the runtime: the only files that meet both a step plan and a device.
RUNTIME_PARTS = {"step", "planning", "failures", "weights", "handlers", "machinery"}
BELOW_RUNTIME = GROUND | HOLDINGS | {"scheduler", "cpu_ops", "device", "trace", "portal"}
BELOW_CHECKPOINT = BELOW_RUNTIME | RUNTIME_PARTS | {"runtime"}
BELOW_OPTIMIZER = BELOW_CHECKPOINT | {"checkpoint", "distributed"}
BELOW_ENGINE = BELOW_OPTIMIZER | {"optimizer"}
BELOW_TUNING = BELOW_ENGINE | {"engine", "__init__"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "profile": set(),
    "config": {"errors", "profile"},
    "scheduler": GROUND,
    "cpu_ops": GROUND,
    "device": GROUND,
    "portal": GROUND,
    "trace": GROUND | {"scheduler"},
    **dict.fromkeys(HOLDINGS, GROUND | HOLDINGS | {"cpu_ops", "device"}),
    **dict.fromkeys(RUNTIME_PARTS | {"runtime"}, BELOW_RUNTIME | RUNTIME_PARTS),
    **dict.fromkeys(("checkpoint", "distributed"), BELOW_CHECKPOINT),
    "optimizer": BELOW_OPTIMIZER,
    "engine": BELOW_ENGINE,
    "__init__": BELOW_TUNING - {"__init__"},
    "tuning": BELOW_TUNING,
    "train": BELOW_TUNING | {"tuning"},
    "cli": BELOW_TUNING | {"tuning", "train"},
    "__main__": {"cli"},
}

#: Modules that a room must not know, and packages that only some modules may know.
FORBIDDEN = {
    "scheduler": {"threading", "concurrent", "multiprocessing"},  # and all but the standard library
    "cpu_ops": {"asyncio", "uvloop"},
}
ONLY_IN = {"numexpr": "cpu_ops/numexpr_", "numba": "cpu_ops/numba_", "llvmlite": "cpu_ops/numba_"}


def place(path: Path) -> str:
    """``cpu_ops/rule.py`` for the file of that name."""
    return path.relative_to(ROOT / PACKAGE).as_posix()


def room(module_place: str) -> str:
    return module_place.split("/")[0].removesuffix(".py")


def imported(tree: ast.AST, *, module: str) -> Iterator[tuple[str, int]]:
    """Names of the modules that a file imports anywhere in it, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively: write the whole name"
            assert node.module is not None
            for alias in node.names:
                is_module = module_file(f"{node.module}.{alias.name}") is not None
                yield (f"{node.module}.{alias.name}" if is_module else node.module, node.lineno)


def module_file(name: str) -> str | None:
    """The place of a module of the package, None if there is no such module."""
    if name.split(".")[0] != PACKAGE:
        return None
    path = ROOT.joinpath(*name.split("."))
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.exists():
            return place(candidate)
    return None


def all_imports() -> Iterator[tuple[str, str, int]]:
    """(importing file, imported module, line) of the whole package."""
    for path in SOURCES:
        for name, line in imported(ast.parse(path.read_text()), module=place(path)):
            yield place(path), name, line


def test_every_arrow_points_down():
    wrong = []
    for importer, name, line in all_imports():
        target = module_file(name)
        if target is None:
            continue
        here, there = room(importer), room(target)
        assert here in MAY_IMPORT, f"{importer}: room {here!r} has no place in the order, give it one"
        if here != there and there not in MAY_IMPORT[here]:
            wrong.append(f"{importer}:{line} imports {name}, but {here} may not know {there}")

    assert wrong == []


def test_no_import_runs_in_a_circle():
    """Imports inside functions are left out: they are how a module is read only where it is needed."""
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        outermost = ast.Module([n for n in ast.parse(path.read_text()).body if _is_import(n)], [])
        targets = {module_file(name) for name, _ in imported(outermost, module=place(path))}
        graph[place(path)] = {target for target in targets if target} - {place(path)}

    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_room_imports_nothing_it_must_not_know(name):
    known = {module.split(".")[0] for importer, module, _ in all_imports() if room(importer) == name}

    assert known & FORBIDDEN[name] == set()


def test_the_scheduler_needs_the_standard_library_only():
    known = {module.split(".")[0] for importer, module, _ in all_imports() if room(importer) == "scheduler"}

    assert known - set(sys.stdlib_module_names) - {PACKAGE} == set()


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_kernels_package_is_imported_by_its_kernel_only(package):
    importers = {importer for importer, module, _ in all_imports() if module.split(".")[0] == package}

    assert [importer for importer in sorted(importers) if not importer.startswith(ONLY_IN[package])] == []


def test_the_library_does_not_print():
    printing = [
        f"{place(path)}:{node.lineno}"
        for path in SOURCES
        if room(place(path)) not in ("cli", "train")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]

    assert printing == []


def test_every_module_says_what_it_is_for():
    silent = [place(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]

    assert silent == []


def test_what_is_exported_is_what_is_listed():
    public = {
        name
        for name, value in vars(zoff_async).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }

    assert sorted(set(zoff_async.__all__) - {"__version__"}) == sorted(public)
    assert len(zoff_async.__all__) == len(set(zoff_async.__all__))


def test_the_package_tells_type_checkers_that_it_has_types():
    assert (ROOT / PACKAGE / "py.typed").read_bytes() == b""


def test_a_wheel_holds_the_whole_package_and_runs(tmp_path):
    """Built, unpacked into an empty folder and run from there, without the source tree."""
    _run(ROOT, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path))
    (wheel,) = tmp_path.glob("zoff_async-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")

    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*") if _is_shipped(path)}
    assert shipped - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {PACKAGE}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    printed = _run(tmp_path, "-c", "import zoff_async.cli as c; print(c.__file__)", path=tmp_path / "site")
    assert printed.strip() == str(tmp_path / "site" / PACKAGE / "cli.py")
    assert _run(tmp_path, "-m", PACKAGE, "--version", path=tmp_path / "site") == "zoff_async 0.1.0\n"


def _is_shipped(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _run(folder: Path, *arguments: str, path: Path | None = None) -> str:
    """What a Python command prints; its error output is shown if it fails."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path)} if path else None
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
