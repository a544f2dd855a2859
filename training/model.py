"""The model: any Hugging Face causal language model, and its loss in one module.

`build` makes it on the meta device, `training.parallel` shards it, `training.weights` fills the shards: at no
time does a rank hold the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config
from transformers import PreTrainedConfig as HfConfig
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from training.config import TrainingConfig, UsageError
from training.errors import JobError
from training.loss import IGNORED_LABEL, chunked_cross_entropy
from training.preflight import context_length

# Base models whose forward takes prepared masks and is known to be one compiled graph per layer.
_TUNED_MODEL_TYPES = ("qwen2", "qwen3")


def named_architecture(name: str) -> HfConfig | None:
    """The configuration of an architecture with random weights; None if there is none of that name."""
    common = {"tie_word_embeddings": True, "use_cache": False, "attention_dropout": 0.0}
    if (
        name == "tiny"
    ):  # 0.26 M parameters; 256 bytes and three special tokens: an odd number of rows to shard
        return Qwen2Config(
            vocab_size=259,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            max_position_embeddings=4096,
            **common,
        )
    if name == "qwen2.5-1.5b-random":  # https://huggingface.co/Qwen/Qwen2.5-1.5B/blob/main/config.json
        return Qwen2Config(
            vocab_size=151_936,
            hidden_size=1536,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            intermediate_size=8960,
            max_position_embeddings=131_072,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            **common,
        )
    return None


def read_config(folder: str) -> HfConfig:
    """The configuration in a model's folder.

    Raises:
        JobError: it cannot be read, or is of a kind that this version of Transformers does not know.
    """
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise JobError(f"{folder}: config.json cannot be used: {_first_line(error)}") from None


def check_context(hf_config: HfConfig, config: TrainingConfig) -> None:
    """Refuses sequences that are longer than the model's context.

    Raises:
        UsageError: naming both lengths.
    """
    longest = context_length(hf_config.to_dict())
    if longest is not None and config.seq_len > longest:
        remedy = f"{config.model_id} was built for at most {longest} tokens; use that or less"
        raise UsageError([f"--seq-len {config.seq_len}: {remedy}"])


def build(hf_config: HfConfig) -> CausalLM:
    """A model without storage: fp32 parameters on the meta device, tied as the configuration says.

    Raises:
        JobError: not a causal language model that Transformers knows, or one without a list of decoder
        layers.
    """
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    except (ValueError, ImportError) as error:
        raise JobError(
            f"model type {hf_config.model_type}: Transformers cannot build a causal language model of it: "
            f"{_first_line(error)}"
        ) from None
    hf.config.use_cache = False
    hf.tie_weights()
    return CausalLM(hf).train()


class CausalLM(nn.Module):
    """A causal language model whose output is its loss.

    With the loss inside, FSDP's root unit gathers the weight that embedding and head may share once for both.

    Attributes:
        hf: the Hugging Face model. Parameters are named as its own, with `hf.` in front.
        loss_scale: fp32 [], factor of the summed loss; set before each forward. An attribute, since FSDP
            would round an input of the forward to bf16.
        compile_loss: fuse the arithmetic on logits with torch.compile.
        is_tuned: the layers of this architecture compile as one graph each, and need no mask.
        has_plain_head: logits are hidden @ weight.T, so that they never have to exist as a whole.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        self.loss_scale = torch.ones(())
        self.compile_loss = False
        self._layers_name = _find_layers(hf)
        self.is_tuned = hf.config.model_type in _TUNED_MODEL_TYPES and _attends_to_all(hf.config)
        self.has_plain_head = _has_plain_head(hf)
        self.require_tied()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.hf.get_submodule(self._layers_name)

    @property
    def last_norm(self) -> nn.Module | None:
        """The norm after the last layer, where we know its name."""
        return self.hf.base_model.norm if self.is_tuned else None

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """`loss_scale` times the summed cross-entropy.

        Args:
            input_ids: int64 [batch_size, seq_len].
            labels: int64 [batch_size, seq_len], the token after each input; -100 where no loss is wanted.

        Returns:
            fp32 [].
        """
        if not self.has_plain_head:
            logits = self.hf(input_ids=input_ids, use_cache=False).logits.float()
            total = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
            )
            return total * self.loss_scale
        weight = self.hf.get_output_embeddings().weight
        return chunked_cross_entropy(
            self._hidden(input_ids), weight, labels, self.loss_scale, compiled=self.compile_loss
        )

    def _hidden(self, input_ids: Tensor) -> Tensor:
        """Outputs of the last layer, [batch_size, seq_len, hidden_size]."""
        arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if self.is_tuned:
            # No mask makes attention plainly causal. Left to itself, the model looks for packed sequences in
            # the position ids at each call, and the CPU waits for the GPU's answer.
            arguments["attention_mask"] = {"full_attention": None}
        return self.hf.base_model(**arguments)[0]

    def require_tied(self) -> None:
        """Checks that embedding and head are one parameter where the configuration says so.

        Raises:
            JobError: they are two; trained apart, they would no longer be the model that was configured.
        """
        if not self.hf.config.get_text_config().tie_word_embeddings:
            return
        embedding, head = self.hf.get_input_embeddings(), self.hf.get_output_embeddings()
        if embedding is None or head is None or embedding.weight is not head.weight:
            raise JobError(
                f"model type {self.hf.config.model_type}: embedding and output head are to share one weight "
                "(tie_word_embeddings), but are two parameters; this architecture is not supported"
            )


def _find_layers(hf: PreTrainedModel) -> str:
    """Name of the list of decoder layers inside the model."""
    num_layers = getattr(hf.config.get_text_config(), "num_hidden_layers", None)
    for name, module in hf.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name
    raise JobError(
        f"model type {hf.config.model_type}: no list of {num_layers} decoder layers was found in it, so it "
        "cannot be sharded layer by layer; this architecture is not supported"
    )


def _attends_to_all(hf_config: HfConfig) -> bool:
    return set(hf_config.layer_types) == {"full_attention"}


def _has_plain_head(hf: PreTrainedModel) -> bool:
    """Whether logits are hidden @ weight.T and nothing else.

    Some models scale or cap them, and each configuration has a name of its own for that. So the model is
    asked: its forward runs with given outputs of the last layer, and what its head reads and returns has to
    be those outputs and the logits themselves. Where that cannot be seen, the answer is no, which costs
    memory but is never wrong.
    """
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return False
    hidden = torch.empty(1, 2, head.in_features, device=head.weight.device, dtype=head.weight.dtype)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=hidden.device)
    seen: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: seen.extend((inputs[0], output)))
    try:
        with _returning(hidden, hf.base_model, hf.get_decoder()):
            logits = hf(input_ids=ids, use_cache=False).logits
    except Exception:  # a forward that wants more than a decoder's output may fail in any way
        return False
    finally:
        hook.remove()
    return len(seen) == 2 and (seen[0] is hidden or seen[0]._base is hidden) and seen[1] is logits


@contextmanager
def _returning(hidden: Tensor, *modules: nn.Module) -> Iterator[None]:
    """Lets modules return `hidden` instead of computing it."""
    distinct = set(modules)
    for module in distinct:
        module.forward = lambda *args, **kwargs: BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden
        )
    try:
        yield
    finally:
        for module in distinct:
            del module.forward


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
