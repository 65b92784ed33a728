"""Image encoders (vision towers): how each family's transformers modules are called, and what input and output they have. A new
family is a new entry in `ENCODERS`.

Pixels of an image are [1, colours, height, width], or patches of it, [patches, colours, side, side]: see Image in shard.proto.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...proto.images import COLOURS
from ...proto.tiling import tiling
from ..pictures import PromptImage


class Encoder(ABC):
    """The image encoder of one model family."""

    turned = False  # image tokens have positions in three directions (mrope)
    normalizing = torch.float32  # the type in which pixels are rescaled and normalized

    def __init__(self, model: Any, pixels: int) -> None:
        """model: transformers' multimodal model, without its language model; pixels: the most of an image. May raise errors for an
        inconsistent config.json."""
        self._model, self._pixels = model, pixels
        self._vision = model.config.vision_config

    @property
    @abstractmethod
    def largest(self) -> int:
        """An upper bound of the tokens of an image."""

    @abstractmethod
    def fits(self, picture: PromptImage, shape: tuple[int, ...]) -> bool:
        """Whether an image with pixels of this shape has the number of tokens that `picture` says."""

    @abstractmethod
    def blank(self, tokens: int) -> PromptImage:
        """A blank image of about so many tokens."""

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        """Encodes an image to [tokens, levels, hidden]: see `Vision.encode`. pixels: of `picture`, as the encoder expects them."""
        return self._features(pixels)

    def _features(self, pixels: Tensor, **more: Any) -> Tensor:
        """Encodes one image with transformers' own method, to one level."""
        found: Tensor = self._model.get_image_features(pixels, **more).pooler_output[0]
        return found.unsqueeze(1)


def _blank(rows: int, columns: int, shape: tuple[int, ...], size: tuple[int, ...] = ()) -> PromptImage:
    return PromptImage(0, rows, columns, columns, torch.zeros(shape, dtype=torch.uint8), size=size)


