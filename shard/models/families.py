"""The registry of supported architectures: how a Hugging Face config.json becomes a `Shape`, the data that configures the one
decoder.

Holds no tensor and imports no torch, so that the launcher can plan with it.
"""

from typing import Any

from .deepseek_v4_families import DEEPSEEK_V4_ONES
from .dense_families import DENSE
from .fields import (
    AGAIN,
    BLOCKS,
    CHUNKED,
    COMPRESSED,
    FULL,
    INDEXED,
    LINEAR,
    PUBLISHED,
    SHORT,
    SLIDING,
    Config,
    check,
    renamed,
    types_of,
)
from .gemma3n_families import GEMMA3N
from .gemma4_families import GEMMA4
from .hybrid_families import HYBRID
from .image_families import IMAGES, seeing, text_of
from .kimi_families import KIMI_LINEAR
from .latent_families import LATENT
from .layer_norm_families import LAYER_NORM
from .llama4_families import LLAMA4
from .longcat_families import LONGCAT_FLASH
from .nemotron_families import NEMOTRON_H
from .older_families import OLDER, today
from .quantization import beside as beside  # for callers that read a model's folder
from .qwen4_families import QWEN4
from .recurrent_shapes import ShortConvolutionShape
from .ropes import check_factors
from .shape import Shape, Unsupported
from .sliding_families import SLIDING_ONES
from .sparse_families import SPARSE

FAMILIES = (DENSE | GEMMA3N | GEMMA4 | SPARSE | SLIDING_ONES | LATENT | KIMI_LINEAR | LONGCAT_FLASH) | (
    DEEPSEEK_V4_ONES | LAYER_NORM | HYBRID | NEMOTRON_H | LLAMA4 | OLDER | QWEN4
)


def shape(config: Config) -> Shape:
    """The shape of the model that `config` (a parsed config.json) describes.

    Raises Unsupported for an architecture, an activation or a rotary embedding that the decoder doesn't have, and for a
    field that is missing.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Unsupported(f"config.json says architectures {names!r}, a list of names is needed: download the model again")
    config = config | {"architectures": [PUBLISHED.get(name, name) for name in names]}
    for name in config["architectures"]:
        if name in FAMILIES or name in IMAGES:
            try:
                own = renamed(text_of(config, name) if name in IMAGES else today(config) if name in OLDER else config)
                kinds = IMAGES[name] if name in IMAGES else dict.fromkeys(types_of(name), FAMILIES[name])
                check(own, name, [*kinds])
                kind = str(own.get("model_type"))
                kind = kind if kind in kinds else next(iter(kinds))
                found = _sound(kinds[kind](own), own.get("layer_types"))
                return seeing(own, kind, found) if name in IMAGES else found
            except KeyError as error:
                raise Unsupported(f"config.json of a {name} lacks {error}: is it complete?") from None
    if not names:
        raise Unsupported("config.json names no architectures: name the folder of a whole model, or download it again")
    asked = ", ".join(names)
    raise Unsupported(f"architecture {asked} is not supported: this version serves {', '.join(sorted(FAMILIES | IMAGES))}")


def _sound(found: Shape, kinds: list[Any] | None) -> Shape:
    """The same shape. Raises Unsupported if its numbers contradict each other, or the layer types that config.json names."""
    for window in sorted(set(found.windows)):
        keys, heads = found.keys(window), found.query_heads(window)
        if heads % keys.heads:
            raise Unsupported(
                f"config.json says {heads} attention heads and {keys.heads} key/value heads, of which the first must be a "
                f"multiple: {AGAIN}"
            )
        if keys.size % 2:
            raise Unsupported(f"config.json means heads of {keys.size} numbers, an even number is needed: {AGAIN}")
    check_factors(found.rope, found.turned(0))
    for mixture in filter(None, found.mixtures):
        reached = mixture.routed * mixture.groups_chosen // mixture.groups
        if mixture.chosen > reached:
            raise Unsupported(f"config.json says num_experts_per_tok {mixture.chosen}, of {reached} experts: {AGAIN}")
    other = SLIDING
    if found.recurrent:
        other = SHORT if isinstance(found.recurrent, ShortConvolutionShape) else LINEAR
    elif found.chunked:
        other = CHUNKED
    elif found.blocks:
        other = BLOCKS if found.blocks.block else INDEXED
    slides = {SLIDING} if any(found.windows) and not found.chunked else set()
    known = (
        {INDEXED}
        if found.index and not found.recurrent
        else {FULL, other} | slides | ({INDEXED} if found.index or found.pool else set())
    )
    known |= {*COMPRESSED} if found.compressed else set()
    unknown = set(map(str, kinds or ())) - known
    if unknown:
        has = f"full attention and {other}" if other == SHORT else f"full and {other.replace('_', ' ')}"
        raise Unsupported(f"layer_types {', '.join(sorted(unknown))} are not supported: for this family the decoder has {has}")
    for layer, (kind, window) in enumerate(zip(kinds or (), found.windows, strict=False)):
        if (kind in (SLIDING, CHUNKED)) != (window > 0):
            raise Unsupported(
                f"config.json says layer_types {kind!r} for layer {layer}, and by its other fields that layer's window is "
                f"{window or 'none'} (see sliding_window, use_sliding_window): {AGAIN}"
            )
    return found
