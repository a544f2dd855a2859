"""One rank of `benchmarks.boundary_bytes` on a host of its own. Started by it, with torchrun's variables."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import ranks
from benchmarks.boundary_bytes import Options, count_all
from benchmarks.ranks import Place


def main() -> None:
    """Reads the task and counts."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    options = Options(**task["options"] | {"out": Path(task["options"]["out"])})
    torch.set_num_threads(1)
    rank, nodes = int(os.environ["RANK"]), tuple(task["nodes"])
    ranks.set_environment(task["environment"], rank, nodes)
    place = Place(rank, nodes, ranks.device_of(task["device_type"], rank))
    ranks.join(place)
    count_all(place, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
