"""Text prompts to vision-language models: logits against transformers for checkpoints in its own layout and in the hub's, and the
text fields of config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from penstock.shard.config import ShardConfig
from penstock.shard.loading import load
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Unsupported
from penstock.shard.step import Span

from .configurations import GLM_MOE, HYBRID, HYBRID_MOE, MLA, SMALL
from .test_against_transformers import SpanRunner, assert_logits_close, prompt

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]}
MOE_FIELDS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
GLM_MROPE = MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
INTERLEAVED_MROPE = MROPE | {"mrope_interleaved": True}
TEXTS: dict[str, dict[str, Any]] = {
    "Qwen2VL": SMALL | {"rope_parameters": MROPE},
    "Qwen2_5_VL": SMALL | {"rope_parameters": MROPE},
    "Qwen3VL": SMALL | {"rope_parameters": MROPE | {"mrope_interleaved": True}, "head_dim": 8, "num_hidden_layers": 3},
    "Qwen3VLMoe": SMALL
    | MOE_FIELDS
    | {"rope_parameters": MROPE | {"mrope_interleaved": True}, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "Qwen3_5": HYBRID | {"rope_parameters": INTERLEAVED_MROPE},
    "Qwen3_5Moe": HYBRID_MOE | {"rope_parameters": INTERLEAVED_MROPE | {"partial_rotary_factor": 0.5}},
    "Glm4v": SMALL | {"rope_parameters": GLM_MROPE},
    "GlmOcr": SMALL | {"rope_parameters": GLM_MROPE | {"mrope_section": [2, 1, 1]}, "head_dim": 16},
    "Glm4vMoe": {name: value for name, value in GLM_MOE.items() if name != "head_dim"} | {"rope_parameters": GLM_MROPE},
    "Kimi_K25": MLA | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1},
}


def text_and_vision_model(name: str, vision_fields: Mapping[str, Any] = {}, **more: Any) -> Any:
    """A tiny model with random weights. vision_fields: of the image encoder, beside VISION."""
    vision = VISION | vision_fields
    if name == "Kimi_K25":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "Qwen2VL":
        vision |= {"embed_dim": 16, "hidden_size": 64}
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(text_config=TEXTS[name], vision_config=vision, **more)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for key, values in (*model.named_parameters(), *model.named_buffers()):
            if "correction" in key or values.dim() > 1 or "bias" in key:
                values.normal_(0, 0.1)
    return model


def check_text_logits(model: Any, folder: Path) -> None:
    tokens = prompt(3, 40)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    runner = SpanRunner("llama", 16)
    runner.engine = load(ShardConfig(folder=str(folder), model="m"), lambda stage: None)
    runner.engine.resize(64)
    sequence = runner.start(())
    assert_logits_close(runner.run([Span(sequence, 0, tokens, wanted=40)]), expected)


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "Kimi_K25"])
def test_text_logits_of_checkpoints_saved_by_transformers(name: str, tmp_path: Path) -> None:
    model = text_and_vision_model(name)
    model.save_pretrained(tmp_path)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    check_text_logits(model, tmp_path)


def test_qwen3_vl_moe_experts_in_the_hubs_layout_are_loaded(tmp_path: Path) -> None:
    """All experts are in one tensor, with inputs as the first dimension."""
    model = text_and_vision_model("Qwen3VLMoe")
    model.save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    transposed = [key for key in stored if ".experts." in key]
    assert len(transposed) == 4
    stored |= {key: stored[key].transpose(1, 2).contiguous() for key in transposed}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    check_text_logits(model, tmp_path)


def save_in_older_hub_layout(name: str, model: Any, folder: Path) -> None:
    """As older checkpoints on the hub: the text's fields are at the top of config.json, and tensors of text and image encoder have
    no prefix of their own."""
    config_json = model.config.to_dict()
    text = config_json.pop("text_config")
    kind, rope = text.pop("model_type").removesuffix("_text"), text.pop("rope_parameters")
    rope_scaling = {"type": "mrope" if name.startswith("Qwen") else "default", "mrope_section": rope["mrope_section"]}
    older_fields = {"rope_theta": rope["rope_theta"], "rope_scaling": rope_scaling}
    names = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind}
    (folder / "config.json").write_text(json.dumps(text | config_json | older_fields | names))
    renamed = {
        key.replace("model.language_model.", "model.")
        .replace("model.visual.", "visual.")
        .replace("model.projector.", "mlp_AR."): value.clone()
        for key, value in model.state_dict().items()
    }
    safetensors.torch.save_file(renamed, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_qwen2_vl_checkpoints_in_the_hubs_older_layout_are_loaded(name: str, tmp_path: Path) -> None:
    """The text's fields are at the top of config.json, and its tensors have no prefix of their own."""
    model = text_and_vision_model(name)
    save_in_older_hub_layout(name, model, tmp_path)
    check_text_logits(model, tmp_path)


