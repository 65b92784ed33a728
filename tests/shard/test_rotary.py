"""How fast features turn, against transformers, for settings at random."""

import json
import random
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.shard.models.families import shape
from penstock.shard.models.rotary import frequencies, table_of
from penstock.shard.models.shape import Unsupported
from penstock.tests.shard import configurations, tiny

TABLE = 2, 1  # cosines and sines, for every head


def settings(kind: str, chance: random.Random) -> dict[str, Any]:
    """Of one kind, those that may be left out sometimes left out."""
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": chance.choice([500.0, 10000.0, 1e6])}
    if kind != "default":
        found["factor"] = chance.choice([1.0, 1.5, 4, 40.0])
    if kind == "llama3":
        found |= {"low_freq_factor": chance.choice([0.5, 1.0]), "high_freq_factor": chance.choice([2.0, 4.0])}
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = chance.choice([16, 64, 4096])
    if kind == "yarn":
        may = {
            "beta_fast": chance.choice([None, 2.0, 16, 64.0]),
            "beta_slow": chance.choice([None, 0.1, 1, 1.5]),
            "attention_factor": chance.choice([None, 0.7, 1.3]),
            "mscale": chance.choice([None, 0.707, 1.0]),
            "mscale_all_dim": chance.choice([None, 0.0, 0.707, 1]),
            "truncate": chance.choice([False, True]),
        }
        found |= {name: value for name, value in may.items() if chance.random() < 0.6}
    return found


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_waves_are_those_of_transformers(kind: str) -> None:
    chance = random.Random(kind)
    for _ in range(1 if kind == "default" else 60):
        size = chance.choice([8, 64, 128])
        config = transformers.LlamaConfig(**configurations.SMALL, head_dim=size, rope_parameters=settings(kind, chance))
        rope = shape(json.loads(config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}).rope
        if kind == "default":
            expected, amplitude = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq, 1.0
        else:
            expected, amplitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=config.max_position_embeddings)
        torch.testing.assert_close(frequencies(rope, size), expected, rtol=1e-6, atol=0)
        assert rope.amplitude == pytest.approx(amplitude)
        table = table_of(rope, size, 3, torch.float32, torch.device("cpu"))
        assert table.shape == (3, *TABLE, size)
        torch.testing.assert_close(table[0, 0, 0], torch.full((size,), amplitude))


@pytest.mark.parametrize("original", [1, 16, 511, 512, 4096])
def test_both_sets_of_longropes_waves_are_those_of_transformers(original: int) -> None:
    chance = random.Random(original)
    for _ in range(20):
        more = {"factor": chance.choice([1.0, 4, 32.0]), "attention_factor": chance.choice([0.8, 1.3])}
        settings = configurations.LONGROPE | {name: value for name, value in more.items() if chance.random() < 0.4 or original == 1}
        config = transformers.Phi3Config(**configurations.PHI4, original_max_position_embeddings=original, rope_parameters=settings)
        rope = shape(json.loads(config.to_json_string()) | {"architectures": ["Phi3ForCausalLM"]}).rope
        for positions in (original, original + 1):
            expected, amplitude = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=positions)
            torch.testing.assert_close(frequencies(rope, 12, positions), expected, rtol=1e-6, atol=0)
            assert rope.amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
@pytest.mark.parametrize("top", [None, 16, 4096])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_original_positions_at_the_top_of_a_config_take_precedence(kind: str, top: int | None, architecture: str) -> None:
    own = configurations.LONGROPE if kind == "longrope" else settings(kind, random.Random(kind))
    config = getattr(transformers, f"{architecture}Config")(
        **configurations.SMALL, head_dim=12, rope_parameters=own | {"original_max_position_embeddings": 128}
    )
    said = json.loads(config.to_json_string()) | {"architectures": [f"{architecture}ForCausalLM"]}
    if top is not None:
        said["original_max_position_embeddings"] = config.original_max_position_embeddings = top
    rope = shape(said).rope
    for positions in (8, 8192):
        expected, amplitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=positions)
        torch.testing.assert_close(frequencies(rope, 12, positions), expected, rtol=1e-6, atol=0)
        assert rope.amplitude == pytest.approx(amplitude)


def test_longropes_first_name_is_read() -> None:
    config = json.loads((tiny.folder("longrope") / "config.json").read_text())
    said = configurations.LONGROPE | {"rope_type": "su"}
    assert shape(config | {"rope_parameters": said}) == shape(config | {"rope_parameters": configurations.LONGROPE})


def test_yarn_is_added_to_a_config_whose_positions_stay() -> None:
    """As Qwen's model cards say: the model takes as many tokens as the factor makes of those that it was trained on."""
    plain = json.loads((tiny.folder("qwen2") / "config.json").read_text())
    longer = plain | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}
    assert shape(longer).max_positions == 4 * plain["max_position_embeddings"]
    longer["rope_parameters"]["original_max_position_embeddings"] = 64
    assert shape(longer).max_positions == plain["max_position_embeddings"]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"truncate": 1}, "truncate"),
        ({"beta_fast": -1}, "beta_fast"),
        ({"factor": "x"}, "factor"),
        ({"attention_factor": 0}, "attention_"),
    ],
)
def test_settings_that_can_not_be(wrong: dict[str, Any], word: str) -> None:
    config = json.loads((tiny.folder("qwen2") / "config.json").read_text())
    with pytest.raises(Unsupported, match=word):
        shape(config | {"rope_parameters": configurations.YARN | wrong})
