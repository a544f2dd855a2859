"""The line of a step: a progress bar on a terminal, a plain line in a log."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm


class Progress:
    """Shows records of steps as they come.

    Args:
        num_steps: steps of the whole run.
        stream: where to write; stdout by default.
    """

    def __init__(self, num_steps: int, stream: TextIO | None = None) -> None:
        self._num_steps = num_steps
        self._stream = stream or sys.stdout
        self._bar = tqdm(total=num_steps, unit="step", file=self._stream) if self._stream.isatty() else None

    def show(self, record: Mapping[str, Any]) -> None:
        """Writes the line of one step.

        Args:
            record: has `step` (from 1), `loss` (None when it was not finite) and `tokens_per_s`.
        """
        width = len(str(self._num_steps))
        line = f"step {record['step']:>{width}}/{self._num_steps}  {_figures(record)}"
        if self._bar is None:
            print(line, file=self._stream, flush=True)
            return
        self._bar.write(line, file=self._stream)
        self._bar.update(record["step"] - self._bar.n)

    def close(self) -> None:
        """Ends the bar; plain lines need no end."""
        if self._bar is not None:
            self._bar.close()


def _figures(record: Mapping[str, Any]) -> str:
    loss = "not finite" if record["loss"] is None else f"{record['loss']:.4f}"
    skipped = "  skipped" if record.get("skipped") else ""
    return f"loss {loss}  {record['tokens_per_s']:,.0f} tokens/s{skipped}"
