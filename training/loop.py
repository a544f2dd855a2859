"""What each rank does, from the placement of the ranks to the summary, under Ray Train and torchrun alike."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig as HfConfig

from training import data, handshake, metrics, optimizer
from training.agreement import Agreement
from training.attention import attention_backend
from training.config import TrainingConfig
from training.diagnosis import Stage, explained
from training.download import model_folder
from training.errors import DataError, NotFiniteError
from training.feed import Feed, StepData
from training.hardware import peak_bf16_flops
from training.loading import load_model
from training.metrics import Throughput
from training.model import CausalLM, check_context, named_architecture, read_config
from training.parallel import build_mesh, effective_activation_memory, is_compiled
from training.shape import ModelShape
from training.step import Outcome, Result, train_step
from training.weights import FileWeights, RandomWeights, Weights
from training.worker import Worker

logger = logging.getLogger(__name__)


def train(config: TrainingConfig, worker: Worker) -> dict[str, Any]:
    """Runs the whole job on one rank.

    Args:
        config: what to train and how; the same on every rank.
        worker: this rank. The default process group exists.

    Returns:
        The summary, JSON-ready, the same on every rank.

    Raises:
        UsageError: the configuration does not fit the model or the number of workers.
        JobError: the run cannot go on; see `training.errors` for its kinds.
    """
    stage = Stage()
    with explained(worker, config, stage):
        # 1. Where the ranks are, and the mesh over them.
        agreement = Agreement(config.collective_timeout_s)
        nodes = agreement.gather(worker.node)
        mesh = build_mesh(nodes, config, worker.device.type)
        # 2. The network between them is the one that is asked for, before anything is downloaded.
        stage.name = "the transport check"
        transport = handshake.prove(mesh, config, worker)
        # 3. What the model is, and where its weights come from.
        stage.name = "fetching the model"
        hf_config, weights = _find_model(config, worker, agreement)
        # 4. The data of this rank.
        stage.name = "opening the data"
        feed = _open_data(config, worker, hf_config, agreement)
        # 5. The model, sharded, then filled shard by shard.
        stage.name = "loading the model"
        load = partial(load_model, hf_config, weights, mesh, config, worker.device)
        model = agreement.together(load)
        about = _about_job(config, worker, mesh, nodes, hf_config, model)
        logger.info("%s", ", ".join(f"{name} {value}" for name, value in about.items()))
        # 6. Optimizer and steps.
        steps = _Steps(config, worker, agreement, stage, hf_config)
        steps.run(model, feed)
        # 7. The network once more: communicators made since then can differ.
        stage.name = "the final transport check"
        transport = {**transport, "confirmed": handshake.confirm(mesh, config, worker)}
        # 8. What came of it.
        stage.name = "the summary"
        memory = metrics.highest(agreement.gather(metrics.memory(worker.device)))
    return {
        **about,
        **steps.summary(),
        "memory": memory,
        "transport": transport,
    }


def _find_model(config: TrainingConfig, worker: Worker, agreement: Agreement) -> tuple[HfConfig, Weights]:
    hf_config = named_architecture(config.model_id)
    if hf_config is not None:
        check_context(hf_config, config)
        return hf_config, RandomWeights(config.seed, hf_config.initializer_range)
    folder = model_folder(config, agreement, is_first_of_node=worker.local_rank == 0)

    def read() -> tuple[HfConfig, Weights]:
        hf_config = read_config(folder)
        check_context(hf_config, config)
        return hf_config, FileWeights(folder)

    return agreement.together(read)


def _open_data(config: TrainingConfig, worker: Worker, hf_config: HfConfig, agreement: Agreement) -> Feed:
    vocab_size = hf_config.get_text_config().vocab_size
    open_batches = partial(data.batches, config, vocab_size, worker.rank, worker.world_size)
    batches = agreement.together(open_batches)
    num_micro_batches = config.num_micro_batches(worker.world_size)
    return Feed(batches, config, vocab_size, num_micro_batches, worker.device)


@dataclass
class _Progress:
    """What the steps so far came to."""

    first_loss: float | None = None
    last_loss: float | None = None
    num_skipped: int = 0

    def add(self, result: Result) -> None:
        if not result.is_finite:
            self.num_skipped += 1
            return
        self.first_loss = result.loss if self.first_loss is None else self.first_loss
        self.last_loss = result.loss


@dataclass(frozen=True)
class _Unread:
    """A step that is queued, and whose outcome nobody has looked at yet."""

    step: int
    outcome: Outcome
    data: StepData
    learning_rate: float


class _Steps:
    """The optimizer steps of a run, and their figures."""

    def __init__(
        self, config: TrainingConfig, worker: Worker, agreement: Agreement, stage: Stage, hf_config: HfConfig
    ) -> None:
        self._config, self._worker, self._agreement, self._stage = config, worker, agreement, stage
        self._progress = _Progress()
        self._throughput = _throughput(config, worker, hf_config)

    def run(self, model: CausalLM, feed: Feed) -> None:
        """Trains for `config.steps` steps and reports each."""
        adamw = optimizer.build(model, self._config.learning_rate, self._config.weight_decay)
        metrics.reset_peak_memory(self._worker.device)
        self._started = time.perf_counter()
        unread: deque[_Unread] = deque()
        for step in range(1, self._config.steps + 1):
            unread.append(self._queue(step, model, adamw, feed.next()))
            # A GPU computes the step while the one before is read and the next is queued: it never waits.
            while len(unread) > (1 if self._worker.device.type == "cuda" else 0):
                self._finish(unread.popleft())
        while unread:
            self._finish(unread.popleft())
        self._require_progress()

    def _queue(
        self, step: int, model: CausalLM, adamw: torch.optim.Optimizer, step_data: StepData
    ) -> _Unread:
        self._stage.name = f"step {step}"
        optimizer.set_learning_rate(adamw, rate := _learning_rate(self._config, step))
        has_failed = step_data.error is not None
        outcome = train_step(model, adamw, step_data.micro_batches, self._config, has_failed)
        return _Unread(step, outcome, step_data, rate)

    def _finish(self, unread: _Unread) -> None:
        result = unread.outcome.read()
        now = time.perf_counter()
        step_s, self._started = now - self._started, now
        self._require_usable(unread.step, result, unread.data)
        self._report(unread.step, result, step_s, unread.data.wait_s, unread.learning_rate)

    def _require_usable(self, step: int, result: Result, step_data: StepData) -> None:
        """Every rank raises, or none: the result is the same on all."""
        if result.failed_ranks:
            rank = result.failed_ranks[0]
            reason = self._agreement.gather(step_data.error)[rank]
            raise DataError(f"rank {rank}: its data failed in step {step}: {reason}")
        if not result.is_finite and self._config.on_nan == "stop":
            raise NotFiniteError(_not_finite(step, result))

    def _require_progress(self) -> None:
        if self._progress.num_skipped == self._config.steps:
            raise NotFiniteError(
                f"all {self._config.steps} steps were skipped, since none had a finite loss and gradient; "
                "lower --learning-rate and check the data and the weights"
            )

    def _report(self, step: int, result: Result, step_s: float, data_wait_s: float, rate: float) -> None:
        self._progress.add(result)
        self._throughput.add(step_s, data_wait_s)
        tokens_per_s = self._throughput.tokens_per_step / step_s
        self._worker.report(
            {
                "step": step,
                "loss": _json_number(result.loss),
                "grad_norm": _json_number(result.grad_norm),
                "skipped": not result.is_finite,
                "learning_rate": rate,
                "tokens_per_s": tokens_per_s,
                "tokens_per_s_per_gpu": tokens_per_s / self._worker.world_size,
                "mfu": self._throughput.mfu(tokens_per_s),
                "step_s": step_s,
                "data_wait_s": data_wait_s,
            }
        )

    def summary(self) -> dict[str, Any]:
        """Losses and throughput."""
        return {
            "num_steps": self._config.steps,
            "num_skipped_steps": self._progress.num_skipped,
            "first_loss": self._progress.first_loss,
            "last_loss": self._progress.last_loss,
            **self._throughput.summary(),
        }


def _learning_rate(config: TrainingConfig, step: int) -> float:
    return optimizer.learning_rate_at(
        step, peak=config.learning_rate, num_steps=config.steps, warmup_steps=config.warmup_steps
    )


def _throughput(config: TrainingConfig, worker: Worker, hf_config: HfConfig) -> Throughput:
    num_sequences = config.batch_size * config.num_micro_batches(worker.world_size) * worker.world_size
    peak = (
        peak_bf16_flops(torch.cuda.get_device_name(worker.device)) if worker.device.type == "cuda" else None
    )
    return Throughput(
        tokens_per_step=num_sequences * config.seq_len,
        num_gpus=worker.world_size,
        flops_per_token=ModelShape.from_hf_config(hf_config).flops_per_token(config.seq_len),
        peak_flops=peak,
        untimed_steps=config.untimed_steps,
    )


def _not_finite(step: int, result: Result) -> str:
    ranks = ", ".join(str(rank) for rank in result.not_finite_ranks)
    what = f"the loss is not finite on rank {ranks}" if ranks else "the norm of the gradients is not finite"
    return (
        f"step {step}: {what} (loss {result.loss}, gradient norm {result.grad_norm}). Lower --learning-rate, "
        "give more --warmup-steps, or check the data; --on-nan skip leaves such steps out and counts them"
    )


def _json_number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _about_job(
    config: TrainingConfig,
    worker: Worker,
    mesh: DeviceMesh,
    nodes: list[str],
    hf_config: HfConfig,
    model: CausalLM,
) -> dict[str, Any]:
    device = worker.device
    return {
        "model_id": config.model_id,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "world_size": worker.world_size,
        "num_ranks_per_node": dict(Counter(nodes)),
        "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "compiled": is_compiled(config, device.type),
        "activation_memory": effective_activation_memory(config, device.type),
        "attention_backend": attention_backend(hf_config, config.seq_len, device),
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
    }
