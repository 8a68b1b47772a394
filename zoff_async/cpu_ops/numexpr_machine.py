"""numexpr's virtual machine, made safe to run from several threads at once.

Three facts about numexpr 2.14 decide this file:

- A compiled expression keeps its temporaries in itself, so one object run by two threads corrupts the heap: objects
  are compiled once a thread.
- With more than one numexpr thread every call in the process queues on one lock, and runs in threads whose
  floating-point mode is not ours. The setting belongs to whoever else uses numexpr, and changing it while a call is
  under way hangs. So the arithmetic runs on a second copy of numexpr's machine, loaded from the installed file under
  another identity: it has its own setting, one thread, and the user's stays as found.
- Calls on fewer than 2,048 elements run in the calling thread whatever the setting. That is the way where no second
  copy can be loaded (no memfd, or a policy against it): the same bits, slower, and much slower with several workers.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, NamedTuple

import numexpr
import numexpr.interpreter
import numpy as np

from zoff_async.cpu_ops.rule import names_in

log = logging.getLogger(__name__)

#: Elements a call. Scratch of 1 MiB stays in cache, and the five calls of a block, each of which takes the GIL anew,
#: are far enough apart not to wait for one another (a busy Python thread holds it for a whole switch interval).
BLOCK_NUMEL = 1 << 18
#: What a root is called once numpy has taken it: numexpr needs as long for one as for four other operations, because
#: it has no SIMD for it; numpy has, and both round correctly.
ROOT = "root"
_ROOT_CALL = re.compile(r"\bsqrt\((\w+)\)")
#: The largest call that numexpr never spreads over its threads.
SERIAL_NUMEL = 2047


class Compiled(NamedTuple):
    """One expression: call ``run(*arrays, out=..., ex_uses_vml=False)`` with the arrays of ``names``, in that order.

    The arrays must have one length, or be 0-d: numexpr broadcasts a length of one without a word. ``out`` may be one
    of them, but not overlap one.
    """

    run: Callable[..., Any]
    names: tuple[str, ...]
    root_of: str | None = None  # if set, the array whose root ``ROOT`` in ``names`` stands for


def _load_copy() -> Any:
    """numexpr's extension module a second time, with globals of its own (the loader knows files by inode)."""
    file = numexpr.interpreter.__file__
    descriptor = os.memfd_create("numexpr_interpreter")
    try:
        with open(file, "rb") as installed, os.fdopen(os.dup(descriptor), "wb") as copy:
            copy.write(installed.read())
        path = f"/proc/self/fd/{descriptor}"
        spec = spec_from_file_location("interpreter", path, loader=ExtensionFileLoader("interpreter", path))
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        os.close(descriptor)
    module._set_num_threads(1)
    return module


@functools.cache
def _machine() -> tuple[Any, int]:
    """(module with a NumExpr type, elements a call may have)."""
    try:
        return _load_copy(), BLOCK_NUMEL
    except (AttributeError, ImportError, OSError) as error:
        log.info("numexpr runs in calls of %d elements: no second copy of its machine (%s)", SERIAL_NUMEL, error)
        return numexpr.interpreter, SERIAL_NUMEL


class _Local(threading.local):
    def __init__(self) -> None:
        self.compiled: dict[tuple[str, bool], Compiled] = {}


class Machine:
    """Compiles expressions, once for each thread that asks."""

    _compiling = threading.Lock()

    def __init__(self) -> None:
        self._interpreter, self.block_numel = _machine()
        self._local = _Local()

    def compiled(self, expression: str, *, double: bool = False) -> Compiled:
        """``expression`` over fp32 arrays and 0-d arrays, for this thread only; ``double`` evaluates in fp64."""
        key = (expression, double)
        found = self._local.compiled.get(key)
        if found is None:
            text, root_of = (expression, None) if double else _without_root(expression)
            names = names_in(text)
            # numexpr's float is fp32.
            with self._compiling:
                made = numexpr.NumExpr(text, [(name, np.double if double else float) for name in names])
            run = self._interpreter.NumExpr(made.signature, made.tempsig, made.program, made.constants, names)
            # The default lets nothing be rounded but by an operation.
            run = functools.partial(run, casting="same_kind") if double else run
            found = self._local.compiled[key] = Compiled(run, names, root_of)
        return found


def _without_root(expression: str) -> tuple[str, str | None]:
    """``expression`` with the root of its one array taken as given, and the array's name."""
    arrays = set(_ROOT_CALL.findall(expression))
    if len(arrays) != 1:
        return expression, None
    return _ROOT_CALL.sub(ROOT, expression), arrays.pop()
