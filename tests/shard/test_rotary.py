"""Rotary embeddings: frequencies and amplitudes against transformers, for random rope_parameters."""

import json
import random
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.shard.models.families import shape
from penstock.shard.models.rotary import cosines_and_sines, frequencies
from penstock.shard.models.shape import Unsupported
from penstock.tests.shard import configurations, tiny

TABLE_SHAPE = 2, 1  # cosines and sines, the same for every head


def random_rope_parameters(kind: str, generator: random.Random) -> dict[str, Any]:
    """Random values for one rope_type; optional ones are sometimes missing."""
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": generator.choice([500.0, 10000.0, 1e6])}
    if kind != "default":
        parameters["factor"] = generator.choice([1.0, 1.5, 4, 40.0])
    if kind == "llama3":
        parameters |= {"low_freq_factor": generator.choice([0.5, 1.0]), "high_freq_factor": generator.choice([2.0, 4.0])}
    if kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = generator.choice([16, 64, 4096])
    if kind == "yarn":
        optional = {
            "beta_fast": generator.choice([None, 2.0, 16, 64.0]),
            "beta_slow": generator.choice([None, 0.1, 1, 1.5]),
            "attention_factor": generator.choice([None, 0.7, 1.3]),
            "mscale": generator.choice([None, 0.707, 1.0]),
            "mscale_all_dim": generator.choice([None, 0.0, 0.707, 1]),
            "truncate": generator.choice([False, True]),
        }
        parameters |= {name: value for name, value in optional.items() if generator.random() < 0.6}
    return parameters


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_rotary_frequencies_and_amplitude_equal_transformers(kind: str) -> None:
    generator = random.Random(kind)
    for _ in range(1 if kind == "default" else 60):
        size = generator.choice([8, 64, 128])
        config = transformers.LlamaConfig(
            **configurations.SMALL, head_dim=size, rope_parameters=random_rope_parameters(kind, generator)
        )
        rope = shape(json.loads(config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}).rope
        if kind == "default":
            expected, amplitude = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq, 1.0
        else:
            expected, amplitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=config.max_position_embeddings)
        torch.testing.assert_close(frequencies(rope, size), expected, rtol=1e-6, atol=0)
        assert rope.amplitude == pytest.approx(amplitude)
        table = cosines_and_sines(rope, size, 3, torch.float32, torch.device("cpu"))
        assert table.shape == (3, *TABLE_SHAPE, size)
        torch.testing.assert_close(table[0, 0, 0], torch.full((size,), amplitude))


@pytest.mark.parametrize("original", [1, 16, 511, 512, 4096])
def test_short_and_long_longrope_frequencies_equal_transformers(original: int) -> None:
    generator = random.Random(original)
    for _ in range(20):
        optional = {"factor": generator.choice([1.0, 4, 32.0]), "attention_factor": generator.choice([0.8, 1.3])}
        rope_parameters = configurations.LONGROPE | {
            name: value for name, value in optional.items() if generator.random() < 0.4 or original == 1
        }
        config = transformers.Phi3Config(
            **configurations.PHI4, original_max_position_embeddings=original, rope_parameters=rope_parameters
        )
        rope = shape(json.loads(config.to_json_string()) | {"architectures": ["Phi3ForCausalLM"]}).rope
        for positions in (original, original + 1):
            expected, amplitude = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=positions)
            torch.testing.assert_close(frequencies(rope, 12, positions), expected, rtol=1e-6, atol=0)
            assert rope.amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
@pytest.mark.parametrize("top", [None, 16, 4096])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_top_level_original_max_position_embeddings_takes_precedence(kind: str, top: int | None, architecture: str) -> None:
    own = configurations.LONGROPE if kind == "longrope" else random_rope_parameters(kind, random.Random(kind))
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


def test_su_the_first_name_of_longrope_is_read() -> None:
    config = json.loads((tiny.folder("longrope") / "config.json").read_text())
    said = configurations.LONGROPE | {"rope_type": "su"}
    assert shape(config | {"rope_parameters": said}) == shape(config | {"rope_parameters": configurations.LONGROPE})


def test_yarn_extends_max_positions_unless_the_original_number_is_given() -> None:
    """As Qwen's model cards say: YaRN is added to the config, and the model then accepts factor times as many tokens as it was
    trained on, though max_position_embeddings stays the same."""
    config = json.loads((tiny.folder("qwen2") / "config.json").read_text())
    with_yarn = config | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}
    assert shape(with_yarn).max_positions == 4 * config["max_position_embeddings"]
    with_yarn["rope_parameters"]["original_max_position_embeddings"] = 64
    assert shape(with_yarn).max_positions == config["max_position_embeddings"]


@pytest.mark.parametrize(
    ("invalid", "word"),
    [
        ({"truncate": 1}, "truncate"),
        ({"beta_fast": -1}, "beta_fast"),
        ({"factor": "x"}, "factor"),
        ({"attention_factor": 0}, "attention_"),
        ({"rope_theta": 1.0}, "rope_theta 1, and yarn .* a theta above 1"),  # its logarithm divides
        ({"original_max_position_embeddings": 0.5}, "yarn from 0 positions"),
        ({"factor": 1e12}, r"from 128 positions to 1e\+12 times as many"),  # tables would have a row for each
    ],
)
def test_invalid_rope_parameters_are_refused(invalid: dict[str, Any], word: str) -> None:
    config = json.loads((tiny.folder("qwen2") / "config.json").read_text())
    with pytest.raises(Unsupported, match=word):
        shape(config | {"rope_parameters": configurations.YARN | invalid})
