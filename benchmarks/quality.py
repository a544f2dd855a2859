"""What precision does to training: pure bf16, as AWS's sample trains, against our fp32 master weights.

    python -m benchmarks.quality --out benchmarks/results/quality.json
    python -m benchmarks.quality --device cpu --model tiny --quick --out smoke.json

A model first learns an artificial language in fp32 and is rounded to bf16, as published checkpoints are. From
this one start, every arm then trains on the same 300 batches of a changed language, at the sample's learning
rate of 2e-5. The evaluation is always done in bf16, on other batches. One rank: sharding does not matter
here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks import cli, figures, ranks
from benchmarks.loops import LEARNING_RATE, architecture, release
from benchmarks.markov import MarkovLanguage, entropy
from benchmarks.ranks import Place
from benchmarks.report import Report, present
from training import optimizer
from training.config import TrainingConfig
from training.loading import load_model
from training.parallel import build_mesh
from training.step import train_step

BF16_PURE, FP32_MASTERS, OURS = "bf16-pure", "fp32-masters", "ours"
DESCRIPTIONS = {
    BF16_PURE: "weights, gradients and Adam's moments in bf16, torch's default AdamW (the sample)",
    FP32_MASTERS: "the same, but weights, gradients and moments in fp32 and autocast to bf16",
    OURS: "the product's step: fp32 masters, its betas, weight decay and clipping",
}
_PRETRAINING_RATE = 3e-4
_WARMUP_STEPS = 30
_CURVE_STEPS = 25
COLUMNS = {
    "name": "",
    "eval_loss": ".4f",
    "first_loss": ".4f",
    "moved_share": ".3f",
    "moved_share_at_bf16": ".3f",
    "num_steps": "d",
    "seconds": ".0f",
}

Batch = tuple[Tensor, Tensor]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """Sizes of the experiment."""

    out: Path
    model: str
    arms: tuple[str, ...]
    num_pretraining_steps: int
    num_steps: int
    batch_size: int
    seq_len: int
    num_states: int


class StateWeights:
    """Weights from a state dict, as `training.weights.Weights` wants them."""

    def __init__(self, state: State) -> None:
        self._state = state

    def rows(self, names: Sequence[str], shape: torch.Size, start: int, stop: int) -> Tensor:
        """Rows of the tensor that has one of the names."""
        return next(self._state[name] for name in names if name in self._state)[start:stop]


def compare(place: Place, options: Options) -> None:
    """The one rank's work."""
    report = Report.resume(options.out)
    vocab_size = architecture(options.model).vocab_size
    language = MarkovLanguage(vocab_size, min(options.num_states, vocab_size), seed=1, device=place.device)
    sizes = (options.batch_size, options.seq_len)
    old = language.batches(options.num_pretraining_steps, *sizes, seed=11)
    language.change_half(seed=2)
    new, held_out = language.batches(options.num_steps, *sizes, seed=12), language.batches(4, *sizes, seed=13)
    start = _pretrained(place, options, old)
    start_loss = _evaluate(place, options, start, held_out)
    report.note(entropy=entropy(), start_eval_loss=start_loss)
    print(f"start: eval loss {start_loss:.4f}", flush=True)
    for name in options.arms:
        began = time.time()
        losses, end = _ARMS[name](place, options, start, new)
        release(place.device)
        row = {
            "name": name,
            "description": DESCRIPTIONS[name],
            "eval_loss": _evaluate(place, options, end, held_out),
            "moved_share": _moved_share(start, end),
            "moved_share_at_bf16": _moved_share(start, {k: v.bfloat16() for k, v in end.items()}),
            **_about_losses(losses, options),
            "seconds": time.time() - began,
        }
        report.put(row, ("name",))
        release(place.device)
        print(f"{name}: eval loss {row['eval_loss']:.4f}, {row['moved_share']:.1%} moved", flush=True)


def _about_losses(losses: Sequence[float], options: Options) -> dict[str, Any]:
    num_steps = options.num_steps
    steps = sorted({1, *range(_CURVE_STEPS, num_steps + 1, _CURVE_STEPS), num_steps})
    return {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "num_steps": num_steps,
        "curve": [[step, losses[step - 1]] for step in steps],
    }


