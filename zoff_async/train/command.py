"""``zoff train`` on the command line: its options and what it prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console

from zoff_async.config import EVENT_LOOPS, KERNEL_NAMES
from zoff_async.device.choose import DEVICE_NAMES
from zoff_async.scheduler import POLICIES
from zoff_async.train.model import SIZES
from zoff_async.train.prepare import Prepared, Request, prepare
from zoff_async.train.progress import watching
from zoff_async.train.report import print_report
from zoff_async.train.run import train
from zoff_async.train.saving import checkpoint_path
from zoff_async.train.settings import DTYPES

DESCRIPTION = """\
Train a byte-level GPT on a text, its gradients, fp32 master weights, Adam moments and Adam on the host.
With --compare, plain AdamW does the same steps afterwards, and both loss curves are drawn.
"""

EPILOG = """\
examples:
  zoff train --size tiny --steps 200 --compare
  zoff train --text book.txt --size small --steps 2000 --checkpoint runs/book --save-every 200
  zoff train --checkpoint runs/book --resume

A resumed run takes every option that is not given from its checkpoint. It equals the uninterrupted run bit
for bit as long as no option changes and the policy is not delayed, which catches up when it is saved.
"""


class Option(NamedTuple):
    """One option of the command line; without a type it is a switch."""

    name: str
    type: type | None
    metavar: str
    help: str

    def add_to(self, group: Any) -> None:
        if self.type is None:
            group.add_argument(self.name, action="store_true", help=self.help)
        else:
            group.add_argument(self.name, type=self.type, metavar=self.metavar, help=self.help)


OPTIONS = {
    "what to train": (
        Option("--size", str, "SIZE", f"model: {', '.join(SIZES)} (default tiny)"),
        Option("--text", str, "FILE", "text to learn (default: the help topics of this Python)"),
        Option("--context", int, "N", "bytes the model sees (default: by size)"),
        Option("--dtype", str, "TYPE", f"of weights and gradients: {', '.join(DTYPES)} (default fp32)"),
        Option("--seed", int, "N", "of the weights and of the order of the data (default 0)"),
    ),
    "how to train it": (
        Option("--steps", int, "N", "length of the whole run (default 200)"),
        Option("--batch", int, "N", "sequences a backward (default: by size)"),
        Option("--accumulate", int, "N", "backwards a step (default 1)"),
        Option("--lr", float, "X", "peak learning rate (default: by size)"),
        Option("--warmup", int, "N", "steps up to the peak, before a cosine down (default: a tenth)"),
        Option("--max-norm", float, "X", "clip the global gradient norm (default: no clip)"),
        Option("--weight-decay", float, "X", "of the matrices (default 0.1)"),
        Option("--recompute", None, "", "compute activations again in backward: less memory"),
        Option("--compare", None, "", "do the same steps with plain AdamW afterwards"),
    ),
    "where the optimizer lives": (
        Option("--device", str, "NAME", f"{', '.join(DEVICE_NAMES)} (default auto)"),
        Option("--policy", str, "NAME", f"order of a step: {', '.join(sorted(POLICIES))} (default overlap)"),
        Option("--kernel", str, "NAME", f"of Adam: {', '.join(KERNEL_NAMES)} (default auto)"),
        Option("--workers", int, "N", "threads of Adam (default: the cores there are)"),
        Option("--chunk-numel", int, "N", "elements of one job of such a thread"),
        Option("--bucket-bytes", int, "N", "bytes copied together"),
        Option("--event-loop", str, "NAME", f"{', '.join(EVENT_LOOPS)} (default auto)"),
    ),
    "checkpoints and output": (
        Option("--checkpoint", str, "DIR", "save the run there at its end"),
        Option("--save-every", int, "N", "... and after every N steps"),
        Option("--resume", None, "", "go on from the checkpoint in --checkpoint DIR"),
        Option("--stop-after", int, "N", "stop at step N of --steps, to be resumed later"),
        Option("--trace", str, "DIR", "write a trace of the last steps there (see zoff trace --help)"),
        Option("--sample", int, "N", "bytes of text to write at the end (default 200)"),
        Option("--json", None, "", "print one JSON object and nothing else"),
    ),
}

#: Options that say what to do around a run; all others are fields of TrainSettings.
_REQUEST_OPTIONS = ("checkpoint", "resume", "save_every", "stop_after", "compare", "sample", "trace")
_OUTPUT_OPTIONS = ("command", "json")


def add_train(commands: Any) -> None:
    """Add ``train`` to the commands of ``zoff``."""
    parser = commands.add_parser(
        "train",
        help="train a small GPT with its optimizer on the host",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # An option that is not given is absent: a resumed run finds it in its checkpoint.
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for option in options:
            option.add_to(group)
    parser.set_defaults(command=look_at)


def look_at(parsed: argparse.Namespace) -> Callable[[], int]:
    """Prepare the run; what is returned does it.

    Raises:
        ValueError, TypeError, ZoffError: if the input is wrong.
    """
    given = {name: value for name, value in vars(parsed).items() if name not in _OUTPUT_OPTIONS}
    around = {name: given.pop(name) for name in _REQUEST_OPTIONS if name in given}
    return partial(_train, prepare(Request(given, **around)), as_json="json" in parsed)


def _train(run: Prepared, *, as_json: bool) -> int:
    for note in run.notes:
        print(f"note: {note}", file=sys.stderr)
    try:
        outcome = train(run, partial(watching, quiet=as_json))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_what_is_saved(run.request.checkpoint)) from None
    if as_json:
        print(json.dumps(outcome.as_json(), allow_nan=False))
    else:
        print_report(outcome, Console())
    return 0


def _what_is_saved(folder: str | None) -> str:
    if folder is None or not checkpoint_path(folder).exists():
        return "nothing was saved"
    return f"{checkpoint_path(folder)} holds the last checkpoint, --resume goes on from it"
