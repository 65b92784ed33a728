"""Llama 4: what its config.json files say is what transformers takes them for, and layers that see chunks of positions get along
with all that requests may ask for. What tiny models of other shapes answer is in test_oracle.py."""

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
from penstock.tests.shard.configurations import CHUNK
from penstock.tests.shard.driver import Habits, World, drive
from penstock.tests.shard.test_drafter import free
from penstock.tests.shard.test_oracle import Bench, at_rest, check_greedy, close, prompt
from penstock.tests.shard.test_quantized import made
from penstock.tests.shard.test_weights import Alone, change, same

# As on the hub, but for what doesn't matter here.
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
ALONE = {"architectures": ["Llama4ForCausalLM"], "vocab_size": 100, "num_hidden_layers": 4}


def test_the_hubs_models_have_their_sizes() -> None:
    scout, maverick = shape(SCOUT), shape(MAVERICK)
    assert (round(scout.parameters() / 1e9), round(maverick.parameters() / 1e9)) == (108, 401)  # without what encodes images
    assert all(round(found.parameters(tokens=1) / 1e9) == 17 for found in (scout, maverick))
    still = {layer for layer in range(48) if layer % 4 == 3}
    for found in (scout, maverick):
        assert (found.nope_layers, found.nope_query_scale) == (still, TemperatureTuning(strength=0.1, positions=8192))
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
def test_what_is_left_out_is_transformers_default(more: dict[str, Any]) -> None:
    said = {"num_hidden_layers": 6, **more}
    theirs, found = transformers.Llama4TextConfig(**said), shape({"architectures": ["Llama4ForCausalLM"]} | said)
    assert ["chunked_attention" if window else "full_attention" for window in found.windows] == theirs.layer_types
    assert found.chunk == (theirs.attention_chunk_size or 0)
    assert [layer for layer, turns in enumerate(theirs.no_rope_layers) if not turns] == sorted(found.nope_layers)
    assert [layer for layer, mixture in enumerate(found.mixtures) if mixture] == theirs.moe_layers
    for mixture in filter(None, found.mixtures):
        assert (mixture.experts, mixture.chosen) == (theirs.num_local_experts, theirs.num_experts_per_tok)
        assert mixture.size == mixture.shared == theirs.intermediate_size
    query_scale = TemperatureTuning(strength=theirs.attn_scale, positions=theirs.floor_scale)
    assert found.nope_query_scale == (query_scale if theirs.attn_temperature_tuning else None)
    assert (found.intermediate, found.turned_norm) == (theirs.intermediate_size_mlp, theirs.use_qk_norm)
    assert (found.qkv_bias, found.output_bias) == (theirs.attention_bias,) * 2
    assert (found.vocabulary, found.hidden, found.head_size) == (theirs.vocab_size, theirs.hidden_size, theirs.head_dim)
    assert (found.heads, found.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (found.norm_epsilon, found.max_positions) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert found.rope.theta == theirs.rope_parameters["rope_theta"]


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
def test_what_is_wrong_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        shape(ALONE | changed)


def test_pages_end_where_chunks_do() -> None:
    found = shape(ALONE | {"attention_chunk_size": 24})
    for size in (1, 4, 8, 24):
        found.check_pages(size)
    with pytest.raises(Unsupported, match=r"^pages of 16 tokens don't divide the 24 positions .*: use --page-size 8$"):
        found.check_pages(16)
    shape(ALONE | {"attention_chunk_size": None}).check_pages(7)
    config = ShardConfig(folder=str(tiny.folder("llama4")), model="m", page_size=32)
    with pytest.raises(Unsupported, match="use --page-size 16"):
        load(config, lambda stage: None)
    assert load(ShardConfig(**vars_of(config) | {"longest": CHUNK}), lambda stage: None).decoder.shape.chunk == 0


def vars_of(config: ShardConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_within_one_chunk_all_is_plain() -> None:
    found = shape(SCOUT)
    assert found.within(8193) is found
    assert found.within(0) is found
    short = found.within(8192)
    assert (short.windows, short.chunk, short.max_positions) == ((0,) * 48, 0, 8192)
    assert shape(ALONE | {"max_position_embeddings": 8192}).within(0).chunk == 0
    assert shape(ALONE | {"max_position_embeddings": 8193}).within(0).chunk == 8192


# Logits


def random_config(chance: random.Random) -> Any:
    layers, experts, heads = chance.randint(2, 5), chance.randint(1, 6), chance.choice([4, 8])
    more: dict[str, Any] = {"interleave_moe_layer_step": chance.randint(1, 2)}
    if chance.random() < 0.5:
        more["no_rope_layers"] = [chance.randint(0, 1) for _ in range(layers)]
    if chance.random() < 0.5:
        more["layer_types"] = [chance.choice(["chunked_attention", "full_attention"]) for _ in range(layers)]
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": chance.choice([2, 4])}
    return transformers.Llama4TextConfig(
        **configurations.LLAMA4 | sizes | {"intermediate_size": chance.choice([20, 32, 64]), "num_local_experts": experts},
        **more,
        num_experts_per_tok=chance.choice([1, 1, experts]),
        use_qk_norm=chance.random() < 0.6,
        attn_temperature_tuning=chance.random() < 0.7,
        floor_scale=chance.choice([3, 20]),
        attention_bias=chance.random() < 0.4,
        rope_parameters=chance.choice([None, dict(configurations.LLAMA3), dict(configurations.LINEAR)]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_random_models_give_transformers_logits(seed: int, tmp_path: Path) -> None:
    """In random chunks, across several borders, on one rank and on two."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    theirs = transformers.Llama4ForCausalLM(random_config(chance)).eval()
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            value.normal_(1 if "norm" in name else 0, 0.2)
    theirs.save_pretrained(tmp_path)
    tokens, cuts = prompt(seed, 5 * CHUNK + 7), [0]
    while cuts[-1] < len(tokens):
        cuts.append(min(len(tokens), cuts[-1] + chance.choice([1, 2, 15, 16, 17, 40])))
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]

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

    close(torch.cat(work(Ranks(0, 1, tiny.CPU))), expected)
    close(torch.cat(tiny.Threads().run(work)[0]), expected)


def test_of_a_long_span_as_much_is_wanted_as_is_asked_for() -> None:
    """However it is cut."""
    tokens = prompt(3, 70)
    expected = tiny.expected_logits("llama4", tokens)
    bench = Bench("llama4", 16)
    for wanted in (0, 1, 6, 7, 23, 70):
        spans = [Span(bench.start(()), 0, tokens, wanted=wanted), Span(bench.start(()), 0, tokens[:20], wanted=1)]
        found = bench.run(spans)
        close(found[:wanted], expected[70 - wanted :])
        close(found[wanted:], expected[19:20])


def test_chosen_experts_may_have_scores_that_do_not_differ() -> None:
    """As high logits have: 1."""
    logits = torch.tensor([[30.0, 40.0, 50.0, -3.0]])
    layer = copy.copy(tiny.decoder("llama4").layers[0].mlp)
    assert layer is not None
    layer.router = lambda x: logits  # type: ignore[union-attr]
    seen = []
    layer.experts = lambda x, shares, chosen: seen.append(chosen.tolist()) or x  # type: ignore[union-attr]
    layer.made(torch.ones(1, 64))  # type: ignore[union-attr]
    assert seen == [[[2]]]


@pytest.mark.parametrize("name", ["llama4", "llama4-steps"])
def test_experts_of_8_bits_are_the_same_model(name: str, tmp_path: Path) -> None:
    """As Meta has Maverick's: a scale for each output, on either side of it."""
    few, plain = (Path(shutil.copytree(tiny.folder(name), tmp_path / kind)) for kind in ("few", "plain"))
    stored = safetensors.torch.load_file(plain / "model.safetensors")
    kept = dict(stored)
    for key in [key for key in stored if ".experts." in key]:
        codes = [quantize(one.t(), "fp8") for one in stored[key]]
        stored[key] = torch.stack([dequantized(one, torch.float32).t() for one in codes])
        kept[key] = torch.stack([one.codes.view(torch.float8_e4m3fn).t().contiguous() for one in codes])
        scales = torch.stack([one.scales for one in codes])  # [experts, outputs, 1]
        kept[f"{key}_scale"] = scales.transpose(1, 2).contiguous() if "gate_up" in key else scales
    for folder, tensors in ((few, kept), (plain, stored)):
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change(few, quantization_config={"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["self_attn"]})
    for rank in (Ranks(0, 1, tiny.CPU), Alone(1)):
        same(made(few, rank), made(plain, rank))
    del kept[next(key for key in kept if key.endswith("down_proj_scale"))]
    safetensors.torch.save_file(kept, few / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Unsupported, match=r"has no tensor .*down_proj_scale"):
        made(few)


# Tokens


@pytest.mark.parametrize("name", ["llama4", "llama4-steps"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_it_is_paused_and_goes_on_with_pages_that_others_had(name: str, page_size: int) -> None:
    """Prefixes that end before borders, at them and behind them."""
    base = prompt(1, 70)
    asked = tuple(base[:length] + prompt(length, own) for length, own in ((15, 3), (16, 1), (17, 9), (48, 30), (64, 1), (70, 4)))
    for seed in range(2):
        world = check_greedy(name, tiny.engine(name, page_size, 400 // page_size), asked, Habits(pause=0.2, chunk=7), seed)
        assert world.pauses


def requests(drafts: int) -> list[Group]:
    """That cross borders at all places."""
    made = []
    for uid in range(20):
        sampling = Sampling(temperature=0.9, seed=uid) if uid % 3 == 1 else Sampling()
        repeated = prompt(uid % 4, 5) * (1 + uid % 5)
        made.append(tiny.group(uid, repeated, 20 + uid, sampling, choices=1 + (uid % 7 == 2), drafts=drafts))
    return made


@pytest.fixture(scope="module")
def plain() -> World:
    return drive(tiny.engine("llama4", 16, 2000, prefix_caching=False), requests(0), Habits())


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_may_be_asked_for_ahead(plain: World, ahead: bool) -> None:
    engine = tiny.engine("llama4", 4, 300, ahead=ahead)
    assert drive(engine, requests(0), Habits(9, pause=0.05), seed=3).tokens == plain.tokens


@pytest.mark.parametrize(
    ("said", "page_size", "draft"),
    [
        ("tokens=6", 4, "llama4"),
        ("tree=3x2x1", 4, "llama4"),
        ("nodes=24", 16, "llama4"),
        ("tree=2x2,ngram=5", 1, "llama4"),
        ("tree=3x2x1", 4, "llama"),
        ("tokens=6", 1, "llama"),
    ],
)
def test_drafts_change_no_token(said: str, page_size: int, draft: str, plain: World) -> None:
    """By a model that sees the same chunks, or none."""
    engine = guessing("llama4", draft, said, page_size)
    world = drive(free(engine), requests(engine.speculator.most), Habits(7, pause=0.05), seed=page_size)
    assert world.tokens == plain.tokens
    assert world.drafted > 100
    assert world.accepted > (300 if draft == "llama4" else 0)
    assert at_rest(engine)


def guessing(name: str, draft: str, said: str, page_size: int) -> Engine:
    speculation = parse(f"draft=x,{said}")
    drafter = Drafter(tiny.decoder(draft), configurations.VOCABULARY, tiny.CPU, speculation.most)
    speculator = Speculator(tiny.decoder(name).ranks, tiny.CPU, speculation, drafter)
    engine = Engine(tiny.decoder(name), tiny.CPU, page_size, speculator=speculator)
    engine.resize(2000 // page_size)
    return engine


def test_a_draft_model_may_see_chunks_that_its_model_does_not() -> None:
    """Its trees then go beyond their ends, which costs right drafts at most."""
    asked = [tiny.group(uid, prompt(uid, 9 + uid), 30, drafts=9) for uid in range(8)]
    expected = drive(tiny.engine("llama", 16, 2000), copy.deepcopy(asked), Habits()).tokens
    assert drive(free(guessing("llama", "llama4", "tree=3x2x1", 4)), asked, Habits()).tokens == expected


def test_drafts_end_with_their_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are as deep as may be before."""
    ends: list[int] = []
    planned = step.plan

    def plan(spans: Sequence[Span], layout: Any, *rest: Any) -> Any:
        for span in spans:
            if span.parents is not None:
                depth = max(step.attention.depths(span.parents))
                assert span.start // CHUNK == (span.start + depth) // CHUNK
                ends.append((span.start + depth) % CHUNK)
        return planned(spans, layout, *rest)

    engine = guessing("llama4", "llama", "tree=2x2x1x1", 4)
    monkeypatch.setattr("penstock.shard.forward.step.plan", plan)
    engine.speculator.drafter = None  # whose own trees are no matter here
    drive(free(engine), requests(engine.speculator.most), Habits(7), seed=1)
    assert CHUNK - 1 in ends
    assert max(ends) < CHUNK


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_beams_are_those_of_transformers(page_size: int, ahead: bool) -> None:
    """Which part before a border and behind it, in a pool where they are paused."""
    asked = [prompt(seed, length) for seed, length in enumerate((3, 15, 16, 17, 31))]
    groups = [tiny.group(uid, tokens, 24, search=Search(4, 2, 1.0, Stop.WORSE)) for uid, tokens in enumerate(asked)]
    engine = tiny.engine("llama4", page_size, 600 // page_size, ahead=ahead)
    world = drive(engine, groups, Habits(7, pause=0.0 if ahead else 0.02), seed=page_size)
    assert world.failed == {}
    for uid, tokens in enumerate(asked):
        given = torch.tensor([tokens])
        found = tiny.reference("llama4").generate(
            given,
            attention_mask=torch.ones_like(given),
            num_beams=4,
            num_return_sequences=2,
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=[1 << 20],  # none
            pad_token_id=0,
        )
        assert [world.tokens[uid, choice] for choice in range(2)] == found[:, len(tokens) :].tolist()
    assert at_rest(engine)


def test_the_text_of_a_model_with_images(tmp_path: Path) -> None:
    """Whose tensors have other names, and whose text is described by itself."""
    own = tiny.reference("llama4")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    sizes = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "patch_size": 14}
    both = transformers.Llama4ForConditionalGeneration(
        transformers.Llama4Config(text_config=own.config.to_dict(), vision_config=vision | sizes)
    )
    both.language_model.load_state_dict(own.state_dict())
    both.save_pretrained(tmp_path)
    bench = Bench("llama4", 16)
    bench.engine.decoder = load(ShardConfig(folder=str(tmp_path), model="m"), lambda stage: None).decoder
    bench.engine.resize(64)
    tokens = prompt(3, 40)
    close(bench.run([Span(bench.start(()), 0, tokens, wanted=40)]), tiny.expected_logits("llama4", tokens))
