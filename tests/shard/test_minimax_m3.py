"""MiniMax M3: its shape from config.json with the hub's or transformers' field names, checkpoints with the hub's tensor names,
memory for sparse attention, and refusals. Logits and tokens: test_against_transformers.py."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.kernels import indexed
from penstock.launcher import roofline
from penstock.proto.speculation import parse
from penstock.shard import memory
from penstock.shard.config import ShardConfig
from penstock.shard.loading import load
from penstock.shard.models.draft_families import check_speculation
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Shape, Unsupported
from penstock.shard.models.traits import HeadIndex
from penstock.tests.shard import lora, tiny
from penstock.tests.shard.driver import Traffic
from penstock.tests.shard.test_adapters import check_tokens, engine_of, mixed_prompts
from penstock.tests.shard.test_against_transformers import prompt
from penstock.tests.shard.test_quantized import logits
from penstock.tests.shard.test_weights import WEIGHTS, assert_same_weights, load_decoder

SPARSE_ATTENTION_FIELDS = {
    "sparse_num_index_heads": 4,
    "sparse_index_dim": 128,
    "sparse_block_size": 128,
    "sparse_topk_blocks": 16,
    "sparse_local_block": 1,
    "sparse_attention_freq": [0] * 3 + [1] * 57,
}
TEXT_FIELDS: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "vocab_size": 200_064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "swigluoai",
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "rope_theta": 5_000_000,
    "sparse_attention_config": SPARSE_ATTENTION_FIELDS,
    "moe_layer_freq": [0] * 3 + [1] * 57,
}
HUB_CONFIG = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "text_config": TEXT_FIELDS,
}


def text_shape(**more: Any) -> Shape:
    return shape(HUB_CONFIG | {"text_config": TEXT_FIELDS | more})


def test_shape_and_parameters_equal_transformers() -> None:
    """426 billion parameters, 26 of them active for a token."""
    found = text_shape()
    with torch.device("meta"):
        reference = transformers.MiniMaxM3VLForCausalLM(transformers.MiniMaxM3VLTextConfig(**TEXT_FIELDS))
    corrections = [values for key, values in reference.named_buffers() if "correction" in key]
    assert found.parameters() == sum(values.numel() for values in (*reference.parameters(), *corrections))
    assert found == text_shape(model_type="minimax_m3")  # a model_type that transformers does not know
    assert found.blocks == HeadIndex(layers=frozenset(range(3, 60)), heads=4, size=128, most=2048, block=128, local=1)
    assert [mixture is None for mixture in found.mixtures] == [True] * 3 + [False] * 57
    assert (found.max_positions, found.rotary_size, found.rope.theta) == (524_288, 64, 5e6)
    # Per token: keys and values of 4 heads, or of one, and the indexer's keys.
    assert [found.kv_elements(ranks) for ranks in (1, 4, 8)] == [60 * 2 * heads * 128 + 57 * 128 for heads in (4, 1, 1)]
    assert [found.chosen(layer) for layer in (2, 3)] == [0, 2048]


def test_minimal_config_gives_the_same_shape_as_one_saved_by_transformers() -> None:
    fields = {"architectures": ["MiniMaxM3VLForCausalLM"]} | {
        name: TEXT_FIELDS[name] for name in TEXT_FIELDS if name not in SPARSE_ATTENTION_FIELDS
    }
    fields |= {"rotary_dim": 128, "partial_rotary_factor": 1.0, "hidden_act": "silu"}
    saved_config = transformers.MiniMaxM3VLTextConfig(**fields).to_dict()
    assert shape(fields) == shape(saved_config | {"architectures": fields["architectures"]})
    del fields["sparse_attention_config"], fields["moe_layer_freq"]
    found = shape(fields)
    assert found.blocks is None
    assert all(found.mixtures)
    assert found == shape(transformers.MiniMaxM3VLTextConfig(**fields).to_dict() | {"architectures": fields["architectures"]})


def hub_name(name: str) -> str:
    """The hub's name of a tensor."""
    name = re.sub(r"^model\.", "language_model.model.", name).replace("lm_head", "language_model.lm_head")
    name = name.replace("self_attn.indexer.", "self_attn.index_")
    return re.sub(r"mlp\.(experts|gate|shared_experts)\.", r"block_sparse_moe.\1.", name).replace("gate.e_score", "e_score")


