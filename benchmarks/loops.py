"""The training loops that are compared: ours, AWS's sample re-created, and accelerate with FSDP2.

Each is built by one function and then called once per optimizer step. All train the same architecture from
random weights on random token ids.
"""

from __future__ import annotations

import functools
import gc
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from transformers import AutoModelForCausalLM, Qwen2Config
from transformers import PreTrainedConfig as HfConfig

from benchmarks.ranks import Place
from training import optimizer
from training.config import TrainingConfig
from training.loading import load_model
from training.model import CausalLM, named_architecture
from training.parallel import build_mesh
from training.step import Outcome, train_step

OURS, AWS_SAMPLE, ACCELERATE = "ours", "aws-sample", "accelerate-fsdp2"
LEARNING_RATE = 2e-5
_NUM_BATCHES = 3
# The sample wraps modules of more than 1e7 parameters; models of these names have none that large.
_SAMPLE_WRAP_PARAMETERS = 10_000_000
_SMALL_WRAP_PARAMETERS = {"tiny": 15_000, "small": 200_000}

Step = Callable[[], float]
"""Runs one optimizer step; returns a loss, of this step or of the one before (NaN: none yet)."""


@dataclass(frozen=True)
class Workload:
    """What every loop is given.

    Attributes:
        model: an architecture of `training.model.named_architecture`.
        batch_size: sequences per rank and micro-batch.
        seq_len: tokens per sequence.
        num_micro_batches: micro-batches per optimizer step.
        config: how our loop runs it; the others have no such choices.
    """

    model: str
    batch_size: int
    seq_len: int
    num_micro_batches: int
    config: TrainingConfig

    @property
    def tokens_per_step(self) -> int:
        """Of one rank."""
        return self.batch_size * self.seq_len * self.num_micro_batches


def architecture(name: str) -> HfConfig:
    """The configuration of an architecture that needs no files.

    Those of the product, and "small": 6.9 M parameters, of which the embedding is the same 15% as in
    Qwen2.5-1.5B, for counting bytes on CPUs.
    """
    if name == "small":
        return Qwen2Config(
            vocab_size=4096,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=1024,
            tie_word_embeddings=True,
            use_cache=False,
        )
    hf_config = named_architecture(name)
    if hf_config is None:
        raise ValueError(f"{name}: no architecture of this name")
    return hf_config


class DeviceRandomWeights:
    """Random weights drawn where they are needed. Their values do not change how long a step takes.

    `training.weights.RandomWeights` draws on the CPU, the same for any number of ranks, and so takes longer.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    def rows(self, names: Sequence[str], shape: torch.Size, start: int, stop: int) -> Tensor:
        if len(shape) == 1:
            return torch.full((stop - start,), 0.0 if names[0].endswith("bias") else 1.0)
        rows = torch.empty(stop - start, *shape[1:], device=self._generator.device)
        return rows.normal_(0.0, 0.02, generator=self._generator)


def load_ours(place: Place, workload: Workload) -> tuple[CausalLM, torch.optim.AdamW]:
    """The product's model, sharded, and its optimizer."""
    hf_config, config = architecture(workload.model), workload.config
    mesh = build_mesh(place.nodes, config, place.device.type)
    model = load_model(hf_config, DeviceRandomWeights(place.device), mesh, config, place.device)
    return model, optimizer.build(model, LEARNING_RATE, config.weight_decay)


def build_ours(place: Place, workload: Workload) -> Step:
    """The product's own model, sharding, optimizer and step; only Ray and the data loader are left out."""
    model, adamw = load_ours(place, workload)
    return our_step(place, workload, model, adamw)


