"""Requests go by adapters, each by its own or by none, in one batch, and get what transformers says of the merged models."""

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.kernels.linear import Invariance
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
from penstock.shard.models.shape import Unsupported
from penstock.shard.parallel import Ranks
from penstock.shard.sequence import Group, Sampling
from penstock.shard.weights import Weights
from penstock.tests.shard import lora, packing, tiny
from penstock.tests.shard.driver import Habits, World, drive
from penstock.tests.shard.test_oracle import COUNT, at_rest, prompts
from penstock.tests.shard.test_quantized import few_bits
from penstock.tests.shard.test_weights import Alone

# With joint matrices, biases, rotary features in another order, factors, experts beside attention, linear attention, short
# convolutions.
FAMILIES = [
    *("llama", "qwen2", "phi3", "glm4", "granite", "gemma2", "olmo2", "llama4", "mixtral", "qwen2-moe"),
    *("falcon-h1", "granite-4-h", "lfm2", "nemotron-h", "qwen3.5", "deepseek-v3"),
    *("hyperclova", "lfm3", "mimo", "qwen3-next", "kimi-linear", "deepseek-v2", "minimax-m3", "hy-4", "mistral-large4"),
    *("ax-k2", "olmo-hybrid", "gemma3n", "gemma3n-plain", "longcat", "glm-5-next", "deepseek-v4"),
]
Asked = Sequence[tuple[tuple[int, ...], str]]


@functools.cache
def generator(model: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    [architecture] = json.loads((model / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(model, dtype=torch.float32).eval()


@torch.inference_mode()
def greedy(model: Path, tokens: tuple[int, ...], count: int = COUNT) -> list[int]:
    row = list(tokens)
    for _ in range(count):
        row.append(int(generator(model)(torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(tokens) :]


@torch.inference_mode()
def first_logprob(model: Path, tokens: tuple[int, ...], token: int) -> float:
    return float(generator(model)(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)[token])


def engine_of(folder: Path, ahead: bool = False, **config: Any) -> Engine:
    decoder = load(ShardConfig(folder=str(folder), model="m", **config), lambda stage: None).decoder
    found = Engine(decoder, tiny.CPU, 16, ahead=ahead)
    found.resize(512)
    return found


def engine(name: str, changes: tuple[tuple[str, str], ...], ahead: bool = False) -> Engine:
    return engine_of(tiny.folder(name), ahead, adapters=changes)


def requests(asked: Asked, sampling: Sampling | None = None, **more: Any) -> list[Group]:
    return [
        tiny.group(uid, tokens, COUNT, sampling, adapter=adapter, cache_key=adapter, **more)
        for uid, (tokens, adapter) in enumerate(asked)
    ]


def mixed(count: int, seed: int) -> list[tuple[tuple[int, ...], str]]:
    chance = random.Random(seed)
    return [(tokens, chance.choice(["", "0", "1"])) for tokens in prompts(count, 40)]


def check(found: Engine, asked: Asked, models: dict[str, Path], habits: Habits) -> World:
    world = drive(found, requests(asked), habits)
    assert world.failed == {}
    assert world.answers == {uid: greedy(models[adapter], tokens) for uid, (tokens, adapter) in enumerate(asked)}
    assert at_rest(found)
    return world


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixed_batch_gets_what_merged_models_say(name: str, tmp_path: Path) -> None:
    changes, models = lora.of(name, tmp_path)
    asked = mixed(9, 3)
    assert len({adapter for _, adapter in asked}) == 3
    world = check(engine(name, changes), asked, models, Habits(chunk=7, pauses=1))
    for uid, (tokens, adapter) in enumerate(asked):
        found, usual = (first_logprob(models[key], tokens, world.answers[uid][0]) for key in (adapter, ""))
        assert world.logprobs[uid, 0][0] == pytest.approx(found, abs=3e-4)
        assert not adapter or abs(found - usual) > 1e-3


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2", "phi3", "glm4", "granite", "qwen2-moe", "qwen3-next", "qwen3.5", "kimi-linear", "falcon-h1", "nemotron-h"),
        *("deepseek-v2", "deepseek-v3", "granite-4-h", "mistral-large4", "ax-k2", "olmo-hybrid", "gemma3n"),
        *("longcat", "glm-5-next", "deepseek-v4"),
    ],
)
def test_two_ranks_divide_them(name: str, tmp_path: Path) -> None:
    changes, models = lora.of(name, tmp_path)
    asked = mixed(5, 1)

    def work(rank: Ranks) -> None:
        model = shape(json.loads((tiny.folder(name) / "config.json").read_text()))
        weights = Weights(tiny.folder(name), torch.float32, tiny.CPU, lambda read: None)
        own = [Adapter(key, Path(place), torch.float32, tiny.CPU) for key, place in changes]
        found = Engine(Decoder(model, weights, rank, tiny.CPU, adapters=LoraAdapters(own)), tiny.CPU, 16)
        found.resize(256)
        check(found, asked, models, Habits(chunk=9)) if rank.rank == 0 else drive(found, requests(asked), Habits(chunk=9))

    [[greedy(models[adapter], tokens)] for tokens, adapter in asked]  # the ranks' threads would wait for each other
    tiny.Threads().run(work)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("qwen2", "packed-zeros"), ("phi3", "gptq"), ("deepseek-v3", "float8"), ("falcon-h1", "packed-zeros")),
        *(("qwen3-next", "fp8-blocks"), ("qwen3.5", "packed-zeros"), ("kimi-linear", "packed-zeros")),
        *(("olmo-hybrid", "packed-zeros"), ("gemma3n", "packed-zeros")),
    ],
)
def test_weights_of_few_bits(name: str, form: str, tmp_path: Path) -> None:
    """Get what those of all bits get: also where what gates memories is read with these, and apart."""
    few, plain = packing.checkpoints(name, form, tmp_path)
    place = lora.adapter(plain, tmp_path / "adapter", 3)
    found = engine_of(few, adapters=(("a", str(place)),))
    memories = [
        layer.attention for layer in found.decoder.layers if isinstance(layer.attention, LinearAttention | KimiDeltaAttention)
    ]
    assert all(one.gating is not None for one in memories)
    tokens = prompts(1, 40)[0]
    check(found, [(tokens, "a")], {"a": lora.merged(plain, place, tmp_path / "merged")}, Habits(chunk=9))


