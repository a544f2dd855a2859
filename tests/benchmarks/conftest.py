"""One rank in this process: benchmarks run whole, without starting processes that import torch first."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from benchmarks import ranks


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces `ranks.run` by the same function for a single rank, without a process of its own."""

    def run(
        work: Callable[..., None],
        arguments: Sequence[Any],
        nodes: Sequence[str],
        device_type: str,
        environment: Mapping[str, str] | None = None,
        hosts_are_separate: bool = True,
    ) -> None:
        assert len(nodes) == 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ranks._rank(0, work, tuple(arguments), tuple(nodes), device_type, port, environment or {})

    before, num_threads = dict(os.environ), torch.get_num_threads()
    monkeypatch.setattr(ranks, "run", run)
    yield
    torch.set_num_threads(num_threads)
    os.environ.clear()
    os.environ.update(before)
