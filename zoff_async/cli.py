"""The command line: ``zoff`` or ``python -m zoff_async``.

Standard output holds the result and nothing else; progress, notes and errors go to standard error.
Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 130 interrupted; what went wrong is one line.

A command is a function of its parsed options that looks at them and returns what then runs. What it
raises itself is the user's input, what the returned function raises is the run's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from zoff_async import __version__
from zoff_async.errors import ZoffError
from zoff_async.trace.commands import add_parser as add_trace
from zoff_async.train.command import add_train

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors of our own making are left to show their traceback."""
    parsed = _parser().parse_args(arguments)
    try:
        try:
            run = parsed.command(parsed)
        except (ValueError, TypeError, OSError, ZoffError) as error:
            return _complain(error, EXIT_BAD_INPUT)
        return int(run())
    except KeyboardInterrupt as interrupt:
        _say(": ".join(["interrupted", *map(str, interrupt.args)]))
        return EXIT_INTERRUPTED
    except (ZoffError, ArithmeticError, OSError) as error:
        return _complain(error, EXIT_FAILED)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="zoff",
        description="Train models whose optimizer lives on the host.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"zoff_async {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_train(commands)
    add_trace(commands)
    return parser


def _complain(error: BaseException, exit_code: int) -> int:
    message = str(error) or type(error).__name__
    if error.__cause__ is not None and exit_code == EXIT_FAILED:
        message += f" ({type(error.__cause__).__name__}: {error.__cause__})"
    _say(message)
    return exit_code


def _say(message: str) -> None:
    """One line, however many the message has."""
    print("zoff: " + " ".join(message.split()), file=sys.stderr)
