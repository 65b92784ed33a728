"""The text of models with images gives transformers' logits, as these are saved and as the hub has them."""

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
SECTIONS = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 1, 1]}
MOE_FIELDS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
GLM_SECTIONS = SECTIONS | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
QUARTER = SECTIONS | {"mrope_interleaved": True}
TEXTS: dict[str, dict[str, Any]] = {
    "Qwen2VL": SMALL | {"rope_parameters": SECTIONS},
    "Qwen2_5_VL": SMALL | {"rope_parameters": SECTIONS},
    "Qwen3VL": SMALL | {"rope_parameters": SECTIONS | {"mrope_interleaved": True}, "head_dim": 8, "num_hidden_layers": 3},
    "Qwen3VLMoe": SMALL
    | MOE_FIELDS
    | {"rope_parameters": SECTIONS | {"mrope_interleaved": True}, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "Qwen3_5": HYBRID | {"rope_parameters": QUARTER},
    "Qwen3_5Moe": HYBRID_MOE | {"rope_parameters": QUARTER | {"partial_rotary_factor": 0.5}},
    "Glm4v": SMALL | {"rope_parameters": GLM_SECTIONS},
    "GlmOcr": SMALL | {"rope_parameters": GLM_SECTIONS | {"mrope_section": [2, 1, 1]}, "head_dim": 16},
    "Glm4vMoe": {name: value for name, value in GLM_MOE.items() if name != "head_dim"} | {"rope_parameters": GLM_SECTIONS},
    "Kimi_K25": MLA | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1},
}


def text_and_vision_model(name: str, seeing: Mapping[str, Any] = {}, **more: Any) -> Any:
    """A tiny one with random weights. seeing: of what encodes images, beside VISION."""
    vision = VISION | seeing
    if name == "Kimi_K25":
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "Qwen2VL":
        vision |= {"embed_dim": 16, "hidden_size": 64}
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(text_config=TEXTS[name], vision_config=vision, **more)
    made = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for key, values in (*made.named_parameters(), *made.named_buffers()):
            if "correction" in key or values.dim() > 1 or "bias" in key:
                values.normal_(0, 0.1)
    return made


def check_text_logits(made: Any, folder: Path) -> None:
    tokens = prompt(3, 40)
    with torch.inference_mode():
        expected = made(input_ids=torch.tensor([tokens])).logits[0]
    bench = SpanRunner("llama", 16)
    bench.engine = load(ShardConfig(folder=str(folder), model="m"), lambda stage: None)
    bench.engine.resize(64)
    sequence = bench.start(())
    assert_logits_close(bench.run([Span(sequence, 0, tokens, wanted=40)]), expected)


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "Kimi_K25"])
def test_as_transformers_saves_it(name: str, tmp_path: Path) -> None:
    made = text_and_vision_model(name)
    made.save_pretrained(tmp_path)
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    check_text_logits(made, tmp_path)


def test_as_the_hub_has_qwen_3s_experts(tmp_path: Path) -> None:
    """All in one tensor, inputs first."""
    made = text_and_vision_model("Qwen3VLMoe")
    made.save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    turned = [key for key in stored if ".experts." in key]
    assert len(turned) == 4
    stored |= {key: stored[key].transpose(1, 2).contiguous() for key in turned}
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    check_text_logits(made, tmp_path)


