"""Llama 4: shapes and defaults from config.json against transformers' configurations; chunked attention, which restricts layers to
chunks of positions, with random models, preemption, draft trees and beam search, against transformers' logits and tokens. Other
tests of tiny models are in test_against_transformers.py."""

import copy
import itertools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.kernels.codes import dequantized, quantize
from penstock.proto.speculation import parse
from penstock.shard import step
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.hypotheses import Search, Stop
from penstock.shard.drafter import Drafter
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Unsupported
from penstock.shard.models.traits import TemperatureTuning
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling, sequences
from penstock.shard.speculator import Speculator
from penstock.shard.step import Span
from penstock.shard.weights import Weights
from penstock.tests.shard import configurations, tiny
from penstock.tests.shard.configurations import ATTENTION_CHUNK
from penstock.tests.shard.driver import Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import SpanRunner, all_pages_free, assert_logits_close, check_greedy, prompt
from penstock.tests.shard.test_drafter import with_free_drafts
from penstock.tests.shard.test_quantized import build_decoder
from penstock.tests.shard.test_weights import LoadingRank, assert_same_weights, change_config

# The hub's config.json, without fields that don't matter here.
SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "max_position_embeddings": 10_485_760,
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500_000.0,
        "use_qk_norm": True,
        "vocab_size": 202_048,
    },
}
MAVERICK = SCOUT | {
    "text_config": SCOUT["text_config"]  # type: ignore[operator]
    | {
        "attn_temperature_tuning": 4,
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1_048_576,
        "num_local_experts": 128,
        "rope_scaling": None,
        "use_qk_norm": False,
    }
}
TEXT_ONLY = {"architectures": ["Llama4ForCausalLM"], "vocab_size": 100, "num_hidden_layers": 4}


