"""Gemma 4: shapes and defaults from config.json against transformers' configurations, KV caches that differ by layer, and layers
without keys of their own. Logits and tokens: test_against_transformers.py."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.shard.config import ShardConfig
from penstock.shard.loading import load
from penstock.shard.models.decoder import Layer
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Unsupported
from penstock.shard.models.traits import Keys
from penstock.shard.step import Span
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Traffic, drive
from penstock.tests.shard.test_against_transformers import SpanRunner, assert_logits_close, check_preemption, prompt

# Sizes of a model on the hub; missing fields have transformers' defaults.
TEXT = {
    "vocab_size": 262_144,
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 0,
    "num_experts": None,
    "moe_intermediate_size": None,
}
TEXT_ONLY = TEXT | {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
WITH_IMAGES = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": TEXT | {"model_type": "gemma4_text"},
}


EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704}


@pytest.mark.parametrize("config", [TEXT_ONLY, WITH_IMAGES, TEXT_ONLY | {"per_layer_config": {}}])
def test_shapes_equal_transformers_config(config: dict[str, Any]) -> None:
    fields = {name: value for name, value in config.items() if name == "per_layer_config"}
    expected, found = transformers.Gemma4TextConfig(**TEXT, **fields), shape(config)
    kinds = ["sliding_attention" if window else "full_attention" for window in found.windows]
    assert kinds == expected.layer_types
    for layer, window in enumerate(found.windows):
        layer_config, keys = expected.per_layer_config[layer], found.keys(window)
        assert (keys.heads, keys.size) == (layer_config.num_key_value_heads, layer_config.head_dim)
        assert keys.values == (window > 0)
    assert (found.vocabulary, found.max_positions, found.tied) == (expected.vocab_size, expected.max_position_embeddings, True)
    assert (found.attention_scale, found.final_softcap) == (1.0, 30.0)
    assert found.local_rope is not None
    assert (found.rope.kind, found.rope.theta, found.rope.part) == ("proportional", 1e6, 0.25)
    assert (found.local_rope.kind, found.local_rope.theta) == ("default", 1e4)


def test_experts_that_the_unified_one_has_not() -> None:
    """As its own config.json says."""
    none = ("num_experts", "moe_intermediate_size")
    text = TEXT | {"model_type": "gemma4_unified_text"}
    told, untold = (
        {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": fields}
        for fields in (text, {name: value for name, value in text.items() if name not in none})
    )
    assert shape(told) == shape(untold)


def test_fields_missing_in_config_json_have_transformers_defaults() -> None:
    for architecture, expected in (
        ("Gemma4ForCausalLM", transformers.Gemma4TextConfig()),
        ("Gemma4UnifiedForCausalLM", transformers.Gemma4UnifiedTextConfig()),
    ):
        found = shape({"architectures": [architecture], "hidden_size_per_layer_input": 0})
        sizes = (found.hidden, found.intermediate, found.layers, found.heads, found.kv_heads, found.head_size, found.max_positions)
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        assert sizes == tuple(expected.to_dict()[name] for name in (*names, "max_position_embeddings"))
        assert max(found.windows) == expected.sliding_window
        assert found.global_keys == Keys(heads=4, size=512)


def test_ranks_must_divide_the_narrow_mlps_too_where_the_last_ones_are_twice_as_wide() -> None:
    e = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "intermediate_size": 84}
    assert shape(TEXT_ONLY | e).fitting == [1, 2, 4]


def test_kv_cache_size_of_a_token_depends_on_the_layer_type() -> None:
    found = shape(TEXT_ONLY)
    full_layer, sliding_layer = found.windows.index(0), found.windows.index(1024)
    assert [found.slot(ranks, layer) for ranks in (1, 4) for layer in (full_layer, sliding_layer)] == [
        (2, 4, 512),
        (2, 16, 256),
        (2, 1, 512),
        (2, 4, 256),
    ]
    assert found.kv_elements(1) == 50 * 2 * 16 * 256 + 10 * 2 * 4 * 512
    assert found.fitting == [1, 2, 4, 8, 16, 32]
    assert [found.slot(32, layer) for layer in (full_layer, sliding_layer)] == [(2, 1, 512), (2, 1, 256)]
    engine = tiny.engine("gemma4", pages=3)
    assert [tuple(layer.shape) for layer in engine.cache.layers.values()] == [(64, 2, 4, 16), (64, 2, 2, 32)] * 2
    assert [len(part) for part in engine.cache.pages] == [2, 2]
    assert engine.layer_bytes == 4 * 2 * 4 * 16


@pytest.mark.parametrize("seed", range(3))
def test_layers_without_own_keys_compute_only_rows_whose_logits_are_wanted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log-probabilities stay the same, for mixtures of prompts and decodes. Where all logits are wanted, all rows are
    computed."""
    counts = list[tuple[int, int]]()
    transform = Layer.transform

    def counted(layer: Layer, attended: Any, stream: Any, inputs: Any = None) -> None:
        counts.append((layer.index, len(attended[0])))
        transform(layer, attended, stream, inputs)

    groups = [tiny.group(uid, prompt(uid, 9 + 11 * uid), 6, choices=1 + uid % 2) for uid in range(4)]
    requests = [*groups, tiny.group(9, prompt(9, 20), 3, prompt_logprobs=True)]
    unnarrowed_engine = tiny.engine("gemma4-e", page_size=4, pages=200)
    unnarrowed_engine.forward.narrows = False
    expected_result = drive(unnarrowed_engine, copy.deepcopy(requests), Traffic(7), seed=seed)
    monkeypatch.setattr(Layer, "transform", counted)
    found = drive(tiny.engine("gemma4-e", page_size=4, pages=200), requests, Traffic(7), seed=seed)
    assert found.tokens == expected_result.tokens
    for key, logprobs in expected_result.logprobs.items():
        assert found.logprobs[key] == pytest.approx(logprobs, abs=1e-4)
    rows = [sum(count for index, count in counts if index == layer) for layer in range(4)]
    assert rows[0] == rows[1] > 1.5 * rows[2]
    assert rows[2] == rows[3]


