"""LongCat Flash: shapes and parameters from config.json against transformers, layers that become two decoder layers,
zero-computation experts, and tensor names. Logits and tokens: test_against_transformers.py."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.shard.models.draft_families import _eagle3
from penstock.shard.models.families import shape
from penstock.shard.models.mlp import MixtureOfExperts
from penstock.shard.models.renamed import paired_name
from penstock.shard.models.shape import Unsupported
from penstock.shard.models.shortcuts import ShortcutExperts, ShortcutMlp, ShortcutStream
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import sequences
from penstock.shard.step import Span
from penstock.tests.shard import tiny
from penstock.tests.shard.test_against_transformers import SpanRunner, assert_logits_close, check_preemption, prompt
from penstock.tests.shard.test_quantized import build_decoder
from penstock.tests.shard.test_weights import WEIGHTS, LoadingRank, assert_same_weights

ARCHITECTURE = {"architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash"}
FLASH = ARCHITECTURE | {
    "attention_method": "MLA",
    "expert_ffn_hidden_size": 2048,
    "ffn_hidden_size": 12_288,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131_072,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "num_attention_heads": 64,
    "num_layers": 28,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e7,
    "routed_scaling_factor": 6.0,
    "v_head_dim": 128,
    "vocab_size": 131_072,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
}
NAMES = ["longcat", "longcat-busy"]
REQUIRED_FIELDS = ("vocab_size", "hidden_size", "num_attention_heads", "num_layers", "architectures")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_layers": 3, "zero_expert_num": 0, "attention_bias": True},
        {"num_layers": 2, "zero_expert_num": 5, "moe_topk": 3, "kv_lora_rank": 256},
        {"num_hidden_layers": 56},
    ],
)
def test_shapes_and_parameters_equal_transformers(more: dict[str, Any]) -> None:
    """Without the matrices that transformers has for zero-computation experts, half as many as for others."""
    config, found = transformers.LongcatFlashConfig.from_dict(FLASH | more), shape(FLASH | more)
    with torch.device("meta"):
        model = transformers.LongcatFlashForCausalLM(config)
    parameters = [*model.parameters(), *(values for key, values in model.named_buffers() if "correction" in key)]
    unused = config.num_layers * (config.zero_expert_num or 0) * 2 * config.expert_ffn_hidden_size * config.hidden_size
    assert found.parameters() == sum(values.numel() for values in parameters) - unused
    assert found == shape(config.to_dict() | ARCHITECTURE)
    assert found.layers == config.num_hidden_layers
    assert [mixture is not None for mixture in found.mixtures] == [True, False] * config.num_layers
    assert [found.joins(layer) for layer in range(found.layers)] == [False, True] * config.num_layers


def test_fields_missing_in_config_json_have_transformers_defaults() -> None:
    minimal_config = {name: value for name, value in FLASH.items() if name in REQUIRED_FIELDS}
    saved_config = (
        transformers.LongcatFlashConfig(**{name: minimal_config[name] for name in REQUIRED_FIELDS[:4]}).to_dict() | ARCHITECTURE
    )
    assert shape(minimal_config) == shape(FLASH) == shape(saved_config)


def test_parameters_and_kv_cache_size_of_longcat_flash() -> None:
    """561 billion parameters, 27 of them active on average: a third of the 12 experts of a token are zero-computation experts."""
    found = shape(FLASH)
    assert (round(found.parameters() / 1e9), round((found.parameters(tokens=1) - 131_072 * 6144) / 1e9)) == (561, 27)
    [mixture, _] = found.mixtures[:2]
    assert mixture is not None
    assert (mixture.read(1), mixture.routed) == (pytest.approx(8), 768)
    assert found.kv_elements(8) == 56 * 576
    assert dict(found.factors) == {"self_attn.q_b_proj": 2.0, "self_attn.kv_b_proj": 12**0.5}
    assert found.fitting == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_layers": 0}, "num_layers 0, an integer from 1"),
        ({"num_layers": "28"}, "num_layers '28'"),
        ({"num_hidden_layers": 30}, "num_layers 28, and num_hidden_layers 30, which are twice as many"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size 0"),
        ({"moe_topk": None}, "moe_topk null"),
        ({"moe_topk": 769}, "769, of 768 experts"),
        ({"expert_ffn_hidden_size": 1.5}, "expert_ffn_hidden_size 1.5"),
        ({"n_routed_experts": 0}, "n_routed_experts 0"),
        ({"zero_expert_num": None}, "zero_expert_num null"),
        ({"zero_expert_num": -1}, "zero_expert_num -1, an integer from 0"),
        ({"zero_expert_type": "copy"}, "zero_expert_type 'copy' is not supported: for this family the decoder has 'identity'"),
        ({"attention_method": "GQA"}, "attention_method 'GQA' is not supported"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora false is not supported"),
        ({"router_bias": True}, "router_bias true is not supported"),
        ({"norm_topk_prob": True}, "norm_topk_prob true is not supported"),
        ({"q_lora_rank": None}, "q_lora_rank null is not supported"),
        ({"head_dim": 32}, "head_dim 32, and its other sizes mean 64"),
        ({"qk_head_dim": 128}, "qk_head_dim 128, and its other sizes mean 192"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"model_type": "longcat"}, "which is 'longcat_flash'"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        shape(FLASH | changed)


def test_eagle3_draft_heads_are_refused() -> None:
    with pytest.raises(Unsupported, match="counts layers, of which LongcatFlashForCausalLM has two in one"):
        _eagle3({}, shape(FLASH))


def test_each_layer_of_the_checkpoint_becomes_two_decoder_layers() -> None:
    engine = tiny.engine("longcat", pages=3)
    assert [type(layer.mlp) for layer in engine.decoder.layers] == [ShortcutExperts, ShortcutMlp] * 2
    assert engine.token_bytes == 4 * 4 * (20 + 8)
    paired = engine.decoder.shape.paired
    assert paired_name("model.layers.7.self_attn.q_a_proj.weight", paired) == "model.layers.3.self_attn.1.q_a_proj.weight"
    assert paired_name("model.layers.6.mlp.experts.0.up_proj.weight", paired) == "model.layers.3.mlp.experts.0.up_proj.weight"
    assert paired_name("model.embed_tokens.weight", paired) == "model.embed_tokens.weight"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_with_hub_and_transformers_names_are_loaded(name: str, rank: int, tmp_path: Path) -> None:
    """The hub's checkpoints lack the matrices of zero-computation experts and have a multi-token prediction layer; transformers'
    have the matrices of all experts, in one tensor."""
    folder, mixture = Path(shutil.copytree(tiny.folder(name), tmp_path / "hub")), tiny.decoder(name).shape.mixtures[0]
    assert mixture is not None
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    unused = [key for i in range(mixture.experts, mixture.routed) for key in stored if f".experts.{i}." in key]
    assert len(unused) == 2 * mixture.idle * len(tiny.decoder(name).layers) // 2
    for key in unused:
        del stored[key]
    stored |= {"model.mtp.layers.0.self_attn.q_a_proj.weight": torch.ones(3)}
    safetensors.torch.save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    assert_same_weights(build_decoder(folder, LoadingRank(rank)), build_decoder(tiny.folder(name), LoadingRank(rank)))
    tiny.reference(name).save_pretrained(tmp_path / "own", save_original_format=False)
    joined_experts = safetensors.torch.load_file(tmp_path / "own" / WEIGHTS)["model.layers.0.mlp.experts.gate_up_proj"]
    assert len(joined_experts) == mixture.routed
    assert_same_weights(build_decoder(tmp_path / "own", LoadingRank(rank)), build_decoder(tiny.folder(name), LoadingRank(rank)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [7, 13])
def test_preempted_requests_get_transformers_tokens(name: str, chunk: int) -> None:
    check_preemption(name, chunk)


def test_logits_equal_transformers_if_all_or_no_chosen_experts_are_zero_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero-computation experts return their input. Here those of all tokens are the same: three of four, all four, or none."""
    runner, tokens = SpanRunner("longcat", 16), prompt(3, 30)
    reference = tiny.reference("longcat")
    monkeypatch.setattr(MixtureOfExperts, "route", lambda self, x: same_routing(len(x), chosen))
    for layer in reference.model.layers:
        monkeypatch.setattr(layer.mlp.router, "forward", lambda x: (None, *same_routing(x.shape[0] * x.shape[1], chosen)))
    chosen: tuple[int, ...]
    for experts in ((6, 7, 8, 1), (8, 7, 6, 8), (0, 5, 2, 3)):
        chosen = experts
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens])).logits[0]
        assert_logits_close(runner.run([Span(runner.start(()), 0, tokens, wanted=30)]), expected)