@pytest.mark.parametrize("name", ["words-wide", "qwen3.5-wide", "granite-4-h-wide"])
def test_weights_of_few_bits_stay_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing.FORMATS["packed-zeros"], "size", 32)
    few, plain = packing.checkpoints(name, "packed-zeros", tmp_path)
    place = lora.adapter(plain, tmp_path / "adapter", 3)
    found, tokens = engine_of(few, adapters=(("a", str(place)),), dtype="bfloat16"), prompts(1, 40)[0]
    assert few_bits(found.decoder)
    world = drive(found, [tiny.group(1, tokens, COUNT, adapter="a")], Habits())
    token, logprob = world.tokens[1, 0][0], world.logprobs[1, 0][0]
    expected, usual = (first_logprob(model, tokens, token) for model in (lora.merged(plain, place, tmp_path / "merged"), plain))
    assert 10 * abs(logprob - expected) < abs(usual - expected)


def test_company_changes_nothing(tmp_path: Path) -> None:
    """Of drawn answers: alone, and beside those that go by others and by none."""
    changes, _ = lora.of("llama", tmp_path)
    found = engine("llama", changes)
    asked = mixed(8, 5)
    sampling = Sampling(temperature=1.0, seed=11)
    together = drive(found, requests(asked, sampling), Habits(chunk=5, pauses=1))
    assert together.failed == {}
    for uid, one in enumerate(requests(asked, sampling)):
        alone = drive(found, [one], Habits())
        assert alone.tokens[uid, 0] == together.tokens[uid, 0]
        assert alone.logprobs[uid, 0] == pytest.approx(together.logprobs[uid, 0], abs=1e-4)


