"""Tiny vision-language models with random weights, prompts with images for them, and the logits that transformers computes (the
oracle)."""

import copy
import functools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.gemma4_unified import modeling_gemma4_unified as gemma4_unified

from penstock.proto.images import FORMS, MISTRAL
from penstock.proto.tiling import Tiling
from penstock.shard.config import ShardConfig
from penstock.shard.engine import Engine
from penstock.shard.image_cache import ImageCache
from penstock.shard.loading import load
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.models.vision import Vision
from penstock.shard.parallel import Ranks
from penstock.shard.pictures import PromptImage
from penstock.shard.weights import Weights

from .configurations import (
    GEMMA,
    GEMMA4,
    GEMMA4_E,
    GLM_5_NEXT,
    GRANITE,
    HY_4,
    LFM3,
    LLAMA4,
    MINIMAX_3,
    MISTRAL_LARGE_4,
    QWEN_4,
    SMALL,
    VOCABULARY,
)
from .test_multimodal_text import INTERLEAVED_MROPE, MROPE, TEXTS, text_and_vision_model
from .test_step_3 import TEXT as STEP_TEXT
from .tiny import CPU, MODEL_LOCK

PATCH, MERGE, SIDE = 2, 2, 4  # along one side: pixels of a patch, patches of a token, pixels of a token
PLACEHOLDER, BREAK, END = 7, 8, 9  # token ids: an image token, the end of a row, the end of an image
MEAN, DEVIATION = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
QWEN_VISION = {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "in_channels": 3, "depth": 3}
PIXTRAL_VISION = {
    **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"patch_size": PATCH, "image_size": 64, "head_dim": 8},
}
TILE = 2  # tokens along a side of an InternVL tile
TILING = Tiling(resolutions=((8, 16), (16, 8), (16, 16), (24, 8)), side=TILE * SIDE, tokens=TILE)  # LLaVA-NeXT's
STEP_SIDE = 4 * PATCH  # pixels along a side of a Step 3.7 token
OCR_WHOLE, OCR_TILE = 13 * 4 * PATCH, 4 * 4 * PATCH  # pixels along a side of DeepSeek-OCR 2's whole images and tiles
SQUARE = 3  # tokens along a side of images that all have one size, as Gemma 3's
SIGLIP_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": PATCH}
GEMMA4_VISION = SIGLIP_VISION | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pooling_kernel_size": MERGE,
    "position_embedding_size": 64,
}
GEMMA3_TEXT = GEMMA | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
PROCESSORS = {
    **dict.fromkeys(("Glm4v", "Glm4vMoe", "GlmOcr"), "Glm4vImageProcessor"),
    **{"LightOnOcr": "PixtralImageProcessor", "PaddleOCRVL": "PaddleOCRVLImageProcessor"},
    "MiniMaxM3": "MiniMaxM3VLImageProcessor",
    "Llama4": "Llama4ImageProcessorFast",
    "Step3p7": "Step3p7ImageProcessor",
    "HYV4VL": "HYV4VLImageProcessor",
    "Glm5Next": "Glm5NextImageProcessor",
    "DeepseekOcr2": "DeepseekOcr2ImageProcessor",
    **dict.fromkeys(("Mistral3", "MistralLarge4"), "PixtralImageProcessor"),
    **{"Gemma3": "Gemma3ImageProcessor", "InternVL": "GotOcr2ImageProcessor"},
    **dict.fromkeys(("Gemma4", "Gemma4E", "Gemma4Both"), "Gemma4ImageProcessor"),
    "Gemma4Unified": "Gemma4UnifiedImageProcessor",
    **{"Idefics2": "Idefics2ImageProcessor", "Idefics3": "Idefics3ImageProcessor", "SmolVLM": "SmolVLMImageProcessor"},
    **{
        "Llava": "CLIPImageProcessor",
        "LlavaNext": "LlavaNextImageProcessor",
        "GraniteVision": "LlavaNextImageProcessor",
        "LlavaOnevision": "LlavaOnevisionImageProcessor",
        "Pixtral": "PixtralImageProcessor",
    },
}
MODELS = (
    *(name for name in TEXTS if name != "Kimi_K25"),
    "Mistral3",
    "MistralLarge4",
    "Gemma3",
    "Gemma4",
    "Gemma4E",
    "Gemma4Unified",
    "Idefics2",
    "Idefics3",
    "InternVL",
    "Exaone4_5",
    "MiniMaxM3",
    "LightOnOcr",
    "Llama4",
    "PaddleOCRVL",
    "HYV4VL",
    "Lfm3Vl",
    "Glm5Next",
    "Step3p7",
    "Llava",
    "LlavaNext",
    "GraniteVision",
    "LlavaOnevision",
    "Qwen4Exp",
    "Pixtral",
    "SmolVLM",
)


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt with images, for transformers and for shards."""

    ids: list[int]  # for transformers: image tokens are PLACEHOLDER
    kinds: list[int]  # 1 for image tokens, 0 for text
    tokens: list[int]  # for shards: image tokens have ids beyond the vocabulary
    pictures: tuple[PromptImage, ...]


def make_model(name: str, folder: Path, seed: int = 5) -> Any:
    """transformers' model, saved in the folder together with the config of its image processor."""
    torch.manual_seed(seed)
    if name in BUILDERS:
        model: Any = BUILDERS[name]().eval()
        with torch.no_grad():
            for key, values in (*model.named_parameters(), *model.named_buffers()):
                if (values.dim() > 1 and values.is_floating_point()) or "bias" in key or "std_" in key:
                    values.normal_(0, 0.1)
                if key.endswith(("put_min", "put_max")):  # bounds of projections' inputs and outputs, which some values exceed
                    values.fill_((1.6 if "input" in key else 0.7) * (-1 if key.endswith("min") else 0.8))
            if name == "Gemma4Unified":  # transformers embeds a generated placeholder differently: never generate it
                model.get_input_embeddings().weight[PLACEHOLDER] = 0
    else:
        deepstack = {"deepstack_visual_indexes": [0, 2]} if name.startswith("Qwen3VL") else {}
        model = text_and_vision_model(name, QWEN_VISION | deepstack, image_token_id=PLACEHOLDER)
    model.save_pretrained(folder)
    kind = PROCESSORS.get(name, "Qwen2VLImageProcessor")
    preprocessor_config = {
        "image_processor_type": kind,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "image_mean": MEAN,
        "image_std": DEVIATION,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor_config))
    return model


