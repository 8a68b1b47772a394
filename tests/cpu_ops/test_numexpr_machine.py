"""Several threads in numexpr at once, and the user's own numexpr left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numexpr
import numpy as np
import pytest

from zoff_async.cpu_ops import numexpr_machine as machine

STRESS = """
import sys, threading
import numexpr, numpy as np, torch
from zoff_async.cpu_ops import ADAMW, make_kernel

assert numexpr.set_num_threads(4) and numexpr.get_num_threads() == 4
sys.setswitchinterval(1e-5)
kernel = make_kernel("numexpr", ADAMW)
scalars = ADAMW.scalars(step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, factor=0.5)
wrong = []

def work(seed):
    numel = 3000 + seed
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(numel, generator=generator)
    grad = torch.randn(numel, generator=generator).bfloat16()
    master, moments, out = start.clone(), [torch.zeros(numel), torch.zeros(numel)], torch.empty_like(grad)
    update = kernel.bind(master, moments, grad, out)
    first = None
    for _ in range(150):
        master.copy_(start)
        for moment in moments:
            moment.zero_()
        update.run(scalars)
        first = first if first is not None else master.clone()
        if not (torch.equal(master, first) and torch.equal(out, master.bfloat16())):
            wrong.append(seed)

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(wrong), numexpr.get_num_threads(), kernel.machine.block_numel)
"""


@pytest.mark.parametrize("copied", [True, False])
def test_six_threads_get_right_results_and_a_whole_heap(copied):
    """In a process of its own: a shared compiled object, or numexpr's threads, would abort it or give wrong numbers."""
    hide = "" if copied else "import os; del os.memfd_create\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", hide + STRESS], capture_output=True, text=True, timeout=100, check=False
    )

    assert done.stderr == ""
    block = machine.BLOCK_NUMEL if copied else machine.SERIAL_NUMEL
    assert done.stdout.split() == ["0", "4", str(block)]


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the copy of numexpr's machine needs memfd")
def test_the_users_numexpr_keeps_its_threads_and_ours_keeps_one():
    found = numexpr.get_num_threads()
    ours = machine.Machine()
    try:
        numexpr.set_num_threads(2)
        expression = ours.compiled("m + g*c1")

        assert numexpr.get_num_threads() == 2
        assert ours._interpreter._get_num_threads() == 1
        array = np.arange(5000, dtype=np.float32)
        out = np.empty_like(array)
        expression.run(np.float32(2), array, array, out=out, ex_uses_vml=False)
        assert (out == 3 * array).all()
        assert (numexpr.evaluate("a*2", {"a": array}) == 2 * array).all()
        assert numexpr.get_num_threads() == 2
    finally:
        numexpr.set_num_threads(found)


def test_a_compiled_expression_belongs_to_one_thread():
    ours = machine.Machine()
    mine = ours.compiled("m + g")
    theirs = []
    thread = threading.Thread(target=lambda: theirs.append(ours.compiled("m + g")))
    thread.start()
    thread.join()

    assert ours.compiled("m + g") is mine
    assert theirs[0].run is not mine.run
    assert theirs[0].names == mine.names == ("g", "m")


def test_results_are_single_precision():
    expression = machine.Machine().compiled("m*c1")

    assert expression.run(np.float32(0.1), np.ones(3, np.float32), out=None, ex_uses_vml=False).dtype == np.float32