def save_as_qwen_2(name: str, made: Any, folder: Path) -> None:
    """As the hub has it: text is described beside all else, and neither its tensors nor those of what encodes images have a name
    before their own."""
    said = made.config.to_dict()
    text = said.pop("text_config")
    kind, rope = text.pop("model_type").removesuffix("_text"), text.pop("rope_parameters")
    turning = {"type": "mrope" if name.startswith("Qwen") else "default", "mrope_section": rope["mrope_section"]}
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": turning}
    named = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind}
    (folder / "config.json").write_text(json.dumps(text | said | old | named))
    renamed = {
        key.replace("model.language_model.", "model.")
        .replace("model.visual.", "visual.")
        .replace("model.projector.", "mlp_AR."): value.clone()
        for key, value in made.state_dict().items()
    }
    safetensors.torch.save_file(renamed, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL"])
def test_as_the_hub_has_qwen_2(name: str, tmp_path: Path) -> None:
    """Text is described beside all else, and its tensors have no name of their own."""
    made = text_and_vision_model(name)
    save_as_qwen_2(name, made, tmp_path)
    check_text_logits(made, tmp_path)


def test_as_the_hub_has_kimi(tmp_path: Path) -> None:
    """transformers saves its layers as `blocks`, which only its images' are."""
    made = text_and_vision_model("Kimi_K25", tie_word_embeddings=False)
    text = made.config.text_config.to_dict() | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    said = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    made.save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    stored = {key.replace("language_model.model.blocks.", "language_model.model.layers."): value for key, value in stored.items()}
    assert {"language_model.model.layers.1.mlp.experts.0.up_proj.weight", "language_model.lm_head.weight"} < stored.keys()
    safetensors.torch.save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(said))
    check_text_logits(made, tmp_path)


def test_which_says_that_tables_are_tied() -> None:
    """Of Qwen 3 VL's experts the text says so by default, where nothing is."""
    needed = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 8}
    text = transformers.Qwen3VLMoeTextConfig(**needed, num_key_value_heads=4).to_dict()
    assert text["tie_word_embeddings"]
    said = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text}
    assert not shape(said | {"tie_word_embeddings": False}).tied
    assert shape(said | {"tie_word_embeddings": True}).tied


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe"])
def test_whose_text_says_nothing_of_it(name: str, tmp_path: Path) -> None:
    """But transformers writes its default there."""
    made = text_and_vision_model(name, tie_word_embeddings=True)
    made.save_pretrained(tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text())["text_config"]["tie_word_embeddings"]
    check_text_logits(made, tmp_path)


NEEDED = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize("name", ["Llava", "LlavaNext", "LlavaOnevision"])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_whether_llavas_tables_are_tied(name: str, beside: bool, own: bool) -> None:
    text = NEEDED | {"vocab_size": 100, "tie_word_embeddings": own}
    said = getattr(transformers, f"{name}Config")(text_config=dict(text), tie_word_embeddings=beside)
    architectures = {"architectures": [f"{name}ForConditionalGeneration"]}
    assert shape(architectures | {"text_config": text, "tie_word_embeddings": beside}).tied == said.tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Llava", {"model_type": "llama", "vocab_size": 32_064, "max_position_embeddings": 4096}),
        ("Llava", {"model_type": "mistral", "head_dim": 128, "rope_theta": 1e9, "sliding_window": None}),  # Pixtral's
        ("LlavaNext", {"model_type": "mistral", "vocab_size": 32_064, "num_key_value_heads": 8}),
        ("LlavaOnevision", {"vocab_size": 152_000, "tie_word_embeddings": True} | NEEDED),
        ("Idefics2", {"model_type": "mistral", "vocab_size": 32_003, "rms_norm_eps": 1e-5, "max_position_embeddings": 32_768}),
        ("Idefics3", {"model_type": "llama", "vocab_size": 128_259}),
        ("SmolVLM", {"model_type": "llama", "vocab_size": 49_280, "num_key_value_heads": 8}),
    ],
)
def test_whose_text_leaves_out_what_is_usual(name: str, said: dict[str, Any]) -> None:
    theirs = getattr(transformers, f"{name}Config")(text_config=dict(said)).text_config.to_dict()
    architectures = {"architectures": [f"{name}ForConditionalGeneration"]}
    assert shape(architectures | {"text_config": said}) == shape(architectures | {"text_config": theirs})


@pytest.mark.parametrize(
    ("said", "words"),
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
def test_what_is_refused(said: dict[str, Any], words: str) -> None:
    needed = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 8}
    said = dict(said)
    if isinstance(said.get("text_config"), dict):
        said["text_config"] = needed | said["text_config"]
    with pytest.raises(Unsupported, match=words):
        shape({"architectures": ["Qwen3VLMoeForConditionalGeneration"]} | said)
