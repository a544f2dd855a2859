"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse


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


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number above 0")
    return int(text)
