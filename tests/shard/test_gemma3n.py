"""Gemma 3n: shapes and parameters from config.json against transformers, shared KV caches, activation sparsity and AltUp streams.
Logits and tokens: test_against_transformers.py."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from penstock.kernels.linear import Invariance
from penstock.launcher import roofline
from penstock.shard.config import ShardConfig
from penstock.shard.loading import _check_invariant, load
from penstock.shard.models.altup import AltUpStream, Ends
from penstock.shard.models.families import shape
from penstock.shard.models.loader import Loader
from penstock.shard.models.mlp import Mlp, SparseActivationMlp
from penstock.shard.models.shape import Unsupported
from penstock.shard.models.stream import Stream
from penstock.shard.models.traits import AltUpShape
from penstock.shard.parallel import Ranks
from penstock.shard.step import Span
from penstock.shard.weights import Weights
from penstock.tests.shard import tiny
from penstock.tests.shard.test_against_transformers import SpanRunner, assert_logits_close, check_preemption, prompt
from penstock.tests.shard.test_weights import WEIGHTS

ARCHITECTURE = {"architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text"}
# Sizes of models on the hub; missing fields have transformers' defaults.
E4B = ARCHITECTURE | {
    "num_hidden_layers": 35,
    "intermediate_size": [16_384] * 35,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
E2B = ARCHITECTURE | {"intermediate_size": 8192, "num_hidden_layers": 30, "num_kv_shared_layers": 10}
NAMES = ["gemma3n", "gemma3n-plain"]


@pytest.mark.parametrize(
    "config",
    [
        *(ARCHITECTURE, E2B, E4B),
        E2B | {"num_kv_shared_layers": 0, "altup_num_inputs": 2, "laurel_rank": 8, "attention_bias": True},
        E2B | {"num_hidden_layers": 10, "num_kv_shared_layers": 5},
        E4B | {"intermediate_size": [8192] * 20 + [16_384] * 15, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_shapes_and_parameters_equal_transformers(config: dict[str, Any]) -> None:
    expected, found = transformers.Gemma3nTextConfig.from_dict(config), shape(config)
    with torch.device("meta"):
        model = transformers.Gemma3nForCausalLM(expected)
    assert found.parameters() == model.num_parameters()
    assert found == shape(expected.to_dict() | ARCHITECTURE)
    kinds = ["sliding_attention" if window else "full_attention" for window in found.windows]
    assert kinds == expected.layer_types
    assert [found.width(layer) for layer in range(found.layers)] == expected.intermediate_size
    assert [*(found.mlp_closed or [0.0] * found.layers)] == expected.activation_sparsity_pattern
    assert [layer >= found.with_keys for layer in range(found.layers)] == [kind == "reuse" for kind in expected.kv_sharing_modes]
    assert found.local_rope is not None
    assert (found.rope.theta, found.local_rope.theta, found.final_softcap, found.attention_scale) == (1e6, 1e4, 30.0, 1.0)
    assert (found.max_positions, found.tied, max(found.windows)) == (32_768, True, 512)


def test_parameters_and_kv_cache_size_of_e4b() -> None:
    """6.8 billion parameters, of which 2.3 are in the table of per-layer embeddings; 20 of its 35 layers have keys of their own."""
    found = shape(E4B)
    assert (round(found.parameters() / 1e8), round(found.parameters(tokens=1) / 1e8)) == (68, 45)
    assert found.altup == AltUpShape(count=4)
    assert (found.with_keys, found.laurel, found.inputs and found.inputs.size) == (20, 64, 256)
    assert found.kv_elements(1) == 20 * 2 * 2 * 256
    assert found.fitting == [1, 2, 4, 8]
    assert found.sums == 3 * 35


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"altup_num_inputs": 0}, "altup_num_inputs 0, an integer from 1"),
        ({"altup_active_idx": 4}, "altup_active_idx 4, an integer from 0 to 3"),
        ({"altup_active_idx": -1}, "altup_active_idx -1"),
        ({"altup_correct_scale": 1}, "altup_correct_scale 1, true or false"),
        ({"laurel_rank": 0}, "laurel_rank 0"),
        ({"laurel_rank": None}, "laurel_rank null"),
        ({"intermediate_size": [16_384] * 34}, "intermediate_size .*, a number for each of num_hidden_layers"),
        ({"intermediate_size": [16_384] * 34 + [0]}, "intermediate_size 0, an integer from 1"),
        ({"intermediate_size": "16384"}, "intermediate_size '16384'"),
        ({"activation_sparsity_pattern": 0.95}, "activation_sparsity_pattern 0.95, a number for each"),
        ({"activation_sparsity_pattern": [0.95] * 34 + [1.0]}, "activation_sparsity_pattern .*, numbers from 0 on and below 1"),
        ({"activation_sparsity_pattern": [0.95] * 34 + [None]}, "activation_sparsity_pattern .*, numbers from 0 on"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers 35"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers 31: before these there must be layers of all kinds"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input 0, an integer from 1"),
        ({"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input 0"),
        ({"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rotary scaling 'ntk' is not supported"),
        ({"sliding_window": 0}, "there are layers that slide"),
        ({"model_type": "gemma3n"}, "model_type 'gemma3n', and architecture Gemma3nForCausalLM, which is 'gemma3n_text'"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        shape(E4B | changed)


def test_ranks_that_do_not_divide_each_layers_intermediate_size_are_refused() -> None:
    """The intermediate size may differ between layers."""
    with pytest.raises(Unsupported, match=r"^8196 intermediate features of layer 3 can't be divided by 8 ranks"):
        shape(E4B | {"intermediate_size": [8192] * 3 + [8196] + [16_384] * 31}).check_ranks(8)


def test_layers_that_share_keys_use_the_same_cache() -> None:
    engine = tiny.engine("gemma3n", pages=3)
    layers = engine.cache.layers
    assert layers[2] is layers[0]
    assert layers[3] is layers[1]
    assert engine.token_bytes == 4 * 2 * 2 * 4 * 16
    assert [type(layer.mlp) for layer in engine.decoder.layers] == [
        SparseActivationMlp,
        Mlp,
        SparseActivationMlp,
        SparseActivationMlp,
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [7, 13])
def test_preempted_requests_get_transformers_tokens(name: str, chunk: int) -> None:
    check_preemption(name, chunk)


def multimodal_checkpoint(name: str, folder: Path) -> Path:
    """As on the hub, with encoders of images and audio, which are ignored here."""
    shutil.copytree(tiny.folder(name), folder)
    text = json.loads((folder / "config.json").read_text())
    encoder_configs = {"vision_config": {"model_type": "gemma3n_vision"}, "audio_config": {"model_type": "gemma3n_audio"}}
    config_json = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text,
    } | encoder_configs
    config_json["tie_word_embeddings"] = text["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config_json))
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    renamed = {key.replace("model.", "model.language_model."): value for key, value in stored.items()}
    encoder_tensors = {
        "model.vision_tower.timm_model.conv_stem.conv.weight": (3, 3),
        "model.audio_tower.conformer.0.norm.weight": (8,),
    }
    renamed |= {key: torch.ones(size) for key, size in encoder_tensors.items()}
    # Key projections of layers that share keys: the hub's checkpoints hold them, but they are not used.
    key_name = "model.language_model.layers.{}.self_attn.k_proj.weight"
    renamed.setdefault(key_name.format(3), torch.ones(7))
    safetensors.torch.save_file(renamed, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_text_logits_of_a_multimodal_checkpoint_equal_transformers(name: str, tmp_path: Path) -> None:
    runner = SpanRunner(name, 16)
    runner.engine.decoder = load(
        ShardConfig(folder=str(multimodal_checkpoint(name, tmp_path / "m")), model="m"), lambda stage: None
    ).decoder
    runner.engine.resize(64)
    tokens = prompt(3, 40)
    assert_logits_close(runner.run([Span(runner.start(()), 0, tokens, wanted=40)]), tiny.expected_logits(name, tokens))


class FixedStream(Stream):
    """A stream whose projection returns the given values."""

    def through(self, gains: Tensor | None, weight: Any, gates: bool = False) -> Tensor:
        return self._sums.clone()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_activation_sparsity_uses_the_gate_statistics_of_all_ranks(ranks: int) -> None:
    """With means far from 0: the result is that of one rank with all gates."""
    model = tiny.decoder("gemma3n").shape
    gates, ups = torch.randn(5, 88) + 3, torch.randn(5, 88)
    reference_mlp = tiny.reference("gemma3n").model.layers[0].mlp
    expected = torch.nn.functional.gelu(reference_mlp._gaussian_topk(gates), approximate="tanh") * ups

    def work(rank: Ranks) -> Tensor:
        weights = Weights(tiny.folder("gemma3n"), torch.float32, tiny.CPU, lambda read: None)
        mlp = SparseActivationMlp(
            Loader(weights, model, rank, "model.layers.0.", Invariance.USUAL), 88, reference_mlp.activation_sparsity
        )
        part = slice(rank.rank * 88 // ranks, (rank.rank + 1) * 88 // ranks)
        return mlp.inner(FixedStream(torch.cat((gates[:, part], ups[:, part]), 1), rank, 1e-6), None)

    found = torch.cat(tiny.ThreadedRanks(ranks).run(work), 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert 0 < (found != 0).sum() < 0.3 * found.numel()


def test_altup_streams_start_with_the_magnitude_of_the_first() -> None:
    """And a stream of zeros stays 0 instead of becoming NaN."""
    model = tiny.decoder("gemma3n").shape
    weights = Weights(tiny.folder("gemma3n"), torch.float32, tiny.CPU, lambda read: None)
    assert model.altup is not None
    ends = Ends(Loader(weights, model, Ranks(0, 1, tiny.CPU), "model.", Invariance.USUAL), model.altup)
    sums = torch.randn(3, 64)
    sums[1] = 0
    streams = ends.begun(sums)
    torch.testing.assert_close(streams[::2].square().mean(2), sums[::2].square().mean(1, keepdim=True).expand(2, 4))
    assert not streams[1].any()
    assert AltUpStream(sums, Ranks(0, 1, tiny.CPU), 1e-6, True, ends).normalized(None) is sums


def test_eagle3_draft_heads_for_altup_models_are_refused() -> None:
    """They read one residual stream. `--batch-invariant` is accepted on a CPU."""
    from penstock.shard.models.draft_families import _eagle3

    found = shape(E4B)
    with pytest.raises(Unsupported, match="goes by the residual stream, of which Gemma3nForCausalLM has several"):
        _eagle3({}, found)
    _check_invariant(found, torch.device("cpu"))


def test_roofline_counts_the_all_reduce_of_gate_statistics() -> None:
    """In each layer with activation sparsity."""
    accelerator = roofline.Accelerator(
        memory=8e10, bandwidth=3e12, flops=1e15, link=4e11, network=5e10, latency=1e-5, network_latency=2e-5
    )
    seconds = []
    for sparsity in (0.0, 0.95):
        model = shape(E4B | {"activation_sparsity_pattern": [sparsity] * 10 + [0.0] * 25})
        group = roofline.Group(shape=model, ranks=2, nodes=1, item=2, token_bytes=2 * model.kv_elements(2))
        seconds.append(roofline.exchange(group, accelerator, 7, 7))
    assert seconds[1] - seconds[0] == pytest.approx(10 * roofline.all_reduce(accelerator, 2, 1, 8 * 7))
