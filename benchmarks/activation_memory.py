"""What a layer keeps for its backward pass, and what it computes again, under each `activation_memory`.

    python -m benchmarks.activation_memory --out benchmarks/results/activation_memory.json

The compiler chooses which activations to keep, so that memory falls in steps and not in proportion to the
budget. One layer of Qwen2.5-1.5B is prepared as the job prepares it and run on a CPU: the bytes that its
forward hands to its backward are counted, and the FLOPs of the backward. A GPU's kernels can move a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedConfig as HfConfig

from benchmarks import cli, figures
from benchmarks.loops import architecture
from benchmarks.report import Report, present
from training.config import TrainingConfig
from training.model import build
from training.parallel import prepare_layers

BUDGETS = [f"{step / 20:g}" for step in range(19, 0, -1)]
SETTINGS = ["none", *BUDGETS, "full"]
KEY = ("activation_memory",)
COLUMNS = {
    "activation_memory": "",
    "bytes_per_token": ",.0f",
    "backward_mflops_per_token": ".1f",
    "kept_share": ".3f",
    "recomputed_share": ".3f",
}


def measure(model: str, activation_memory: str, seq_len: int) -> dict[str, Any]:
    """Bytes and FLOPs of one layer under one setting, per token."""
    torch._dynamo.reset()
    layer, arguments = _layer(model, activation_memory, seq_len)
    hidden = torch.randn(1, seq_len, architecture(model).hidden_size, dtype=torch.bfloat16)
    hidden.requires_grad_()
    kept = _Kept([*layer.parameters(), *arguments["position_embeddings"]])
    with torch.autograd.graph.saved_tensors_hooks(kept.add, lambda tensor: tensor):
        output = layer(hidden, **arguments)
    with _Products() as products:
        output.sum().backward()
    return {
        "activation_memory": activation_memory,
        "model": model,
        "seq_len": seq_len,
        "bytes_per_token": kept.num_bytes / seq_len,
        "backward_mflops_per_token": products.num_flops / seq_len / 1e6,
    }


def _layer(model: str, activation_memory: str, seq_len: int) -> tuple[nn.Module, dict[str, Any]]:
    """One decoder layer with bf16 weights, prepared as by the job, and what its forward needs beside x."""
    causal_lm = build(_one_layer(architecture(model))).to_empty(device="cpu").bfloat16()
    for parameter in causal_lm.parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
    config = TrainingConfig(device="cpu", num_workers=1, activation_memory=activation_memory, compile="on")
    prepare_layers(causal_lm, config, "cpu")
    positions = torch.arange(seq_len)[None]
    rotary = causal_lm.hf.base_model.rotary_emb(torch.zeros(1, dtype=torch.bfloat16), positions)
    return causal_lm.layers[0], {"attention_mask": None, "position_embeddings": rotary}


def _one_layer(hf_config: HfConfig) -> HfConfig:
    changes = {"num_hidden_layers": 1, "layer_types": hf_config.layer_types[:1], "vocab_size": 64}
    return type(hf_config)(**hf_config.to_dict() | changes)


class _Kept:
    """Counts the memory of tensors that are kept for a backward pass, each storage once.

    Args:
        others: tensors that exist anyway.
    """

    def __init__(self, others: Sequence[Tensor]) -> None:
        self._others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._bytes: dict[int, int] = {}

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._others:
            self._bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())


class _Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products, compiled ones too; attention on a CPU is none of them.

    PyTorch's own counter takes operations apart, and breaks where compiled code calls attention.
    """

    supports_higher_order_operators = True  # of "full", which recomputes with the same random numbers
    num_flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        flops_of = flop_registry.get(getattr(function, "_overloadpacket", None))
        if flops_of is not None:
            self.num_flops += flops_of(*args, **(kwargs or {}), out_val=output)
        return output


def with_shares(row: dict[str, Any], everything: dict[str, Any], least: dict[str, Any]) -> dict[str, Any]:
    """Adds what the predictor needs: both are 0 ... 1 and hold for layers of other sizes more or less.

    `kept_share`: of what is kept beyond that of "full". `recomputed_share`: FLOPs that come on top, as a
    share of the layer's forward and backward, which without recomputation are 1.5 times its backward.
    """
    span = everything["bytes_per_token"] - least["bytes_per_token"]
    backward = everything["backward_mflops_per_token"]
    return row | {
        "kept_share": (row["bytes_per_token"] - least["bytes_per_token"]) / span,
        "recomputed_share": (row["backward_mflops_per_token"] - backward) / (1.5 * backward),
    }


# --- command line -----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser("activation_memory", __doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file (JSON)")
    parser.add_argument("--model", choices=("qwen2.5-1.5b-random", "tiny"), default="qwen2.5-1.5b-random")
    parser.add_argument("--seq-len", type=cli.positive, default=2048, help="tokens")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0."""
    args = _parser().parse_args(argv)
    report = Report.start(args.out, "activation_memory", {"model": args.model, "seq_len": args.seq_len})
    for setting in SETTINGS:
        row = measure(args.model, setting, args.seq_len)
        report.put(row, KEY)
        print(f"{setting}: {row['bytes_per_token']:,.0f} bytes a token", flush=True)
    everything, least = report.rows[0], report.rows[-1]
    for row in list(report.rows):
        report.put(with_shares(row, everything, least), KEY)
    present(args.out, COLUMNS, figures.activation_memory)
    return 0


if __name__ == "__main__":
    cli.run(main)