def test_shapes_and_parameters_of_scout_and_maverick() -> None:
    scout, maverick = shape(SCOUT), shape(MAVERICK)
    assert (round(scout.parameters() / 1e9), round(maverick.parameters() / 1e9)) == (108, 401)  # without the image encoder
    assert all(round(found.parameters(tokens=1) / 1e9) == 17 for found in (scout, maverick))
    layers_without_rope = {layer for layer in range(48) if layer % 4 == 3}
    for found in (scout, maverick):
        assert (found.nope_layers, found.nope_query_scale) == (layers_without_rope, TemperatureTuning(strength=0.1, positions=8192))
        assert found.windows == (8192, 8192, 8192, 0) * 12
        assert found.turned_positions == found.chunk == 8192
    assert (scout.turned_norm, maverick.turned_norm) == (True, False)
    assert [bool(mixture) for mixture in maverick.mixtures] == [False, True] * 24


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"no_rope_layer_interval": 2},
        {"no_rope_layers": [0, 0, 1, 1, 1, 0]},
        {"no_rope_layers": []},
        {"interleave_moe_layer_step": 2},
        {"moe_layers": [0, 5], "interleave_moe_layer_step": 3},
        {"moe_layers": []},
        {"attention_chunk_size": None},
        {"attn_temperature_tuning": False, "use_qk_norm": False, "attention_bias": True, "floor_scale": 7, "attn_scale": 2.0},
    ],
)
def test_fields_missing_in_config_json_have_transformers_defaults(more: dict[str, Any]) -> None:
    fields = {"num_hidden_layers": 6, **more}
    expected, found = transformers.Llama4TextConfig(**fields), shape({"architectures": ["Llama4ForCausalLM"]} | fields)
    assert ["chunked_attention" if window else "full_attention" for window in found.windows] == expected.layer_types
    assert found.chunk == (expected.attention_chunk_size or 0)
    assert [layer for layer, has_rope in enumerate(expected.no_rope_layers) if not has_rope] == sorted(found.nope_layers)
    assert [layer for layer, mixture in enumerate(found.mixtures) if mixture] == expected.moe_layers
    for mixture in filter(None, found.mixtures):
        assert (mixture.experts, mixture.chosen) == (expected.num_local_experts, expected.num_experts_per_tok)
        assert mixture.size == mixture.shared == expected.intermediate_size
    query_scale = TemperatureTuning(strength=expected.attn_scale, positions=expected.floor_scale)
    assert found.nope_query_scale == (query_scale if expected.attn_temperature_tuning else None)
    assert (found.intermediate, found.turned_norm) == (expected.intermediate_size_mlp, expected.use_qk_norm)
    assert (found.qkv_bias, found.output_bias) == (expected.attention_bias,) * 2
    assert (found.vocabulary, found.hidden, found.head_size) == (expected.vocab_size, expected.hidden_size, expected.head_dim)
    assert (found.heads, found.kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    assert (found.norm_epsilon, found.max_positions) == (expected.rms_norm_eps, expected.max_position_embeddings)
    assert found.rope.theta == expected.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size 0"),
        ({"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4}, "attention_chunk_size null"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types 'sliding_attention' for layer 0"),
        ({"layer_types": ["chunked_attention", *["linear_attention"] * 3]}, "layer_types linear_attention are not supported"),
        ({"layer_types": ["full_attention"]}, "a name for each of num_hidden_layers"),
        ({"no_rope_layers": [1, 1]}, r"no_rope_layers \[1, 1\]"),
        ({"no_rope_layers": 3}, "no_rope_layers 3"),
        ({"moe_layers": "all"}, "moe_layers 'all'"),
        ({"moe_layers": [1.5]}, r"moe_layers \[1.5\]"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok 17, of 16 experts"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step 0"),
        ({"floor_scale": 0}, "floor_scale 0"),
        ({"attn_scale": -1}, "attn_scale -1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            "use_qk_norm with rotary scaling 'yarn'",
        ),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        shape(TEXT_ONLY | changed)


def test_page_sizes_that_do_not_divide_the_attention_chunk_are_refused() -> None:
    found = shape(TEXT_ONLY | {"attention_chunk_size": 24})
    for size in (1, 4, 8, 24):
        found.check_pages(size)
    with pytest.raises(Unsupported, match=r"^pages of 16 tokens don't divide the 24 positions .*: use --page-size 8$"):
        found.check_pages(16)
    shape(TEXT_ONLY | {"attention_chunk_size": None}).check_pages(7)
    config = ShardConfig(folder=str(tiny.folder("llama4")), model="m", page_size=32)
    with pytest.raises(Unsupported, match="use --page-size 16"):
        load(config, lambda stage: None)
    assert load(ShardConfig(**config_fields(config) | {"longest": ATTENTION_CHUNK}), lambda stage: None).decoder.shape.chunk == 0


def config_fields(config: ShardConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_contexts_within_one_chunk_use_full_attention() -> None:
    found = shape(SCOUT)
    assert found.within(8193) is found
    assert found.within(0) is found
    short = found.within(8192)
    assert (short.windows, short.chunk, short.max_positions) == ((0,) * 48, 0, 8192)
    assert shape(TEXT_ONLY | {"max_position_embeddings": 8192}).within(0).chunk == 0
    assert shape(TEXT_ONLY | {"max_position_embeddings": 8193}).within(0).chunk == 8192


# Logits


def random_config(generator: random.Random) -> Any:
    layers, experts, heads = generator.randint(2, 5), generator.randint(1, 6), generator.choice([4, 8])
    more: dict[str, Any] = {"interleave_moe_layer_step": generator.randint(1, 2)}
    if generator.random() < 0.5:
        more["no_rope_layers"] = [generator.randint(0, 1) for _ in range(layers)]
    if generator.random() < 0.5:
        more["layer_types"] = [generator.choice(["chunked_attention", "full_attention"]) for _ in range(layers)]
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": generator.choice([2, 4])}
    return transformers.Llama4TextConfig(
        **configurations.LLAMA4 | sizes | {"intermediate_size": generator.choice([20, 32, 64]), "num_local_experts": experts},
        **more,
        num_experts_per_tok=generator.choice([1, 1, experts]),
        use_qk_norm=generator.random() < 0.6,
        attn_temperature_tuning=generator.random() < 0.7,
        floor_scale=generator.choice([3, 20]),
        attention_bias=generator.random() < 0.4,
        rope_parameters=generator.choice([None, dict(configurations.LLAMA3), dict(configurations.LINEAR)]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_logits_of_random_models_equal_transformers(seed: int, tmp_path: Path) -> None:
    """In random prompt chunks, across several boundaries of attention chunks, on one rank and on two."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    reference = transformers.Llama4ForCausalLM(random_config(generator)).eval()
    with torch.no_grad():
        for name, value in reference.named_parameters():
            value.normal_(1 if "norm" in name else 0, 0.2)
    reference.save_pretrained(tmp_path)
    tokens, cuts = prompt(seed, 5 * ATTENTION_CHUNK + 7), [0]
    while cuts[-1] < len(tokens):
        cuts.append(min(len(tokens), cuts[-1] + generator.choice([1, 2, 15, 16, 17, 40])))
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]

    @torch.inference_mode()
    def work(ranks: Ranks) -> list[Any]:
        model = shape(json.loads((tmp_path / "config.json").read_text()))
        decoder = Decoder(model, Weights(tmp_path, torch.float32, tiny.CPU, lambda read: None), ranks, tiny.CPU)
        engine = Engine(decoder, tiny.CPU, 4)
        engine.resize(64)
        [sequence], _ = sequences(tokens, 1)
        engine.pool.extend(sequence.pages, len(tokens))
        parts = itertools.pairwise(cuts)
        spans = [Span(sequence, start, tokens[start:stop], wanted=stop - start) for start, stop in parts]
        return [decoder.logits(engine.forward([span])) for span in spans]

    assert_logits_close(torch.cat(work(Ranks(0, 1, tiny.CPU))), expected)
    assert_logits_close(torch.cat(tiny.ThreadedRanks().run(work)[0]), expected)


def test_span_across_chunks_returns_the_wanted_logits() -> None:
    """Though the span is cut at the boundaries of attention chunks."""
    tokens = prompt(3, 70)
    expected = tiny.expected_logits("llama4", tokens)
    runner = SpanRunner("llama4", 16)
    for wanted in (0, 1, 6, 7, 23, 70):
        spans = [Span(runner.start(()), 0, tokens, wanted=wanted), Span(runner.start(()), 0, tokens[:20], wanted=1)]
        found = runner.run(spans)
        assert_logits_close(found[:wanted], expected[70 - wanted :])
        assert_logits_close(found[wanted:], expected[19:20])


def test_expert_is_chosen_by_logits_if_sigmoid_scores_are_equal() -> None:
    """The sigmoid of each high logit is 1."""
    logits = torch.tensor([[30.0, 40.0, 50.0, -3.0]])
    layer = copy.copy(tiny.decoder("llama4").layers[0].mlp)
    assert layer is not None
    layer.router = lambda x: logits  # type: ignore[union-attr]
    chosen_experts = []
    layer.experts = lambda x, shares, chosen: chosen_experts.append(chosen.tolist()) or x  # type: ignore[union-attr]
    layer.made(torch.ones(1, 64))  # type: ignore[union-attr]
    assert chosen_experts == [[[2]]]


@pytest.mark.parametrize("name", ["llama4", "llama4-steps"])
def test_fp8_experts_load_as_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    """As in Meta's checkpoint of Maverick, with a scale for each output, whichever dimension outputs are."""
    quantized, plain = (Path(shutil.copytree(tiny.folder(name), tmp_path / kind)) for kind in ("few", "plain"))
    dequantized_tensors = safetensors.torch.load_file(plain / "model.safetensors")
    quantized_tensors = dict(dequantized_tensors)
    for key in [key for key in dequantized_tensors if ".experts." in key]:
        expert_weights = [quantize(expert.t(), "fp8") for expert in dequantized_tensors[key]]
        dequantized_tensors[key] = torch.stack([dequantized(expert, torch.float32).t() for expert in expert_weights])
        quantized_tensors[key] = torch.stack([expert.codes.view(torch.float8_e4m3fn).t().contiguous() for expert in expert_weights])
        scales = torch.stack([expert.scales for expert in expert_weights])  # [experts, outputs, 1]
        quantized_tensors[f"{key}_scale"] = scales.transpose(1, 2).contiguous() if "gate_up" in key else scales
    for folder, tensors in ((quantized, quantized_tensors), (plain, dequantized_tensors)):
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(quantized, quantization_config={"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn"]})
    for rank in (Ranks(0, 1, tiny.CPU), LoadingRank(1)):
        assert_same_weights(build_decoder(quantized, rank), build_decoder(plain, rank))
    del quantized_tensors[next(key for key in quantized_tensors if key.endswith("down_proj_scale"))]
    safetensors.torch.save_file(quantized_tensors, quantized / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Unsupported, match=r"has no tensor .*down_proj_scale"):
        build_decoder(quantized)


# Tokens


@pytest.mark.parametrize("name", ["llama4", "llama4-steps"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_preempted_requests_with_shared_prefixes_get_transformers_tokens(name: str, page_size: int) -> None:
    """Shared prefixes that end before, at and behind boundaries of attention chunks."""
    longest = prompt(1, 70)
    prompts = tuple(
        longest[:length] + prompt(length, suffix_length)
        for length, suffix_length in ((15, 3), (16, 1), (17, 9), (48, 30), (64, 1), (70, 4))
    )
    for seed in range(2):
        result = check_greedy(name, tiny.engine(name, page_size, 400 // page_size), prompts, Traffic(pause=0.2, chunk=7), seed)
        assert result.pauses


def requests_across_chunks(drafts: int) -> list[Group]:
    """Requests that cross boundaries of attention chunks at all places."""
    groups = []
    for uid in range(20):
        sampling = Sampling(temperature=0.9, seed=uid) if uid % 3 == 1 else Sampling()
        repeated = prompt(uid % 4, 5) * (1 + uid % 5)
        groups.append(tiny.group(uid, repeated, 20 + uid, sampling, choices=1 + (uid % 7 == 2), drafts=drafts))
    return groups


@pytest.fixture(scope="module")
def result_without_drafts() -> Results:
    return drive(tiny.engine("llama4", 16, 2000, prefix_caching=False), requests_across_chunks(0), Traffic())


@pytest.mark.parametrize("ahead", [False, True])
def test_overlapping_steps_give_the_same_tokens(result_without_drafts: Results, ahead: bool) -> None:
    engine = tiny.engine("llama4", 4, 300, ahead=ahead)
    assert drive(engine, requests_across_chunks(0), Traffic(9, pause=0.05), seed=3).tokens == result_without_drafts.tokens


@pytest.mark.parametrize(
    ("speculation", "page_size", "draft"),
    [
        ("tokens=6", 4, "llama4"),
        ("tree=3x2x1", 4, "llama4"),
        ("nodes=24", 16, "llama4"),
        ("tree=2x2,ngram=5", 1, "llama4"),
        ("tree=3x2x1", 4, "llama"),
        ("tokens=6", 1, "llama"),
    ],
)
def test_speculation_changes_no_token(speculation: str, page_size: int, draft: str, result_without_drafts: Results) -> None:
    """With a draft model that has the same chunked attention, or none."""
    engine = speculating_engine("llama4", draft, speculation, page_size)
    result = drive(with_free_drafts(engine), requests_across_chunks(engine.speculator.most), Traffic(7, pause=0.05), seed=page_size)
    assert result.tokens == result_without_drafts.tokens
    assert result.drafted > 100
    assert result.accepted > (300 if draft == "llama4" else 0)
    assert all_pages_free(engine)


def speculating_engine(name: str, draft: str, options: str, page_size: int) -> Engine:
    speculation = parse(f"draft=x,{options}")
    drafter = Drafter(tiny.decoder(draft), configurations.VOCABULARY, tiny.CPU, speculation.most)
    speculator = Speculator(tiny.decoder(name).ranks, tiny.CPU, speculation, drafter)
    engine = Engine(tiny.decoder(name), tiny.CPU, page_size, speculator=speculator)
    engine.resize(2000 // page_size)
    return engine


def test_draft_model_may_have_chunked_attention_where_the_target_has_none() -> None:
    """Its trees then go beyond the ends of its chunks, which can only cost acceptance."""
    groups = [tiny.group(uid, prompt(uid, 9 + uid), 30, drafts=9) for uid in range(8)]
    expected = drive(tiny.engine("llama", 16, 2000), copy.deepcopy(groups), Traffic()).tokens
    assert drive(with_free_drafts(speculating_engine("llama", "llama4", "tree=3x2x1", 4)), groups, Traffic()).tokens == expected


def test_draft_trees_end_with_their_attention_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are as deep as possible before."""
    last_positions: list[int] = []
    original = step.plan

    def plan(spans: Sequence[Span], layout: Any, *rest: Any) -> Any:
        for span in spans:
            if span.parents is not None:
                depth = max(step.attention.depths(span.parents))
                assert span.start // ATTENTION_CHUNK == (span.start + depth) // ATTENTION_CHUNK
                last_positions.append((span.start + depth) % ATTENTION_CHUNK)
        return original(spans, layout, *rest)

    engine = speculating_engine("llama4", "llama", "tree=2x2x1x1", 4)
    monkeypatch.setattr("penstock.shard.forward.step.plan", plan)
    engine.speculator.drafter = None  # its own trees are not tested here
    drive(with_free_drafts(engine), requests_across_chunks(engine.speculator.most), Traffic(7), seed=1)
    assert ATTENTION_CHUNK - 1 in last_positions
    assert max(last_positions) < ATTENTION_CHUNK


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_beam_search_equals_transformers(page_size: int, ahead: bool) -> None:
    """Beams fork before and behind the boundary of a chunk, and are preempted."""
    prompts = [prompt(seed, length) for seed, length in enumerate((3, 15, 16, 17, 31))]
    groups = [tiny.group(uid, tokens, 24, search=Search(4, 2, 1.0, Stop.WORSE)) for uid, tokens in enumerate(prompts)]
    engine = tiny.engine("llama4", page_size, 600 // page_size, ahead=ahead)
    result = drive(engine, groups, Traffic(7, pause=0.0 if ahead else 0.02), seed=page_size)
    assert result.failed == {}
    for uid, tokens in enumerate(prompts):
        input_ids = torch.tensor([tokens])
        found = tiny.reference("llama4").generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            num_beams=4,
            num_return_sequences=2,
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=[1 << 20],  # none
            pad_token_id=0,
        )
        assert [result.tokens[uid, choice] for choice in range(2)] == found[:, len(tokens) :].tolist()
    assert all_pages_free(engine)


def test_text_logits_of_a_checkpoint_with_an_image_encoder_equal_transformers(tmp_path: Path) -> None:
    """Its tensors have other names, and the text has a config of its own."""
    reference = tiny.reference("llama4")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    sizes = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "patch_size": 14}
    vision_model = transformers.Llama4ForConditionalGeneration(
        transformers.Llama4Config(text_config=reference.config.to_dict(), vision_config=vision | sizes)
    )
    vision_model.language_model.load_state_dict(reference.state_dict())
    vision_model.save_pretrained(tmp_path)
    runner = SpanRunner("llama4", 16)
    runner.engine.decoder = load(ShardConfig(folder=str(tmp_path), model="m"), lambda stage: None).decoder
    runner.engine.resize(64)
    tokens = prompt(3, 40)
    assert_logits_close(runner.run([Span(runner.start(()), 0, tokens, wanted=40)]), tiny.expected_logits("llama4", tokens))