def test_kimi_k2_5_checkpoint_with_the_hubs_names_is_loaded(tmp_path: Path) -> None:
    """transformers saves layers of text as `blocks`, which on the hub is the name of the image encoder's only."""
    model = text_and_vision_model("Kimi_K25", tie_word_embeddings=False)
    text = model.config.text_config.to_dict() | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    config_json = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    model.save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    stored = {key.replace("language_model.model.blocks.", "language_model.model.layers."): value for key, value in stored.items()}
    assert {"language_model.model.layers.1.mlp.experts.0.up_proj.weight", "language_model.lm_head.weight"} < stored.keys()
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    check_text_logits(model, tmp_path)


def test_tie_word_embeddings_beside_text_config_takes_precedence_for_qwen3_vl_moe() -> None:
    """By default transformers writes true in text_config, though embeddings are not tied."""
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 8}
    text = transformers.Qwen3VLMoeTextConfig(**sizes, num_key_value_heads=4).to_dict()
    assert text["tie_word_embeddings"]
    fields = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text}
    assert not shape(fields | {"tie_word_embeddings": False}).tied
    assert shape(fields | {"tie_word_embeddings": True}).tied


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe"])
def test_qwen3_5_tied_embeddings_follow_the_outer_config(name: str, tmp_path: Path) -> None:
    """transformers writes its default, false, in text_config."""
    model = text_and_vision_model(name, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text())["text_config"]["tie_word_embeddings"]
    check_text_logits(model, tmp_path)


QWEN2_SIZES = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize("name", ["Llava", "LlavaNext", "LlavaOnevision"])
@pytest.mark.parametrize("tied_beside_text", [False, True])
@pytest.mark.parametrize("tied_in_text", [False, True])
def test_llava_tied_embeddings_are_those_of_transformers(name: str, tied_beside_text: bool, tied_in_text: bool) -> None:
    text = QWEN2_SIZES | {"vocab_size": 100, "tie_word_embeddings": tied_in_text}
    expected = getattr(transformers, f"{name}Config")(text_config=dict(text), tie_word_embeddings=tied_beside_text)
    architectures = {"architectures": [f"{name}ForConditionalGeneration"]}
    assert (
        shape(architectures | {"text_config": text, "tie_word_embeddings": tied_beside_text}).tied == expected.tie_word_embeddings
    )


@pytest.mark.parametrize(
    ("name", "text_config"),
    [
        ("Llava", {"model_type": "llama", "vocab_size": 32_064, "max_position_embeddings": 4096}),
        ("Llava", {"model_type": "mistral", "head_dim": 128, "rope_theta": 1e9, "sliding_window": None}),  # Pixtral's
        ("LlavaNext", {"model_type": "mistral", "vocab_size": 32_064, "num_key_value_heads": 8}),
        ("LlavaOnevision", {"vocab_size": 152_000, "tie_word_embeddings": True} | QWEN2_SIZES),
        ("Idefics2", {"model_type": "mistral", "vocab_size": 32_003, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768}),
        ("Idefics3", {"model_type": "llama", "vocab_size": 128_259}),
        ("SmolVLM", {"model_type": "llama", "vocab_size": 49_280, "num_key_value_heads": 8}),
    ],
)
def test_fields_missing_in_text_config_have_transformers_defaults(name: str, text_config: dict[str, Any]) -> None:
    full_text_config = getattr(transformers, f"{name}Config")(text_config=dict(text_config)).text_config.to_dict()
    architectures = {"architectures": [f"{name}ForConditionalGeneration"]}
    assert shape(architectures | {"text_config": text_config}) == shape(architectures | {"text_config": full_text_config})


@pytest.mark.parametrize(
    ("config_json", "words"),
    [
        (
            {"text_config": {"model_type": "qwen3"}},
            "model_type 'qwen3', and architecture Qwen3VLMoe.*, which is 'qwen3_vl_moe_text'",
        ),
        ({"text_config": {"norm_topk_prob": False}}, "norm_topk_prob false is not supported"),
        ({"text_config": 3}, "text_config 3, an object is needed"),
        ({}, "lacks 'text_config'"),
    ],
)
def test_unsupported_or_invalid_text_config_is_refused(config_json: dict[str, Any], words: str) -> None:
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 8}
    config_json = dict(config_json)
    if isinstance(config_json.get("text_config"), dict):
        config_json["text_config"] = sizes | config_json["text_config"]
    with pytest.raises(Unsupported, match=words):
        shape({"architectures": ["Qwen3VLMoeForConditionalGeneration"]} | config_json)
