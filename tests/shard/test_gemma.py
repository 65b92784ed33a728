"""Gemma 2 and 3: shapes and defaults from config.json against transformers' configurations, soft caps and norm gains. Logits and
tokens: test_against_transformers.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.shard.config import ShardConfig
from penstock.shard.loading import load
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Unsupported
from penstock.shard.step import Span
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Traffic
from penstock.tests.shard.test_against_transformers import SpanRunner, assert_logits_close, check_greedy, prompt

GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
# As on the hub; most missing fields have transformers' defaults.
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
GEMMA3_1B = GEMMA3 | {
    "vocab_size": 262_144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rope_local_base_freq": 10000,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "sliding_window": 512,
    "layer_types": None,
    "sliding_window_pattern": 6,
}
GEMMA3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
KINDS_WITHOUT_PATTERN = {
    "layer_types": ["full_attention", *["sliding_attention"] * 25],
    "sliding_window_pattern": None,  # not read then
}


@pytest.mark.parametrize(
    ("config", "config_class"),
    [
        (GEMMA2_2B, transformers.Gemma2Config),
        (GEMMA3_1B, transformers.Gemma3TextConfig),
        (GEMMA3_1B | KINDS_WITHOUT_PATTERN, transformers.Gemma3TextConfig),
        (GEMMA3_4B, transformers.Gemma3TextConfig),
    ],
)
def test_shapes_equal_transformers_config(config: dict[str, Any], config_class: Any) -> None:
    fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    expected = config_class(**fields)
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    found = shape(config if "architectures" in config else nested)
    kinds = ["sliding_attention" if window else "full_attention" for window in found.windows]
    assert kinds == expected.layer_types
    assert set(found.windows) == {0, expected.sliding_window}
    assert (found.heads, found.kv_heads, found.head_size) == (
        expected.num_attention_heads,
        expected.num_key_value_heads,
        expected.head_dim,
    )
    assert (found.vocabulary, found.max_positions, found.tied) == (expected.vocab_size, expected.max_position_embeddings, True)
    assert (found.softcap, found.final_softcap) == (expected.attn_logit_softcapping or 0, expected.final_logit_softcapping or 0)
    assert found.attention_scale == expected.query_pre_attn_scalar**-0.5
    ropes = expected.rope_parameters
    expected_ropes = [ropes["full_attention"], ropes["sliding_attention"]] if found.local_rope else [ropes]
    for rope, values in zip([found.rope, found.local_rope], expected_ropes, strict=False):
        assert rope is not None
        assert (rope.theta, rope.kind, rope.factor) == (values["rope_theta"], values["rope_type"], values.get("factor", 1))


def test_rope_of_sliding_layers_may_be_scaled() -> None:
    """Without original_max_position_embeddings, relative to the model's own number of positions."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0}
    found = shape(GEMMA3_1B | {"rope_parameters": {"sliding_attention": yarn}, "max_position_embeddings": 2048})
    assert found.local_rope is not None
    assert (found.local_rope.kind, found.local_rope.theta, found.local_rope.original_positions) == ("yarn", 100.0, 2048)
    assert (found.rope.kind, found.rope.theta) == ("default", 1e6)


def test_text_logits_of_a_checkpoint_with_an_image_encoder_equal_transformers(tmp_path: Path) -> None:
    """Its tensors have other names, and the text has a config of its own."""
    reference = tiny.reference("gemma3")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = transformers.Gemma3Config(text_config=reference.config.to_dict(), vision_config=vision | {"patch_size": 14})
    vision_model = transformers.Gemma3ForConditionalGeneration(config)
    vision_model.model.language_model.load_state_dict(reference.model.state_dict())
    vision_model.save_pretrained(tmp_path)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    runner = SpanRunner("gemma3", 16)
    runner.engine.decoder = load(ShardConfig(folder=str(tmp_path), model="m"), lambda stage: None).decoder
    runner.engine.resize(64)
    tokens = prompt(3, 40)
    sequence = runner.start(())
    assert_logits_close(runner.run([Span(sequence, 0, tokens, wanted=40)]), tiny.expected_logits("gemma3", tokens))


def test_shared_prefix_attention_is_off_with_logit_softcapping() -> None:
    """The merge of partial attention does not know of capped logits."""
    prompts = (prompt(1, 40),) * 3
    check_greedy("gemma2-full", tiny.engine("gemma2-full"), prompts, Traffic())


def test_norm_gains_are_rounded_to_bfloat16_before_1_is_added() -> None:
    """Gains are stored as differences from 1, and 1 + 0.002 would be 1 in bfloat16."""
    folder = tiny.folder("gemma2")
    found = load(ShardConfig(folder=str(folder), model="m", dtype="bfloat16"), lambda stage: None).decoder
    stored = tiny.reference("gemma2").model.norm.weight.to(torch.bfloat16).float()
    assert found.norm.equal(stored + 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern 0"),
        ({"sliding_window": None}, "sliding_window null, and there are layers that slide"),
        ({"sliding_window": 0}, "sliding_window 0, and there are layers that slide"),
        ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping -1.0"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear'"),
        ({"rope_parameters": {"rope_type": "default"}}, "an object for each kind"),
        ({"rope_parameters": {"chunked_attention": {}}}, "chunked_attention"),
        ({"rope_parameters": {"full_attention": {}}, "rope_scaling": {"rope_type": "linear"}}, "leave one of them"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 3}, "text_config 3"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        shape(GEMMA3_1B | changed)