@pytest.mark.parametrize("ahead", [False, True])
def test_choices_and_beams_go_by_them_as_well(ahead: bool, tmp_path: Path) -> None:
    changes, models = lora.of("llama", tmp_path)
    found = engine("llama", changes, ahead=ahead)
    whole = engine_of(models["1"])
    asked = prompts(3, 40)
    sampling = Sampling(temperature=1.0, seed=2)

    def groups(adapter: str) -> list[Group]:
        search = Search(3, 2, 1.0, Stop.FULL, 0, False, [])
        return [
            tiny.group(0, asked[0], COUNT, sampling, choices=3, adapter=adapter),
            tiny.group(1, asked[1], COUNT, search=search, end_ids=[7], adapter=adapter),
            tiny.group(2, asked[2], COUNT, adapter=adapter, drafts=4),
        ]

    changed, expected = drive(found, groups("1"), Habits(pauses=1)), drive(whole, groups(""), Habits())
    assert changed.failed == expected.failed == {}
    assert changed.tokens == expected.tokens


def test_a_shard_without_it_says_so() -> None:
    world = drive(tiny.engine("llama"), [tiny.group(1, (1, 2, 3), COUNT, adapter="x"), tiny.group(2, (1, 2, 3), COUNT)], Habits())
    assert world.failed == {1: "the shards have no adapter 'x'"}
    assert len(world.tokens[2, 0]) == COUNT


# Those that come later


def with_room(name: str, room: int, rank: int = 8, changes: tuple[tuple[str, str], ...] = (), **more: Any) -> Engine:
    return engine_of(tiny.folder(name), adapters=changes, max_loras=room, max_lora_rank=rank, **more)


def bring(found: Engine, key: str, place: str | Path) -> None:
    assert found.adapt(key, prepared(found, place)) == ""


def prepared(found: Engine, place: str | Path) -> list[Any]:
    return found.decoder.adapters.prepared(Adapter("later", Path(place), torch.float32, tiny.CPU))


# Of MiniMax M3 the plan goes by its own checkpoint, in which gates and what they let through are two matrices.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "minimax-m3"])
def test_one_that_comes_later_is_as_one_that_was_there(name: str, tmp_path: Path) -> None:
    changes, models = lora.of(name, tmp_path)
    (_, first), (_, second) = changes
    found = with_room(name, 2, changes=(("0", first),))
    assert found.decoder.adapters.later == planned(found)
    bring(found, "1", second)
    assert found.decoder.adapters.later == 0
    check(found, mixed(9, 3), models, Habits(chunk=7, pauses=1))


def planned(found: Engine) -> int:
    """Bytes that the plan says one takes."""
    return 8 * found.decoder.shape.adapted(1) * 4


@pytest.mark.parametrize("name", ["falcon-h1", "granite-4-h", "nemotron-h", "bamba", "qwen3.5", "qwen3-next", "kimi-linear"])
def test_beside_few_bits_none_takes_more_than_is_planned(name: str) -> None:
    found = with_room(name, 1, quantize="int8")
    assert found.decoder.shape.quantization is not None
    assert 0.7 * planned(found) < found.decoder.adapters.later <= planned(found)
    if found.decoder.shape.recurrent.limits:
        assert found.decoder.adapters.later == planned(found)


def test_they_come_and_go_while_others_are_asked_for(tmp_path: Path) -> None:
    """In any order, into any place: each answers as its own merged model does, and nothing is left of what was there before."""
    changes, models = lora.of("phi3", tmp_path, 4)
    places, chance = dict(changes), random.Random(5)
    found, there = with_room("phi3", 2, rank=15), set[str]()
    for _ in range(12):
        key = chance.choice(sorted(places) if len(there) < 2 else sorted(there))
        if key in there:
            assert found.adapt(drop=key) == ""
            there.remove(key)
        else:
            bring(found, key, places[key])
            there.add(key)
        asked = [(tokens, chance.choice(["", *sorted(there)])) for tokens in prompts(5, 30)]
        found.clear()  # what a key stands for never changes, but for a test's
        check(found, asked, models, Habits(chunk=9))


