"""Which kernel a name means, on machines with and without its package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.cpu_ops.reference import HYPER
from zoff_async.cpu_ops import ADAMW, KERNELS, choose, make_kernel, make_landing
from zoff_async.cpu_ops.numpy_landing import NumpyLanding


@pytest.fixture
def without(monkeypatch):
    """``without("numba")``: as on a machine where it is not installed."""

    def remove(package: str) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        choose._numba_loads.cache_clear()

    yield remove
    monkeypatch.undo()
    choose._numba_loads.cache_clear()


def test_auto_is_numba_where_it_is_installed():
    assert make_kernel("auto", ADAMW).name == "numba"
    assert type(make_landing("auto")) is type(make_landing("numba"))


def test_auto_is_numexpr_without_numba(without):
    without("numba")

    assert make_kernel("auto", ADAMW).name == "numexpr"
    assert type(make_landing("auto")) is NumpyLanding


def test_auto_chooses_only_among_kernels_of_one_order(without):
    order = make_kernel("auto", ADAMW).order
    without("numba")

    assert make_kernel("auto", ADAMW).order == order


def test_auto_passes_over_a_numba_that_does_not_load(monkeypatch, caplog):
    """numba refuses a numpy that is newer than it knows; training goes on, and says so."""

    def refuse(name: str) -> None:
        raise ImportError("Numba needs NumPy 2.1 or less")

    choose._numba_loads.cache_clear()
    monkeypatch.setattr(choose, "import_module", refuse)
    try:
        assert make_kernel("auto", ADAMW).name == "numexpr"
    finally:
        choose._numba_loads.cache_clear()
    assert "numba is installed but does not load" in caplog.text
    assert "NumPy 2.1 or less" in caplog.text


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            "numba",
            "kernel 'numba' needs the package numba, which is not installed: pip install 'zoff-async[fast]'",
        ),
        ("numexpr", "kernel 'numexpr' needs the package numexpr, which is not installed: pip install numexpr"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(without, kernel, message):
    without(kernel)
    with pytest.raises(ImportError) as caught:
        make_kernel(kernel, ADAMW)

    assert str(caught.value) == message


def test_numba_works_without_numexpr_and_numexpr_without_numba():
    """Importing the room imports neither; each kernel imports its own."""
    program = """
import sys
sys.modules[{absent!r}] = None
import torch
from zoff_async.cpu_ops import ADAMW, make_kernel, make_landing
kernel = make_kernel({name!r}, ADAMW)
make_landing({name!r}).prepare(torch.bfloat16, None, add=False)
tensors = [torch.ones(8) for _ in range(4)]
kernel.bind(tensors[0], tensors[1:3], tensors[3], None).run(
    ADAMW.scalars(step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1))
print(kernel.name, sys.modules[{absent!r}])
"""
    for name, absent in (("numba", "numexpr"), ("numexpr", "numba")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(name=name, absent=absent)],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.stdout.split() == [name, "None"], done.stderr


@pytest.mark.parametrize("make", [lambda: make_kernel("cuda", ADAMW), lambda: make_landing("cuda")])
def test_an_unknown_kernel_is_refused_with_the_list(make):
    with pytest.raises(ValueError) as caught:
        make()

    assert str(caught.value) == "unknown kernel 'cuda': choose one of auto, numexpr, numba, torch"


def test_every_listed_kernel_can_be_made_and_says_so_in_the_log(caplog):
    caplog.set_level("INFO", logger=choose.__name__)
    for name in KERNELS:
        tensors = [torch.ones(8) for _ in range(4)]
        make_kernel(name, ADAMW).bind(tensors[0], tensors[1:3], tensors[3], None).run(ADAMW.scalars(**HYPER))

    assert [record.getMessage() for record in caplog.records] == [
        "adamw runs on the numba kernel (asked for: auto)",
        "adamw runs on the numexpr kernel (asked for: numexpr)",
        "adamw runs on the numba kernel (asked for: numba)",
        "adamw runs on the torch kernel (asked for: torch)",
    ]
