"""Folders of models that accept images, with the files that a router reads; and generated images."""

import io
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy
import tokenizers
from PIL import Image

from penstock.proto.images import FORMS
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import make_tokenizer

PATCH_SIZES = {
    "qwen2_vl": 14,
    "qwen3_vl": 16,
    "glm4v": 14,
    "glm5_next": 14,
    "mistral3": 14,
    "paddleocr_vl": 14,
    "minimax_m3_vl": 14,
    "hy_v4_vl": 16,
    "lfm3_vl": 16,
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 4096, "longest_edge": 1 << 24},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "glm4v": {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 12544, "longest_edge": 9633792}},
    "glm5_next": {"image_processor_type": "Glm5NextImageProcessor", "image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.3, 0.3]},
    "paddleocr_vl": {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 1280},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "minimax_m3_vl": {"image_processor_type": "MiniMaxM3VLImageProcessor", "size": [672, 672]},
    "llama4": {
        "image_processor_type": "Llama4ImageProcessorFast",
        "size": {"height": 64, "width": 64},
        "max_patches": 6,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "step3p7": {"image_processor_type": "Step3p7ImageProcessor"},
    "lfm3_vl": {"size": {"shortest_edge": 64 * 64, "longest_edge": 1 << 20}, "patch_size": 16},
    "hy_v4_vl": {
        "image_processor_type": "HYV4VLImageProcessor",
        "size": {"shortest_edge": 64 * 64, "longest_edge": 1 << 22},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.5, 0.5],
    },
    "deepseek_ocr2": {"image_processor_type": "DeepseekOcr2ImageProcessor"},
    "lighton_ocr": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}, "patch_size": 14},
    "mistral3": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}, "patch_size": 14},
    "internvl": {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 448}, "max_patches": 12},
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}},
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
    },
    "llava_next": {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 56},
        "crop_size": {"height": 56, "width": 56},
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]],
    },
    "llava_onevision": {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 56, "width": 56},
        "image_grid_pinpoints": [[56 * rows, 56 * columns] for rows in range(1, 5) for columns in range(1, 5)],
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "idefics2": {
        "image_processor_type": "Idefics2ImageProcessor",
        "size": {"shortest_edge": 30, "longest_edge": 98},
        "do_image_splitting": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    **{
        family: {
            "image_processor_type": f"{name}ImageProcessor",
            "size": {"longest_edge": 256},
            "max_image_size": {"longest_edge": 64},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
        for family, name in (("idefics3", "Idefics3"), ("smolvlm", "SmolVLM"))
    },
    "pixtral": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 1024},
        "patch_size": {"height": 16, "width": 16},
    },
    "gemma4": {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3},
    "gemma4_unified": {"image_processor_type": "Gemma4UnifiedImageProcessor", "max_soft_tokens": 140},
}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_image_model(folder: Path, family: str = "qwen2_vl") -> Tokenizer:
    """Writes config, image processor, chat template, and a byte-level tokenizer with the family's special tokens."""
    make_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    form = FORMS["mistral3" if family == "pixtral" else family]
    image_tokens = form.around[0], form.word, form.around[1]
    if form.tiles:
        text_between = set(re.findall("<[^<>]+>", form.tiles.written("", 1, 2)))
        tokenizer.add_special_tokens(sorted(token for token in text_between if not token.startswith("<row_")))
    tokenizer.add_special_tokens([token for token in (*image_tokens, "[IMG_BREAK]", "[IMG_END]") if token])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE.replace("IMAGE", form.written or "".join(image_tokens))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model: dict[str, Any] = {"model_type": family, "image_token_id": tokenizer.token_to_id(image_tokens[1])}
    if family in ("mistral3", "lighton_ocr"):
        model |= {"spatial_merge_size": 2, "vision_config": {"patch_size": 14}}
    if family.startswith("llava"):
        model["vision_config"] = {"image_size": 336 if family == "llava" else 56, "patch_size": 14}
    if family == "llava_onevision":
        model["vision_aspect_ratio"] = "anyres_max_5"
    if form.tiles:
        model |= {"vision_config": {"patch_size": 8}, "scale_factor": 2, "perceiver_config": {"resampler_n_latents": 6}}
    if family == "step3p7":
        model["vision_config"] = {"image_size": 728, "patch_size": 14}
    if family == "llama4":
        model["vision_config"] |= {"image_size": 64, "pixel_shuffle_ratio": 0.5}
    if family == "pixtral":
        model |= {"model_type": "llava", "vision_config": {"model_type": "pixtral", "patch_size": 16}}
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    return Tokenizer(folder)


def noise_image(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """An image of blurred noise."""
    noise = numpy.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), "uint8")
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def oversized_png(width: int, height: int) -> bytes:
    """A small PNG whose header claims this size."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
