"""Model families of 2019 to 2023 (GPT-2 to Falcon and DBRX), with other tensor names, layouts and config fields, learned positions
and ALiBi: logits and defaults against transformers, and refusals."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from penstock.shard.config import ShardConfig
from penstock.shard.loading import load
from penstock.shard.models.alibi import alibi_biases
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Shape, Unsupported
from penstock.shard.step import Span
from penstock.tests.shard import lora, tiny
from penstock.tests.shard.test_against_transformers import SpanRunner, assert_logits_close, prompt
from penstock.tests.shard.test_heads import TOKENS, logits
from penstock.tests.shard.test_weights import WEIGHTS

CONFIG_CLASSES = {
    "BloomForCausalLM": transformers.BloomConfig,
    "DbrxForCausalLM": transformers.DbrxConfig,
    "FalconForCausalLM": transformers.FalconConfig,
    "GPT2LMHeadModel": transformers.GPT2Config,
    "GPTBigCodeForCausalLM": transformers.GPTBigCodeConfig,
    "GPTJForCausalLM": transformers.GPTJConfig,
    "GPTNeoForCausalLM": transformers.GPTNeoConfig,
    "GPTNeoXForCausalLM": transformers.GPTNeoXConfig,
    "MptForCausalLM": transformers.MptConfig,
    "OPTForCausalLM": transformers.OPTConfig,
}
# Required sizes, by the field names of each family's config.json.
SIZES: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {"hidden_size": 256, "n_layer": 24, "n_head": 8},
    "DbrxForCausalLM": {"d_model": 256, "n_layers": 24, "n_heads": 8},
    "FalconForCausalLM": {"hidden_size": 256, "num_hidden_layers": 24, "num_attention_heads": 8},
    "GPTNeoForCausalLM": {"hidden_size": 256, "num_layers": 24, "num_heads": 8},
    "GPTNeoXForCausalLM": {"hidden_size": 256, "num_hidden_layers": 24, "num_attention_heads": 8, "intermediate_size": 99},
    "MptForCausalLM": {"d_model": 192, "n_layers": 24, "n_heads": 12},
    "OPTForCausalLM": {"hidden_size": 256, "num_hidden_layers": 24, "num_attention_heads": 8, "ffn_dim": 99},
    **{name: {"n_embd": 256, "n_layer": 24, "n_head": 8} for name in ("GPT2LMHeadModel", "GPTBigCodeForCausalLM")},
    "GPTJForCausalLM": {"n_embd": 256, "n_layer": 24, "n_head": 8, "rotary_dim": 16},
}


def copy_checkpoint(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.folder(name), tmp_path / "copy"))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("bloom", 4),
        ("dbrx", 2),
        ("dbrx", 4),
        ("dbrx-shares", 4),
        ("falcon", 2),
        ("falcon-7b", 4),
        ("falcon-one-norm", 4),
        ("falcon-rw", 4),
        ("falcon-serial", 2),
        ("gpt-bigcode", 4),
        ("gpt-bigcode-heads", 2),
        ("gpt-neo", 4),
        ("gpt-neox", 4),
        ("gpt-neox-serial", 2),
        ("gpt2", 4),
        ("gptj", 2),
        ("mpt", 2),
        ("mpt", 3),
        ("opt", 4),
        ("opt-plain", 2),
    ],
)
def test_logits_on_several_ranks_equal_transformers(name: str, ranks: int) -> None:
    assert_logits_close(logits(tiny.folder(name), ranks), tiny.expected_logits(name, TOKENS))


@pytest.mark.parametrize(
    "name", ["falcon-7b", "falcon-one-norm", "falcon-serial", "gpt-bigcode-heads", "gpt-neox-serial", "opt-plain"]
)
def test_logits_on_one_rank_equal_transformers(name: str) -> None:
    assert_logits_close(logits(tiny.folder(name), 1), tiny.expected_logits(name, TOKENS))


@pytest.mark.parametrize("architecture", CONFIG_CLASSES)
def test_fields_missing_in_config_json_have_transformers_defaults(architecture: str) -> None:
    fields = {"vocab_size": 99} | SIZES[architecture]
    full_config = json.loads(CONFIG_CLASSES[architecture](**fields).to_json_string(use_diff=False))

    def shape_of(config: dict[str, Any]) -> Shape:
        return shape(config | {"architectures": [architecture]})

    assert shape_of(fields) == shape_of(full_config)
    lengths = [full_config[name] for name in ("max_position_embeddings", "n_positions", "max_seq_len") if name in full_config]
    assert [shape_of(fields).max_positions] == (lengths or [2048])  # transformers has no maximum for BLOOM


@pytest.mark.parametrize(("name", "root", "other"), [("gpt2", "transformer.", ""), ("opt", "model.decoder.", "decoder.")])
def test_tensor_names_without_the_usual_prefix_are_read(name: str, root: str, other: str, tmp_path: Path) -> None:
    """As in the first checkpoints of these families."""
    folder = copy_checkpoint(name, tmp_path)
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    safetensors.torch.save_file({key.replace(root, other, 1): value for key, value in stored.items()}, folder / WEIGHTS)
    assert_logits_close(logits(folder, 1), tiny.expected_logits(name, TOKENS))


@pytest.mark.parametrize("name", ["gpt2", "falcon", "gpt-neox"])
def test_joint_qkv_tensor_counts_once_in_loading_progress(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though queries, keys and values are cut from it separately."""
    read: list[int] = []
    monkeypatch.setattr("penstock.shard.loading.Progress.__call__", lambda progress, count: read.append(count))
    loaded = load(ShardConfig(folder=str(tiny.folder(name)), model=name), lambda stage: None)
    assert sum(read) == loaded.decoder.shape.parameters()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_learned_positions_omit_the_offset_rows_of_opt(load_format: str) -> None:
    decoder = load(ShardConfig(folder=str(tiny.folder("opt")), model="m", load_format=load_format), lambda stage: None).decoder
    assert decoder.positions is not None
    assert decoder.positions.shape == (decoder.shape.max_positions, 64)
    if load_format == "auto":
        stored = safetensors.torch.load_file(tiny.folder("opt") / WEIGHTS)["model.decoder.embed_positions.weight"]
        assert decoder.positions.equal(stored[2:])


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, "post_layernorm true is not supported"),
        ("DbrxForCausalLM", {"ffn_config": {"ffn_act_fn": "silu"}}, "ffn_act_fn 'silu', an object is needed"),
        ("DbrxForCausalLM", {"ffn_config": 5}, "ffn_config 5, an object is needed"),
        ("DbrxForCausalLM", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "hidden_act 'gelu' is not supported"),
        ("DbrxForCausalLM", {"ffn_config": {"moe_normalize_expert_weights": 2}}, "moe_normalize_expert_weights 2 is not supported"),
        (
            "DbrxForCausalLM",
            {"attn_config": {"rope_theta": 5e5}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_theta 500000.0 of attention, and 10000 in rope_parameters",
        ),
        ("FalconForCausalLM", {"alibi": True}, "alibi is not supported where 8 heads share 1 keys"),
        ("FalconForCausalLM", {"bias": "yes"}, "config.json says bias 'yes', true or false is needed"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true is not supported"),
        ("GPT2LMHeadModel", {"activation_function": "tanh"}, "hidden_act 'tanh' is not supported"),
        ("GPT2LMHeadModel", {"n_layer": 0}, "num_hidden_layers 0"),
        ("GPT2LMHeadModel", {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}, "weights of few bits"),
        ("GPTJForCausalLM", {"rotary_dim": 34}, "rotary_dim 34, an even number up to 32"),
        ("GPTNeoForCausalLM", {"attention_types": [[["global"], 2]]}, "attention_types [[['global'], 2]], global or local"),
        ("GPTNeoForCausalLM", {"attention_types": 3}, "attention_types 3, global or local"),
        ("MptForCausalLM", {"attn_config": {"alibi": False}}, "alibi false is not supported"),
        ("MptForCausalLM", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type 'multiquery_attention' is not"),
        ("MptForCausalLM", {"attn_config": {"clip_qkv": -1}}, "clip_qkv -1, a number above 0"),
        ("MptForCausalLM", {"attn_config": {"prefix_lm": True}}, "prefix_lm true is not supported"),
        ("MptForCausalLM", {"expansion_ratio": 3}, "expansion_ratio 3 is not supported: for this family the decoder has 4"),
        ("MptForCausalLM", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale 'inv_sqrt_d_model' is not supported"),
        ("MptForCausalLM", {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm' is not supported"),
        ("MptForCausalLM", {"no_bias": False}, "no_bias false is not supported"),
        ("MptForCausalLM", {"expansion_ratio": None}, "expansion_ratio null is not supported: for this family the decoder has 4"),
        ("MptForCausalLM", {"logit_scale": 0}, "logit_scale 0 is not supported: for this family the decoder has none"),
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before false is not supported"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 128}, "word_embed_proj_dim 128 is not supported"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(architecture: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported) as refused:
        shape({"architectures": [architecture], "vocab_size": 99} | SIZES[architecture] | fields)
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["bloom", "falcon-rw", "mpt"])
def test_alibi_logits_at_large_positions_equal_transformers(name: str) -> None:
    """At positions that transformers rounds for Falcon."""
    runner, tokens = SpanRunner(name, 16), prompt(5, 500)
    sequence = runner.start(tokens[:300])
    found = [
        runner.run([Span(sequence, start, tokens[start:stop], wanted=stop - start)]) for start, stop in ((300, 499), (499, 500))
    ]
    assert_logits_close(torch.cat(found), tiny.expected_logits(name, tokens)[300:])


@pytest.mark.parametrize("heads", [*range(1, 20), 32, 40, 64, 71, 112])
def test_alibi_slopes_equal_transformers(heads: int) -> None:
    sizes = {"hidden_size": 8 * heads, "num_hidden_layers": 1, "num_attention_heads": heads, "vocab_size": 9}
    bloom, mpt = (shape(sizes | {"architectures": [f"{name}ForCausalLM"], "alibi_bias_max": 5}) for name in ("Bloom", "MPT"))
    assert bloom.alibi is not None
    assert mpt.alibi is not None
    found, mpt_slopes = (torch.tensor(alibi_shape.alibi.slopes) * 8**-0.5 for alibi_shape in (bloom, mpt))
    torch.testing.assert_close(found, _get_alibi_slopes(heads, tiny.CPU))
    torch.testing.assert_close(mpt_slopes, -build_mpt_alibi_tensor(heads, 2, 5)[:, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bloom", "falcon-rw", "mpt"])
def test_alibi_table_is_exact_in_16_bit_formats(name: str, dtype: torch.dtype) -> None:
    model_shape = replace(tiny.decoder(name).shape, max_positions=40_000)
    assert model_shape.alibi is not None
    found = alibi_biases(model_shape, 1, 2, dtype, tiny.CPU).double().sum(2)
    slopes = torch.tensor(model_shape.alibi.slopes[model_shape.heads // 2 :])
    positions = torch.arange(40_000).unsqueeze(1)
    expected = (slopes.bfloat16() * positions if model_shape.alibi.rounded else slopes * positions).double()
    relative_error = (found - expected).abs() / expected.clamp(min=1)
    assert relative_error.max() < (1e-7 if dtype == torch.float16 else 1e-30)  # small values have fewer bits in float16


def test_alibi_with_too_many_positions_for_float16_is_refused() -> None:
    model_shape = replace(tiny.decoder("bloom").shape, max_positions=1 << 20)
    alibi_biases(model_shape, 0, 1, torch.bfloat16, tiny.CPU)
    with pytest.raises(Unsupported, match="1048576 positions with ALiBi are too many for float16: use --dtype bfloat16"):
        alibi_biases(model_shape, 0, 1, torch.float16, tiny.CPU)


def test_alibi_with_an_8_bit_kv_cache_is_refused() -> None:
    with pytest.raises(Unsupported, match="ALiBi has more bits than keys of fp8_e4m3fn: leave --kv-cache-dtype out"):
        load(ShardConfig(folder=str(tiny.folder("bloom")), model="m", kv_cache_dtype="fp8_e4m3fn"), lambda stage: None)


def test_adapters_for_families_with_their_own_tensor_names_are_refused(tmp_path: Path) -> None:
    """Adapters have the family's tensor names, which are not translated."""
    adapter = lora.adapter(tiny.folder("gptj"), tmp_path / "adapter", seed=1)
    with pytest.raises(Unsupported, match=r"adapter a changes .*attn\.._proj.*, which is not supported"):
        load(ShardConfig(folder=str(tiny.folder("gptj")), model="m", adapters=(("a", str(adapter)),)), lambda stage: None)


def test_tensor_of_the_wrong_shape_is_refused_with_its_stored_name(tmp_path: Path) -> None:
    folder = copy_checkpoint("gpt-neox", tmp_path)
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    name = "gpt_neox.layers.1.attention.query_key_value.weight"
    safetensors.torch.save_file(stored | {name: torch.zeros(64, 64)}, folder / WEIGHTS)
    with pytest.raises(Unsupported, match=r"query_key_value.weight is \[64, 64\], config.json says \[192, 64\]"):
        logits(folder, 1)
