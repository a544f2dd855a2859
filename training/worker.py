"""Where one rank stands: the only thing the loop knows of whoever started it.

Ray Train (`training.run`) and torchrun (`training.torchrun`) each build a `Worker`; everything below
them is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Worker:
    """One rank of the job. The default process group exists before this object does.

    Attributes:
        rank: 0 ... world_size - 1.
        world_size: number of ranks.
        local_rank: index among the ranks of this node.
        node: name of the node; equal for exactly those ranks that share a host (Ray's node id, or the
            host name under torchrun).
        device: where this rank computes.
        report: called on every rank with the record of a step (a flat, JSON-ready mapping). It may be a
            barrier (Ray Train's is), so every rank calls it the same number of times.
        say_last: says, from any thread and on any rank, why this process is about to be ended from outside.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    device: torch.device
    report: Callable[[Mapping[str, Any]], None]
    say_last: Callable[[str], None]
