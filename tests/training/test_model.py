"""The model and its weights: what is loaded is what Transformers would load, however it is sharded."""

import json
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from tests.training.engine import (
    TINY,
    configured,
    gradients,
    micro_batches,
    parameters,
    relative_error,
    tiny_model,
)
from tests.training.ranks import run_ranks
from training import optimizer
from training.config import UsageError
from training.errors import JobError
from training.model import CausalLM, build, check_context, named_architecture, read_config
from training.shape import QWEN25_1_5B, ModelShape
from training.step import train_step
from training.weights import FileWeights, RandomWeights, load_weights

CPU = torch.device("cpu")
SIZES = {"vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ARCHITECTURES = {
    "qwen2": transformers.Qwen2Config(
        **SIZES, num_key_value_heads=2, intermediate_size=48, tie_word_embeddings=True
    ),
    "llama": transformers.LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        intermediate_size=48,
        tie_word_embeddings=False,
        rope_parameters=LLAMA3_ROPE,
    ),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES, intermediate_size=64, tie_word_embeddings=False),
    "gpt2": transformers.GPT2Config(
        vocab_size=131, n_embd=32, n_layer=3, n_head=4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0
    ),
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0),
    # Its logits are capped, and its layers alternate between sliding windows and full attention.
    "gemma2": transformers.Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        intermediate_size=48,
        head_dim=8,
        final_logit_softcapping=5.0,
        sliding_window=8,
    ),
    # Its head has a bias.
    "phi": transformers.PhiConfig(**SIZES, intermediate_size=64),
}


