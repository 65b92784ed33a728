"""Qwen 4 Exp: what config.json says of it, what its checkpoints hold, and what its parts ask of pages and drafts. What it
computes: test_oracle.py."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from transformers.models.qwen4_exp import modeling_qwen4_exp as oracle

from penstock.launcher import roofline
from penstock.proto.speculation import Speculation
from penstock.shard import forward
from penstock.shard.models.draft_families import check_speculation
from penstock.shard.models.families import shape
from penstock.shard.models.ngrams import primes
from penstock.shard.models.recurrent_shapes import LinearAttentionShape
from penstock.shard.models.shape import Shape, Unsupported
from penstock.shard.models.traits import GatedHyperConnections, PoolIndex
from penstock.shard.step import Span
from penstock.tests.shard import seeing, tiny
from penstock.tests.shard.test_oracle import prompt
from penstock.tests.shard.test_quantized import logits, made
from penstock.tests.shard.test_vision import bench_of
from penstock.tests.shard.test_weights import WEIGHTS, Alone, decoder

INDEX = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
TOLD = {"ple_layer_ids": [2, 10], "eos_token_id": [248_046, 248_044]}
NEEDED = INDEX | {"vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}
NEEDED |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}} | TOLD
SAID = {"architectures": ["Qwen4ExpForCausalLM"]}


def text(**more: Any) -> Shape:
    return shape(SAID | NEEDED | more)


def test_it_is_transformers() -> None:
    """Its sizes, and what is left out: 149 billion parameters, of which tables of n-grams are 82; also where images are seen."""
    found, theirs = text(), transformers.Qwen4ExpTextConfig(**NEEDED)
    with torch.device("meta"):
        model = transformers.Qwen4ExpForCausalLM(theirs)
    assert found.parameters() == sum(values.numel() for values in model.parameters())
    assert (round(found.parameters() / 1e9), round(found.ngrams.table(1) / 1e9)) == (149, 82)  # type: ignore[union-attr]
    assert round(found.parameters(tokens=1) / 1e9, 1) == 4.2
    assert found == shape(theirs.to_dict() | SAID)
    said = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp"}
    seen = shape(said | {"text_config": NEEDED, "image_token_id": 5})
    assert (seen.rope.axes, seen.ngrams.image, found.ngrams.image) == ((0, 1, 2) * 10 + (0, 1), 5, 248_056)  # type: ignore[union-attr]
    attending = [layer for layer, kind in enumerate(theirs.layer_types) if kind == "indexed_attention"]
    assert found.keyed == found.attending == attending
    assert found.blocks == PoolIndex(layers=frozenset(attending), heads=16, size=128, most=2048, pool=16)
    assert found == text(layer_types=["linear_attention" if i % 4 < 3 else "full_attention" for i in range(40)])
    assert found.hyper == GatedHyperConnections(count=4, rank=320)
    assert found.kv_elements(1) == 10 * (2 * 2 * 256 + 128)
    remembered = 30 * (3 * 8192 * 2 + 4 * 32 * 128 * 128) + 2 * 9 * 4 * 2048 * 2
    assert found.state_bytes(1, 2) == remembered
    assert found.fitting == [1, 2, 4, 8, 16]


def test_tables_are_transformers() -> None:
    ngrams, theirs = text().ngrams, transformers.Qwen4ExpTextConfig(**NEEDED)
    assert ngrams is not None
    for place, layer in enumerate(ngrams.layers):
        with torch.device("meta"):
            module = oracle.Qwen4ExpTextNGramEmbedding(theirs, ngrams.size, layer, place)
        assert [*ngrams.sizes(layer)] == module.head_vocab_sizes
        assert [*ngrams.offsets(layer)] == module.head_offsets
        assert (ngrams.rows(layer), ngrams.size // ngrams.count) == tuple(module.ngram_embedding.weight.shape)
        assert ngrams.end == module.eos_token_id
        built = oracle._build_layer_multipliers(ngrams.vocabulary, ngrams.most, place, ngrams.seed)
        assert [*ngrams.multipliers(layer)] == built.tolist()


def test_prime_numbers() -> None:
    """Beside those that pass for some to fewer witnesses (Jaeschke 1993)."""
    assert primes(1, 12) == (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    for wrong in (2047, 1_373_653, 25_326_001, 3_215_031_751, 2_152_302_898_747, 3_474_749_660_383):
        [found] = primes(wrong, 1)
        assert found > wrong
        assert oracle._is_prime(found)


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
def test_what_is_refused(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        text(**field)


def test_without_n_grams_nothing_is_asked_of_them() -> None:
    found = text(ple_layer_ids=None, eos_token_id=None, ngram_size="none")
    assert found.ngrams is None
    assert isinstance(found.recurrent, LinearAttentionShape)
    assert not found.recurrent.sigmoid
    assert text(output_gate_type="sigmoid").recurrent.sigmoid  # type: ignore[union-attr]


def test_pages_hold_whole_pools() -> None:
    text().check_pages(32)
    with pytest.raises(Unsupported, match=r"pages of 8 tokens don't hold whole pools of 16, .*--page-size 16"):
        text().check_pages(8)
    text(indexer_compress_ratio=1).check_pages(5)


def test_drafts_follow_each_other() -> None:
    """Also where no layer remembers: a tree's nodes don't stand by their positions."""
    found = text(layer_types=["indexed_attention"] * 40, ple_layer_ids=[])
    assert found.recurrent is None
    check_speculation(found, Speculation(draft="x", widths=(1, 1)))
    with pytest.raises(Unsupported, match="where blocks, pools or entries of tokens are chosen, drafts must be a chain"):
        check_speculation(found, Speculation(draft="x", widths=(2, 1)))


def test_a_table_in_one_tensor_or_by_parts(tmp_path: Path) -> None:
    """Of each rank the rows that it has, wherever parts end; and names as where images are seen."""
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
    torch.testing.assert_close(logits(decoder(folder), tokens), tiny.expected_logits("qwen4-exp", tokens), rtol=1e-4, atol=1e-4)
    for place in (folder, plain):
        ranks = [made(place, Alone(rank, 2)) for rank in range(2)]
        for layer, whole in tables.items():
            found = torch.cat([rank.layers[layer].ngrams.table for rank in ranks])  # type: ignore[union-attr]
            assert found[: len(whole)].equal(whole)
            assert not found[len(whole) :].any()


def test_pools_that_begin_with_an_image_have_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These know no positions but those of their tokens: of pools of 4 the last that an image's token begins ends 3 behind it."""
    reference, asked = seeing.made("Qwen4Exp", tmp_path), list[int]()
    prompt = seeing.seen("Qwen4Exp", reference.config.model_type, random.Random(1), [(1, 2)])
    bench, sequence = bench_of(tmp_path, prompt)
    monkeypatch.setattr(forward, "_fitting", lambda graphs, tokens: asked.append(sequence.computed))
    for start, token in enumerate(prompt.tokens):
        bench.run([Span(sequence, start, [token])])
    [picture] = prompt.pictures
    assert asked == [*range(picture.end + 3, len(prompt.tokens))]


def test_hashes_of_another_model(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.folder("qwen4-exp"), tmp_path / "other"))
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"seed": 4321}))
    with pytest.raises(Unsupported, match=r"layers.0.ple.*layer_multipliers is not what follows from config.json"):
        decoder(folder)


def test_the_estimate_reads_a_key_of_each_pool() -> None:
    """Keys and values of 2,048 tokens, and 128 numbers of each 16."""
    found = text()
    group = roofline.Group(shape=found, ranks=1, nodes=1, item=2, token_bytes=found.kv_elements(1) * 2)
    assert roofline.context_bytes(group, 100_000) == 2 * 10 * (2048 * 2 * 2 * 256 + 100_000 * 128 // 16)