def _mistral() -> Any:
    text = SMALL | {"model_type": "mistral", "head_dim": 8, "sliding_window": None}
    config = transformers.Mistral3Config(
        text_config=text,
        vision_config=PIXTRAL_VISION,
        image_token_index=PLACEHOLDER,
        spatial_merge_size=MERGE,
        tie_word_embeddings=False,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def _mistral_large() -> Any:
    """transformers saves its checkpoint with Mistral's own tensor names."""
    config = transformers.MistralLarge4Config(
        text_config=MISTRAL_LARGE_4, vision_config=PIXTRAL_VISION, image_token_index=PLACEHOLDER, spatial_merge_size=MERGE
    )
    return transformers.MistralLarge4ForConditionalGeneration(config)


def _lighton_ocr() -> Any:
    """Its output matrix is the embedding table, whatever text_config says."""
    text = SMALL | {"model_type": "qwen3", "head_dim": 16}
    config = transformers.LightOnOcrConfig(
        text_config=text, vision_config=PIXTRAL_VISION, image_token_id=PLACEHOLDER, spatial_merge_size=MERGE
    )
    return transformers.LightOnOcrForConditionalGeneration(config)


def _paddle() -> Any:
    text = SMALL | {"head_dim": 16, "rope_parameters": MROPE | {"mrope_section": [4, 2, 2]}}
    vision = SIGLIP_VISION | {"image_size": 8 * PATCH, "spatial_merge_size": MERGE}
    config = transformers.PaddleOCRVLConfig(text_config=text, vision_config=vision, image_token_id=PLACEHOLDER)
    return transformers.PaddleOCRVLForConditionalGeneration(config)


def _exaone() -> Any:
    text = SMALL | {"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2}
    vision = QWEN_VISION | {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "out_hidden_size": 64,
    }
    config = transformers.Exaone4_5_Config(
        text_config=text, vision_config=vision | {"fullatt_block_indexes": [1], "window_size": 16}, image_token_id=PLACEHOLDER
    )
    return transformers.Exaone4_5_ForConditionalGeneration(config)


def _minimax() -> Any:
    vision = SIGLIP_VISION | {"spatial_merge_size": MERGE, "temporal_patch_size": 2}
    config = transformers.MiniMaxM3VLConfig(
        text_config=MINIMAX_3, vision_config=vision, projector_hidden_size=24, image_token_index=PLACEHOLDER
    )
    return transformers.MiniMaxM3SparseForConditionalGeneration(config)


def _llama4() -> Any:
    """transformers 5.24 reads an attribute of the text model's output that is missing there."""
    transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
    inner = SIGLIP_VISION["hidden_size"] * MERGE**2
    vision = SIGLIP_VISION | {"image_size": SQUARE * SIDE, "pixel_shuffle_ratio": 1 / MERGE, "intermediate_size": inner}
    vision |= {"vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24}
    config = transformers.Llama4Config(text_config=LLAMA4, vision_config=vision, image_token_index=PLACEHOLDER)
    return transformers.Llama4ForConditionalGeneration(config)


def _hy_4() -> Any:
    """The norms of latents have the epsilon of other norms."""
    vision = SIGLIP_VISION | {"spatial_merge_size": MERGE, "max_image_size": 16 * PATCH, "out_hidden_size": HY_4["hidden_size"]}
    text = HY_4 | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]},
        "rms_norm_eps": 0.1,
    }
    config = transformers.HYV4VLConfig(text_config=text, vision_config=vision, image_token_id=PLACEHOLDER)
    return transformers.HYV4VLForConditionalGeneration(config)