def hub_checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with the hub's names, as of the model with images: gate and up projections are separate, and so are experts."""
    folder = Path(shutil.copytree(tiny.folder("minimax-m3"), tmp_path / "own"))
    stored = {hub_name(name): values for name, values in safetensors.torch.load_file(folder / WEIGHTS).items()}
    hub_tensors = {}
    for name, values in stored.items():
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(each.chunk(2) for each in values):
                hub_tensors |= {
                    name.replace("gate_up_proj", f"{i}.{part}.weight"): tensor for part, tensor in (("w1", gate), ("w3", up))
                }
        elif name.endswith("experts.down_proj"):
            hub_tensors |= {name.replace("down_proj", f"{i}.w2.weight"): tensor for i, tensor in enumerate(values)}
        elif "gate_up_proj" in name:
            hub_tensors |= {
                name.replace("gate_up", part): tensor for part, tensor in zip(("gate", "up"), values.chunk(2), strict=True)
            }
        else:
            hub_tensors[name] = values
    safetensors.torch.save_file({name: values.contiguous() for name, values in hub_tensors.items()}, folder / WEIGHTS)
    config_json = json.loads((folder / "config.json").read_text())
    config_json = {"architectures": HUB_CONFIG["architectures"], "model_type": "minimax_m3_vl", "text_config": config_json}
    config_json["tie_word_embeddings"] = config_json["text_config"]["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config_json))
    return folder


def test_logits_of_a_checkpoint_with_the_hubs_names_equal_transformers(tmp_path: Path) -> None:
    model, tokens = load_decoder(hub_checkpoint(tmp_path)), prompt(3, 90)
    torch.testing.assert_close(logits(model, tokens), tiny.expected_logits("minimax-m3", tokens), rtol=1e-4, atol=1e-4)
    assert_same_weights(model, tiny.decoder("minimax-m3"))


def test_adapters_with_transformers_module_names_apply_to_the_hubs_checkpoint(tmp_path: Path) -> None:
    """transformers' modules have joint gate and up projections."""
    changes, models = lora.adapters_for("minimax-m3", tmp_path)
    assert any("mlp.gate_up_proj" in key for key in safetensors.torch.load_file(Path(changes[0][1]) / "adapter_model.safetensors"))
    folder = hub_checkpoint(tmp_path)
    check_tokens(engine_of(folder, adapters=changes), mixed_prompts(9, 3), models, Traffic(chunk=7, pauses=1))
    conflicting = Path(shutil.copytree(changes[0][1], tmp_path / "both"))
    stored = safetensors.torch.load_file(conflicting / "adapter_model.safetensors")
    gate_tensors = {
        key.replace("gate_up_proj", "gate_proj"): values.clone() for key, values in stored.items() if "mlp.gate_up_proj" in key
    }
    safetensors.torch.save_file(stored | gate_tensors, conflicting / "adapter_model.safetensors")
    with pytest.raises(Unsupported, match=r"mlp.gate_up_proj and layers.*mlp.gate_proj, a part of it: save it again"):
        engine_of(folder, adapters=(("both", str(conflicting)),))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"rotary_dim": 32}, "rotary_dim 32, and by partial_rotary_factor 64 features of a head turn, .*: say 0.25 there"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha 1.0 is not supported"),
        ({"sparse_attention_config": 3}, "sparse_attention_config 3, an object is needed"),
        ({"sparse_attention_config": SPARSE_ATTENTION_FIELDS | {"sparse_num_index_heads": 8}}, "index_n_heads 8, .* as key heads"),
        ({"sparse_attention_config": SPARSE_ATTENTION_FIELDS | {"sparse_index_dim": 64}}, "index_head_dim 64 .* of the same size"),
        (
            {"sparse_attention_config": SPARSE_ATTENTION_FIELDS | {"sparse_local_block": 0}},
            "index_local_blocks 0, an integer from 1",
        ),
        ({"sparse_attention_config": SPARSE_ATTENTION_FIELDS | {"sparse_local_block": 17}}, "index_local_blocks 17"),
        ({"sparse_attention_config": SPARSE_ATTENTION_FIELDS | {"sparse_block_size": "8"}}, "index_block_size '8', an integer"),
        (
            {"sparse_attention_config": SPARSE_ATTENTION_FIELDS | {"sparse_attention_freq": [1]}},
            "layer_types .* for each of num_hidden_layers",
        ),
        ({"moe_layer_freq": 1}, "mlp_layer_types 1, 'dense' or 'sparse' is needed for each"),
        ({"layer_types": ["sliding_attention"] * 60}, "'full_attention' or 'minimax_m3_sparse' is needed for each"),
        ({"swiglu_limit": -1}, "swiglu_limit -1, a number above 0"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        text_shape(**field)


def test_page_sizes_that_do_not_divide_attention_blocks_are_refused() -> None:
    text_shape().check_pages(128)
    with pytest.raises(Unsupported, match=r"pages of 48 tokens don't divide the 128 tokens of a block .* use --page-size 16"):
        text_shape().check_pages(48)
    with pytest.raises(Unsupported, match="pages of 5 tokens don't divide the 16 tokens of a block"):
        load(ShardConfig(folder=str(tiny.folder("minimax-m3")), model="m", page_size=5), lambda stage: None)


@pytest.mark.parametrize(("speculation", "supported"), [("ngram=3", True), ("draft=d,tokens=3", True), ("draft=d,nodes=9", False)])
def test_only_chains_of_draft_tokens_are_supported(speculation: str, supported: bool) -> None:
    """Nodes of a tree are not in the order of their positions, as tokens of a block must be."""
    if supported:
        check_speculation(text_shape(), parse(speculation))
    else:
        with pytest.raises(Unsupported, match="where blocks, pools or entries of tokens are chosen, drafts must be a chain"):
            check_speculation(text_shape(), parse(speculation))


def test_sparse_attention_model_as_a_draft_model_is_refused() -> None:
    folder = tiny.folder("minimax-m3")
    with pytest.raises(Unsupported, match="cannot draft for others: take another"):
        load(ShardConfig(folder=str(tiny.folder("llama")), model="m", speculate=f"draft={folder},tokens=3"), lambda stage: None)


def test_batch_invariance_with_sparse_attention_is_refused() -> None:
    with pytest.raises(Unsupported, match="--batch-invariant is not there for sparse attention"):
        load(ShardConfig(folder=str(tiny.folder("minimax-m3")), model="m", batch_invariant=True), lambda stage: None)


def test_memory_for_sparse_attention_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, for 64 query tokens at once over their whole context: products for each key head, and a mask for each query
    head."""
    free = 1 << 32
    monkeypatch.setattr(memory, "_sample", lambda *given: memory.Measured(64, 1 << 20, 1.0))
    monkeypatch.setattr(memory, "_available", lambda device: free)
    engine = tiny.engine("minimax-m3", 16, 4)
    model_shape, pool_bytes = engine.decoder.shape, []
    for variant in (model_shape, replace(model_shape, blocks=None)):
        monkeypatch.setattr(engine.decoder, "shape", variant)
        pages, *_ = memory.size_pool(engine, 0, 1.0, 128, 4, 100_000, 100_000)
        pool_bytes.append(pages * 16 * 4 * model_shape.kv_elements(1))
    bytes_per_pair = indexed.PRODUCT_BYTES * 4 + 4 * 8
    assert pool_bytes[1] * model_shape.kv_elements(1) // variant.kv_elements(1) > pool_bytes[0]
    assert engine.decoder.ranks.size == 1
    assert bytes_per_pair * 64 * 100_000 == pytest.approx(
        memory._selection_bytes(_with_shape(engine, model_shape), 128, 100_000), rel=0.01
    )


def _with_shape(engine: Any, found: Shape) -> Any:
    engine.decoder.shape = found
    return engine


def test_roofline_counts_selected_blocks_and_indexer_keys() -> None:
    """For a long context: all keys in layers without an indexer; 2,048 keys and all indexer keys in layers with one."""
    found = text_shape()
    group = roofline.Group(shape=found, ranks=4, nodes=1, item=2, token_bytes=found.kv_elements(4) * 2)
    kv_elements = 2 * 128
    expected = 2 * (3 * 100_000 * kv_elements + 57 * (2048 * kv_elements + 100_000 * 128))
    assert roofline.context_bytes(group, 100_000) == pytest.approx(expected)
    assert roofline.context_bytes(group, 1000) == pytest.approx(1000 * group.token_bytes)
