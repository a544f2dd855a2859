"""Counts follow from sizes: compared with real Transformers models built on the meta device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import transformers

from training.model import named_architecture
from training.shape import KNOWN_SHAPES, QWEN25_1_5B, ModelShape

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 101,
}


def test_the_published_model_has_its_published_number_of_parameters():
    assert QWEN25_1_5B.num_parameters() == 1_543_714_304
    untied = dataclasses.replace(QWEN25_1_5B, tied=False)
    assert untied.num_parameters() == 1_543_714_304 + 151_936 * 1536 == 1_777_088_000


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen2Config(**SIZES),
        transformers.LlamaConfig(**SIZES),
        transformers.LlamaConfig(**SIZES, attention_bias=True),
        transformers.MistralConfig(**SIZES, head_dim=16),
    ],
    ids=["qwen2", "llama", "llama-with-biases", "mistral-with-wide-heads"],
)
def test_parameters_are_those_of_the_real_model(config, tied):
    config.tie_word_embeddings = tied
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_hf_config(config).num_parameters() == real


def test_the_shape_of_the_published_model_is_read_from_its_configuration():
    config = transformers.Qwen2Config(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    assert ModelShape.from_hf_config(config) == QWEN25_1_5B


def test_other_families_are_read_by_their_own_names():
    expected = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "intermediate_size": 128,
    }
    from_class = ModelShape.from_hf_config(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99)
    )
    raw = SimpleNamespace(n_embd=32, n_layer=2, n_head=4, n_inner=None, vocab_size=99, model_type="gpt2")
    for shape in (from_class, ModelShape.from_hf_config(raw)):
        assert expected.items() <= dataclasses.asdict(shape).items()


def test_a_configuration_without_sizes_is_refused_by_name():
    with pytest.raises(ValueError, match="num_hidden_layers or n_layer"):
        ModelShape.from_hf_config(SimpleNamespace(hidden_size=4, num_attention_heads=2, vocab_size=9))


def test_flops_are_six_per_weight_and_the_causal_half_of_attention():
    weights_without_norms_and_biases = 1_543_714_304 - 28 * (2 * 1536 + 1536 + 2 * 256) - 1536
    assert QWEN25_1_5B.flops_per_token(0) == 6 * weights_without_norms_and_biases
    attention = QWEN25_1_5B.flops_per_token(2048) - QWEN25_1_5B.flops_per_token(0)
    assert attention == 6 * 28 * 1536 * 2048


def test_flops_do_not_depend_on_tying():
    untied = dataclasses.replace(QWEN25_1_5B, tied=False)
    assert untied.flops_per_token(2048) == QWEN25_1_5B.flops_per_token(2048)


@pytest.mark.parametrize("name", ["tiny", "qwen2.5-1.5b-random"])
def test_shapes_known_by_name_are_those_the_job_builds(name):
    assert KNOWN_SHAPES[name] == ModelShape.from_hf_config(named_architecture(name))