def test_zero_padded_layer_numbers_in_per_layer_config_are_read() -> None:
    """transformers pads them if there are ten layers or more."""
    saved = transformers.Gemma4TextConfig(**TEXT).to_dict()
    assert "05" in saved["per_layer_config"]
    assert shape(saved | {"architectures": ["Gemma4ForCausalLM"]}) == shape(TEXT_ONLY)


def test_layers_that_share_keys_have_the_cache_scales_of_the_layer_that_writes_them(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.folder("gemma4-e"), tmp_path / "model"))
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    scales = {
        f"model.layers.{layer}.self_attn.{part}_scale": torch.tensor(2.0 + layer + number / 2)
        for layer in range(2)
        for number, part in enumerate("kv")
    }
    safetensors.torch.save_file(stored | scales, folder / "model.safetensors", {"format": "pt"})
    layers = load(ShardConfig(folder=str(folder), model="m"), lambda stage: None).decoder.layers
    found = [layer.attention.scales[:, 0].tolist() for layer in layers]  # type: ignore[union-attr]
    assert found == [[2.0, 2.5], [3.0, 3.5]] * 2


def test_layers_that_share_keys_use_the_same_cache() -> None:
    """They take no memory of their own."""
    engine = tiny.engine("gemma4-e", pages=3)
    layers = engine.cache.layers
    assert layers[2] is layers[0]
    assert layers[3] is layers[1]
    assert [len(part) for part in engine.cache.pages] == [1, 1]
    model = engine.decoder.shape
    assert [model.source(layer) for layer in range(4)] == [0, 1, 0, 1]
    assert engine.token_bytes == 4 * 2 * (4 * 16 + 4 * 32)
    assert [layer.mlp.down.shape[1] for layer in engine.decoder.layers] == [model.intermediate] * 2 + [2 * model.intermediate] * 2


