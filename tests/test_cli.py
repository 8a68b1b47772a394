"""The command line as a person or a script meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from zoff_async.cli import main

pytestmark = pytest.mark.usefixtures("one_torch_thread")

#: The same for processes of their own.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = ["--batch", "2", "--context", "16", "--sample", "0"]


def zoff(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A new process."""
    command = [sys.executable, "-W", "error", "-m", "zoff_async", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=ONE_THREAD)


def test_json_is_one_object_and_nothing_else(capsys):
    code = main(["train", "--steps", "3", "--compare", "--json", *SMALL])

    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert figures["steps"] == len(figures["losses"]) == 3
    assert figures["reference_loss_last"] == pytest.approx(figures["loss_last"], abs=1e-3)


def test_without_json_there_is_a_report(capsys):
    assert main(["train", "--steps", "2", *SMALL]) == 0

    out, err = capsys.readouterr()
    for title in ("Run", "Where the bytes live", "Time by lane, a step"):
        assert title in out
    assert "offloaded  step      2/2" in err


def test_twenty_steps_equal_ten_and_ten_in_a_new_process(tmp_path):
    """Bit for bit, across processes."""
    run = ["train", "--steps", "20", *SMALL, "--max-norm", "1", "--json"]
    whole = zoff(*run, "--checkpoint", tmp_path / "whole")
    first = zoff(*run, "--checkpoint", tmp_path / "parts", "--stop-after", "10")
    second = zoff("train", "--checkpoint", tmp_path / "parts", "--resume", "--json", "--sample", "0")

    assert [done.returncode for done in (whole, first, second)] == [0, 0, 0], second.stderr
    assert json.loads(second.stdout)["losses"] == json.loads(whole.stdout)["losses"]
    left, right = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"] for name in ("whole", "parts")
    )
    assert all(torch.equal(left[name], right[name]) for name in left)


BAD = [
    ([], "zoff: the following arguments are required: COMMAND (see zoff --help)"),
    (["fly"], "zoff: argument COMMAND: invalid choice: 'fly'"),
    (["train", "--stepz", "3"], "zoff: unrecognized arguments: --stepz 3 (see zoff --help)"),
    (["train", "--steps", "many"], "zoff train: argument --steps: invalid int value: 'many'"),
    (["train", "--steps", "0"], "zoff: --steps must be at least 1, got 0"),
    (["train", "--lr", "-1"], "zoff: --lr must be a finite number of at least 0, got -1.0"),
    (["train", "--size", "huge"], "zoff: --size must be one of tiny, small"),
    (["train", "--dtype", "fp16"], "zoff: --dtype fp16 is not there: it needs a loss scale"),
    (["train", "--policy", "magic"], "zoff: policy 'magic' is unknown; use one of serial, overlap"),
    (["train", "--policy", "in_backward", "--max-norm", "1"], "zoff: "),
    (["train", "--kernel", "fast"], "zoff: kernel must be one of auto, numexpr, numba, torch, got 'fast'"),
    (["train", "--device", "abacus"], "zoff: device must be one of auto, host, cpu, cuda, emulated:PRESET"),
    (["train", "--device", "emulated:abacus"], "zoff: "),
    (["train", "--event-loop", "trio"], "zoff: event_loop must be one of auto, uvloop, asyncio, got 'trio'"),
    (["train", "--workers", "0"], "zoff: workers must be at least 1, got 0"),
    (["train", "--bucket-bytes", "0"], "zoff: bucket_bytes must be at least 1, got 0"),
    (["train", "--chunk-numel", "-4"], "zoff: chunk_numel must be at least 1, got -4"),
    (["train", "--text", "/no/such/file"], "zoff: cannot read --text '/no/such/file': No such file or dir"),
    (
        ["train", "--text", "/dev/null"],
        "zoff: --text '/dev/null' is empty: give a file with something to learn",
    ),
    (["train", "--context", "9999999"], "zoff: text 'pydoc_data.topics' has "),
    (["train", "--resume"], "zoff: --resume needs a directory: add --checkpoint DIR"),
    (["train", "--resume", "--checkpoint", "/no/such/place"], "zoff: no checkpoint in '/no/such/place'"),
    (["train", "--checkpoint", "/dev/null/run"], "zoff: cannot make --checkpoint '/dev/null/run': Not a dir"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: " ".join(value)[:40])
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    try:
        code = main(arguments)
    except SystemExit as exit_:  # argparse's own way out
        code = exit_.code

    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_bad_input_shows_no_traceback_in_a_process_of_its_own():
    done = zoff("train", "--steps", "0")

    assert (done.returncode, done.stdout, done.stderr) == (2, "", "zoff: --steps must be at least 1, got 0\n")


def test_a_run_that_fails_says_why_in_one_line(capsys, monkeypatch):
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("zoff_async.train.run.sample_text", full_disk)
    code = main(["train", "--steps", "1", "--json", "--batch", "2", "--context", "16"])

    assert (code, capsys.readouterr()) == (1, ("", "zoff: [Errno 28] No space left on device\n"))


def test_a_bug_of_ours_is_not_hidden(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr("zoff_async.train.command.train", broken)
    with pytest.raises(KeyError):
        main(["train", "--steps", "1", *SMALL])


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_ends_the_run_with_one_line_and_keeps_the_checkpoint(tmp_path):
    run = ["train", "--checkpoint", str(tmp_path), "--sample", "0"]
    assert main([*run, "--steps", "1000000", "--stop-after", "1", "--batch", "2", "--context", "16"]) == 0
    command = [sys.executable, "-m", "zoff_async", *run, "--resume"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ONE_THREAD, **pipes) as process:
        first_line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()

    file = tmp_path / "checkpoint.pt"
    assert first_line.startswith("offloaded  step      2/1000000")
    assert (process.returncode, out) == (130, "")
    assert err == f"zoff: interrupted: {file} holds the last checkpoint, --resume goes on from it\n"
    assert torch.load(file, weights_only=True)["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_help_and_version_are_there(capsys):
    for arguments, expected in (
        (["--help"], "train a small GPT with its optimizer on the host"),
        (["train", "--help"], "--save-every N"),
        (["--version"], "zoff_async "),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out


def test_the_installed_command_is_this_one():
    scripts = metadata.entry_points(group="console_scripts", name="zoff")
    if not scripts:
        pytest.skip("run from a folder, not installed")
    (script,) = scripts

    assert script.load() is main