def same_routing(count: int, chosen: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights, and the same experts for all tokens."""
    return torch.tensor([[0.4, 0.1, 0.3, 0.7]]).expand(count, 4).contiguous(), torch.tensor([chosen]).expand(count, 4).contiguous()


def test_two_all_reduces_per_decoder_layer() -> None:
    """The output of experts is added up together with that of the second MLP."""
    counts = []

    @torch.inference_mode()
    def work(ranks: Ranks) -> None:
        engine = tiny.rank_engine("longcat", ranks)
        calls, all_reduce = [0], ranks.all_reduce

        def counted(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return all_reduce(x)

        ranks.all_reduce = counted  # type: ignore[method-assign]
        [sequence], _ = sequences(prompt(1, 9), 1)
        engine.pool.extend(sequence.pages, 9)
        engine.forward([Span(sequence, 0, sequence.tokens)])
        counts.append((calls[0], engine.decoder.shape.sums + 1))

    tiny.ThreadedRanks(2).run(work)
    assert counts == [(9, 9)] * 2


def test_held_expert_output_follows_the_selected_rows() -> None:
    stream = ShortcutStream(torch.arange(12.0).view(4, 3), Ranks(0, 1, tiny.CPU), 1e-6)
    stream.hold(-torch.arange(12.0).view(4, 3))
    stream.select(torch.tensor([2, 0]))
    assert not (stream.normalized(None) + stream.held()).any()


def test_config_saved_by_transformers_has_two_decoder_layers_per_layer() -> None:
    """transformers does not save num_hidden_layers."""
    config_json = json.loads((tiny.folder("longcat") / "config.json").read_text())
    assert "num_hidden_layers" not in config_json
    assert shape(config_json).layers == 4