@pytest.mark.parametrize("name", ["gemma4", "gemma4-e", "gemma4-experts", "gemma4-values"])
@pytest.mark.parametrize("computed", [0, 6])
def test_preempted_requests_get_transformers_tokens(name: str, computed: int) -> None:
    check_preemption(name, 7 + computed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input -1"),
        ({"hidden_size_per_layer_input": "256"}, "hidden_size_per_layer_input '256'"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input 100"),
        ({"hidden_size_per_layer_input": 8, "pad_token_id": None}, "pad_token_id null"),
        ({"num_kv_shared_layers": 60}, "num_kv_shared_layers 60"),
        ({"num_kv_shared_layers": 56}, "num_kv_shared_layers 56: before these there must be layers of all kinds"),
        ({"num_kv_shared_layers": "2"}, "num_kv_shared_layers '2'"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers -1"),
        ({"use_double_wide_mlp": 1}, "use_double_wide_mlp 1"),
        (EXPERTS | {"use_double_wide_mlp": True, "num_kv_shared_layers": 2}, "use_double_wide_mlp together with enable_moe_block"),
        ({"enable_moe_block": 1}, "enable_moe_block 1"),
        ({"enable_moe_block": True}, "num_experts null, and there are experts"),
        ({"enable_moe_block": True, "num_experts": 8}, "lacks 'top_k_experts'"),
        (EXPERTS | {"top_k_experts": 9}, "9, of 8 experts"),
        (EXPERTS | {"top_k_experts": 0}, "top_k_experts 0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"layer_types": ["sliding_attention"] * 60, "sliding_window": 0}, "there are layers that slide"),
        ({"num_global_key_value_heads": 5}, "32 attention heads and 5 key/value heads"),
        ({"num_global_key_value_heads": "4"}, "num_key_value_heads '4' of layers that see all"),
        ({"global_head_dim": 0}, "head_dim 0 of layers that see all"),
        ({"global_head_dim": 33}, "heads of 33 numbers"),
        ({"attention_k_eq_v": "yes"}, "attention_k_eq_v 'yes'"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"per_layer_config": {"5": {"head_dim": 8}}}, "per_layer_config"),
        ({"per_layer_config": {"5": 3}}, "per_layer_config"),
        ({"per_layer_config": 3}, "per_layer_config 3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "rotary scaling 'yarn'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}},
            "partial_rotary_factor",
        ),
        ({"num_experts": "4"}, "num_experts '4'"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        shape(TEXT_ONLY | changed)


@pytest.mark.parametrize(
    ("name", "config_class", "model_class"),
    [
        ("gemma4", transformers.Gemma4Config, transformers.Gemma4ForConditionalGeneration),
        ("gemma4-unified", transformers.Gemma4UnifiedConfig, transformers.Gemma4UnifiedForConditionalGeneration),
    ],
)
def test_text_logits_of_a_checkpoint_with_an_image_encoder_equal_transformers(
    name: str, config_class: Any, model_class: Any, tmp_path: Path
) -> None:
    """Its tensors have other names, and the text has a config of its own."""
    reference = tiny.reference(name)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    vision = {"vision_config": small | {"num_key_value_heads": 2}} if name == "gemma4" else {}
    vision_model = model_class(
        config_class(text_config=reference.config.to_dict(), tie_word_embeddings=reference.config.tie_word_embeddings, **vision)
    )
    vision_model.model.language_model.load_state_dict(reference.model.state_dict())
    vision_model.lm_head.load_state_dict(reference.lm_head.state_dict())
    vision_model.save_pretrained(tmp_path)
    runner = SpanRunner(name, 16)
    runner.engine.decoder = load(ShardConfig(folder=str(tmp_path), model="m"), lambda stage: None).decoder
    runner.engine.resize(64)
    tokens = prompt(3, 40)
    assert_logits_close(runner.run([Span(runner.start(()), 0, tokens, wanted=40)]), tiny.expected_logits(name, tokens))