class GridEncoder(Encoder):
    """An encoder for images whose pixels' shape follows from their rows and columns of tokens."""

    side: int  # pixels along each side of the square that a token covers

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of the pixels of an image with so many tokens; (): no image has."""
        return 1, COLOURS, rows * self.side, columns * self.side

    def grid(self, tokens: int) -> tuple[int, int]:
        """Rows and columns of an image with about so many tokens."""
        rows = max(1, math.isqrt(tokens))
        return rows, max(1, tokens // rows)

    @property
    def largest(self) -> int:
        return max(1, self._pixels // self.side**2)

    def fits(self, picture: PromptImage, shape: tuple[int, ...]) -> bool:
        return shape == self.shape(picture.rows, picture.columns)

    def blank(self, tokens: int) -> PromptImage:
        rows, columns = self.grid(tokens)
        return _blank(rows, columns, self.shape(rows, columns))


class QwenEncoder(GridEncoder):
    """The encoder of Qwen's and GLM's families. To it an image is a video of identical frames."""

    turned = True

    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels)
        self._merged, self._patch = int(self._vision.spatial_merge_size), int(self._vision.patch_size)
        self.side = self._merged * self._patch

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return rows * columns * self._merged**2, COLOURS, self._patch, self._patch

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        film = pixels.unsqueeze(2).repeat(1, 1, int(self._vision.temporal_patch_size), 1, 1).flatten(1)
        found = self._model.get_image_features(film, image_grid_thw=self._patches(picture, pixels.device))
        deeper = getattr(found, "deepstack_features", None) or ()
        return torch.stack([level[0] for level in (found.pooler_output, *deeper)], 1)

    def _patches(self, picture: PromptImage, device: torch.device) -> Tensor:
        """Frames of the video, and its rows and columns of patches: [1, 3]."""
        return torch.tensor([[1, picture.rows * self._merged, picture.columns * self._merged]], device=device)


class StillEncoder(QwenEncoder):
    """The same for EXAONE, GLM 5 Next, LFM and MiniMax: image tokens have one position each."""

    turned = False


class Paddle(QwenEncoder):
    """The encoder of PaddleOCR-VL: patches row by row, of one frame each."""

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        return self._features(pixels, image_grid_thw=self._patches(picture, pixels.device))


class Hy4(Paddle):
    """The encoder of Hy 4: each row of tokens ends with the same token."""

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return super().shape(rows, columns - 1) if columns > 1 else ()

    @property
    def largest(self) -> int:
        """No image is 200 times as high as wide, nor 300 times when its sides are rounded."""
        tokens = super().largest
        return tokens + math.isqrt(300 * tokens)

    def grid(self, tokens: int) -> tuple[int, int]:
        rows, columns = super().grid(tokens)
        return rows, max(2, columns)

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        return super().__call__(pixels.flatten(1), replace(picture, columns=picture.columns - 1))


class Mistral(GridEncoder):
    """The encoder of Mistral 3 (Pixtral). It does not use get_image_features, which fails for a single token (transformers
    5.24)."""

    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels)
        self.side = int(self._vision.patch_size) * int(model.config.spatial_merge_size)

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        sizes = torch.tensor([pixels.shape[-2:]], device=pixels.device)
        said = self._model.config.vision_feature_layer
        hidden = self._model.vision_tower(pixels, image_sizes=sizes, output_hidden_states=True).hidden_states
        chosen = torch.cat([hidden[layer] for layer in ([said] if isinstance(said, int) else said)], -1)
        found: Tensor = self._model.multi_modal_projector(chosen[0], sizes)
        return found.unsqueeze(1)


class LightOn(Mistral):
    """The same encoder for LightOnOCR, by other names. Pixels beyond whole tokens are visible to the encoder alone."""

    def fits(self, picture: PromptImage, shape: tuple[int, ...]) -> bool:
        known = len(shape) == 4 and shape[:2] == (1, COLOURS)
        return known and (picture.rows, picture.columns) == tuple(length // self.side for length in shape[2:])

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        sizes = torch.tensor([pixels.shape[-2:]], device=pixels.device)
        hidden = self._model.vision_encoder(pixels, image_sizes=sizes).last_hidden_state
        found: Tensor = self._model.vision_projection(hidden[0], sizes)
        return found.unsqueeze(1)


class SquareEncoder(GridEncoder):
    """An encoder for images of one size."""

    def __init__(self, model: Any, pixels: int, tokens: int) -> None:
        """tokens: along each side."""
        super().__init__(model, pixels)
        self._size, self._tokens = int(self._vision.image_size), tokens
        self.side = self._size // tokens

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        return (1, COLOURS, self._size, self._size) if rows == columns == self._tokens else ()

    @property
    def largest(self) -> int:
        return self._tokens**2

    def grid(self, tokens: int) -> tuple[int, int]:
        return self._tokens, self._tokens


class Step3Encoder(GridEncoder):
    """The encoder of Step 3.7: tiles, and an overview image larger than they are."""

    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels)
        self._size = int(self._vision.image_size)  # side of the overview image
        self.side = int(self._vision.patch_size) * 4  # after two convolutions

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        side = rows * self.side
        return (1, COLOURS, side, side) if rows == columns and side <= self._size else ()

    @property
    def largest(self) -> int:
        return (self._size // self.side) ** 2

    def grid(self, tokens: int) -> tuple[int, int]:
        rows = min(max(1, math.isqrt(tokens)), self._size // self.side)
        return rows, rows


class DeepseekOcrEncoder(Encoder):
    """The encoder of DeepSeek-OCR 2: tiles, and a larger overview image, after which a separator token follows. The number of
    tokens follows from the size."""

    FEW, MANY = 144, 256

    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels)
        sam = self._vision.sam_config
        # Sides of the overview image, and of the square that a token of the SAM encoder covers.
        self._size, self._unit = int(sam.image_size), int(sam.patch_size) * 4

    @property
    def largest(self) -> int:
        return self.MANY + 1

    def _tokens(self, side: int) -> int:
        return (self.FEW if (side // self._unit) ** 2 <= self.FEW else self.MANY) + (side == self._size)

    def fits(self, picture: PromptImage, shape: tuple[int, ...]) -> bool:
        known = len(shape) == 4 and shape[:2] == (1, COLOURS) and shape[2] == shape[3] and self._unit <= shape[2] <= self._size
        return known and (picture.rows, picture.columns) == (1, self._tokens(shape[2]))

    def blank(self, tokens: int) -> PromptImage:
        """The overview image, whatever the number of tokens."""
        return _blank(1, self._tokens(self._size), (1, COLOURS, self._size, self._size))

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        found: Tensor = self._model.multi_modal_projector(self._model.vision_tower(pixels).last_hidden_state)[0]
        if pixels.shape[-1] == self._size:
            found = torch.cat((found, self._model.view_separator.unsqueeze(0)))
        return found.unsqueeze(1)


class Gemma3(SquareEncoder):
    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels, math.isqrt(int(model.config.mm_tokens_per_image)))


class Idefics(SquareEncoder):
    """The encoder of Idefics 3 and SmolVLM: each tile is an image."""

    def __init__(self, model: Any, pixels: int) -> None:
        vision = model.config.vision_config
        super().__init__(model, pixels, int(vision.image_size) // int(vision.patch_size) // int(model.config.scale_factor))

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        return self._features(pixels.unsqueeze(0))


class Llama4(SquareEncoder):
    """The encoder of Llama 4: each tile is an image."""

    normalizing = torch.bfloat16

    def __init__(self, model: Any, pixels: int) -> None:
        vision = model.config.vision_config
        super().__init__(model, pixels, int(int(vision.image_size) // int(vision.patch_size) * float(vision.pixel_shuffle_ratio)))

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        found: Tensor = self._model.multi_modal_projector(self._model.vision_model(pixels).last_hidden_state[0])
        return found.unsqueeze(1)


class Gemma4(GridEncoder):
    """The encoder of Gemma 4: patches with explicit positions."""

    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels)
        self._patch = int(self._vision.patch_size)
        self.side = self._patch * int(self._vision.pooling_kernel_size)

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        high, wide = (length // self._patch for length in pixels.shape[-2:])
        patches = pixels.view(COLOURS, high, self._patch, wide, self._patch).permute(1, 3, 2, 4, 0).reshape(1, high * wide, -1)
        y, x = torch.meshgrid(*(torch.arange(count, device=pixels.device) for count in (high, wide)), indexing="ij")
        places = torch.stack((x, y), -1).view(1, -1, 2)
        return self._features(patches, image_position_ids=places)


class Gemma4Unified(Gemma4):
    """The encoder of the 12B: a token is a patch."""

    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels)
        self._patch = self.side


class InternVL(GridEncoder):
    """The encoder of InternVL: tiles, each encoded by itself, one below the other; the last is an overview of the image, if there
    are several."""

    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels)
        size = self._vision.image_size
        self._side = int(size[0] if isinstance(size, (list, tuple)) else size)  # pixels of a tile
        self._tokens = math.isqrt(int(model.config.image_seq_length))
        self.side = self._side // self._tokens

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        tiles, rest = divmod(rows, self._tokens)
        return (tiles, COLOURS, self._side, self._side) if columns == self._tokens and not rest else ()

    @property
    def largest(self) -> int:
        return max(1, self._pixels // self._side**2) * self._tokens**2

    def grid(self, tokens: int) -> tuple[int, int]:
        return max(1, tokens // self._tokens**2) * self._tokens, self._tokens

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        found: Tensor = self._model.get_image_features(pixels).pooler_output
        return found.flatten(0, 1).unsqueeze(1)


class Llava(SquareEncoder):
    def __init__(self, model: Any, pixels: int) -> None:
        vision = model.config.vision_config
        super().__init__(model, pixels, int(vision.image_size) // int(vision.patch_size))

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        return self._features(pixels, **_layers(self._model.config))


class Pixtral(GridEncoder):
    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels)
        self.side = int(self._vision.patch_size)

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        sizes = torch.tensor([pixels.shape[-2:]], device=pixels.device)
        return self._features(pixels, image_sizes=sizes, **_layers(self._model.config))


def _layers(config: Any) -> dict[str, Any]:
    """Fields that say which layers' features LLaVA uses."""
    return {name: getattr(config, name) for name in ("vision_feature_layer", "vision_feature_select_strategy")}


