"""GLM 5 Next: its shape from config.json against transformers, limits on page sizes and draft tokens, and tensor names. Logits and
tokens: test_against_transformers.py."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.launcher import roofline
from penstock.proto.speculation import Speculation
from penstock.shard.models.draft_families import check_speculation, draft_shape
from penstock.shard.models.families import shape
from penstock.shard.models.recurrent_shapes import KimiDeltaShape
from penstock.shard.models.shape import Shape, Unsupported
from penstock.shard.models.traits import HyperConnections, Index, Latent
from penstock.tests.shard import tiny
from penstock.tests.shard.test_weights import WEIGHTS, assert_same_weights, load_decoder

REQUIRED_SIZES = {
    "vocab_size": 154_880,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
}
ARCHITECTURE = {"architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next"}
LINEAR_ATTENTION_FIELDS = {"head_dim": 64, "num_heads": 32, "short_conv_kernel_size": 3}


def shape_of(**text: Any) -> Shape:
    return shape(ARCHITECTURE | {"text_config": REQUIRED_SIZES | text})


def test_shape_and_parameters_equal_transformers() -> None:
    """Also defaults of missing fields, and a config without text_config. 313 billion parameters, 17 of them active for a token."""
    found, config = shape_of(), transformers.Glm5NextConfig(text_config=REQUIRED_SIZES)
    with torch.device("meta"):
        model = transformers.Glm5NextForConditionalGeneration(config)
    text_parameters = [values for key, values in model.named_parameters() if "visual." not in key]
    corrections = [values for key, values in model.named_buffers() if "correction" in key]
    assert found.parameters() == sum(values.numel() for values in (*text_parameters, *corrections))
    assert (round(found.parameters() / 1e9), round(found.parameters(tokens=1) / 1e9)) == (313, 17)
    assert found == shape(config.to_dict() | ARCHITECTURE) == shape(REQUIRED_SIZES | ARCHITECTURE)
    attending = [layer for layer, kind in enumerate(config.text_config.layer_types) if kind == "indexed_attention"]
    assert found.indexing == found.keyed == attending
    assert [found.slot(ranks, 3) for ranks in (1, 8)] == [(1, 1, 512 + 2 * 128)] * 2
    index = Index(heads=32, size=128, most=2048, pool=16)
    assert found.latent == Latent(size=512, turned=0, plain=256, values=256, queries=1536, epsilon=1e-5, index=index)
    assert found.hyper == HyperConnections(count=4, magnitude=2.0, epsilon=1e-6, rounds=20, averaged=True)
    assert (found.attention_scale, found.rotary_elements, found.max_positions) == (1 / 16, 0, 1 << 20)
    assert found.fitting == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"linear_lower_bound": None},
        {"linear_lower_bound": -2.0},
        {"linear_attn_config": LINEAR_ATTENTION_FIELDS},
        {"linear_attn_config": LINEAR_ATTENTION_FIELDS | {"gate_lower_bound": -3.0}, "linear_lower_bound": None},
        {"linear_attn_config": LINEAR_ATTENTION_FIELDS, "linear_lower_bound": None},
        {"linear_attn_config": LINEAR_ATTENTION_FIELDS | {"safe_gate": False}, "linear_lower_bound": None},
    ],
)
def test_linear_attention_shape_equals_transformers(more: dict[str, Any]) -> None:
    """From fields at the top of config.json, or from those of linear_attn_config."""
    expected = transformers.Glm5NextTextConfig(**REQUIRED_SIZES | more)
    found = shape_of(**more).recurrent
    assert isinstance(found, KimiDeltaShape)
    assert (found.value_heads, found.value_size) == (expected.linear_num_heads, expected.linear_head_dim)
    assert (found.width, found.bound) == (expected.linear_conv_kernel_dim, expected.linear_lower_bound or 0)


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": ["indexed_attention"] * 4, "index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"layer_types": ["linear_attention", *["full_attention"] * 3], "index_topk_pattern": "SFSF"},
        {"layer_types": ["linear_attention", *["indexed_attention"] * 3], "indexer_types": ["shared", "full", "shared", "full"]},
    ],
)
def test_layers_that_share_an_indexer_are_those_of_transformers(more: dict[str, Any]) -> None:
    """Among layers with attention the first has an indexer of its own, whatever the pattern says of other layers."""
    fields = REQUIRED_SIZES | {"num_hidden_layers": 4} | more
    expected = transformers.Glm5NextTextConfig(**fields)
    found = shape(ARCHITECTURE | {"text_config": fields})
    kinds = zip(expected.layer_types, expected.indexer_types, strict=True)
    assert found.indexing == [layer for layer, kind in enumerate(kinds) if kind == ("indexed_attention", "full")]
    assert found.index is not None
    assert found.index.borrowing == frozenset(found.attending) - frozenset(found.indexing)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim 64 is not supported: for this family the decoder has none"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported"),
        ({"index_topk": 100}, "index_topk 100 and index_kpool 16, of which the first must be a multiple"),
        ({"index_kpool": 0}, "index_kpool 0, an integer from 1"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail false is not supported"),
        ({"q_lora_rank": None}, "q_lora_rank null: an index needs latents of queries"),
        ({"linear_lower_bound": 0}, "linear_lower_bound 0, a number below 0, or null"),
        ({"linear_lower_bound": "-5"}, "linear_lower_bound '-5', a number below 0"),
        ({"linear_attn_config": [1]}, r"linear_attn_config \[1\], an object is needed"),
        ({"linear_attn_config": {"num_heads": 0}}, "linear_num_heads 0, an integer from 1"),
        ({"linear_attn_config": {"safe_gate": 1}}, "safe_gate 1, true or false"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters 0, an integer from 1"),
        ({"hc_eps": 0}, "hc_eps 0, a number above 0"),
        ({"swiglu_limit": 0}, "swiglu_limit 0, a number above 0"),
        ({"layer_types": ["linear_attention"] * 45}, "layers of linear attention alone"),
        ({"layer_types": ["sliding_attention"] * 45}, "layer_types sliding_attention are not supported"),
        ({"indexer_types": ["full"] * 3 + ["shared"] * 42}, "the first of which has its own"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"mlp_bias": True}, "mlp_bias true is not supported"),
        ({"model_type": "glm6_next_text"}, "model_type 'glm6_next_text'"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        shape_of(**field)


def test_page_sizes_that_do_not_hold_whole_indexer_pools_are_refused() -> None:
    found = shape_of(index_kpool=32)
    found.check_pages(64)
    with pytest.raises(Unsupported, match=r"pages of 16 tokens don't hold whole pools of 32, .*--page-size 32"):
        found.check_pages(16)
    shape_of(index_kpool=1).check_pages(5)


def test_only_chains_of_draft_tokens_are_supported() -> None:
    """Also without recurrent layers: nodes of a tree are not in the order of their positions, which pools need."""
    found = shape_of(layer_types=["indexed_attention"] * 45)
    assert found.recurrent is None
    check_speculation(found, Speculation(draft="x", widths=(1, 1)))
    with pytest.raises(Unsupported, match="where blocks, pools or entries of tokens are chosen, drafts must be a chain"):
        check_speculation(found, Speculation(draft="x", widths=(2, 1)))
    with pytest.raises(Unsupported, match="an index chooses blocks of tokens there"):
        draft_shape(ARCHITECTURE | {"text_config": REQUIRED_SIZES | {"layer_types": ["indexed_attention"] * 45}}, found)


def test_hyper_connection_tensors_with_transformers_names_are_read(tmp_path: Path) -> None:
    """Other checkpoints have the hub's names."""
    stored = safetensors.torch.load_file(tiny.folder("glm-5-next") / WEIGHTS)
    assert any("hc_attn_fn" in name for name in stored)
    stored = {name.replace("hc_attn_", "attn_hc.").replace("hc_ffn_", "ffn_hc."): values for name, values in stored.items()}
    folder = Path(shutil.copytree(tiny.folder("glm-5-next"), tmp_path / "other"))
    safetensors.torch.save_file(stored, folder / WEIGHTS)
    assert_same_weights(load_decoder(folder), tiny.decoder("glm-5-next"))


def test_roofline_counts_selected_tokens_and_a_key_of_each_pool() -> None:
    """Latents of 2,048 tokens and 128 numbers of each pool of 16 tokens, but no gates and no other keys."""
    found = shape_of()
    group = roofline.Group(shape=found, ranks=1, nodes=1, item=2, token_bytes=found.kv_elements(1) * 2)
    layers = len(found.indexing)
    assert roofline.context_bytes(group, 100_000) == 2 * layers * (2048 * 512 + 100_000 * 128 // 16)