def _glm_5_next() -> Any:
    """With an activation limit that the encoder's values reach."""
    vision = QWEN_VISION | {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "projection_intermediate_size": 20}
    config = transformers.Glm5NextConfig(
        text_config=GLM_5_NEXT | {"rms_norm_eps": 0.1},
        vision_config=vision | {"out_hidden_size": GLM_5_NEXT["hidden_size"], "swiglu_limit": 0.1},
        image_token_id=PLACEHOLDER,
    )
    return transformers.Glm5NextForConditionalGeneration(config)


def _qwen_4() -> Any:
    """Pools of the indexer begin within images, and n-grams among image tokens."""
    text = QWEN_4 | {"num_hidden_layers": 2, "layer_types": QWEN_4["layer_types"][:2], "ple_layer_ids": [1]}
    text |= {"rope_parameters": INTERLEAVED_MROPE | {"partial_rotary_factor": 0.5}}
    vision = QWEN_VISION | {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": QWEN_4["hidden_size"]}
    config = transformers.Qwen4ExpConfig(text_config=text, vision_config=vision, image_token_id=PLACEHOLDER)
    return transformers.Qwen4ExpForConditionalGeneration(config)


def _deepseek_ocr_2() -> Any:
    """Whole images have as few pixels as possible while they have other numbers of tokens than tiles."""
    sam = SIGLIP_VISION | {"image_size": OCR_WHOLE, "num_hidden_layers": 1, "global_attn_indexes": [0], "output_channels": 8}
    vision = {"sam_config": sam | {"downsample_channels": [12, 16]}, "encoder_config": SMALL | {"hidden_size": 16, "head_dim": 4}}
    text = SMALL | {"n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "routed_scaling_factor": 1.7}
    text |= {
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "pad_token_id": 0,
        "max_position_embeddings": 2048,
    }
    config = transformers.DeepseekOcr2Config(text_config=text, vision_config=vision, image_token_id=PLACEHOLDER)
    return transformers.DeepseekOcr2ForConditionalGeneration(config)


def _lfm3() -> Any:
    text = LFM3 | {"model_type": "lfm3", "layer_types": ["conv", "full_attention", "sliding_attention", "conv"]}
    vision = SIGLIP_VISION | {"spatial_merge_size": MERGE, "layer_types": ["conv", "full_attention"], "num_key_value_heads": 1}
    config = transformers.Lfm3VlConfig(text_config=text, vision_config=vision, projector_hidden_size=24, image_token_id=PLACEHOLDER)
    return transformers.Lfm3VlForConditionalGeneration(config)


def _step_3_7() -> Any:
    vision = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": PATCH, "mlp_ratio": 1.5}
    config = transformers.Step3p7Config(
        text_config=STEP_TEXT, vision_config=vision | {"image_size": SQUARE * STEP_SIDE}, image_token_id=PLACEHOLDER
    )
    return transformers.Step3p7ForConditionalGeneration(config)


def _gemma3() -> Any:
    vision = SIGLIP_VISION | {"image_size": SQUARE * SIDE, "model_type": "siglip_vision_model", "vision_use_head": False}
    tokens = {"image_token_index": PLACEHOLDER, "mm_tokens_per_image": SQUARE**2, "boi_token_index": 5, "eoi_token_index": 6}
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=GEMMA3_TEXT, vision_config=vision, **tokens)
    )


