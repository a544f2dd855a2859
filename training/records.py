"""What a run leaves behind: `steps.jsonl` and `summary.json` in <storage path>/<run name>/.

`summary.json` says `running` from the start of an attempt, so that the result of an earlier attempt under the
same name is never taken for this one's; then `succeeded`, `failed` or `interrupted`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Literal

from training.storage import STORAGE_ERRORS, Place, locate

SUMMARY_MARK = "summary: "
"""What the line of the summary on stdout begins with; JSON follows, to the end of that line."""

Status = Literal["running", "succeeded", "failed", "interrupted"]

# Object stores cannot append: the file is written again as a whole, at most this often and at most at this
# mean rate, so that long runs do not spend their network on it.
_REWRITE_INTERVAL_S = 5.0
_REWRITE_BYTES_PER_S = 200_000


class RunFolder:
    """The files of one run.

    Args:
        storage_path: local folder or URI.
        run_name: name of the folder below it.

    Raises:
        OSError, ArrowException: from every method, when the place cannot be written.
    """

    def __init__(self, storage_path: str, run_name: str) -> None:
        folder = locate(storage_path).child(run_name)
        self._summary = folder.child("summary.json")
        self._steps = _step_file(folder.child("steps.jsonl"))
        self._about: dict[str, Any] = {"run_name": run_name, "started_at": _now()}

    def start(self, config: Mapping[str, Any]) -> None:
        """Begins an attempt: an empty `steps.jsonl`, and a summary that says `running`.

        Args:
            config: the run's configuration, which the summary keeps.
        """
        self._about["config"] = dict(config)
        self._summary.write(_json({"status": "running", **self._about}))
        self._steps.clear()

    def add(self, record: Mapping[str, Any]) -> None:
        """Stores the record of a step: at once in a local folder, within seconds elsewhere."""
        self._steps.add(json.dumps(record).encode() + b"\n")

    def finish(self, status: Status, result: Mapping[str, Any], error: str = "") -> dict[str, Any]:
        """Stores the last records and the summary.

        Args:
            status: how the attempt ended.
            result: what the loop returned; empty when it did not end.
            error: why it failed.

        Returns:
            The summary.
        """
        summary: dict[str, Any] = {"status": status, **self._about, "finished_at": _now()}
        if error:
            summary["error"] = error
        summary |= result
        self._steps.close()
        self._summary.write(_json(summary))
        return summary


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _step_file(place: Place) -> _AppendedFile | _RewrittenObject:
    return _AppendedFile(place) if place.is_local else _RewrittenObject(place)


class _AppendedFile:
    """Lines in a local file, flushed one by one."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def clear(self) -> None:
        self._place.write(b"")

    def add(self, line: bytes) -> None:
        with open(self._place.path, "ab") as stream:
            stream.write(line)

    def close(self) -> None:
        """Every line is on disk already."""


class _RewrittenObject:
    """Lines in an object store. A write that fails in between is tried again with the next line."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._content = bytearray()
        self._written_at_s = 0.0

    def clear(self) -> None:
        self._content.clear()
        self._write()

    def add(self, line: bytes) -> None:
        self._content += line
        interval_s = max(_REWRITE_INTERVAL_S, len(self._content) / _REWRITE_BYTES_PER_S)
        if time.monotonic() - self._written_at_s < interval_s:
            return
        try:
            self._write()
        except STORAGE_ERRORS:
            self._written_at_s = time.monotonic()  # `close` writes all again, and raises if it cannot

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        self._place.write(bytes(self._content))
        self._written_at_s = time.monotonic()
