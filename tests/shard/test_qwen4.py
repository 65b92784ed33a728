"""Qwen 4 Exp: its shape and n-gram tables from config.json against transformers, layouts of checkpoints, limits on page sizes and
draft tokens. Logits and tokens: test_against_transformers.py."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.qwen4_exp import modeling_qwen4_exp as transformers_qwen4

from penstock.launcher import roofline
from penstock.proto.speculation import Speculation
from penstock.shard import forward
from penstock.shard.models.draft_families import check_speculation
from penstock.shard.models.families import shape
from penstock.shard.models.ngrams import primes
from penstock.shard.models.recurrent_shapes import LinearAttentionShape
from penstock.shard.models.shape import Shape, Unsupported
from penstock.shard.models.traits import GatedHyperConnections, HeadIndex
from penstock.shard.step import Span
from penstock.tests.shard import tiny, vision_models
from penstock.tests.shard.test_against_transformers import prompt
from penstock.tests.shard.test_quantized import build_decoder, logits
from penstock.tests.shard.test_vision import runner_with_prompt
from penstock.tests.shard.test_weights import WEIGHTS, LoadingRank, load_decoder

INDEXER_FIELDS = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
NGRAM_FIELDS = {"ple_layer_ids": [2, 10], "eos_token_id": [248_046, 248_044]}
REQUIRED_FIELDS = INDEXER_FIELDS | {"vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}
REQUIRED_FIELDS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}} | NGRAM_FIELDS
ARCHITECTURE = {"architectures": ["Qwen4ExpForCausalLM"]}


def text_shape(**more: Any) -> Shape:
    return shape(ARCHITECTURE | REQUIRED_FIELDS | more)


def test_shape_and_parameters_equal_transformers() -> None:
    """Also defaults of missing fields, and the text of the model with images. 149 billion parameters, 82 of them in n-gram
    tables."""
    found, config = text_shape(), transformers.Qwen4ExpTextConfig(**REQUIRED_FIELDS)
    with torch.device("meta"):
        model = transformers.Qwen4ExpForCausalLM(config)
    assert found.parameters() == sum(values.numel() for values in model.parameters())
    assert (round(found.parameters() / 1e9), round(found.ngrams.table(1) / 1e9)) == (149, 82)  # type: ignore[union-attr]
    assert round(found.parameters(tokens=1) / 1e9, 1) == 4.2
    assert found == shape(config.to_dict() | ARCHITECTURE)
    vision_config = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp"}
    vision_shape = shape(vision_config | {"text_config": REQUIRED_FIELDS, "image_token_id": 5})
    assert (vision_shape.rope.axes, vision_shape.ngrams.image, found.ngrams.image) == ((0, 1, 2) * 10 + (0, 1), 5, 248_056)  # type: ignore[union-attr]
    attending = [layer for layer, kind in enumerate(config.layer_types) if kind == "indexed_attention"]
    assert found.keyed == found.attending == attending
    assert found.blocks == HeadIndex(layers=frozenset(attending), heads=16, size=128, most=2048, pool=16)
    assert found == text_shape(layer_types=["linear_attention" if i % 4 < 3 else "full_attention" for i in range(40)])
    assert found.hyper == GatedHyperConnections(count=4, rank=320)
    assert found.kv_elements(1) == 10 * (2 * 2 * 256 + 128)
    expected_state_bytes = 30 * (3 * 8192 * 2 + 4 * 32 * 128 * 128) + 2 * 9 * 4 * 2048 * 2
    assert found.state_bytes(1, 2) == expected_state_bytes
    assert found.fitting == [1, 2, 4, 8, 16]


def test_ngram_tables_and_hashes_equal_transformers() -> None:
    ngrams, config = text_shape().ngrams, transformers.Qwen4ExpTextConfig(**REQUIRED_FIELDS)
    assert ngrams is not None
    for index, layer in enumerate(ngrams.layers):
        with torch.device("meta"):
            module = transformers_qwen4.Qwen4ExpTextNGramEmbedding(config, ngrams.size, layer, index)
        assert [*ngrams.sizes(layer)] == module.head_vocab_sizes
        assert [*ngrams.offsets(layer)] == module.head_offsets
        assert (ngrams.rows(layer), ngrams.size // ngrams.count) == tuple(module.ngram_embedding.weight.shape)
        assert ngrams.end == module.eos_token_id
        multipliers = transformers_qwen4._build_layer_multipliers(ngrams.vocabulary, ngrams.most, index, ngrams.seed)
        assert [*ngrams.multipliers(layer)] == multipliers.tolist()


def test_primes_exclude_strong_pseudoprimes() -> None:
    """Numbers that a Miller-Rabin test with fewer witnesses takes for primes (Jaeschke 1993)."""
    assert primes(1, 12) == (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    for pseudoprime in (2047, 1_373_653, 25_326_001, 3_215_031_751, 2_152_302_898_747, 3_474_749_660_383):
        [found] = primes(pseudoprime, 1)
        assert found > pseudoprime
        assert transformers_qwen4._is_prime(found)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"indexer_n_heads": None}, "nothing of indexer_n_heads, by which tokens are chosen"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads 2 is not supported"),
        ({"indexer_budget": 2050}, "indexer_budget 2050 and indexer_compress_ratio 16, of which the first must be a multiple"),
        ({"indexer_head_dim": 32}, "indexer_head_dim 32, and 64 features of a head turn"),
        ({"indexer_head_dim": 65}, "indexer_head_dim 65, and 64 features of a head turn: an even number"),
        ({"indexer_compress_ratio": "16"}, "indexer_compress_ratio '16', an integer from 1"),
        ({"hc_count": 1}, "hc_count 1, an integer from 2"),
        ({"hc_lowrank": 0}, "hc_lowrank 0, an integer from 1"),
        ({"output_gate_type": "gelu"}, "output_gate_type 'gelu' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ({"ple_layer_ids": [0]}, r"ple_layer_ids \[0\], numbers from 1 to 40"),
        ({"ple_layer_ids": 3}, "ple_layer_ids 3, numbers from 1"),
        ({"ple_layer_ids": [4]}, "ple_layer_ids 4 is not supported: that layer has no linear attention"),
        ({"ple_embed_dim": 100}, "ple_embed_dim 100, and there are 16 heads of n-grams"),
        ({"ngram_size": 1}, "ngram_size 1, an integer from 2"),
        ({"heads_per_ngram": 3000}, "means 12000 heads of n-grams"),
        ({"seed": 1.5}, "seed 1.5, an integer from 0"),
        ({"eos_token_id": None}, "eos_token_id null, where n-grams end"),
        ({"eos_token_id": [248_320]}, r"eos_token_id \[248320\], where n-grams end"),
        ({"layer_types": ["linear_attention"] * 40}, "layers of linear attention alone"),
        ({"layer_types": ["sliding_attention"] * 40, "ple_layer_ids": []}, "layer_types sliding_attention are not supported"),
        ({"layer_types": ["indexed_attention"] * 40}, "ple_layer_ids 2 is not supported: that layer has no linear attention"),
        ({"model_type": "qwen3_5_moe_text"}, "model_type 'qwen3_5_moe_text'"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        text_shape(**field)


def test_ngram_fields_are_ignored_without_ngram_layers() -> None:
    found = text_shape(ple_layer_ids=None, eos_token_id=None, ngram_size="none")
    assert found.ngrams is None
    assert isinstance(found.recurrent, LinearAttentionShape)
    assert not found.recurrent.sigmoid
    assert text_shape(output_gate_type="sigmoid").recurrent.sigmoid  # type: ignore[union-attr]


def test_page_sizes_that_do_not_hold_whole_indexer_pools_are_refused() -> None:
    text_shape().check_pages(32)
    with pytest.raises(Unsupported, match=r"pages of 8 tokens don't hold whole pools of 16, .*--page-size 16"):
        text_shape().check_pages(8)
    text_shape(indexer_compress_ratio=1).check_pages(5)


def test_only_chains_of_draft_tokens_are_supported() -> None:
    """Also without recurrent layers: nodes of a tree are not in the order of their positions, which pools need."""
    found = text_shape(layer_types=["indexed_attention"] * 40, ple_layer_ids=[])
    assert found.recurrent is None
    check_speculation(found, Speculation(draft="x", widths=(1, 1)))
    with pytest.raises(Unsupported, match="where blocks, pools or entries of tokens are chosen, drafts must be a chain"):
        check_speculation(found, Speculation(draft="x", widths=(2, 1)))


def test_ngram_table_is_read_from_one_tensor_or_several(tmp_path: Path) -> None:
    """Each rank reads its own rows, wherever parts end. The joined checkpoint has the tensor names of the model with images."""
    plain = tiny.folder("qwen4-exp")
    stored = safetensors.torch.load_file(plain / WEIGHTS)
    tables = {}
    for layer in (0, 2):
        name = f"model.layers.{layer}.ple.ple_embedding.ngram_embedding"
        parts = [stored.pop(f"{name}.shard_{part}.weight") for part in range(5)]
        assert len(parts[0]) > len(parts[-1])
        stored[f"{name}.weight"] = tables[layer] = torch.cat(parts)
    folder = Path(shutil.copytree(plain, tmp_path / "joined"))
    stored = {name.replace("model.", "model.language_model.", 1): values for name, values in stored.items()}
    safetensors.torch.save_file(stored, folder / WEIGHTS)
    tokens = prompt(3, 40)
    torch.testing.assert_close(
        logits(load_decoder(folder), tokens), tiny.expected_logits("qwen4-exp", tokens), rtol=1e-4, atol=1e-4
    )
    for folder_of_model in (folder, plain):
        ranks = [build_decoder(folder_of_model, LoadingRank(rank, 2)) for rank in range(2)]
        for layer, table in tables.items():
            found = torch.cat([rank.layers[layer].ngrams.table for rank in ranks])  # type: ignore[union-attr]
            assert found[: len(table)].equal(table)
            assert not found[len(table) :].any()


def test_steps_with_indexer_pools_that_begin_in_an_image_use_no_cuda_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs only know the positions of their own tokens. Of pools of 4, the last that begins with an image token ends 3 tokens
    behind it."""
    reference, graph_lookups = vision_models.make_model("Qwen4Exp", tmp_path), list[int]()
    image_prompt = vision_models.image_prompt("Qwen4Exp", reference.config.model_type, random.Random(1), [(1, 2)])
    runner, sequence = runner_with_prompt(tmp_path, image_prompt)
    monkeypatch.setattr(forward, "_fitting", lambda graphs, tokens: graph_lookups.append(sequence.computed))
    for start, token in enumerate(image_prompt.tokens):
        runner.run([Span(sequence, start, [token])])
    [picture] = image_prompt.pictures
    assert graph_lookups == [*range(picture.end + 3, len(image_prompt.tokens))]


def test_ngram_hashes_of_another_seed_are_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.folder("qwen4-exp"), tmp_path / "other"))
    config_json = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config_json | {"seed": 4321}))
    with pytest.raises(Unsupported, match=r"layers.0.ple.*layer_multipliers is not what follows from config.json"):
        load_decoder(folder)


def test_roofline_counts_selected_tokens_and_a_key_of_each_pool() -> None:
    """Keys and values of 2,048 tokens, and 128 numbers of each pool of 16 tokens."""
    found = text_shape()
    group = roofline.Group(shape=found, ranks=1, nodes=1, item=2, token_bytes=found.kv_elements(1) * 2)
    assert roofline.context_bytes(group, 100_000) == 2 * 10 * (2048 * 2 * 2 * 256 + 100_000 * 128 // 16)
