"""Ranks that run the handshake over gloo, with an NCCL that writes the log of a case instead of talking."""

import os
import threading
from pathlib import Path

from training import bandwidth, efa_device, handshake
from training.config import TrainingConfig
from training.parallel import build_mesh

CASES = Path(__file__).parents[1] / "cases/nccl"


def on_gloo(worker, nodes, fields):
    """`prove` and `confirm` as they are."""
    config = TrainingConfig(device="cpu", num_workers=worker.world_size, **fields)
    mesh = build_mesh(nodes, config, "cpu")
    return handshake.prove(mesh, config, worker), handshake.confirm(mesh, config, worker)


def on_fake_nccl(worker, nodes, fields, case, *, errors=(), hangs=(), dies=(), later=(), environment=()):
    """`prove` and `confirm` of a job on GPUs.

    Args:
        case: folder of logs that "NCCL" writes; "" for none.
        errors: {rank: what NCCL raises there}.
        hangs: ranks whose collectives never return.
        dies: ranks that end without a word.
        later: {rank: line that NCCL logs between `prove` and `confirm`}.
        environment: variables for this rank.
    """
    os.environ.update(dict(environment))
    config = TrainingConfig(device="cuda", num_workers=worker.world_size, **fields)
    log = handshake.open_log(config, worker.rank)
    efa_device.COUNTERS_ROOT = Path("/nowhere")

    def collectives(groups, device):
        if case:
            written = Path(os.environ["NCCL_DEBUG_FILE"].replace("%%", "%"))
            written.write_bytes((CASES / case / f"rank{worker.rank}.log").read_bytes())
        if worker.rank in dict(errors):
            raise RuntimeError(dict(errors)[worker.rank])
        if worker.rank in dies:
            os._exit(1)
        if worker.rank in hangs:
            threading.Event().wait()

    bandwidth.exercise = collectives
    mesh = build_mesh(nodes, config, "cpu")
    proven = handshake.prove(mesh, config, worker)
    if worker.rank in dict(later):
        with log.open("a") as stream:
            stream.write(dict(later)[worker.rank] + "\n")
    return proven, handshake.confirm(mesh, config, worker)
