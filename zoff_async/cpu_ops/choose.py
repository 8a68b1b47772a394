"""The kernels there are, and which one ``auto`` means on this machine.

numexpr and numba are imported here and nowhere else in the package, by way of their kernels, and only when
asked for.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from importlib.util import find_spec

from zoff_async.cpu_ops.kernel import Kernel
from zoff_async.cpu_ops.landing import Landing
from zoff_async.cpu_ops.numpy_landing import NumpyLanding
from zoff_async.cpu_ops.rule import UpdateRule

log = logging.getLogger(__name__)

#: Names ``make_kernel`` and ``make_landing`` take.
KERNELS = ("auto", "numexpr", "numba", "torch")


def make_kernel(name: str, rule: UpdateRule) -> Kernel:
    """The kernel called ``name`` for ``rule``.

    ``auto`` is numba where it is installed and numexpr elsewhere: both keep the rule's own order of
    operations, so the choice changes the speed and no bit. ``torch`` runs torch's fused operator, which has
    an order of its own.

    Raises:
        ValueError: if there is no such kernel, or torch has no fused operator for the rule.
        ImportError: if the package that the kernel needs is not installed; the message has the command.
    """
    chosen = _resolve(name)
    log.info("%s runs on the %s kernel (asked for: %s)", rule.name, chosen, name)
    if chosen == "numba":
        from zoff_async.cpu_ops.numba_kernel import NumbaKernel

        return NumbaKernel(rule)
    if chosen == "numexpr":
        from zoff_async.cpu_ops.numexpr_kernel import NumexprKernel

        return NumexprKernel(rule)
    from zoff_async.cpu_ops.torch_kernel import TorchKernel

    return TorchKernel(rule)


def make_landing(name: str) -> Landing:
    """The landing that goes with the kernel called ``name``: compiled by numba, or by numpy; same bits."""
    if _resolve(name) == "numba":
        from zoff_async.cpu_ops.numba_landing import NumbaLanding

        return NumbaLanding()
    return NumpyLanding()


def _resolve(name: str) -> str:
    """A kernel's own name, its package being there."""
    if name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}: choose one of {', '.join(KERNELS)}")
    if name == "auto":
        return "numba" if _numba_loads() else _resolve("numexpr")
    if name in ("numexpr", "numba") and find_spec(name) is None:
        package = "'zoff-async[fast]'" if name == "numba" else "numexpr"
        raise ImportError(f"kernel {name!r} needs the package {name}, which is not installed: pip install {package}")
    return name


@functools.cache
def _numba_loads() -> bool:
    """Whether numba is installed and of use: it refuses to load beside a numpy newer than it knows."""
    if find_spec("numba") is None:
        return False
    try:
        import_module("zoff_async.cpu_ops.numba_text")
    except ImportError as error:
        log.warning("numba is installed but does not load, so numexpr is used, which is slower: %s", error)
        return False
    return True