def _pretrained(place: Place, options: Options, batches: Sequence[Batch]) -> State:
    """A model that knows the language, rounded to bf16."""
    torch.manual_seed(0)
    with place.device:
        model = AutoModelForCausalLM.from_config(architecture(options.model), dtype=torch.float32).train()
    adamw = optimizer.build(model, _PRETRAINING_RATE, weight_decay=0.1)
    for index, batch in enumerate(batches, start=1):
        optimizer.set_learning_rate(adamw, _PRETRAINING_RATE * min(1.0, index / _WARMUP_STEPS))
        loss = _loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
    return {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    input_ids, labels = batch
    with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=_is_fp32(model)):
        logits = model(input_ids=input_ids).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _is_fp32(model: nn.Module) -> bool:
    return next(model.parameters()).dtype == torch.float32


def _train_plainly(dtype: torch.dtype) -> Callable[..., tuple[list[float], State]]:
    """An arm without our loop: torch's own AdamW with its defaults, full logits, no clipping."""

    def train(
        place: Place, options: Options, start: State, batches: Sequence[Batch]
    ) -> tuple[list[float], State]:
        model = _plain_model(place, options, start, dtype)
        adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        losses = []
        for batch in batches:
            loss = _loss(model, batch)
            loss.backward()
            adamw.step()
            adamw.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        return torch.stack(losses).tolist(), _state(model)

    return train


def _train_ours(
    place: Place, options: Options, start: State, batches: Sequence[Batch]
) -> tuple[list[float], State]:
    config = TrainingConfig(
        model_id=options.model,
        device=place.device.type,
        num_workers=1,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        gradient_accumulation=1,
        activation_memory="none",
        learning_rate=LEARNING_RATE,
    )
    mesh = build_mesh(place.nodes, config, place.device.type)
    model = load_model(architecture(options.model), StateWeights(start), mesh, config, place.device)
    adamw = optimizer.build(model, LEARNING_RATE, config.weight_decay)
    losses = [train_step(model, adamw, [batch], config).read().loss for batch in batches]
    return losses, _state(model.hf)


_ARMS: dict[str, Callable[..., tuple[list[float], State]]] = {
    BF16_PURE: _train_plainly(torch.bfloat16),
    FP32_MASTERS: _train_plainly(torch.float32),
    OURS: _train_ours,
}


def _plain_model(place: Place, options: Options, state: State, dtype: torch.dtype) -> nn.Module:
    with place.device:
        model = AutoModelForCausalLM.from_config(architecture(options.model), dtype=dtype).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    return model


def _state(model: nn.Module) -> State:
    return {name: _whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _evaluate(place: Place, options: Options, state: State, batches: Sequence[Batch]) -> float:
    model = _plain_model(place, options, state, torch.bfloat16).eval()
    return torch.stack([_loss(model, batch) for batch in batches]).mean().item()


def _moved_share(start: State, end: State) -> float:
    """Share of weights whose stored value is no longer the first one."""
    moved = sum(int((end[name] != before).sum()) for name, before in start.items())
    return moved / sum(before.numel() for before in start.values())


# --- command line -----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(
        "quality",
        __doc__,
        "Arms: " + "; ".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items()) + ".",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file (JSON)")
    parser.add_argument(
        "--arms", nargs="+", choices=DESCRIPTIONS, default=list(DESCRIPTIONS), help="what to train"
    )
    parser.add_argument("--model", choices=("qwen2.5-1.5b-random", "tiny"), default="qwen2.5-1.5b-random")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--num-pretraining-steps", type=cli.positive, default=250, help="steps before the arms"
    )
    parser.add_argument("--num-steps", type=cli.positive, default=300, help="steps of each arm")
    parser.add_argument("--batch-size", type=cli.positive, default=8, help="sequences")
    parser.add_argument("--seq-len", type=cli.positive, default=512, help="tokens")
    parser.add_argument("--num-states", type=cli.positive, default=4096, help="tokens that occur")
    parser.add_argument("--quick", action="store_true", help="a few short steps: does everything run?")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, 1 when it ended early, or 2 when it cannot run."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU here; use --device cpu --model tiny to see that everything runs")
    sizes = (args.num_pretraining_steps, args.num_steps, args.batch_size, args.seq_len, args.num_states)
    if args.quick:
        sizes = (10, 10, 2, 32, 64)
    options = Options(args.out, args.model, tuple(args.arms), *sizes)
    parameters = {name: value for name, value in vars(options).items() if name != "out"}
    Report.start(args.out, "quality", parameters)
    try:
        ranks.run(compare, (options,), ["node0"], args.device)
    except ranks.RanksError as error:
        print(error, file=sys.stderr)
        return 1
    present(args.out, COLUMNS, figures.quality)
    return 0


if __name__ == "__main__":
    cli.run(main)
