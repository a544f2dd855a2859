"""Sizes of a decoder-only language model, and what follows from them by arithmetic: parameters and FLOPs.

Standard library only: the predictor and the operator's commands use it where torch is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Transformers' common names first, then those of GPT-2's family (a raw config.json has no attribute map).
_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
}
_INTERMEDIATE_NAMES = ("intermediate_size", "n_inner", "ffn_dim")

# Architectures whose query, key and value projections have a bias that no configuration field mentions.
_QKV_BIAS_MODEL_TYPES = {"qwen2", "qwen2_moe", "gpt2", "gpt_neox", "opt", "phi"}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer with gated MLP, RMS norms and rotary positions (Qwen2, Llama).

    Attributes:
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of one head.
        intermediate_size: width of the MLP.
        vocab_size: rows of the embedding.
        tied: whether the output head is the embedding.
        qkv_bias: whether query, key and value projections have a bias (Qwen2 does).
        output_bias: whether the attention's output projection has one.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool = True
    qkv_bias: bool = False
    output_bias: bool = False

    @classmethod
    def from_hf_config(cls, config: Any) -> ModelShape:
        """Reads a Hugging Face configuration of any causal language model.

        Args:
            config: a `PreTrainedConfig`, or any object with the attributes of a config.json.

        Raises:
            ValueError: a size is missing; the message names the attributes looked for.
        """
        get_text_config = getattr(config, "get_text_config", None)
        config = get_text_config() if get_text_config else config
        sizes = {name: _first(config, names) for name, names in _NAMES.items()}
        if missing := [" or ".join(_NAMES[name]) for name, size in sizes.items() if size is None]:
            raise ValueError(
                f"the model's configuration lacks {', '.join(missing)}: not a decoder-only language model"
            )
        model_type = getattr(config, "model_type", "")
        every_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            **sizes,
            num_kv_heads=_first(config, ("num_key_value_heads",)) or sizes["num_heads"],
            head_dim=_first(config, ("head_dim",)) or sizes["hidden_size"] // sizes["num_heads"],
            intermediate_size=_first(config, _INTERMEDIATE_NAMES) or 4 * sizes["hidden_size"],
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            qkv_bias=every_bias or model_type in _QKV_BIAS_MODEL_TYPES,
            output_bias=every_bias,
        )

    @property
    def attention_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (the value heads have the same)."""
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; an untied output head has as many again."""
        return self.vocab_size * self.hidden_size

    def num_matmul_parameters(self) -> int:
        """Weights that every token is multiplied with: matrices of the layers and the output head."""
        attention = 2 * self.hidden_size * (self.attention_size + self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.embedding_parameters

    def num_parameters(self) -> int:
        """Parameters, each counted once. Exact for Qwen2 and Llama; an estimate for other architectures."""
        biases = (
            self.qkv_bias * (self.attention_size + 2 * self.kv_size) + self.output_bias * self.hidden_size
        )
        norms = 2 * self.hidden_size
        untied_embedding = 0 if self.tied else self.embedding_parameters
        return (
            self.num_matmul_parameters()
            + self.num_layers * (biases + norms)
            + self.hidden_size  # the norm after the last layer
            + untied_embedding
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Model FLOPs of one training token, forward and backward: 6 N + 6 L a S.

        N are the weights of matrix multiplications (output head included, embedding look-up not), L the
        layers, a the width of all heads, S the sequence length: two attention products of 2 a S FLOPs each,
        halved since a token attends to half of the sequence on average, times 3 for forward and backward.
        Recomputed activations do not count (PaLM, arXiv:2204.02311 appendix B, with the causal half).

        Args:
            seq_len: tokens per sequence.
        """
        return 6.0 * self.num_matmul_parameters() + 6.0 * self.num_layers * self.attention_size * seq_len


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


# https://huggingface.co/Qwen/Qwen2.5-1.5B/blob/main/config.json
QWEN25_1_5B = ModelShape(
    hidden_size=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=8960,
    vocab_size=151_936,
    tied=True,
    qkv_bias=True,
)

# training.model.named_architecture("tiny"); a test holds them together.
TINY = ModelShape(
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=256,
    vocab_size=259,
    tied=True,
    qkv_bias=True,
)

KNOWN_SHAPES = {"Qwen/Qwen2.5-1.5B": QWEN25_1_5B, "qwen2.5-1.5b-random": QWEN25_1_5B, "tiny": TINY}
"""Shapes that are known by the name a job gives (`model_id`), without a file."""
