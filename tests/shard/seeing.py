"""Tiny random models that see, pictures for them, and what transformers computes with both."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from penstock.proto.images import FORMS
from penstock.shard.config import ShardConfig
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.families import shape
from penstock.shard.models.sight import Sight
from penstock.shard.parallel import Ranks
from penstock.shard.pictures import Picture
from penstock.shard.weights import Weights

from .test_images import TEXTS, model
from .tiny import CPU, MAKING, SMALL, VOCABULARY

PATCH, MERGE, SIDE = 2, 2, 4  # pixels of a patch, patches of a token, pixels of a token: each along one side
PLACEHOLDER, BREAK, END = 7, 8, 9  # ids of the vocabulary
MEAN, DEVIATION = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
VISION = {"patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2, "in_channels": 3, "depth": 3}
PIXTRAL = {
    **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"patch_size": PATCH, "image_size": 64, "head_dim": 8},
}
PROCESSORS = {"Glm4v": "Glm4vImageProcessor", "Glm4vMoe": "Glm4vImageProcessor", "Mistral3": "PixtralImageProcessor"}
SEEING = (*(name for name in TEXTS if name != "Kimi_K25"), "Mistral3")


@dataclass(frozen=True)
class Seen:
    """A prompt with images: as transformers has it, and as the shards do."""

    ids: list[int]  # with placeholders
    kinds: list[int]  # 1 where they are
    tokens: list[int]  # with ids that are in no vocabulary
    pictures: tuple[Picture, ...]


def made(name: str, folder: Path, seed: int = 5) -> Any:
    """transformers' model, saved in the folder with what prepares pictures for it."""
    torch.manual_seed(seed)
    if name == "Mistral3":
        text = SMALL | {"model_type": "mistral", "head_dim": 8, "sliding_window": None}
        config = transformers.Mistral3Config(
            text_config=text,
            vision_config=PIXTRAL,
            image_token_index=PLACEHOLDER,
            spatial_merge_size=MERGE,
            tie_word_embeddings=False,
        )
        found: Any = transformers.Mistral3ForConditionalGeneration(config).eval()
        with torch.no_grad():
            for key, values in found.named_parameters():
                if values.dim() > 1 or "bias" in key:
                    values.normal_(0, 0.1)
    else:
        more = {"deepstack_visual_indexes": [0, 2]} if name.startswith("Qwen3VL") else {}
        found = model(name, VISION | more, image_token_id=PLACEHOLDER)
    found.save_pretrained(folder)
    kind = PROCESSORS.get(name, "Qwen2VLImageProcessor")
    said = {"image_processor_type": kind, "patch_size": PATCH, "merge_size": MERGE, "image_mean": MEAN, "image_std": DEVIATION}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return found


def engine(folder: Path, pages: int = 64, page_size: int = 16, **more: Any) -> Engine:
    found = load(ShardConfig(folder=str(folder), model="m", image_pixels=1 << 20, **more), lambda stage: None)
    found.resize(pages, page_size)
    return found


def half(folder: Path, ranks: Ranks, page_size: int) -> Engine:
    """One rank's engine."""
    config = json.loads((folder / "config.json").read_text())
    weights = Weights(folder, torch.float32, CPU, lambda read: None)
    form = shape(config)
    decoder = Decoder(form, weights, ranks, CPU)
    with MAKING:  # while its modules are made, all that the process makes have no memory
        decoder.sight = Sight(config, folder, weights, 1 << 20, form)
    found = Engine(decoder, CPU, page_size)
    found.resize(128, page_size)
    return found


def seen(name: str, kind: str, chance: random.Random, sizes: list[tuple[int, int]], words: int = 5) -> Seen:
    """A prompt with images of these sizes, as rows and columns, and words before, between and behind them. kind: model_type."""
    form = FORMS[kind]
    ids, tokens, pictures = list[int](), list[int](), []
    for rows, columns in sizes:
        said = [chance.randrange(10, VOCABULARY) for _ in range(words)]
        ids, tokens = ids + said, tokens + said
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        shape = (1, 3, rows * SIDE, columns * SIDE) if name == "Mistral3" else (rows * columns * MERGE**2, 3, PATCH, PATCH)
        pixels = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        own = random.Random(hash((pixels.numpy().tobytes(), rows)))  # ids follow from what is shown
        pictures.append(Picture(len(ids), rows, columns, columns, pixels))
        for row in range(rows):
            ids += [PLACEHOLDER] * columns
            tokens += (own.randrange(VOCABULARY, 1 << 32) for _ in range(columns))
            if form.breaks:
                ids.append(END if row == rows - 1 else BREAK)
                tokens.append(ids[-1])
    tail = [chance.randrange(10, VOCABULARY) for _ in range(words)]
    ids, tokens = ids + tail, tokens + tail
    return Seen(ids, [int(token == PLACEHOLDER) for token in ids], tokens, tuple(pictures))


def inputs(name: str, prompt: Seen) -> dict[str, Any]:
    """What transformers' model takes."""
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    pixels = [(picture.pixels.float() / 255 - mean) / deviation for picture in prompt.pictures]
    found: dict[str, Any] = {"input_ids": torch.tensor([prompt.ids])}
    if name == "Mistral3":
        sizes = [(picture.rows * SIDE, picture.columns * SIDE) for picture in prompt.pictures]
        height, width = (max(size[axis] for size in sizes) for axis in range(2))
        padded = torch.zeros(len(pixels), 3, height, width)
        for own, one in zip(padded, pixels, strict=True):
            own[:, : one.shape[-2], : one.shape[-1]] = one[0]
        return found | {"pixel_values": padded, "image_sizes": torch.tensor(sizes)}
    patches = [one.unsqueeze(2).repeat(1, 1, 2, 1, 1).flatten(1) for one in pixels]
    grids = [(1, picture.rows * MERGE, picture.columns * MERGE) for picture in prompt.pictures]
    return found | {
        "pixel_values": torch.cat(patches),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": torch.tensor([prompt.kinds]),
    }


@torch.inference_mode()
def logits(reference: Any, name: str, prompt: Seen) -> Tensor:
    """[tokens, vocabulary], by transformers."""
    found: Tensor = reference(**inputs(name, prompt)).logits[0]
    return found