def _llava(model: Any, pixels: int) -> Encoder:
    return (Pixtral if model.config.vision_config.model_type == "pixtral" else Llava)(model, pixels)


class LlavaNextEncoder(Encoder):
    """The encoder of LLaVA-NeXT: see `proto.tiling`."""

    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels)
        config, vision = model.config, self._vision
        said = getattr(config, "vision_aspect_ratio", "")
        every = tiling(config.image_grid_pinpoints, int(vision.image_size), int(vision.patch_size), said)
        self._tiling = every.within(pixels)
        config.image_grid_pinpoints = [*self._tiling.resolutions]  # transformers' own code looks them up

    @property
    def largest(self) -> int:
        return self._tiling.longest

    def fits(self, picture: PromptImage, shape: tuple[int, ...]) -> bool:
        if len(picture.size) != 2 or min(picture.size) < 1:
            return False
        size = picture.size[0], picture.size[1]
        return (picture.rows, picture.columns, shape) == (1, self._tiling.length(size), self._shape(size))

    def blank(self, tokens: int) -> PromptImage:
        fewest, *others = sorted(self._tiling.resolutions, key=math.prod)
        size = max([fewest, *(one for one in others if self._tiling.length(one) <= tokens)], key=math.prod)
        return _blank(1, self._tiling.length(size), self._shape(size), size)

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        return self._features(pixels, image_sizes=torch.tensor([picture.size]), **_layers(self._model.config))

    def _shape(self, size: tuple[int, int]) -> tuple[int, ...]:
        return self._tiling.tiles(self._tiling.best(size)), COLOURS, self._tiling.side, self._tiling.side


