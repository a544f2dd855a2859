"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from benchmarks.report import Report


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where there is none to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def parser(benchmark: str, doc: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser for `python -m benchmarks.<benchmark>`.

    Args:
        benchmark: name of the module.
        doc: its docstring; the first paragraph describes it.
        epilog: shown after the arguments.
    """
    description = doc.partition("\n\n")[0]
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}",
        description=description,
        epilog=epilog,
        formatter_class=_HelpFormatter,
    )


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as from `timeout`: ends the program the way Ctrl-C does."""


def _terminate(*_: Any) -> NoReturn:
    raise _Terminated


def run(main: Callable[[], int]) -> NoReturn:
    """Runs a benchmark as a program: Ctrl-C and SIGTERM end it with its ranks, and keep what was measured."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = main()
    except KeyboardInterrupt as error:
        kept = Report.interrupt()
        print(f"interrupted; what was measured is in {kept}" if kept else "interrupted", file=sys.stderr)
        code = 128 + (signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT)
    sys.exit(code)


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number above 0")
    return int(text)
