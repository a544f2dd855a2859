"""A benchmark's result file: rows, and everything needed to judge them. Written again after every row."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "accelerate", "ray", "numpy")


class Report:
    """The result file of one run. What was measured survives a run that is cut off."""

    _of_this_program: Path | None = None

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path, self._content = path, content

    @classmethod
    def start(cls, path: Path, benchmark: str, parameters: Mapping[str, Any]) -> Report:
        """Writes a file without rows.

        Args:
            path: the JSON file.
            benchmark: name of the program.
            parameters: what the run was asked to do.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        Report._of_this_program = path
        report = cls(path, {"benchmark": benchmark, "complete": False})
        report.note(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command_line(),
            machine=machine(),
            versions=versions(),
            parameters=dict(parameters),
            rows=[],
        )
        return report

    @classmethod
    def resume(cls, path: Path) -> Report:
        """Goes on with a file that `start` made, in another process."""
        return cls(path, json.loads(path.read_text(encoding="utf-8")))

    def continued(self) -> None:
        """Notes that another run adds to the file, which no longer stops where it did."""
        Report._of_this_program = self._path
        run = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": command_line()}
        self.note(continued=[*self._content.get("continued", []), run], stopped=None)

    @classmethod
    def interrupt(cls) -> Path | None:
        """Says in the file that this program writes, if any, that it was interrupted; returns the file."""
        path = Report._of_this_program
        if path and not (report := cls.resume(path)).get("complete"):
            report.note(stopped="interrupted")
        return path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._content["rows"]

    def get(self, name: str) -> Any:
        """A fact beside the rows; None if there is none of that name."""
        return self._content.get(name)

    def put(self, row: dict[str, Any], key: Sequence[str]) -> None:
        """Adds a row, or replaces the one that has the same values under `key`."""
        for index, old in enumerate(self.rows):
            if all(old[name] == row[name] for name in key):
                self.rows[index] = row
                break
        else:
            self.rows.append(row)
        self._write()

    def note(self, **facts: Any) -> None:
        """Adds facts beside the rows."""
        self._content |= facts
        self._write()

    def finish(self) -> None:
        """Marks the run as complete."""
        self.note(complete=True)

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self._path)


def command_line() -> str:
    """How the program was started, without paths of this machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"-m {spec.name}" if spec else Path(sys.argv[0]).name
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return " ".join(["python", program, *words])


def machine() -> dict[str, Any]:
    """What the numbers were made on."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str | None]:
    """Versions of what did the work."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return found


def present(
    path: Path, columns: Mapping[str, str], draw: Callable[[Path], Any], is_complete: bool = True
) -> list[dict[str, Any]]:
    """Ends a benchmark: marks its file complete, prints its table, draws its picture.

    Args:
        path: the result file.
        columns: of the table; see `table`.
        draw: one of benchmarks.figures.
        is_complete: false leaves the mark out.

    Returns:
        The rows.
    """
    report = Report.resume(path)
    if is_complete:
        report.finish()
    print(table(report.rows, columns))
    draw(path)
    return report.rows


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Rows as aligned text.

    Args:
        columns: field of a row -> how to format it, such as ",.0f"; missing and None values are shown as "-".
    """
    cells = [list(columns)] + [[_cell(row.get(name), spec) for name, spec in columns.items()] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _cell(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)