class OneVisionEncoder(LlavaNextEncoder):
    """The encoder of LLaVA-OneVision: where a prompt has several images, each is one tile, with a token after it."""

    def fits(self, picture: PromptImage, shape: tuple[int, ...]) -> bool:
        tokens, side = self._tiling.tokens**2 + 1, self._tiling.side
        among = (picture.rows, picture.columns, shape) == (1, tokens, (1, COLOURS, side, side))
        return (among and len(picture.size) == 2) or super().fits(picture, shape)

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        together = torch.tensor([1 if len(pixels) > 1 else 2])
        sizes = torch.tensor([picture.size])
        return self._features(pixels, image_sizes=sizes, batch_num_images=together, **_layers(self._model.config))


class Idefics2Encoder(Encoder):
    """The encoder of Idefics 2: a perceiver resampler gives every image the same number of tokens."""

    def __init__(self, model: Any, pixels: int) -> None:
        super().__init__(model, pixels)
        self._tokens, self._patch = int(model.config.perceiver_config.resampler_n_latents), int(self._vision.patch_size)

    @property
    def largest(self) -> int:
        return self._tokens

    def fits(self, picture: PromptImage, shape: tuple[int, ...]) -> bool:
        known = len(shape) == 4 and shape[:2] == (1, COLOURS) and min(shape[2:]) >= self._patch
        return known and math.prod(shape[2:]) <= self._pixels and (picture.rows, picture.columns) == (1, self._tokens)

    def blank(self, tokens: int) -> PromptImage:
        """The largest possible image, or where fewer tokens would do, the smallest."""
        largest = max(self._patch, min(int(self._vision.image_size), math.isqrt(self._pixels)))
        side = largest if tokens >= self._tokens else self._patch
        return _blank(1, self._tokens, (1, COLOURS, side, side))

    def __call__(self, pixels: Tensor, picture: PromptImage) -> Tensor:
        return self._features(pixels.unsqueeze(0))


# By the model_type of config.json.
ENCODERS: dict[str, Callable[[Any, int], Encoder]] = {
    **dict.fromkeys(
        (
            *("glm46v", "glm4v", "glm_ocr", "glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
            *("qwen3_vl_moe", "qwen4_exp"),
        ),
        QwenEncoder,
    ),
    **dict.fromkeys(("exaone4_5", "glm5_next", "lfm3_vl", "minimax_m3_vl"), StillEncoder),
    "hy_v4_vl": Hy4,
    "deepseek_ocr2": DeepseekOcrEncoder,
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "gemma4_unified": Gemma4Unified,
    "idefics2": Idefics2Encoder,
    **dict.fromkeys(("idefics3", "smolvlm"), Idefics),
    "internvl": InternVL,
    "lighton_ocr": LightOn,
    "llama4": Llama4,
    "llava": _llava,
    "llava_next": LlavaNextEncoder,
    "llava_onevision": OneVisionEncoder,
    **dict.fromkeys(("mistral3", "mistral_large4"), Mistral),
    "paddleocr_vl": Paddle,
    "step3p7": Step3Encoder,
}
