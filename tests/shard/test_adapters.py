"""LoRA adapters: requests with different adapters, or none, in one batch get the tokens of transformers' merged models; adapters
that are loaded and dropped while the engine runs; refused adapters."""

import functools
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.kernels.linear import Invariance
from penstock.shard import adapters
from penstock.shard.adapters import Adapter
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.hypotheses import Search, Stop
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.models.kimi_linear_attention import KimiDeltaAttention
from penstock.shard.models.linear_attention import LinearAttention
from penstock.shard.models.lora import LoraAdapters, LoraTarget
from penstock.shard.models.recurrent_shapes import StateSpaceShape
from penstock.shard.models.shape import Unsupported
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling
from penstock.shard.weights import Weights
from penstock.tests.shard import lora, packing, tiny
from penstock.tests.shard.driver import Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import ANSWER_LENGTH, all_pages_free, prompts
from penstock.tests.shard.test_quantized import quantized_weights
from penstock.tests.shard.test_weights import LoadingRank

# With fused matrices, biases, permuted rotary features, multipliers, experts beside attention, linear attention, short
# convolutions.
FAMILIES = [
    *("llama", "qwen2", "phi3", "glm4", "granite", "gemma2", "olmo2", "llama4", "mixtral", "qwen2-moe"),
    *("falcon-h1", "granite-4-h", "lfm2", "nemotron-h", "qwen3.5", "deepseek-v3"),
    *("hyperclova", "lfm3", "mimo", "qwen3-next", "kimi-linear", "deepseek-v2", "minimax-m3", "hy-4", "mistral-large4"),
    *("ax-k2", "olmo-hybrid", "gemma3n", "gemma3n-plain", "longcat", "glm-5-next", "deepseek-v4"),
]
PromptsWithAdapters = Sequence[tuple[tuple[int, ...], str]]