def _gemma4(bidirectional: str | None, small: bool) -> Any:
    """bidirectional: "vision" if image tokens attend to each other; small: with per-layer embeddings, and last layers without
    keys."""
    text = GEMMA4_E if small else GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
    config = transformers.Gemma4Config(
        text_config=text | {"use_bidirectional_attention": bidirectional},
        vision_config=GEMMA4_VISION | {"standardize": bool(bidirectional), "use_clipped_linears": small},
        audio_config=None,
        image_token_id=PLACEHOLDER,
        boi_token_id=5,
        eoi_token_id=6,
        video_token_id=1000,  # outside the vocabulary
        audio_token_id=1001,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def _gemma4_unified() -> Any:
    """Its image encoder is one matrix, with norms and position embeddings.

    transformers 5.24 has a mask for it in which an image's tokens attend to each other only in layers with sliding windows, as in
    other models of the family, and as in vLLM; but its `forward` uses another mask. This replaces it.
    """
    module, original = gemma4_unified, gemma4_unified.create_masks_for_generate

    def masks(block_sequence_ids: Tensor | None = None, **more: Any) -> Any:
        if block_sequence_ids is None:
            return original(**more)
        return module.create_masks_for_vision_model(block_sequence_ids=block_sequence_ids, **more)

    module.create_masks_for_generate = masks
    text = GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "use_bidirectional_attention": "vision"}
    vision = {"patch_size": PATCH, "pooling_kernel_size": MERGE, "mm_embed_dim": 24, "mm_posemb_size": 64, "output_proj_dims": 24}
    config = transformers.Gemma4UnifiedConfig(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=PLACEHOLDER,
        boi_token_id=5,
        eoi_token_id=6,
        video_token_id=1000,
        audio_token_id=1001,
    )
    return transformers.Gemma4UnifiedForConditionalGeneration(config)


def _internvl() -> Any:
    vision = SIGLIP_VISION | {"image_size": [TILE * SIDE] * 2, "patch_size": [PATCH] * 2}
    config = transformers.InternVLConfig(
        text_config=SMALL | {"model_type": "qwen2"},
        vision_config=vision,
        image_token_id=PLACEHOLDER,
        image_seq_length=TILE**2,
        tie_word_embeddings=False,
    )
    return transformers.InternVLForConditionalGeneration(config)


