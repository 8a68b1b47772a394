"""``zoff trace``: look at the trace files that ``zoff train --trace`` and ``timeline.save()`` write.

``add_parser`` adds the command; its options carry ``command``, a function that reads the files (what is wrong
with them is the user's input) and returns what then writes the answer to standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zoff_async.trace.diff import describe, differences
from zoff_async.trace.plot import check_format
from zoff_async.trace.timeline import Timeline

Answer = Callable[[], int]

#: What ``check`` returns when a trace breaks its plan.
BROKEN = 1

EPILOG = """examples:
  zoff train --trace traces               write traces/step-....json.gz while training
  zoff trace summary traces/trace.json.gz what limits the step, and what would help
  zoff trace plot traces/trace.json.gz -o step.png
  zoff trace diff overlap.json.gz in_backward.json.gz

Every trace file also opens in https://ui.perfetto.dev and chrome://tracing.
"""


def add_parser(subparsers: Any) -> None:
    """Add ``trace`` to the commands of ``zoff``."""
    parser = subparsers.add_parser(
        "trace",
        help="look at a trace: picture, summary, comparison, check",
        description="Look at recorded steps.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="what to do", metavar="ACTION", required=True)
    _add(actions, "summary", _summary, "what limits the step, lane by lane, and what would help")
    plot = _add(actions, "plot", _plot, "draw the last steps", as_json=False)
    plot.add_argument("-o", "--output", metavar="PICTURE", default="step.png", help="file to write (default step.png)")
    plot.add_argument("--text", action="store_true", help="draw it here, as text")
    plot.add_argument("--steps", type=int, metavar="N", default=2, help="how many steps (default 2)")
    _add(actions, "diff", _diff, "two traces side by side", files=("first", "second"))
    _add(actions, "check", _check, "does the trace keep its plan: edges, and lanes of capacity one")


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    answer: Answer = args.command(args)
    return answer()


def _add(
    actions: Any,
    name: str,
    command: Callable[[argparse.Namespace], Answer],
    text: str,
    *,
    files: tuple[str, ...] = ("file",),
    as_json: bool = True,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    for file in files:
        parser.add_argument(file, metavar=file.upper(), help="a trace: .json or .json.gz")
    if as_json:
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(command=command)
    return parser


def _summary(args: argparse.Namespace) -> Answer:
    report = Timeline.load(args.file).report()
    return _write(_json(report.asdict()) if args.json else report.describe())


def _plot(args: argparse.Namespace) -> Answer:
    if args.steps < 1:
        raise ValueError(f"--steps is {args.steps}: at least one step can be drawn")
    if not args.text:
        check_format(args.output)
    timeline = Timeline.load(args.file)
    if args.text:
        return _write(timeline.gantt(steps=args.steps))

    def draw() -> int:
        timeline.plot(args.output, steps=args.steps)
        return _write(f"{Path(args.output)}\n")()

    return draw


def _diff(args: argparse.Namespace) -> Answer:
    first, second = Timeline.load(args.first).report(), Timeline.load(args.second).report()
    if not args.json:
        return _write(describe(first, second, (args.first, args.second)))
    rows = [
        {"name": item.name, "unit": item.unit, "first": item.first, "second": item.second, "ratio": item.ratio}
        for item in differences(first, second)
    ]
    return _write(_json({"first": args.first, "second": args.second, "figures": rows}))


def _check(args: argparse.Namespace) -> Answer:
    timeline = Timeline.load(args.file)
    findings = timeline.check()
    if args.json:
        text = _json({"spans": len(timeline.spans), "steps": list(timeline.steps), "findings": findings})
    elif findings:
        text = "\n".join(findings) + "\n"
    else:
        text = f"{len(timeline.spans)} spans of {len(timeline.steps)} steps keep their plan\n"
    write = _write(text)

    def judge() -> int:
        write()
        return BROKEN if findings else 0

    return judge


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False) + "\n"


def _write(text: str) -> Answer:
    def write() -> int:
        sys.stdout.write(text)
        return 0

    return write
