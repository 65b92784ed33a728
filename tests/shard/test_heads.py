"""More ranks than key/value heads: several ranks hold the same head. Logits equal transformers', and each rank's weights take the
planned bytes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from penstock.shard.adapters import Adapter
from penstock.shard.engine import Engine
from penstock.shard.models import loader
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.models.lora import LoraAdapters
from penstock.shard.models.shape import Unsupported
from penstock.shard.models.traits import Keys
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import sequences
from penstock.shard.step import Span
from penstock.shard.weights import Weights
from penstock.tests.shard import lora, packing, tiny
from penstock.tests.shard.test_adapters import transformers_model
from penstock.tests.shard.test_against_transformers import assert_logits_close, prompt
from penstock.tests.shard.test_quantized import build_decoder
from penstock.tests.shard.test_weights import WEIGHTS, LoadingRank, assert_same_weights

# With biases, fused matrices, norms over all heads, gates, sinks, permuted rotary features, heads of another size in some layers.
FAMILIES = [
    ("ax-k2", 4),
    ("bamba", 8),  # groups of the state space take the place of key heads
    ("falcon-h1", 8),
    ("falcon-h1-norms", 4),
    ("gemma3n", 8),
    ("gemma3n-plain", 4),
    ("gemma4", 4),
    ("gemma4", 8),
    ("gemma4-e", 4),
    ("glm-5-next", 4),
    ("granite-4-h", 4),
    ("granite-4-h-moe", 4),
    ("granite-swa", 8),
    ("hy-4", 4),
    ("hyperclova", 8),
    ("kimi-linear", 4),
    ("laguna", 4),
    ("lfm2", 8),
    ("lfm3", 8),
    ("longcat", 8),
    ("mimo", 4),
    ("mistral-large4", 8),
    ("nemotron-h-moe", 4),
    ("olmo-hybrid", 4),
    ("qwen4-exp", 2),
    ("one-key-gpt-oss", 4),
    ("one-key-llama", 2),
    ("two-keys-llama4", 4),
    ("two-keys-minimax-m2", 8),
    ("two-keys-minimax-m3", 8),
    ("two-keys-olmo2", 4),
    ("two-keys-phi3", 4),
    ("two-keys-qwen2", 4),
    ("two-keys-qwen3-next", 4),
]
TOKENS = prompt(3, 40)


def logits(folder: Path, size: int, adapter: Path | None = None) -> Tensor:
    """[TOKENS, vocabulary] of so many ranks: two chunks and a single token, with keys and values from the cache."""

    @torch.inference_mode()
    def work(ranks: Ranks) -> list[Tensor | None]:
        model = shape(json.loads((folder / "config.json").read_text()))
        changes = [Adapter("a", adapter, torch.float32, tiny.CPU)] if adapter else []
        weights = Weights(folder, torch.float32, tiny.CPU, lambda read: None)
        engine = Engine(Decoder(model, weights, ranks, tiny.CPU, adapters=LoraAdapters(changes)), tiny.CPU, 16)
        engine.resize(4)
        [sequence], _ = sequences(TOKENS, 1)
        sequence.state, sequence.adapter, found = 1, len(changes) - 1, []
        engine.pool.extend(sequence.pages, len(TOKENS))
        for start, stop in ((0, 17), (17, 39), (39, 40)):
            span = Span(sequence, start, TOKENS[start:stop], wanted=stop - start)
            found.append(engine.decoder.logits(engine.forward([span])))
            sequence.computed = stop
        return found

    return torch.cat([part for part in tiny.ThreadedRanks(size).run(work)[0] if part is not None])


@pytest.mark.parametrize(("name", "ranks"), FAMILIES)
def test_logits_equal_transformers_with_repeated_key_heads(name: str, ranks: int) -> None:
    assert_logits_close(logits(tiny.folder(name), ranks), tiny.expected_logits(name, TOKENS))


def test_per_layer_embedding_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "FEATURES", 10_000)  # not a divisor of its rows
    assert_logits_close(logits(tiny.folder("gemma4-e"), 2), tiny.expected_logits("gemma4-e", TOKENS))


def test_adapters_with_repeated_key_heads_match_merged_models(tmp_path: Path) -> None:
    """For separate matrices, and for three stored as one fused matrix."""
    for name in ("two-keys-qwen2", "two-keys-phi3"):
        place = lora.adapter(tiny.folder(name), tmp_path / name, 1)
        merged = lora.merged(tiny.folder(name), place, tmp_path / f"{name}-merged")
        with torch.inference_mode():
            expected = transformers_model(merged)(torch.tensor([TOKENS])).logits[0]
        torch.testing.assert_close(logits(tiny.folder(name), 4, place), expected, rtol=0, atol=1e-3)
        assert (expected - tiny.expected_logits(name, TOKENS)).abs().max() > 1


@pytest.mark.parametrize("form", ["awq", "fp8-blocks", "packed-zeros"])
def test_quantized_weights_with_repeated_key_heads_equal_unquantized_ones(form: str, tmp_path: Path) -> None:
    quantized, plain = packing.checkpoints("two-keys-qwen2", form, tmp_path)
    for rank in range(4):
        assert_same_weights(build_decoder(quantized, LoadingRank(rank, 4)), build_decoder(plain, LoadingRank(rank, 4)))


@pytest.mark.parametrize(("name", "ranks"), FAMILIES)
def test_planned_weight_bytes_match_each_rank(name: str, ranks: int) -> None:
    model = build_decoder(tiny.folder(name), LoadingRank(0, ranks))
    assert model.shape.weight_bytes(ranks, 4, "cpu", "float32", not model.head.shared) == model.weight_bytes


def test_kv_cache_scales_follow_the_repeated_heads(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny.folder("two-keys-qwen2"), tmp_path / "model"))
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    for layer in range(2):
        stored |= {f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor([1.0, 2.0]) + layer for name in "kv"}
    safetensors.torch.save_file(stored, folder / WEIGHTS)
    for rank, expected in enumerate((1.0, 1.0, 2.0, 2.0)):
        found = [layer.attention.scales for layer in build_decoder(folder, LoadingRank(rank, 4)).layers]
        assert all(own is not None and own.equal(torch.full((2, 1), expected + i)) for i, own in enumerate(found))


def test_fitting_rank_counts_divide_or_repeat_heads() -> None:
    """Query heads, and heads of linear attention, are divided among ranks; key heads may be repeated, each equally often."""
    model = shape(json.loads((tiny.folder("gemma4") / "config.json").read_text()))
    wide = replace(model, heads=24, kv_heads=6, intermediate=240)
    assert replace(wide, global_keys=None).fitting == [1, 2, 3, 6, 12, 24]
    assert replace(wide, global_keys=Keys(heads=4, size=32)).fitting == [1, 2, 12, 24]
    with pytest.raises(Unsupported, match=r"^6 key/value heads can't be divided by 4 ranks: use --num-shard 1, 2, 6, 12, 24$"):
        wide.check_ranks(4)
    with pytest.raises(Unsupported, match=r"^4 key/value heads of layers without a window can't be divided by 6 ranks"):
        replace(wide, global_keys=Keys(heads=4, size=32)).check_ranks(6)
