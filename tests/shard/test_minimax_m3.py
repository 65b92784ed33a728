"""MiniMax M3: what its config.json says, by its own names or transformers', its checkpoint, and what is not served of it. What it
computes: test_oracle.py."""

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
from penstock.shard.models.traits import BlockIndex
from penstock.tests.shard import lora, tiny
from penstock.tests.shard.driver import Habits
from penstock.tests.shard.test_adapters import check, engine_of, mixed
from penstock.tests.shard.test_oracle import prompt
from penstock.tests.shard.test_quantized import logits
from penstock.tests.shard.test_weights import WEIGHTS, decoder, same

SPARSE = {
    "sparse_num_index_heads": 4,
    "sparse_index_dim": 128,
    "sparse_block_size": 128,
    "sparse_topk_blocks": 16,
    "sparse_local_block": 1,
    "sparse_attention_freq": [0] * 3 + [1] * 57,
}
TEXT: dict[str, Any] = {
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
    "sparse_attention_config": SPARSE,
    "moe_layer_freq": [0] * 3 + [1] * 57,
}
WHOLE = {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl", "text_config": TEXT}


def text(**more: Any) -> Shape:
    return shape(WHOLE | {"text_config": TEXT | more})


def test_its_sizes_are_transformers() -> None:
    """426 billion parameters, 26 of them for a token."""
    found = text()
    with torch.device("meta"):
        theirs = transformers.MiniMaxM3VLForCausalLM(transformers.MiniMaxM3VLTextConfig(**TEXT))
    corrections = [values for key, values in theirs.named_buffers() if "correction" in key]
    assert found.parameters() == sum(values.numel() for values in (*theirs.parameters(), *corrections))
    assert found == text(model_type="minimax_m3")  # which is nothing to transformers
    assert found.blocks == BlockIndex(layers=frozenset(range(3, 60)), heads=4, size=128, most=2048, block=128, local=1)
    assert [mixture is None for mixture in found.mixtures] == [True] * 3 + [False] * 57
    assert (found.max_positions, found.rotary_size, found.rope.theta) == (524_288, 64, 5e6)
    # Of each token keys and values of 4 heads, or of one, and the index's.
    assert [found.kv_elements(ranks) for ranks in (1, 4, 8)] == [60 * 2 * heads * 128 + 57 * 128 for heads in (4, 1, 1)]
    assert [found.chosen(layer) for layer in (2, 3)] == [0, 2048]


def test_what_is_left_out_is_what_transformers_writes() -> None:
    given = {"architectures": ["MiniMaxM3VLForCausalLM"]} | {name: TEXT[name] for name in TEXT if name not in SPARSE}
    given |= {"rotary_dim": 128, "partial_rotary_factor": 1.0, "hidden_act": "silu"}
    written = transformers.MiniMaxM3VLTextConfig(**given).to_dict()
    assert shape(given) == shape(written | {"architectures": given["architectures"]})
    del given["sparse_attention_config"], given["moe_layer_freq"]
    found = shape(given)
    assert found.blocks is None
    assert all(found.mixtures)
    assert found == shape(transformers.MiniMaxM3VLTextConfig(**given).to_dict() | {"architectures": given["architectures"]})


def renamed(name: str) -> str:
    """As the model's own checkpoint has it."""
    name = re.sub(r"^model\.", "language_model.model.", name).replace("lm_head", "language_model.lm_head")
    name = name.replace("self_attn.indexer.", "self_attn.index_")
    return re.sub(r"mlp\.(experts|gate|shared_experts)\.", r"block_sparse_moe.\1.", name).replace("gate.e_score", "e_score")


def own_checkpoint(tmp_path: Path) -> Path:
    """Has the names of what sees images, too; gates and what they let through are two tensors, and experts are apart."""
    folder = Path(shutil.copytree(tiny.folder("minimax-m3"), tmp_path / "own"))
    stored = {renamed(name): values for name, values in safetensors.torch.load_file(folder / WEIGHTS).items()}
    own = {}
    for name, values in stored.items():
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(each.chunk(2) for each in values):
                own |= {name.replace("gate_up_proj", f"{i}.{part}.weight"): one for part, one in (("w1", gate), ("w3", up))}
        elif name.endswith("experts.down_proj"):
            own |= {name.replace("down_proj", f"{i}.w2.weight"): one for i, one in enumerate(values)}
        elif "gate_up_proj" in name:
            own |= {name.replace("gate_up", part): one for part, one in zip(("gate", "up"), values.chunk(2), strict=True)}
        else:
            own[name] = values
    safetensors.torch.save_file({name: values.contiguous() for name, values in own.items()}, folder / WEIGHTS)
    said = json.loads((folder / "config.json").read_text())
    said = {"architectures": WHOLE["architectures"], "model_type": "minimax_m3_vl", "text_config": said}
    said["tie_word_embeddings"] = said["text_config"]["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_its_own_checkpoint(tmp_path: Path) -> None:
    model, tokens = decoder(own_checkpoint(tmp_path)), prompt(3, 90)
    torch.testing.assert_close(logits(model, tokens), tiny.expected_logits("minimax-m3", tokens), rtol=1e-4, atol=1e-4)
    same(model, tiny.decoder("minimax-m3"))


def test_adapters_of_its_own_checkpoint_may_be_of_transformers_modules(tmp_path: Path) -> None:
    """Where gates and what they let through are one."""
    changes, models = lora.of("minimax-m3", tmp_path)
    assert any("mlp.gate_up_proj" in key for key in safetensors.torch.load_file(Path(changes[0][1]) / "adapter_model.safetensors"))
    folder = own_checkpoint(tmp_path)
    check(engine_of(folder, adapters=changes), mixed(9, 3), models, Habits(chunk=7, pauses=1))
    both = Path(shutil.copytree(changes[0][1], tmp_path / "both"))
    stored = safetensors.torch.load_file(both / "adapter_model.safetensors")
    joint = {
        key.replace("gate_up_proj", "gate_proj"): values.clone() for key, values in stored.items() if "mlp.gate_up_proj" in key
    }
    safetensors.torch.save_file(stored | joint, both / "adapter_model.safetensors")
    with pytest.raises(Unsupported, match=r"mlp.gate_up_proj and layers.*mlp.gate_proj, a part of it: save it again"):
        engine_of(folder, adapters=(("both", str(both)),))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"rotary_dim": 32}, "rotary_dim 32, and by partial_rotary_factor 64 features of a head turn, .*: say 0.25 there"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha 1.0 is not supported"),
        ({"sparse_attention_config": 3}, "sparse_attention_config 3, an object is needed"),
        ({"sparse_attention_config": SPARSE | {"sparse_num_index_heads": 8}}, "index_n_heads 8, .* as key heads"),
        ({"sparse_attention_config": SPARSE | {"sparse_index_dim": 64}}, "index_head_dim 64 .* of the same size"),
        ({"sparse_attention_config": SPARSE | {"sparse_local_block": 0}}, "index_local_blocks 0, an integer from 1"),
        ({"sparse_attention_config": SPARSE | {"sparse_local_block": 17}}, "index_local_blocks 17"),
        ({"sparse_attention_config": SPARSE | {"sparse_block_size": "8"}}, "index_block_size '8', an integer"),
        ({"sparse_attention_config": SPARSE | {"sparse_attention_freq": [1]}}, "layer_types .* for each of num_hidden_layers"),
        ({"moe_layer_freq": 1}, "mlp_layer_types 1, 'dense' or 'sparse' is needed for each"),
        ({"layer_types": ["sliding_attention"] * 60}, "'full_attention' or 'minimax_m3_sparse' is needed for each"),
        ({"swiglu_limit": -1}, "swiglu_limit -1, a number above 0"),
    ],
)
def test_what_is_refused(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        text(**field)


def test_pages_divide_blocks() -> None:
    text().check_pages(128)
    with pytest.raises(Unsupported, match=r"pages of 48 tokens don't divide the 128 tokens of a block .* use --page-size 16"):
        text().check_pages(48)
    with pytest.raises(Unsupported, match="pages of 5 tokens don't divide the 16 tokens of a block"):
        load(ShardConfig(folder=str(tiny.folder("minimax-m3")), model="m", page_size=5), lambda stage: None)


@pytest.mark.parametrize(("asked", "served"), [("ngram=3", True), ("draft=d,tokens=3", True), ("draft=d,nodes=9", False)])
def test_drafts_follow_each_other(asked: str, served: bool) -> None:
    """A tree's nodes do not stand by their positions, as a block's tokens do."""
    if served:
        check_speculation(text(), parse(asked))
    else:
        with pytest.raises(Unsupported, match="where blocks, pools or entries of tokens are chosen, drafts must be a chain"):
            check_speculation(text(), parse(asked))


def test_it_does_not_guess_for_others() -> None:
    folder = tiny.folder("minimax-m3")
    with pytest.raises(Unsupported, match="cannot draft for others: take another"):
        load(ShardConfig(folder=str(tiny.folder("llama")), model="m", speculate=f"draft={folder},tokens=3"), lambda stage: None)


def test_the_batch_is_not_invariant() -> None:
    with pytest.raises(Unsupported, match="--batch-invariant is not there for sparse attention"):
        load(ShardConfig(folder=str(tiny.folder("minimax-m3")), model="m", batch_invariant=True), lambda stage: None)


def test_memory_for_what_an_index_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, of 64 tokens at once among all that they see: products of each key head, and a mask of each query head."""
    free = 1 << 32
    monkeypatch.setattr(memory, "_sample", lambda *given: memory.Measured(64, 1 << 20, 1.0))
    monkeypatch.setattr(memory, "_available", lambda device: free)
    engine = tiny.engine("minimax-m3", 16, 4)
    found, rooms = engine.decoder.shape, []
    for one in (found, replace(found, blocks=None)):
        monkeypatch.setattr(engine.decoder, "shape", one)
        pages, *_ = memory.size_pool(engine, 0, 1.0, 128, 4, 100_000, 100_000)
        rooms.append(pages * 16 * 4 * found.kv_elements(1))
    each = indexed.PRODUCT_BYTES * 4 + 4 * 8
    assert rooms[1] * found.kv_elements(1) // one.kv_elements(1) > rooms[0]
    assert engine.decoder.ranks.size == 1
    assert each * 64 * 100_000 == pytest.approx(memory._chosen(_with(engine, found), 128, 100_000), rel=0.01)


def _with(engine: Any, found: Shape) -> Any:
    engine.decoder.shape = found
    return engine


def test_what_a_token_reads() -> None:
    """Of a long context: all keys in layers without an index, and 2,048 in those with one, and their index's."""
    found = text()
    group = roofline.Group(shape=found, ranks=4, nodes=1, item=2, token_bytes=found.kv_elements(4) * 2)
    own = 2 * 128
    expected = 2 * (3 * 100_000 * own + 57 * (2048 * own + 100_000 * 128))
    assert roofline.context_bytes(group, 100_000) == pytest.approx(expected)
    assert roofline.context_bytes(group, 1000) == pytest.approx(1000 * group.token_bytes)