def test_two_ranks_divide_those_that_come_later(tmp_path: Path) -> None:
    changes, models = lora.of("qwen2", tmp_path)
    asked = mixed(5, 1)

    def work(rank: Ranks) -> None:
        model = shape(json.loads((tiny.folder("qwen2") / "config.json").read_text()))
        weights = Weights(tiny.folder("qwen2"), torch.float32, tiny.CPU, lambda read: None)
        found = Engine(Decoder(model, weights, rank, tiny.CPU, adapters=LoraAdapters(room=2, rank=8)), tiny.CPU, 16)
        found.resize(256)
        for key, place in changes:
            bring(found, key, place)
        check(found, asked, models, Habits(chunk=9)) if rank.rank == 0 else drive(found, requests(asked), Habits(chunk=9))

    [[greedy(models[adapter], tokens)] for tokens, adapter in asked]  # the ranks' threads would wait for each other
    tiny.Threads().run(work)


def test_what_can_not_come_changes_nothing(place: Path) -> None:
    found = with_room("llama", 1, rank=3)
    with pytest.raises(
        Unsupported, match="adapter later has rank 4, and there is room for 3: start the server with --max-lora-rank 4"
    ):
        bring(found, "x", place)
    found = with_room("llama", 1)
    spoil(place, **{"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)})
    with pytest.raises(Unsupported, match=r"adapter later changes layers\.7\.mlp\.up_proj"):
        bring(found, "x", place)
    assert found.decoder.adapters.names == [""]


def test_one_that_is_asked_for_stays(place: Path) -> None:
    found = with_room("llama", 1)
    bring(found, "x", place)
    found.prefill(1, [tiny.group(1, (1, 2, 3), COUNT, adapter="x")], [(1, 3)], 3, [])
    assert found.adapt(drop="x") == "there are groups that go by adapter x: it can't be dropped"
    other = prepared(found, place)
    assert found.adapt("y", other) == "there is no room for adapter y: all 1 places are taken"
    found.filter([1])
    assert found.adapt("y", other, drop="x") == "there is no room for adapter y: all 1 places are taken"
    assert "x" in found.decoder.adapters.names, "who does not come takes nobody's place"
    assert found.adapt(drop="x") == ""
    assert found.adapt("y", other) == ""
    assert found.adapt(drop="z") == ""


@pytest.mark.parametrize(
    ("pattern", "tame"),
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
def test_patterns_that_anybody_may_have_written_are_compared_quickly(place: Path, pattern: str, tame: bool) -> None:
    change(place, alpha_pattern={pattern: 3})
    Adapter("mine", place, torch.float32, tiny.CPU)
    if tame:
        Adapter("mine", place, torch.float32, tiny.CPU, tame=True)
    else:
        with pytest.raises(Unsupported, match=r"adapter mine: .* says alpha_pattern .*--lora-adapters"):
            Adapter("mine", place, torch.float32, tiny.CPU, tame=True)


def test_names_and_patterns_are_not_too_many_and_not_too_long(place: Path) -> None:
    change(place, alpha_pattern={f"layers.{i}": 1 for i in range(1001)})
    with pytest.raises(Unsupported, match="has 1001 patterns in alpha_pattern, up to 1000"):
        Adapter("mine", place, torch.float32, tiny.CPU, tame=True)
    change(place, alpha_pattern={".*.*x": 1})
    Adapter("mine", place, torch.float32, tiny.CPU, tame=True)
    stored = safetensors.torch.load_file(place / lora.WEIGHTS)
    key = next(iter(stored))
    spoil(place, **{key: None, f"{'model.' * 600}{key[key.index('layers.') :]}": stored[key]})
    with pytest.raises(Unsupported, match=r"adapter mine changes (model\.)+mo?\.\.\., no matrix has so long a name"):
        Adapter("mine", place, torch.float32, tiny.CPU, tame=True)


def test_a_file_may_be_written_to_while_its_adapter_is_used(tmp_path: Path) -> None:
    """Also where products take weights as they are."""
    folder = lora.adapter(tiny.folder("llama"), tmp_path / "one", 1)
    spoil(folder, **{key: tensor.half() for key, tensor in safetensors.torch.load_file(folder / lora.WEIGHTS).items()})
    read = Adapter("one", folder, torch.float16, tiny.CPU)
    factors = [pair for matrix in {name for name, _ in read._places} if (pair := read.pair([matrix], *size_of(folder, matrix)))]
    before = [factor.clone() for pair in factors for factor in pair]
    with (folder / lora.WEIGHTS).open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(b"\0" * (size - size // 2))
    assert all(factor.equal(was) for factor, was in zip([f for pair in factors for f in pair], before, strict=True))


def size_of(folder: Path, matrix: str) -> tuple[int, int]:
    stored = safetensors.torch.load_file(folder / lora.WEIGHTS)
    down, up = (next(tensor for key, tensor in stored.items() if f"{matrix}.lora_{factor}." in key) for factor in "AB")
    return len(up), down.shape[1]


# What is read


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"lora_alpha": 3}, 0.75),
        ({"lora_alpha": 3, "use_rslora": True}, 1.5),
        ({"lora_alpha": 1, "alpha_pattern": {"q_proj|k_proj|v_proj|o_proj": 6, "mlp.*": 6}}, 1.5),
        ({"lora_alpha": 1, "alpha_pattern": {r"model\.layers\.0\..*": 6, "^model.layers.1.+": 6}}, 1.5),
    ],
)
def test_factors(config: dict[str, Any], factor: float, tmp_path: Path) -> None:
    model = tiny.folder("llama")
    place = lora.adapter(model, tmp_path / "a", 1, rank=4, **config)
    merged = lora.merged(model, place, tmp_path / "b", factor)
    check(engine("llama", (("a", str(place)),)), [((5, 6, 7), "a")], {"a": merged}, Habits())


def change(place: Path, **fields: Any) -> None:
    path = place / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refuses(place: Path, *words: str) -> None:
    with pytest.raises(Unsupported) as error:
        engine("llama", (("mine", str(place)),))
    assert "adapter" in str(error.value)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return lora.adapter(tiny.folder("llama"), tmp_path / "adapter", 1)


@pytest.mark.parametrize(
    ("fields", "words"),
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
def test_configs_that_are_not_supported(place: Path, fields: dict[str, Any], words: list[str]) -> None:
    change(place, **fields)
    refuses(place, *words)


@pytest.mark.parametrize("content", ["", "[]", "7", "{", "[" * 200_000])
def test_broken_configs(place: Path, content: str) -> None:
    (place / "adapter_config.json").write_text(content)
    refuses(place, "adapter_config.json")


def test_files_that_are_missing(place: Path) -> None:
    (place / lora.WEIGHTS).write_bytes(b"nothing")
    refuses(place, lora.WEIGHTS, "can't be read")
    (place / lora.WEIGHTS).unlink()
    refuses(place, f"has no {lora.WEIGHTS}")
    (place / "adapter_config.json").unlink()
    refuses(place, "adapter_config.json can't be read")


def spoil(place: Path, **tensors: torch.Tensor | None) -> None:
    stored = safetensors.torch.load_file(place / lora.WEIGHTS)
    for name, tensor in tensors.items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    safetensors.torch.save_file(stored, place / lora.WEIGHTS)


def test_tensors_that_do_not_fit(place: Path) -> None:
    key = next(key for key in safetensors.torch.load_file(place / lora.WEIGHTS) if key.endswith("down_proj.lora_A.weight"))
    matrix = key.removeprefix("base_model.model.model.").removesuffix(".lora_A.weight")
    stored = safetensors.torch.load_file(place / lora.WEIGHTS)[key]
    spoil(place, **{key: stored[:, 1:].contiguous()})
    refuses(place, matrix, "[4, 87]", "which is [64, 88]", "different models")
    spoil(place, **{key: stored.int()})
    refuses(place, "torch.int32", "a matrix of floats is needed")
    spoil(place, **{key: None})
    refuses(place, f"has no lora_A for {matrix}", "download it again")
    spoil(place, **{key: stored, "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": stored.clone()})
    refuses(place, "layers.7.mlp.up_proj", "not in this model")
    spoil(place, **{"base_model.model.lm_head.lora_A.weight": stored})
    refuses(place, "changes base_model.model.lm_head.lora_A.weight", "merge_and_unload")


def test_a_tower_for_images_has_layers_of_its_own(place: Path) -> None:
    """Of which none is to be taken for one of the text's."""
    key = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    spoil(place, **{key: torch.zeros(4, 64)})
    refuses(place, f"changes {key}", "merge_and_unload")


class Asking(LoraAdapters):
    """Notes the matrices that a model would have changed."""

    def __init__(self) -> None:
        super().__init__(room=1, rank=1)
        self.asked = set[str]()

    def lora(self, change: LoraTarget, weight: Sequence[int], exact: Invariance, like: torch.Tensor) -> None:
        for part in getattr(change, "parts", [change]):
            self.asked |= {*part.names}


@pytest.mark.parametrize(
    "name",
    [*FAMILIES, "afmoe", "ernie-moe", "exaone-moe", "granite-moe-shared", "hunyuan-moe", "hy-v3", "laguna", "minicpm3"],
)
def test_matrices_have_the_names_of_transformers_modules(name: str) -> None:
    """By which peft knows them, whatever the checkpoint calls them."""
    found, folder = Asking(), tiny.folder(name)
    weights = Weights(folder, torch.float32, tiny.CPU, lambda read: None)
    Decoder(shape(json.loads((folder / "config.json").read_text())), weights, Alone(0, 1), tiny.CPU, adapters=found)
    modules = [key for key, module in tiny.reference(name).named_modules() if isinstance(module, torch.nn.Linear)]
    named = {key[key.index("layers.") :] for key in modules if "layers." in key and "vision_tower" not in key}
    named = {key for key in named if ".compressor." not in key}  # DeepSeek V4's, which nobody changes
    assert {key.rpartition(".")[2] for key in named - found.asked} <= {
        "kv_b_proj",
        "gate",
        "router",
        *("wg", "classifier", "o_a_proj"),
        "weights_proj",
        "wk",
        "wq_b",
        *("fc1", "fc2"),  # of gates of norms
        *("modality_router", "prediction_coefs", "correction_coefs"),  # of several streams
    }


def test_names_of_other_releases(place: Path) -> None:
    """Of peft, and of transformers, whose models with images have had two."""
    stored = safetensors.torch.load_file(place / lora.WEIGHTS)
    usual = next(key for key in stored if key.endswith("down_proj.lora_A.weight"))
    matrix = usual.removeprefix("base_model.model.model.").removesuffix(".lora_A.weight")
    for start in ("", "model.", "base_model.model.model.language_model.", "base_model.model.language_model.model."):
        for end in (".weight", ".default.weight"):
            named = {f"{start}{matrix}.lora_{factor}{end}": stored[usual.replace("lora_A", f"lora_{factor}")] for factor in "AB"}
            safetensors.torch.save_file(named, place / lora.WEIGHTS)
            found = Adapter("mine", place, torch.float32, tiny.CPU)
            assert found.pair([matrix], 64, 88) is not None
            found.check()
    spoil(place, **{usual: stored[usual]})
    refuses(place, "has both ", usual, "for the same matrix")


def test_a_rank_of_nothing(place: Path) -> None:
    usual = next(key for key in safetensors.torch.load_file(place / lora.WEIGHTS) if key.endswith("down_proj.lora_A.weight"))
    spoil(place, **{usual: torch.zeros(0, 88), usual.replace("lora_A", "lora_B"): torch.zeros(64, 0)})
    refuses(place, "has rank 0 for layers.")
    safetensors.torch.save_file({}, place / lora.WEIGHTS)
    refuses(place, "has no tensors")


def test_what_latents_are_made_of_is_not_changed(tmp_path: Path) -> None:
    """What leads from them to heads is no product of its own."""
    tensors = {f"base_model.model.model.layers.0.self_attn.kv_b_proj.lora_{factor}.weight": torch.ones(2, 2) for factor in "AB"}
    safetensors.torch.save_file(tensors, tmp_path / lora.WEIGHTS)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["kv_b_proj"]}))
    with pytest.raises(Unsupported, match=r"adapter own changes layers\.0\.self_attn\.kv_b_proj, which is not supported"):
        engine("deepseek-v3", (("own", str(tmp_path)),))


def test_what_they_take_is_counted(tmp_path: Path) -> None:
    changes, _ = lora.of("llama", tmp_path)
    usual, more = tiny.decoder("llama"), engine("llama", changes).decoder
    tensors = [safetensors.torch.load_file(f"{folder}/{lora.WEIGHTS}") for _, folder in changes]
    stored = sum(tensor.nbytes for one in tensors for tensor in one.values())
    assert more.weight_bytes - usual.weight_bytes >= stored
