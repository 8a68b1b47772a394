"""Whole processes: scripts that fall off their end, debug mode, forks, interrupts. Each runs with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
#: A process that takes longer has hung, in seconds (most of it is the import of torch).
LIMIT_S = 90.0

MODEL = """
import os, sys, threading, time, warnings
import torch
from torch import nn
import zoff_async as zoff

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

def optimizer_for(model, policy="overlap", **config):
    return zoff.OffloadAdamW(model.parameters(), lr=0.1, model=model, policy=policy,
                             config=zoff.OffloadConfig(bucket_bytes=100, workers=2, kernel="numexpr", **config))

def step(optimizer):
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run MODEL and then the text, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", MODEL + text],
        cwd=ROOT,
        env={**os.environ, "ZOFF_PROFILE": "off", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def assert_quiet(done: subprocess.CompletedProcess[str], printed: str, returncode: int = 0) -> None:
    """Nothing is told but, in asyncio's debug mode on a busy machine, that a turn of the loop took long."""
    told = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    assert told == []
    assert done.stdout == printed
    assert done.returncode == returncode


def test_a_script_that_ends_without_close_ends_quietly():
    """Every policy and both loops, updates in flight, gradients that were never stepped, one optimizer that failed.

    In debug mode of asyncio, and with an exit code of its own.
    """
    done = script(
        """
from zoff_async.device import EmulatedDevice, Faults
kept = []
for event_loop in ("asyncio", "uvloop"):
    for policy in ("overlap", "in_backward", "delayed", "serial"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        kept.append((model, optimizer_for(model, policy, event_loop=event_loop)))
        step(kept[-1][1])
        step(kept[-1][1])
        if policy != "in_backward":  # there, a backward that no step() follows has moved weights: that is told
            model(torch.ones(2, 8)).sum().backward()
failing = nn.Linear(4, 4)
optimizer = zoff.OffloadAdamW(failing.parameters(), config=zoff.OffloadConfig(
    device=EmulatedDevice(faults=Faults(fail_d2h_at=(1,)))))
failing(torch.ones(1, 4)).sum().backward()
try:
    optimizer.step()
except zoff.DeviceError:
    print("end")
raise SystemExit(3)
""",
        PYTHONASYNCIODEBUG="1",
    )
    assert_quiet(done, "end\n", returncode=3)


def test_a_forked_child_is_told_and_ends_and_the_parent_goes_on():
    """Reads of the model, backward and step in the child raise or work, and never hang; so does leaving it."""
    done = script(
        """
import signal
from zoff_async.device import EmulatedDevice
device = EmulatedDevice()
optimizer = optimizer_for(model, device=device)
step(optimizer)
optimizer.synchronize()
device.hold("h2d")
model(torch.ones(2, 8)).square().sum().backward()
optimizer.step()            # the update is in flight, and will be for as long as the child lives
optimizer.zero_grad()

def child(name, job):
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        for _ in range(100):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            time.sleep(0.05)
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            print(name, "hangs")
        return
    try:
        if name == "exit":
            print(name, "works", flush=True)
        job()
        print(name, "works")
    except zoff.ZoffError as error:
        print(name, type(error).__name__)
    sys.stdout.flush()
    os._exit(0)

child("step", optimizer.step)
child("state_dict", optimizer.state_dict)
child("zero_grad", optimizer.zero_grad)
child("read", lambda: model(torch.ones(1, 8)))
child("close", optimizer.close)
def many_backwards():
    weights = [p for p in optimizer.param_groups[0]["params"]]
    for _ in range(3):
        sum(w.square().sum() for w in weights).backward()
child("backward", many_backwards)
child("exit", lambda: sys.exit(0))  # runs the exit handlers
device.let("h2d")
for _ in range(3):
    step(optimizer)
optimizer.synchronize()
print(optimizer.statistics().steps)
""",
    )
    lines = done.stdout.splitlines()
    told = dict(line.split() for line in lines[:-1])
    assert [name for name, what in told.items() if what == "hangs"] == []
    assert done.stderr == ""
    assert lines[-1] == "5"
    assert told["step"] == told["state_dict"] == "StepError"
    assert told["close"] == told["exit"] == "works"
    assert told["zero_grad"] in ("works", "StepError")
    assert told["read"] in ("works", "StepError")
    assert told["backward"] in ("works", "StepError")


def test_data_loader_workers_that_are_forked_in_the_middle_of_training():
    done = script(
        """
from torch.utils.data import DataLoader
optimizer = optimizer_for(model)
for epoch in range(2):
    for x in DataLoader(torch.ones(6, 8), batch_size=2, num_workers=2, multiprocessing_context="fork"):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
optimizer.synchronize()
print(optimizer.statistics().steps)
""",
    )
    assert done.stdout == "6\n", done.stderr
    assert done.returncode == 0


def test_an_interrupt_ends_a_script_at_once():
    """SIGINT in a training loop whose uploads never end: one KeyboardInterrupt, and the process is gone."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            MODEL
            + """
optimizer = optimizer_for(model)
print("go", flush=True)
while True:
    step(optimizer)
""",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert told.count("KeyboardInterrupt") == 1
    assert "Exception ignored" not in told
    assert process.returncode in (1, -signal.SIGINT)