def _save(folder, kind, dtype=torch.float32, **how):
    torch.manual_seed(1)
    # No two elements equal, norms and biases included: a transposed or shifted shard cannot go unnoticed.
    hf = AutoModelForCausalLM.from_config(ARCHITECTURES[kind], dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    hf.to(dtype).save_pretrained(folder, **how)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tied and untied, one file and several with an index, bf16 and fp32."""
    root = tmp_path_factory.mktemp("models")
    several = {"max_shard_size": "20KB"}
    saved = {
        "tied-fp32": _save(root / "tied-fp32", "qwen2"),
        "tied-bf16-several": _save(root / "tied-bf16", "qwen2", torch.bfloat16, **several),
        "untied-bf16": _save(root / "untied-bf16", "llama", torch.bfloat16),
        "untied-fp32-several": _save(root / "untied-fp32", "llama", **several),
    }
    assert (root / "tied-bf16" / "model.safetensors.index.json").exists()
    return saved


def _loaded(worker, nodes, folder):
    hf_config = read_config(folder)
    model = tiny_model(worker, nodes, configured(), hf_config=hf_config, weights=FileWeights(folder))
    is_tied = model.hf.get_input_embeddings().weight is model.hf.get_output_embeddings().weight
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return parameters(model), buffers, is_tied


def _loaded_all(worker, nodes, folders):
    return {name: _loaded(worker, nodes, folder) for name, folder in folders.items()}


@pytest.mark.parametrize(
    "nodes", [["a"], ["a", "a"], ["a", "b", "a", "b"]], ids=["1 rank", "2 ranks", "2 x 2 ranks"]
)
def test_shards_hold_exactly_what_from_pretrained_loads(folders, nodes):
    for rank in run_ranks(_loaded_all, len(nodes), nodes, folders, nodes=nodes):
        for name, (loaded, buffers, is_tied) in rank.items():
            expected = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
            assert loaded.keys() == {f"hf.{name}" for name, _ in expected.named_parameters()}
            assert is_tied == name.startswith("tied")
            for key, parameter in expected.named_parameters():
                assert torch.equal(loaded[f"hf.{key}"], parameter), (name, key)
            for key, buffer in expected.named_buffers():
                assert torch.equal(buffers[f"hf.{key}"], buffer), (name, key)


def _compare_with_transformers(worker, nodes, folder):
    """Loss and gradients of a step, and those of the Hugging Face model with plain cross-entropy."""
    pairs = micro_batches(1, vocab_size=131)
    model = tiny_model(
        worker, nodes, configured(), hf_config=read_config(folder), weights=FileWeights(folder)
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.zero_grad = lambda set_to_none=True: None
    loss = train_step(model, sgd, pairs, configured(max_grad_norm=0.0)).read().loss
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids, labels = pairs[0]
    expected = F.cross_entropy(hf(input_ids=ids, use_cache=False).logits.flatten(0, 1), labels.flatten())
    expected.backward()
    expected_gradients = {f"hf.{name}": parameter.grad for name, parameter in hf.named_parameters()}
    return loss, gradients(model), expected.item(), expected_gradients


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_loss_and_gradients_of_every_architecture_are_those_of_transformers(tmp_path, kind):
    folder = _save(tmp_path, kind)
    for loss, found, expected_loss, expected in run_ranks(_compare_with_transformers, 2, ["a", "a"], folder):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert relative_error(found, expected) < 2e-5, kind


OTHER_HEADS = {
    "cohere": transformers.CohereConfig(**SIZES, num_key_value_heads=2, intermediate_size=48, pad_token_id=0),
    "granite": transformers.GraniteConfig(
        **SIZES, num_key_value_heads=2, intermediate_size=48, logits_scaling=8.0
    ),
}


def test_heads_that_do_more_than_a_product_are_recognised():
    plain = {
        kind: build(hf_config).has_plain_head for kind, hf_config in (ARCHITECTURES | OTHER_HEADS).items()
    }
    assert plain == {kind: kind not in ("gemma2", "phi", *OTHER_HEADS) for kind in plain}


def test_a_transformer_whose_hidden_states_are_changed_before_the_head_is_recognised():
    class Halved(transformers.LlamaForCausalLM):
        def forward(self, input_ids, **kwargs):
            return CausalLMOutput(logits=self.lm_head(self.model(input_ids, **kwargs)[0] / 2))

    assert not CausalLM(Halved(ARCHITECTURES["llama"])).has_plain_head


def _rows_read(worker, nodes, folder):
    weights = FileWeights(folder)
    read = weights.rows
    sizes = []

    def counted(names, shape, start, stop):
        tensor = read(names, shape, start, stop)
        sizes.append(tensor.numel())
        return tensor

    weights.rows = counted
    model = tiny_model(worker, nodes, configured(), hf_config=read_config(folder), weights=weights)
    return sum(sizes), sum(parameter.to_local().numel() for parameter in model.parameters())


def test_each_rank_reads_only_its_own_rows(folders):
    outcomes = run_ranks(_rows_read, 4, ["a"] * 4, folders["untied-bf16"])
    assert all(num_read == num_held for num_read, num_held in outcomes)
    hf = AutoModelForCausalLM.from_pretrained(folders["untied-bf16"])
    assert sum(num_read for num_read, _ in outcomes) == sum(
        parameter.numel() for parameter in hf.parameters()
    )


def test_pytorch_files_are_read_like_safetensors(folders, tmp_path):
    expected = AutoModelForCausalLM.from_pretrained(folders["untied-bf16"], dtype=torch.float32)
    torch.save(expected.state_dict(), tmp_path / "pytorch_model.bin")
    model = build(expected.config)
    load_weights(model, FileWeights(tmp_path), CPU)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.hf.get_parameter(name), parameter)


def test_files_of_a_model_without_its_head_are_recognised(tmp_path):
    hf = transformers.GPT2LMHeadModel(ARCHITECTURES["gpt2"])
    hf.transformer.save_pretrained(tmp_path)
    model = build(ARCHITECTURES["gpt2"])
    load_weights(model, FileWeights(tmp_path), CPU)
    assert torch.equal(model.hf.transformer.h[1].attn.c_attn.weight, hf.transformer.h[1].attn.c_attn.weight)


@pytest.mark.parametrize("boundaries", [[0, 259], [0, 65, 130, 195, 259], [0, 1, 256, 257, 259]])
def test_random_weights_do_not_depend_on_how_they_are_cut(boundaries):
    weights, shape = RandomWeights(3, 0.02), torch.Size([259, 8])
    whole = weights.rows(["embed.weight"], shape, 0, 259)
    pieces = [weights.rows(["embed.weight"], shape, *piece) for piece in pairwise(boundaries)]
    assert torch.equal(torch.cat(pieces), whole)
    assert whole.std() == pytest.approx(0.02, rel=0.1)


def test_random_weights_depend_on_seed_name_and_row():
    shape = torch.Size([512, 4])
    drawn = [
        RandomWeights(seed, 1.0).rows([name], shape, 0, 512) for seed, name in [(0, "a"), (1, "a"), (0, "b")]
    ]
    assert not any(torch.equal(one[:256], other[:256]) for one, other in pairwise(drawn))
    assert not torch.equal(drawn[0][:256], drawn[0][256:])


def test_norms_start_at_one_and_biases_at_zero():
    model = build(TINY)
    load_weights(model, RandomWeights(0, 0.02), CPU)
    assert model.last_norm.weight.eq(1).all()
    assert model.layers[0].self_attn.q_proj.bias.eq(0).all()


def test_tied_weights_are_one_parameter_for_the_optimizer():
    model = build(TINY)
    load_weights(model, RandomWeights(0, 0.02), CPU)
    shared = model.hf.lm_head.weight
    assert shared is model.hf.model.embed_tokens.weight
    groups = optimizer.build(model, 1e-3, 0.1).param_groups
    assert sum(parameter is shared for group in groups for parameter in group["params"]) == 1


@pytest.mark.parametrize(
    ("name", "num_parameters"), [("tiny", 263_424), ("qwen2.5-1.5b-random", 1_543_714_304)]
)
def test_named_architectures_have_the_size_their_help_promises(name, num_parameters):
    model = build(named_architecture(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert ModelShape.from_hf_config(named_architecture(name)).num_parameters() == num_parameters
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in model.parameters())


def test_the_random_architecture_has_the_shape_of_qwen():
    assert ModelShape.from_hf_config(named_architecture("qwen2.5-1.5b-random")) == QWEN25_1_5B


def test_two_weights_that_should_be_tied_are_refused():
    model = build(TINY)
    model.hf.lm_head.weight = torch.nn.Parameter(model.hf.lm_head.weight.clone())
    with pytest.raises(JobError, match=r"qwen2.*share one weight.*not supported"):
        model.require_tied()


@pytest.mark.parametrize(
    "hf_config", [transformers.T5Config(), transformers.ViTConfig()], ids=["seq2seq", "images"]
)
def test_unsupported_models_say_so_in_one_sentence(hf_config):
    with pytest.raises(JobError, match=f"model type {hf_config.model_type}: ") as raised:
        build(hf_config)
    assert "\n" not in str(raised.value)


def test_a_model_without_a_list_of_layers_is_refused():
    hf = transformers.Qwen2ForCausalLM(TINY)
    hf.model.layers = torch.nn.Sequential(*hf.model.layers)
    with pytest.raises(JobError, match=r"model type qwen2: no list of 4 decoder layers.*not supported"):
        CausalLM(hf)


def test_a_buffer_that_nobody_computes_is_refused():
    model = build(TINY)
    model.hf.model.register_buffer("mystery", torch.zeros(3, device="meta"), persistent=False)
    with pytest.raises(JobError, match=r"buffer model.mystery is in no file"):
        load_weights(model, RandomWeights(0, 0.02), CPU)


def test_sequences_longer_than_the_context_are_refused_with_both_lengths():
    check_context(TINY, configured(seq_len=4096))
    with pytest.raises(UsageError, match=r"--seq-len 4097.*at most 4096 tokens"):
        check_context(TINY, configured(seq_len=4097))


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(JobError, match="no weights"):
        FileWeights(tmp_path)


def test_a_damaged_file_is_named(folders, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{broken")
    with pytest.raises(JobError, match=r"model.safetensors: cannot be read"):
        FileWeights(tmp_path)


def test_a_file_that_the_index_names_but_is_missing_is_named(tmp_path):
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(JobError, match=r"model-00001-of-00001.safetensors: cannot be read"):
        FileWeights(tmp_path)


def test_weights_of_another_model_are_refused_with_the_tensor(folders):
    with pytest.raises(JobError, match=r"lack the tensor model.layers.0.self_attn.q_proj.bias"):
        load_weights(build(ARCHITECTURES["qwen2"]), FileWeights(folders["untied-fp32-several"]), CPU)
    with pytest.raises(
        JobError, match=r"embed_tokens.weight is \[131, 32\], but config.json describes \[259, 64\]"
    ):
        load_weights(build(TINY), FileWeights(folders["tied-fp32"]), CPU)


def test_a_folder_without_a_usable_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(JobError, match=f"{tmp_path}: config.json cannot be used"):
        read_config(str(tmp_path))