@functools.cache
def transformers_model(model: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    [architecture] = json.loads((model / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(model, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(model: Path, tokens: tuple[int, ...], count: int = ANSWER_LENGTH) -> list[int]:
    row = list(tokens)
    for _ in range(count):
        row.append(int(transformers_model(model)(torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(tokens) :]


@torch.inference_mode()
def first_logprob(model: Path, tokens: tuple[int, ...], token: int) -> float:
    return float(transformers_model(model)(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)[token])


def engine_of(folder: Path, ahead: bool = False, **config: Any) -> Engine:
    decoder = load(ShardConfig(folder=str(folder), model="m", **config), lambda stage: None).decoder
    loaded = Engine(decoder, tiny.CPU, 16, overlap=ahead)
    loaded.resize(512)
    return loaded


def engine(name: str, adapters: tuple[tuple[str, str], ...], ahead: bool = False) -> Engine:
    return engine_of(tiny.folder(name), ahead, adapters=adapters)


def requests(prompts_with_adapters: PromptsWithAdapters, sampling: Sampling | None = None, **more: Any) -> list[Group]:
    return [
        tiny.group(uid, tokens, ANSWER_LENGTH, sampling, adapter=adapter, cache_key=adapter, **more)
        for uid, (tokens, adapter) in enumerate(prompts_with_adapters)
    ]


def mixed_prompts(count: int, seed: int) -> list[tuple[tuple[int, ...], str]]:
    chance = random.Random(seed)
    return [(tokens, chance.choice(["", "0", "1"])) for tokens in prompts(count, 40)]


def check_tokens(loaded: Engine, prompts_with_adapters: PromptsWithAdapters, models: dict[str, Path], traffic: Traffic) -> Results:
    results = drive(loaded, requests(prompts_with_adapters), traffic)
    assert results.failed == {}
    assert results.answers == {uid: greedy(models[adapter], tokens) for uid, (tokens, adapter) in enumerate(prompts_with_adapters)}
    assert all_pages_free(loaded)
    return results


@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_batch_of_adapters_matches_merged_models(name: str, tmp_path: Path) -> None:
    adapters, models = lora.adapters_for(name, tmp_path)
    prompts_with_adapters = mixed_prompts(9, 3)
    assert len({adapter for _, adapter in prompts_with_adapters}) == 3
    results = check_tokens(engine(name, adapters), prompts_with_adapters, models, Traffic(chunk=7, pauses=1))
    for uid, (tokens, adapter) in enumerate(prompts_with_adapters):
        merged_logprob, original = (first_logprob(models[key], tokens, results.answers[uid][0]) for key in (adapter, ""))
        assert results.logprobs[uid, 0][0] == pytest.approx(merged_logprob, abs=3e-4)
        assert not adapter or abs(merged_logprob - original) > 1e-3


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2", "phi3", "glm4", "granite", "qwen2-moe", "qwen3-next", "qwen3.5", "kimi-linear", "falcon-h1", "nemotron-h"),
        *("deepseek-v2", "deepseek-v3", "granite-4-h", "mistral-large4", "ax-k2", "olmo-hybrid", "gemma3n"),
        *("longcat", "glm-5-next", "deepseek-v4"),
    ],
)
def test_adapters_on_two_ranks_match_merged_models(name: str, tmp_path: Path) -> None:
    adapters, models = lora.adapters_for(name, tmp_path)
    prompts_with_adapters = mixed_prompts(5, 1)

    def work(rank: Ranks) -> None:
        model = shape(json.loads((tiny.folder(name) / "config.json").read_text()))
        weights = Weights(tiny.folder(name), torch.float32, tiny.CPU, lambda read: None)
        own = [Adapter(key, Path(folder), torch.float32, tiny.CPU) for key, folder in adapters]
        loaded = Engine(Decoder(model, weights, rank, tiny.CPU, adapters=LoraAdapters(own)), tiny.CPU, 16)
        loaded.resize(256)
        check_tokens(loaded, prompts_with_adapters, models, Traffic(chunk=9)) if rank.rank == 0 else drive(
            loaded, requests(prompts_with_adapters), Traffic(chunk=9)
        )

    [[greedy(models[adapter], tokens)] for tokens, adapter in prompts_with_adapters]  # the ranks' threads would wait for each other
    tiny.ThreadedRanks().run(work)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("qwen2", "packed-zeros"), ("phi3", "gptq"), ("deepseek-v3", "float8"), ("falcon-h1", "packed-zeros")),
        *(("qwen3-next", "fp8-blocks"), ("qwen3.5", "packed-zeros"), ("kimi-linear", "packed-zeros")),
        *(("olmo-hybrid", "packed-zeros"), ("gemma3n", "packed-zeros")),
    ],
)
def test_adapters_with_quantized_weights_match_unquantized_merged_models(name: str, form: str, tmp_path: Path) -> None:
    """Same tokens as unquantized weights, also where the gates of linear attention are read with them, or separately."""
    quantized, plain = packing.checkpoints(name, form, tmp_path)
    folder = lora.adapter(plain, tmp_path / "adapter", 3)
    loaded = engine_of(quantized, adapters=(("a", str(folder)),))
    linear_layers = [
        layer.attention for layer in loaded.decoder.layers if isinstance(layer.attention, LinearAttention | KimiDeltaAttention)
    ]
    assert all(one.gating is not None for one in linear_layers)
    tokens = prompts(1, 40)[0]
    check_tokens(loaded, [(tokens, "a")], {"a": lora.merged(plain, folder, tmp_path / "merged")}, Traffic(chunk=9))


@pytest.mark.parametrize("name", ["words-wide", "qwen3.5-wide", "granite-4-h-wide"])
def test_adapters_leave_quantized_weights_quantized(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing.FORMATS["packed-zeros"], "size", 32)
    quantized, plain = packing.checkpoints(name, "packed-zeros", tmp_path)
    folder = lora.adapter(plain, tmp_path / "adapter", 3)
    loaded, tokens = engine_of(quantized, adapters=(("a", str(folder)),), dtype="bfloat16"), prompts(1, 40)[0]
    assert quantized_weights(loaded.decoder)
    results = drive(loaded, [tiny.group(1, tokens, ANSWER_LENGTH, adapter="a")], Traffic())
    token, logprob = results.tokens[1, 0][0], results.logprobs[1, 0][0]
    expected, original = (first_logprob(model, tokens, token) for model in (lora.merged(plain, folder, tmp_path / "merged"), plain))
    assert 10 * abs(logprob - expected) < abs(original - expected)


def test_sampled_tokens_do_not_depend_on_other_adapters_in_the_batch(tmp_path: Path) -> None:
    """Sampled answers are the same alone and beside requests with other adapters or none."""
    adapters, _ = lora.adapters_for("llama", tmp_path)
    loaded = engine("llama", adapters)
    prompts_with_adapters = mixed_prompts(8, 5)
    sampling = Sampling(temperature=1.0, seed=11)
    together = drive(loaded, requests(prompts_with_adapters, sampling), Traffic(chunk=5, pauses=1))
    assert together.failed == {}
    for uid, one in enumerate(requests(prompts_with_adapters, sampling)):
        alone = drive(loaded, [one], Traffic())
        assert alone.tokens[uid, 0] == together.tokens[uid, 0]
        assert alone.logprobs[uid, 0] == pytest.approx(together.logprobs[uid, 0], abs=1e-4)


@pytest.mark.parametrize("ahead", [False, True])
def test_choices_beams_and_drafts_use_the_adapter(ahead: bool, tmp_path: Path) -> None:
    adapters, models = lora.adapters_for("llama", tmp_path)
    loaded = engine("llama", adapters, ahead=ahead)
    whole = engine_of(models["1"])
    token_lists = prompts(3, 40)
    sampling = Sampling(temperature=1.0, seed=2)

    def groups(adapter: str) -> list[Group]:
        search = Search(3, 2, 1.0, Stop.FULL, 0, False, [])
        return [
            tiny.group(0, token_lists[0], ANSWER_LENGTH, sampling, choices=3, adapter=adapter),
            tiny.group(1, token_lists[1], ANSWER_LENGTH, search=search, end_ids=[7], adapter=adapter),
            tiny.group(2, token_lists[2], ANSWER_LENGTH, adapter=adapter, drafts=4),
        ]

    changed, expected = drive(loaded, groups("1"), Traffic(pauses=1)), drive(whole, groups(""), Traffic())
    assert changed.failed == expected.failed == {}
    assert changed.tokens == expected.tokens


def test_unknown_adapter_fails_only_its_group() -> None:
    results = drive(
        tiny.engine("llama"),
        [tiny.group(1, (1, 2, 3), ANSWER_LENGTH, adapter="x"), tiny.group(2, (1, 2, 3), ANSWER_LENGTH)],
        Traffic(),
    )
    assert results.failed == {1: "the shards have no adapter 'x'"}
    assert len(results.tokens[2, 0]) == ANSWER_LENGTH


# Adapters that are loaded later


def engine_with_room(name: str, room: int, rank: int = 8, adapters: tuple[tuple[str, str], ...] = (), **more: Any) -> Engine:
    return engine_of(tiny.folder(name), adapters=adapters, max_loras=room, max_lora_rank=rank, **more)


def load_later(loaded: Engine, key: str, folder: str | Path) -> None:
    assert loaded.adapt(key, prepared(loaded, folder)) == ""


def prepared(loaded: Engine, folder: str | Path) -> list[Any]:
    return loaded.decoder.adapters.prepared(Adapter("later", Path(folder), torch.float32, tiny.CPU))


# Not MiniMax M3: the plan is by its own checkpoint, in which gate and up projections are two matrices.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "minimax-m3"])
def test_adapter_loaded_later_matches_merged_model(name: str, tmp_path: Path) -> None:
    adapters, models = lora.adapters_for(name, tmp_path)
    (_, first), (_, second) = adapters
    loaded = engine_with_room(name, 2, adapters=(("0", first),))
    assert loaded.decoder.adapters.later == planned_bytes(loaded)
    load_later(loaded, "1", second)
    assert loaded.decoder.adapters.later == 0
    check_tokens(loaded, mixed_prompts(9, 3), models, Traffic(chunk=7, pauses=1))


def planned_bytes(loaded: Engine) -> int:
    """The planned bytes of one adapter."""
    return 8 * loaded.decoder.shape.adapted(1) * 4


@pytest.mark.parametrize("name", ["falcon-h1", "granite-4-h", "nemotron-h", "bamba", "qwen3.5", "qwen3-next", "kimi-linear"])
def test_adapters_beside_quantized_weights_take_no_more_than_planned(name: str) -> None:
    loaded = engine_with_room(name, 1, quantize="int8")
    assert loaded.decoder.shape.quantization is not None
    assert 0.7 * planned_bytes(loaded) < loaded.decoder.adapters.later <= planned_bytes(loaded)
    if isinstance(loaded.decoder.shape.recurrent, StateSpaceShape):
        assert loaded.decoder.adapters.later == planned_bytes(loaded)


def test_adapters_are_loaded_and_dropped_in_any_order(tmp_path: Path) -> None:
    """In any order, into any place: each answers as its merged model does, and nothing is left of the adapter there before."""
    adapters, models = lora.adapters_for("phi3", tmp_path, 4)
    places, chance = dict(adapters), random.Random(5)
    loaded, present = engine_with_room("phi3", 2, rank=15), set[str]()
    for _ in range(12):
        key = chance.choice(sorted(places) if len(present) < 2 else sorted(present))
        if key in present:
            assert loaded.adapt(drop=key) == ""
            present.remove(key)
        else:
            load_later(loaded, key, places[key])
            present.add(key)
        prompts_with_adapters = [(tokens, chance.choice(["", *sorted(present)])) for tokens in prompts(5, 30)]
        loaded.clear()  # the adapter of a key never changes outside of this test
        check_tokens(loaded, prompts_with_adapters, models, Traffic(chunk=9))


def test_adapters_loaded_later_on_two_ranks_match_merged_models(tmp_path: Path) -> None:
    adapters, models = lora.adapters_for("qwen2", tmp_path)
    prompts_with_adapters = mixed_prompts(5, 1)

    def work(rank: Ranks) -> None:
        model = shape(json.loads((tiny.folder("qwen2") / "config.json").read_text()))
        weights = Weights(tiny.folder("qwen2"), torch.float32, tiny.CPU, lambda read: None)
        loaded = Engine(Decoder(model, weights, rank, tiny.CPU, adapters=LoraAdapters(room=2, rank=8)), tiny.CPU, 16)
        loaded.resize(256)
        for key, folder in adapters:
            load_later(loaded, key, folder)
        check_tokens(loaded, prompts_with_adapters, models, Traffic(chunk=9)) if rank.rank == 0 else drive(
            loaded, requests(prompts_with_adapters), Traffic(chunk=9)
        )

    [[greedy(models[adapter], tokens)] for tokens, adapter in prompts_with_adapters]  # the ranks' threads would wait for each other
    tiny.ThreadedRanks().run(work)


def test_adapter_that_cannot_be_loaded_later_is_refused(folder: Path) -> None:
    loaded = engine_with_room("llama", 1, rank=3)
    with pytest.raises(
        Unsupported, match="adapter later has rank 4, and there is room for 3: start the server with --max-lora-rank 4"
    ):
        load_later(loaded, "x", folder)
    loaded = engine_with_room("llama", 1)
    change_tensors(folder, **{"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)})
    with pytest.raises(Unsupported, match=r"adapter later changes layers\.7\.mlp\.up_proj"):
        load_later(loaded, "x", folder)
    assert loaded.decoder.adapters.names == [""]


def test_adapter_in_use_is_not_dropped(folder: Path) -> None:
    loaded = engine_with_room("llama", 1)
    load_later(loaded, "x", folder)
    loaded.prefill(1, [tiny.group(1, (1, 2, 3), ANSWER_LENGTH, adapter="x")], [(1, 3)], 3, [])
    assert loaded.adapt(drop="x") == "there are groups that go by adapter x: it can't be dropped"
    other = prepared(loaded, folder)
    assert loaded.adapt("y", other) == "there is no room for adapter y: all 1 places are taken"
    loaded.filter([1])
    assert loaded.adapt("y", other, drop="x") == "there is no room for adapter y: all 1 places are taken"
    assert "x" in loaded.decoder.adapters.names, "an adapter that is refused replaces none"
    assert loaded.adapt(drop="x") == ""
    assert loaded.adapt("y", other) == ""
    assert loaded.adapt(drop="z") == ""


@pytest.mark.parametrize(
    ("pattern", "restricted"),
    [
        ("q_proj|k_proj", True),
        (r"^model\.layers\.\d+\.mlp\..+", True),
        ("model.layers.[0-3].*", True),
        ("([a-z_.0-9]+)+X", False),
        ("(a|a)(a|a)", False),
        (".*.*.*x", False),
        ("a{1,99}", False),
        ("(?=a)b", False),
    ],
)
def test_untrusted_alpha_patterns_with_slow_regexes_are_refused(folder: Path, pattern: str, restricted: bool) -> None:
    change_config(folder, alpha_pattern={pattern: 3})
    Adapter("mine", folder, torch.float32, tiny.CPU)
    if restricted:
        Adapter("mine", folder, torch.float32, tiny.CPU, tame=True)
    else:
        with pytest.raises(Unsupported, match=r"adapter mine: .* says alpha_pattern .*--lora-adapters"):
            Adapter("mine", folder, torch.float32, tiny.CPU, tame=True)


def test_untrusted_alpha_patterns_with_slow_regexes_are_not_even_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of all letters takes 5 ms, and there is room for 45,000 of them."""
    change_config(folder, alpha_pattern={"(?i:[\0-\U0010ffff])": 3})
    monkeypatch.setattr(adapters, "_within", lambda pattern: pytest.fail("compiled"))
    with pytest.raises(Unsupported, match=r"adapter mine: .* says alpha_pattern .*--lora-adapters"):
        Adapter("mine", folder, torch.float32, tiny.CPU, tame=True)


def test_too_many_patterns_and_too_long_names_are_refused(folder: Path) -> None:
    change_config(folder, alpha_pattern={f"layers.{i}": 1 for i in range(1001)})
    with pytest.raises(Unsupported, match="has 1001 patterns in alpha_pattern, up to 1000"):
        Adapter("mine", folder, torch.float32, tiny.CPU, tame=True)
    change_config(folder, alpha_pattern={".*.*x": 1})
    Adapter("mine", folder, torch.float32, tiny.CPU, tame=True)
    stored = safetensors.torch.load_file(folder / lora.WEIGHTS)
    key = next(iter(stored))
    change_tensors(folder, **{key: None, f"{'model.' * 600}{key[key.index('layers.') :]}": stored[key]})
    with pytest.raises(Unsupported, match=r"adapter mine changes (model\.)+mo?\.\.\., no matrix has so long a name"):
        Adapter("mine", folder, torch.float32, tiny.CPU, tame=True)


def test_overwriting_the_file_of_a_loaded_adapter_changes_nothing(tmp_path: Path) -> None:
    """Also where products use the weights without conversion."""
    folder = lora.adapter(tiny.folder("llama"), tmp_path / "one", 1)
    change_tensors(folder, **{key: tensor.half() for key, tensor in safetensors.torch.load_file(folder / lora.WEIGHTS).items()})
    adapter = Adapter("one", folder, torch.float16, tiny.CPU)
    factors = [
        pair for matrix in {name for name, _ in adapter._places} if (pair := adapter.pair([matrix], *shape_of(folder, matrix)))
    ]
    before = [factor.clone() for pair in factors for factor in pair]
    with (folder / lora.WEIGHTS).open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\0" * (size - size // 2))
    assert all(factor.equal(saved) for factor, saved in zip([f for pair in factors for f in pair], before, strict=True))


def shape_of(folder: Path, matrix: str) -> tuple[int, int]:
    stored = safetensors.torch.load_file(folder / lora.WEIGHTS)
    down, up = (next(tensor for key, tensor in stored.items() if f"{matrix}.lora_{factor}." in key) for factor in "AB")
    return len(up), down.shape[1]


# What is read from an adapter's files


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"lora_alpha": 3}, 0.75),
        ({"lora_alpha": 3, "use_rslora": True}, 1.5),
        ({"lora_alpha": 1, "alpha_pattern": {"q_proj|k_proj|v_proj|o_proj": 6, "mlp.*": 6}}, 1.5),
        ({"lora_alpha": 1, "alpha_pattern": {r"model\.layers\.0\..*": 6, "^model.layers.1.+": 6}}, 1.5),
    ],
)
def test_lora_scale_is_computed_from_alpha_rank_rslora_and_alpha_pattern(
    config: dict[str, Any], factor: float, tmp_path: Path
) -> None:
    model = tiny.folder("llama")
    folder = lora.adapter(model, tmp_path / "a", 1, rank=4, **config)
    merged = lora.merged(model, folder, tmp_path / "b", factor)
    check_tokens(engine("llama", (("a", str(folder)),)), [((5, 6, 7), "a")], {"a": merged}, Traffic())


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def check_refused(folder: Path, *fragments: str) -> None:
    with pytest.raises(Unsupported) as error:
        engine("llama", (("mine", str(folder)),))
    assert "adapter" in str(error.value)
    assert "\n" not in str(error.value)
    for word in fragments:
        assert word in str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return lora.adapter(tiny.folder("llama"), tmp_path / "adapter", 1)


@pytest.mark.parametrize(
    ("fields", "fragments"),
    [
        ({"peft_type": "IA3"}, ["peft_type 'IA3'", "only 'LORA'"]),
        ({"peft_type": None}, ["peft_type None"]),
        ({"use_dora": True}, ["use_dora", "merge_and_unload"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save"]),
        ({"layer_replication": [[0, 2], [1, 2]]}, ["layer_replication"]),
        ({"alora_invocation_tokens": [5, 6]}, ["alora_invocation_tokens"]),
        ({"use_bdlora": {"target_modules_bd_a": ["q_proj"]}}, ["use_bdlora"]),
        ({"arrow_config": {"top_k": 3}}, ["arrow_config"]),
        ({"bias": "all"}, ["bias 'all'"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights 'pissa_niter_4'", "path_initial_model_for_weight_conversion"]),
        ({"init_lora_weights": "lora_ga"}, ["init_lora_weights 'lora_ga'", "path_initial_model_for_weight_conversion"]),
        ({"lora_alpha": "much"}, ["lora_alpha 'much'", "a number is needed"]),
        ({"lora_alpha": float("inf")}, ["lora_alpha inf"]),
        ({"alpha_pattern": {".*": True}}, ["alpha_pattern True"]),
        ({"alpha_pattern": 7}, ["alpha_pattern 7"]),
        ({"alpha_pattern": ["ab"]}, ["alpha_pattern ['ab']", "an object is needed"]),
        ({"alpha_pattern": {"a{99999999999999}": 1}}, ["alpha_pattern"]),
        ({"lora_alpha": 10**400}, ["lora_alpha 1000"]),
        ({"alpha_pattern": {"(": 7}}, ["alpha_pattern", "unterminated"]),
    ],
)
def test_unsupported_adapter_configs_are_refused(folder: Path, fields: dict[str, Any], fragments: list[str]) -> None:
    change_config(folder, **fields)
    check_refused(folder, *fragments)


@pytest.mark.parametrize("content", ["", "[]", "7", "{", "[" * 200_000])
def test_broken_adapter_configs_are_refused(folder: Path, content: str) -> None:
    (folder / "adapter_config.json").write_text(content)
    check_refused(folder, "adapter_config.json")


def test_pipe_in_place_of_an_adapters_config_is_refused(folder: Path) -> None:
    (folder / adapters.CONFIG).unlink()
    os.mkfifo(folder / adapters.CONFIG)
    check_refused(folder, adapters.CONFIG, "it is no file")


def test_missing_or_unreadable_adapter_files_are_refused(folder: Path) -> None:
    (folder / lora.WEIGHTS).write_bytes(b"nothing")
    check_refused(folder, lora.WEIGHTS, "can't be read")
    (folder / lora.WEIGHTS).unlink()
    check_refused(folder, f"has no {lora.WEIGHTS}")
    (folder / "adapter_config.json").unlink()
    check_refused(folder, "adapter_config.json can't be read")


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    stored = safetensors.torch.load_file(folder / lora.WEIGHTS)
    for name, tensor in tensors.items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    safetensors.torch.save_file(stored, folder / lora.WEIGHTS)


def test_adapter_tensors_that_do_not_fit_the_model_are_refused(folder: Path) -> None:
    key = next(key for key in safetensors.torch.load_file(folder / lora.WEIGHTS) if key.endswith("down_proj.lora_A.weight"))
    matrix = key.removeprefix("base_model.model.model.").removesuffix(".lora_A.weight")
    stored = safetensors.torch.load_file(folder / lora.WEIGHTS)[key]
    change_tensors(folder, **{key: stored[:, 1:].contiguous()})
    check_refused(folder, matrix, "[4, 87]", "which is [64, 88]", "different models")
    change_tensors(folder, **{key: stored.int()})
    check_refused(folder, "torch.int32", "a matrix of floats is needed")
    change_tensors(folder, **{key: stored.double()})
    load_later(engine_with_room("llama", 1), "x", folder)
    change_tensors(folder, **{key: torch.zeros(4, 44, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})
    check_refused(folder, "stored as F4", "8 bits or more")
    change_tensors(folder, **{key: None})
    check_refused(folder, f"has no lora_A for {matrix}", "download it again")
    change_tensors(folder, **{key: stored, "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": stored.clone()})
    check_refused(folder, "layers.7.mlp.up_proj", "not in this model")
    change_tensors(folder, **{"base_model.model.lm_head.lora_A.weight": stored})
    check_refused(folder, "changes base_model.model.lm_head.lora_A.weight", "merge_and_unload")


def test_adapter_for_the_vision_tower_is_refused(folder: Path) -> None:
    """None of them may be taken for a layer of the text model."""
    key = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    change_tensors(folder, **{key: torch.zeros(4, 64)})
    check_refused(folder, f"changes {key}", "merge_and_unload")


class RecordingAdapters(LoraAdapters):
    """Records the matrices for which a model asks for adapters."""

    def __init__(self) -> None:
        super().__init__(room=1, rank=1)
        self.requested = set[str]()

    def lora(self, change_config: LoraTarget, weight: Sequence[int], exact: Invariance, like: torch.Tensor) -> None:
        for part in getattr(change_config, "parts", [change_config]):
            self.requested |= {*part.names}


@pytest.mark.parametrize(
    "name",
    [*FAMILIES, "afmoe", "ernie-moe", "exaone-moe", "granite-moe-shared", "hunyuan-moe", "hy-v3", "laguna", "minicpm3"],
)
def test_adapter_target_names_are_those_of_transformers_modules(name: str) -> None:
    """peft goes by these names, whatever the checkpoint calls the matrices."""
    recording, folder = RecordingAdapters(), tiny.folder(name)
    weights = Weights(folder, torch.float32, tiny.CPU, lambda read: None)
    Decoder(shape(json.loads((folder / "config.json").read_text())), weights, LoadingRank(0, 1), tiny.CPU, adapters=recording)
    modules = [key for key, module in tiny.reference(name).named_modules() if isinstance(module, torch.nn.Linear)]
    named = {key[key.index("layers.") :] for key in modules if "layers." in key and "vision_tower" not in key}
    named = {key for key in named if ".compressor." not in key}  # DeepSeek V4's, which can't be changed
    assert {key.rpartition(".")[2] for key in named - recording.requested} <= {
        "kv_b_proj",
        "gate",
        "router",
        *("wg", "classifier", "o_a_proj"),
        "weights_proj",
        "wk",
        "wq_b",
        *("fc1", "fc2"),  # in gates of norms
        *("modality_router", "prediction_coefs", "correction_coefs"),  # of several residual streams
    }


def test_tensor_names_of_other_releases_are_accepted(folder: Path) -> None:
    """Names of other releases of peft, and of transformers, whose models with images have had two."""
    stored = safetensors.torch.load_file(folder / lora.WEIGHTS)
    original = next(key for key in stored if key.endswith("down_proj.lora_A.weight"))
    matrix = original.removeprefix("base_model.model.model.").removesuffix(".lora_A.weight")
    for start in ("", "model.", "base_model.model.model.language_model.", "base_model.model.language_model.model."):
        for end in (".weight", ".default.weight"):
            named = {f"{start}{matrix}.lora_{factor}{end}": stored[original.replace("lora_A", f"lora_{factor}")] for factor in "AB"}
            safetensors.torch.save_file(named, folder / lora.WEIGHTS)
            loaded = Adapter("mine", folder, torch.float32, tiny.CPU)
            assert loaded.pair([matrix], 64, 88) is not None
            loaded.check()
    change_tensors(folder, **{original: stored[original]})
    check_refused(folder, "has both ", original, "for the same matrix")


def test_adapter_of_rank_0_or_without_tensors_is_refused(folder: Path) -> None:
    original = next(key for key in safetensors.torch.load_file(folder / lora.WEIGHTS) if key.endswith("down_proj.lora_A.weight"))
    change_tensors(folder, **{original: torch.zeros(0, 88), original.replace("lora_A", "lora_B"): torch.zeros(64, 0)})
    check_refused(folder, "has rank 0 for layers.")
    safetensors.torch.save_file({}, folder / lora.WEIGHTS)
    check_refused(folder, "has no tensors")


def test_adapter_for_kv_b_proj_is_refused(tmp_path: Path) -> None:
    """The projection from latents to heads is not computed as a product of its own."""
    tensors = {f"base_model.model.model.layers.0.self_attn.kv_b_proj.lora_{factor}.weight": torch.ones(2, 2) for factor in "AB"}
    safetensors.torch.save_file(tensors, tmp_path / lora.WEIGHTS)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["kv_b_proj"]}))
    with pytest.raises(Unsupported, match=r"adapter own changes layers\.0\.self_attn\.kv_b_proj, which is not supported"):
        engine("deepseek-v3", (("own", str(tmp_path)),))


def test_adapter_weights_are_counted(tmp_path: Path) -> None:
    adapters, _ = lora.adapters_for("llama", tmp_path)
    original, more = tiny.decoder("llama"), engine("llama", adapters).decoder
    tensors = [safetensors.torch.load_file(f"{folder}/{lora.WEIGHTS}") for _, folder in adapters]
    stored = sum(tensor.nbytes for one in tensors for tensor in one.values())
    assert more.weight_bytes - original.weight_bytes >= stored
