"""Host memory of a group of processes, as the kernel accounts for it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_INTERVAL_S = 0.05


@dataclass(frozen=True)
class HostMemory:
    """Proportional set size: a page that n processes share counts as 1/n in each, so that sums are true.

    Attributes:
        anonymous_gib: memory of the processes' own, which cannot be given back.
        file_gib: mapped pages of files; the kernel drops them when memory is short.
        shared_gib: shared memory (tmpfs), which cannot be given back either.
    """

    anonymous_gib: float
    file_gib: float
    shared_gib: float

    @property
    def total_gib(self) -> float:
        return self.anonymous_gib + self.file_gib + self.shared_gib


def host_memory(pids: Iterable[int]) -> HostMemory:
    """What these processes hold together; one that has ended counts as nothing."""
    sums = {"Anon": 0, "File": 0, "Shmem": 0}
    for pid in pids:
        for kind, kib in _pss_kib(pid).items():
            sums[kind] += kib
    return HostMemory(sums["Anon"] / 2**20, sums["File"] / 2**20, sums["Shmem"] / 2**20)


def _pss_kib(pid: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return {}
    return {
        kind: int(kib) for kind, kib in re.findall(r"^Pss_(Anon|File|Shmem):\s+(\d+) kB", text, re.MULTILINE)
    }


class PeakMemory:
    """Watches processes in the background while its `with` block runs.

    Attributes:
        start: at the beginning of the block.
        peak: at the moment with the highest total.
        peak_unreclaimable_gib: the most memory at one moment that the kernel could not have dropped.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.start = self.peak = host_memory(self._pids)
        self.peak_unreclaimable_gib = 0.0

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.is_set():
            self._look()
            time.sleep(_INTERVAL_S)

    def _look(self) -> None:
        now = host_memory(self._pids)
        self.peak = max(self.peak, now, key=lambda memory: memory.total_gib)
        self.peak_unreclaimable_gib = max(self.peak_unreclaimable_gib, now.anonymous_gib + now.shared_gib)