def _llava() -> Any:
    vision = SIGLIP_VISION | {
        "image_size": SQUARE * SIDE,
        "patch_size": SIDE,
        "num_hidden_layers": 3,
        "model_type": "clip_vision_model",
    }
    text = SMALL | {"model_type": "llama"}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision | {"projection_dim": 8}, image_token_index=PLACEHOLDER)
    return transformers.LlavaForConditionalGeneration(config)


def _llava_next() -> Any:
    vision = SIGLIP_VISION | {
        "image_size": TILING.side,
        "patch_size": SIDE,
        "num_hidden_layers": 3,
        "model_type": "clip_vision_model",
    }
    config = transformers.LlavaNextConfig(
        text_config=SMALL | {"model_type": "mistral", "sliding_window": None},
        vision_config=vision | {"projection_dim": 8},
        image_token_index=PLACEHOLDER,
        image_grid_pinpoints=[[*one] for one in TILING.resolutions],
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def _granite() -> Any:
    """The text's embedding multiplier also applies to image features, which are taken from several layers."""
    vision = SIGLIP_VISION | {
        "image_size": TILING.side,
        "patch_size": SIDE,
        "model_type": "siglip_vision_model",
        "vision_use_head": False,
    }
    config = transformers.LlavaNextConfig(
        text_config=GRANITE | {"model_type": "granite"},
        vision_config=vision | {"num_hidden_layers": 3},
        image_token_index=PLACEHOLDER,
        image_grid_pinpoints=[[*one] for one in TILING.resolutions],
        vision_feature_layer=[-3, -1],
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaNextForConditionalGeneration(config)


def _llava_onevision() -> Any:
    """Larger images are reduced to as many tokens as a tile has."""
    vision = SIGLIP_VISION | {
        "image_size": TILING.side,
        "patch_size": SIDE,
        "model_type": "siglip_vision_model",
        "vision_use_head": False,
    }
    config = transformers.LlavaOnevisionConfig(
        text_config=SMALL | {"model_type": "qwen2"},
        vision_config=vision,
        image_token_index=PLACEHOLDER,
        image_grid_pinpoints=[[*one] for one in TILING.resolutions],
        vision_aspect_ratio="anyres_max_1",
        tie_word_embeddings=False,
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def _idefics(name: str) -> Any:
    vision = SIGLIP_VISION | {"image_size": SQUARE * SIDE}
    config = getattr(transformers, f"{name}Config")(
        text_config=SMALL | {"model_type": "llama"}, vision_config=vision, image_token_id=PLACEHOLDER, scale_factor=MERGE
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _idefics2() -> Any:
    perceiver = {"resampler_n_latents": SQUARE**2, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 8}
    config = transformers.Idefics2Config(
        text_config=SMALL | {"model_type": "mistral", "sliding_window": None},
        vision_config=SIGLIP_VISION | {"image_size": SQUARE * SIDE},
        perceiver_config=perceiver | {"num_key_value_heads": 2, "hidden_size": SMALL["hidden_size"]},
        image_token_id=PLACEHOLDER,
    )
    return transformers.Idefics2ForConditionalGeneration(config)


def _pixtral() -> Any:
    vision, text = PIXTRAL_VISION | {"patch_size": SIDE}, SMALL | {"model_type": "mistral", "sliding_window": None}
    feature_fields = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=PLACEHOLDER, **feature_fields)
    return transformers.LlavaForConditionalGeneration(config)


BUILDERS = {
    "Idefics2": _idefics2,
    "Idefics3": lambda: _idefics("Idefics3"),
    "SmolVLM": lambda: _idefics("SmolVLM"),
    "Llava": _llava,
    "LlavaNext": _llava_next,
    "GraniteVision": _granite,
    "LlavaOnevision": _llava_onevision,
    "Pixtral": _pixtral,
    "InternVL": _internvl,
    "Mistral3": _mistral,
    "MistralLarge4": _mistral_large,
    "LightOnOcr": _lighton_ocr,
    "Llama4": _llama4,
    "Step3p7": _step_3_7,
    "DeepseekOcr2": _deepseek_ocr_2,
    "HYV4VL": _hy_4,
    "Glm5Next": _glm_5_next,
    "Lfm3Vl": _lfm3,
    "Qwen4Exp": _qwen_4,
    "PaddleOCRVL": _paddle,
    "Exaone4_5": _exaone,
    "MiniMaxM3": _minimax,
    "Gemma3": _gemma3,
    "Gemma4": lambda: _gemma4("vision", small=False),
    "Gemma4E": lambda: _gemma4(None, small=True),
    "Gemma4Both": lambda: _gemma4("vision", small=True),
    "Gemma4Unified": _gemma4_unified,
}
TILED_MODELS = ("LlavaNext", "LlavaOnevision", "GraniteVision")
UNPATCHED_MODELS = tuple(
    name for name in BUILDERS if name not in ("PaddleOCRVL", "Exaone4_5", "MiniMaxM3", "HYV4VL", "Lfm3Vl", "Glm5Next", "Qwen4Exp")
)  # models that take whole images or tiles as pixels, not patches


def engine(folder: Path, pages: int = 64, page_size: int = 16, image_pixels: int = 1 << 20, **more: Any) -> Engine:
    """A new engine with an empty pool and an empty image cache. more: settings of the shard."""
    if more.keys() <= {"prefix_caching", "overlap"}:
        decoder = copy.copy(_decoder(folder, image_pixels))
        if decoder.vision is not None:
            decoder.vision = copy.copy(decoder.vision)
            decoder.vision._cache = ImageCache()
        new_engine = Engine(decoder, CPU, page_size, more.get("prefix_caching", True), overlap=more.get("overlap") == "on")
    else:
        new_engine = load_engine(folder, image_pixels, page_size=page_size, **more)
    new_engine.resize(pages)
    return new_engine


@functools.cache
def _decoder(folder: Path, image_pixels: int) -> Decoder:
    """Weights, which new engines share."""
    return load_engine(folder, image_pixels).decoder


def load_engine(folder: Path, image_pixels: int, **more: Any) -> Engine:
    return load(ShardConfig(folder=str(folder), model="m", image_pixels=image_pixels, **more), lambda stage: None)


def rank_engine(folder: Path, ranks: Ranks, page_size: int) -> Engine:
    """An engine with one rank's part of the weights."""
    config = json.loads((folder / "config.json").read_text())
    weights = Weights(folder, torch.float32, CPU, lambda read: None)
    text_shape = shape(config)
    decoder = Decoder(text_shape, weights, ranks, CPU)
    with MODEL_LOCK:  # creates modules on the meta device, for all threads of the process
        decoder.vision = Vision(config, folder, weights, 1 << 20, text_shape)
    new_engine = Engine(decoder, CPU, page_size)
    new_engine.resize(128)
    return new_engine


def image_prompt(name: str, model_type: str, generator: random.Random, sizes: list[tuple[int, int]], words: int = 5) -> ImagePrompt:
    """A prompt with images of these sizes (rows and columns of tokens), and random words before, between and behind them."""
    image_form = MISTRAL if name == "Pixtral" else FORMS[model_type]
    sizes = [(SQUARE, SQUARE)] * len(sizes) if image_form.fixed or (image_form.tiles and name != "Idefics2") else sizes
    sizes = [(TILE * rows, TILE) for rows, _ in sizes] if name == "InternVL" else sizes
    if name == "Step3p7":  # whole images have the largest size, tiles are smaller
        sizes = [(SQUARE, SQUARE), (1, 1), (SQUARE, SQUARE)][: len(sizes)]
    ids, tokens, pictures = list[int](), list[int](), []
    for rows, columns in sizes:
        words_before = [generator.randrange(10, VOCABULARY) for _ in range(words)]
        ids, tokens = ids + words_before, tokens + words_before
        pixel_generator = torch.Generator().manual_seed(generator.randrange(1 << 30))
        size: tuple[int, ...] = ()
        tiles = rows // TILE if name == "InternVL" else 1
        shape = (
            (tiles, 3, rows // tiles * SIDE, columns * SIDE)
            if name in UNPATCHED_MODELS
            else (rows * columns * MERGE**2, 3, PATCH, PATCH)
        )
        if name == "LightOnOcr" and rows > 1:  # its sizes need only be multiples of a patch, not of a token
            shape = (1, 3, rows * SIDE + PATCH, columns * SIDE)
        if name == "Step3p7":
            shape = (1, 3, rows * STEP_SIDE, columns * STEP_SIDE)
        if name == "DeepseekOcr2":
            side = OCR_TILE if len(pictures) == 1 else OCR_WHOLE
            rows, columns, shape = 1, 144 if side == OCR_TILE else 257, (1, 3, side, side)
        if name == "Idefics2":  # its images need not be multiples of a patch
            rows, columns, shape = 1, SQUARE**2, (1, 3, 5 * rows, 7 * columns)
        if name in TILED_MODELS:
            rows, columns, shape, size = _tiled_layout(name, (5 * rows, 5 * columns), bool(pictures) and len(sizes) > 2)
        columns += name == "HYV4VL"  # a token ends each row
        pixels = torch.randint(0, 256, shape, generator=pixel_generator, dtype=torch.uint8)
        generator_of_ids = random.Random(hash((pixels.numpy().tobytes(), rows)))  # ids depend on the image's content only
        pictures.append(PromptImage(len(ids), rows, columns, columns, pixels, size=size))
        for row in range(rows):
            ids += [PLACEHOLDER] * columns
            tokens += (generator_of_ids.randrange(VOCABULARY, 1 << 32) for _ in range(columns))
            if image_form.breaks:
                ids.append(END if row == rows - 1 else BREAK)
                tokens.append(ids[-1])
    tail = [generator.randrange(10, VOCABULARY) for _ in range(words)]
    ids, tokens = ids + tail, tokens + tail
    return ImagePrompt(ids, [int(token == PLACEHOLDER) for token in ids], tokens, tuple(pictures))


def _tiled_layout(name: str, size: tuple[int, int], among_several: bool) -> tuple[int, int, tuple[int, ...], tuple[int, int]]:
    """Rows, columns, shape of the pixels and size of an image of this size; transformers would raise an error if they were wrong.
    among_several: the image is one of several."""
    tiling = replace(TILING, most=int(name == "LlavaOnevision"))
    if name == "LlavaOnevision" and among_several:
        return 1, TILE**2 + 1, (1, 3, TILING.side, TILING.side), size
    return 1, tiling.length(size), (tiling.tiles(tiling.best(size)), 3, TILING.side, TILING.side), size


def model_inputs(name: str, prompt: ImagePrompt) -> dict[str, Any]:
    """The arguments of transformers' model."""
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    pixels = [(picture.pixels.float() / 255 - mean) / deviation for picture in prompt.pictures]
    model_arguments: dict[str, Any] = {"input_ids": torch.tensor([prompt.ids])}
    if name in ("Mistral3", "MistralLarge4", "Pixtral", "LightOnOcr", "Idefics2"):
        sizes = [image.shape[-2:] for image in pixels]
        height, width = (max(size[axis] for size in sizes) for axis in range(2))
        padded, mask = torch.zeros(len(pixels), 3, height, width), torch.zeros(len(pixels), height, width, dtype=torch.int64)
        for padded_image, image_mask, image in zip(padded, mask, pixels, strict=True):
            padded_image[:, : image.shape[-2], : image.shape[-1]] = image[0]
            image_mask[: image.shape[-2], : image.shape[-1]] = 1
        if name == "Idefics2":
            return model_arguments | {"pixel_values": padded.unsqueeze(0), "pixel_attention_mask": mask.unsqueeze(0)}
        return model_arguments | {"pixel_values": padded, "image_sizes": torch.tensor(sizes)}
    if name == "Gemma3":
        return model_arguments | {"pixel_values": torch.cat(pixels), "token_type_ids": torch.tensor([prompt.kinds])}
    if name in ("Step3p7", "DeepseekOcr2"):  # only the second image has a tile
        wholes, tile = torch.cat(pixels[::2]), pixels[1]
        return model_arguments | {"pixel_values": wholes, "pixel_values_local": tile, "num_local_patches": torch.tensor([0, 1])}
    if name in ("Idefics3", "SmolVLM"):
        return model_arguments | {"pixel_values": torch.cat(pixels).unsqueeze(0)}
    if name in TILED_MODELS:
        model_arguments |= {"image_sizes": torch.tensor([picture.size for picture in prompt.pictures])}
    if name == "LlavaOnevision":
        single_tiles = sum(len(picture.pixels) == 1 for picture in prompt.pictures)
        model_arguments |= {
            "batch_num_images": torch.tensor([1] * (len(pixels) - single_tiles) + [single_tiles] * bool(single_tiles))
        }
    if name == "Llama4":  # in bfloat16, as its own processor computes
        normalized = [
            (picture.pixels.bfloat16() * (1 / 255) - mean.bfloat16()) / deviation.bfloat16() for picture in prompt.pictures
        ]
        return model_arguments | {"pixel_values": torch.cat(normalized).float()}
    if name in ("InternVL", "Llava", *TILED_MODELS):
        return model_arguments | {"pixel_values": torch.cat(pixels)}
    if name.startswith("Gemma4"):
        return (
            model_arguments | _gemma4_inputs(prompt, name == "Gemma4Unified") | {"mm_token_type_ids": torch.tensor([prompt.kinds])}
        )
    patches = [image.flatten(1) for image in pixels]
    if name == "PaddleOCRVL":
        patches = pixels
    elif name != "HYV4VL":
        patches = [image.unsqueeze(2).repeat(1, 1, 2, 1, 1).flatten(1) for image in pixels]
    grids = [(1, picture.rows * MERGE, (picture.columns - (name == "HYV4VL")) * MERGE) for picture in prompt.pictures]
    model_arguments |= {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}
    return (
        model_arguments
        if name in ("Exaone4_5", "MiniMaxM3", "Lfm3Vl", "Glm5Next")
        else model_arguments | {"mm_token_type_ids": torch.tensor([prompt.kinds])}
    )


def _gemma4_inputs(prompt: ImagePrompt, merged: bool) -> dict[str, Tensor]:
    """Patches and their positions, padded to the largest image. merged: a patch is as large as a token."""
    patches_per_side, side = (1, SIDE) if merged else (MERGE, PATCH)
    most_patches = max(picture.tokens for picture in prompt.pictures) * patches_per_side**2
    patches, all_positions = [], []
    for picture in prompt.pictures:
        patch_rows, patch_columns = picture.rows * patches_per_side, picture.columns * patches_per_side
        assert picture.pixels is not None
        image_patches = (
            picture.pixels[0]
            .float()
            .div(255)
            .view(3, patch_rows, side, patch_columns, side)
            .permute(1, 3, 2, 4, 0)
            .reshape(patch_rows * patch_columns, -1)
        )
        positions = torch.tensor([(x, y) for y in range(patch_rows) for x in range(patch_columns)])
        padding = most_patches - len(image_patches)
        patches.append(torch.nn.functional.pad(image_patches, (0, 0, 0, padding)))
        all_positions.append(torch.nn.functional.pad(positions, (0, 0, 0, padding), value=-1))
    return {"pixel_values": torch.stack(patches), "image_position_ids": torch.stack(all_positions)}


@torch.inference_mode()
def logits(reference: Any, name: str, prompt: ImagePrompt) -> Tensor:
    """[tokens, vocabulary], by transformers. Its LLaVA-NeXT does not divide by Granite's logits_scaling, which is done here."""
    found: Tensor = reference(**model_inputs(name, prompt)).logits[0]
    return found / GRANITE["logits_scaling"] if name == "GraniteVision" else found