def our_step(place: Place, workload: Workload, model: CausalLM, adamw: torch.optim.AdamW) -> Step:
    """Steps of a model from `load_ours` on random token ids."""
    batches = [
        [
            _shifted(ids)
            for ids in _random_ids(place, workload, workload.seq_len + 1, workload.num_micro_batches)
        ]
        for _ in range(_NUM_BATCHES)
    ]
    count = _Counter()
    unread: deque[Outcome] = deque()
    most_unread = 1 if place.device.type == "cuda" else 0  # as in training.loop: a GPU never waits to be read

    def step() -> float:
        micro_batches = batches[count.next() % _NUM_BATCHES]
        unread.append(train_step(model, adamw, micro_batches, workload.config))
        return unread.popleft().read().loss if len(unread) > most_unread else math.nan

    return step


def shard_as_sample(model: nn.Module, name: str, device: torch.device) -> FullyShardedDataParallel:
    """FSDP1 over all ranks, with units of more than 1e7 parameters.

    Args:
        model: unsharded.
        name: of its architecture: small ones get smaller units.
        device: of this rank.
    """
    wrap_parameters = _SMALL_WRAP_PARAMETERS.get(name, _SAMPLE_WRAP_PARAMETERS)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=wrap_parameters)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device)


def build_aws_sample(place: Place, workload: Workload) -> Step:
    """What AWS's sample "Multi-Node Ray Train on EKS" runs, in our words.

    FSDP1 with a wrapping policy by size, so that embedding and output head land in different units and are no
    longer tied; weights, gradients and Adam's moments in bf16; the logits of the whole batch; the loss read
    on the host after each step.
    """
    model = _hugging_face_model(workload.model, place.device, torch.bfloat16)
    sharded = shard_as_sample(model, workload.model, place.device)
    adamw = torch.optim.AdamW(sharded.parameters(), lr=LEARNING_RATE)
    batches = _random_ids(place, workload, workload.seq_len, _NUM_BATCHES)
    count = _Counter()

    def step() -> float:
        adamw.zero_grad()
        for _ in range(workload.num_micro_batches):  # the sample's own number is 1
            ids = batches[count.next() % _NUM_BATCHES]
            loss = sharded(input_ids=ids, labels=ids).loss
            loss.backward()
        adamw.step()
        return loss.item()

    return step


def build_accelerate(place: Place, workload: Workload) -> Step:
    """accelerate with its FSDP2 plugin as its documentation configures it: bf16 compute over fp32 weights."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    _forget_accelerate_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen2DecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    on_gpu = place.device.type == "cuda"
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, cpu=not on_gpu)
    model = _hugging_face_model(workload.model, place.device, torch.float32)
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=on_gpu)
    model, adamw = accelerator.prepare(model, adamw)
    batches = _random_ids(place, workload, workload.seq_len, _NUM_BATCHES)
    count = _Counter()

    def step() -> float:
        ids = batches[count.next() % _NUM_BATCHES]
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        return loss.item()

    return step


BUILDERS = {OURS: build_ours, AWS_SAMPLE: build_aws_sample, ACCELERATE: build_accelerate}


def release(device: torch.device) -> None:
    """Frees what a loop held, once its step function is gone."""
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def clear(device: torch.device) -> None:
    """Frees every tensor on a GPU, between loops that share none: each starts on an empty device.

    FSDP1 never lets go of its flat parameters. Left alone they count for the next loop's peak memory, and
    can make it run out.
    """
    release(device)
    if device.type == "cuda":
        for tensor in gc.get_objects():
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device == device:
                tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()


class _Counter:
    def __init__(self) -> None:
        self._next = 0

    def next(self) -> int:
        self._next += 1
        return self._next - 1


def _hugging_face_model(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(architecture(name), dtype=dtype)
    return model.train()


def _random_ids(place: Place, workload: Workload, length: int, num_batches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + place.rank)
    vocab_size = architecture(workload.model).vocab_size
    shape = (num_batches, workload.batch_size, length)
    return list(torch.randint(0, vocab_size, shape, generator=generator).to(place.device))


def _shifted(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _forget_accelerate_state() -> None:
    """accelerate keeps its first configuration for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def is_finite(loss: float) -> bool:
    """Whether a step trained at all: a benchmark of NaNs measures nothing."""
    return math.isfinite(loss)
