"""Step 3.7 Flash's text: logits and tokens against transformers, for checkpoints in both layouts, and the fields of the hub's
config.json."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.shard import step
from penstock.shard.config import ShardConfig
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Shape, Unsupported
from penstock.shard.parallel import Ranks
from penstock.shard.weights import Weights
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Traffic, drive
from penstock.tests.shard.test_against_transformers import SpanRunner, assert_logits_close, prompt
from penstock.tests.shard.test_weights import WEIGHTS, assert_same_weights, load_decoder

LAYER_TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
TEXT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 88,
    "moe_intermediate_size": 20,
    "share_expert_dim": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_sliding_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "layer_types": LAYER_TYPES,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "swiglu_limits": [0, 0, 0.3, 0.5],
    "swiglu_limits_shared": [0.4, 0, 0.2, None],
    "moe_router_scaling_factor": 1.7,
    "query_pre_attn_scalar": 12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
ARCHITECTURE = {"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7"}
# Fields of the hub's config.json.
HUB_TEXT_CONFIG: dict[str, Any] = {
    "model_type": "step3p5",
    "architectures": ["Step3p5ForCausalLM"],
    "num_hidden_layers": 45,
    "hidden_size": 4096,
    "intermediate_size": 11_264,
    "moe_intermediate_size": 1280,
    "vocab_size": 128_896,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "moe_router_scaling_factor": 3.0,
    "moe_router_activation": "sigmoid",
    "use_moe_router_bias": True,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "share_expert_dims": 1280,
    "num_nextn_predict_layers": 3,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 8},
    "sliding_window": 512,
    "rope_theta": ([5e6] + [1e4] * 3) * 12,
    "partial_rotary_factors": ([0.5] + [1.0] * 3) * 12,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 131_072,
    },
    "max_position_embeddings": 262_144,
    "swiglu_limits": [0.0] * 43 + [7, 7] + [0.0] * 3,
    "swiglu_limits_shared": [0.0] * 43 + [16, 16] + [0.0] * 3,
    "zero_centered": True,
    "use_head_wise_attn_gate": True,
}


def hub_shape(**more: Any) -> Shape:
    return shape(ARCHITECTURE | {"text_config": HUB_TEXT_CONFIG | more})


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """transformers' model, and the folders where it is saved in the original format and in transformers' own."""
    torch.manual_seed(3)
    config = transformers.Step3p7Config(text_config=TEXT, vision_config=VISION, image_token_id=7)
    with tiny.MODEL_LOCK:
        model = transformers.Step3p7ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for key, values in (*model.named_parameters(), *model.named_buffers()):
                if ("language_model" in key or "lm_head" in key) and "inv_freq" not in key:
                    values.normal_(0, 0.3)
        folders = [tmp_path_factory.mktemp(name) for name in ("original", "own")]
        model.save_pretrained(folders[0])
        model.save_pretrained(folders[1], save_original_format=False)
    return model, *folders


@torch.inference_mode()
def reference_logits(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


def test_logits_in_chunks_equal_transformers_in_both_checkpoint_layouts(saved_model: tuple[Any, Path, Path]) -> None:
    """In two chunks, longer than the sliding window."""
    model, folder, transformers_folder = saved_model
    runner, tokens = SpanRunner("llama", 4), prompt(3, 60)
    runner.engine = load(ShardConfig(folder=str(folder), model="m", page_size=4), lambda stage: None)
    runner.engine.resize(64)
    sequence = runner.start(tokens[:23])
    found = runner.run([step.Span(sequence, 23, tokens[23:], wanted=37)])
    assert_logits_close(found, reference_logits(model, tokens)[23:])
    assert_same_weights(load_decoder(transformers_folder), load_decoder(folder))
    names = safetensors.torch.load_file(folder / WEIGHTS).keys() | safetensors.torch.load_file(transformers_folder / WEIGHTS).keys()
    assert {"model.layers.1.moe.gate_proj.weight", "model.language_model.layers.1.mlp.experts.gate_up_proj"} <= names


def test_tokens_of_two_ranks_equal_transformers(saved_model: tuple[Any, Path, Path]) -> None:
    """Six requests, some of them preempted."""
    model, folder, _ = saved_model
    prompts = [prompt(seed, 3 + 7 * seed) for seed in range(6)]

    def work(rank: Ranks) -> Any:
        weights = Weights(folder, torch.float32, tiny.CPU, lambda read: None)
        engine = Engine(Decoder(shape(json.loads((folder / "config.json").read_text())), weights, rank, tiny.CPU), tiny.CPU, 4)
        engine.resize(64)
        return drive(engine, [tiny.group(uid, tokens, 5) for uid, tokens in enumerate(prompts)], Traffic(7, pause=0.1)).tokens

    first, second = tiny.ThreadedRanks(2).run(work)
    assert first == second
    for uid, tokens in enumerate(prompts):
        row = list(tokens)
        for _ in range(5):
            row.append(int(reference_logits(model, tuple(row))[-1].argmax()))
        assert first[uid, 0] == row[len(tokens) :]


def test_the_hubs_config_fields_are_read_like_those_of_transformers() -> None:
    """196 billion parameters, 11 of them active for a token."""
    found = hub_shape()
    saved_config = transformers.Step3p7TextConfig(**HUB_TEXT_CONFIG).to_dict()
    assert found == shape(ARCHITECTURE | {"text_config": saved_config})
    assert found.parameters() / 1e9 == pytest.approx(196.9, abs=0.5)
    assert found.parameters(tokens=1) / 1e9 == pytest.approx(11.5, abs=0.5)
    assert (found.query_heads(0), found.query_heads(512), found.keys(0).heads) == (64, 96, 8)
    assert (found.turned(0), found.turned(512)) == (64, 128)
    assert (found.rope.kind, found.local_rope and found.local_rope.kind) == ("llama3", "default")
    assert [mixture and (mixture.limit, mixture.shared_limit) for mixture in found.mixtures[41:]] == [(0, 0)] * 2 + [(7, 16)] * 2
    assert sum(mixture is None for mixture in found.mixtures) == 3


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"moe_router_activation": "softmax"}, "moe_router_activation 'softmax' is not supported"),
        ({"zero_centered": False}, "zero_centered false is not supported"),
        ({"moe_layers_enum": "3,x"}, "moe_layers_enum '3,x', numbers of layers are needed"),
        ({"moe_layers_enum": 7}, "moe_layers_enum 7, numbers of layers"),
        ({"swiglu_limits": [7]}, "swiglu_limits .*, a number for each layer"),
        ({"swiglu_limits_shared": [-1] * 45}, "swiglu_limits_shared -1, a number above 0"),
        ({"rope_theta": [1e4]}, "rope_theta .*, a number for each layer"),
        ({"moe_top_k": 0}, "num_experts_per_tok 0, an integer"),
        ({"attention_other_setting": {"num_attention_heads": "96"}}, "num_sliding_attention_heads '96', an integer"),
        ({"layer_types": ["full_attention"] * 46}, "layer_types .*, a name for each of num_hidden_layers"),
    ],
)
def test_unsupported_or_invalid_config_is_refused_by_field_name(field: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        hub_shape(**field)


def test_quantized_experts_in_one_tensor_are_refused(saved_model: tuple[Any, Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved_model[1], tmp_path / "few"))
    stored = safetensors.torch.load_file(folder / WEIGHTS)
    stored["model.layers.1.moe.gate_proj.weight_scale_inv"] = torch.ones(8, 1, 1)
    safetensors.torch.save_file(stored, folder / WEIGHTS)
    with pytest.raises(Unsupported, match="says that experts that are all in one tensor have few bits"):
        load_decoder(folder)
