"""Image preprocessing per model family: resizes and cuts an image into patches or tiles as the family's image processor in
transformers does. A new family is a new class. Only rescaling and normalizing is left to the shards, so that pixels are a byte
each.

Opens no files: it runs where `pixels` opens them.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..proto.images import COLOURS
from ..proto.tiling import tiling

MOST_PIXELS = 1 << 26  # largest image, decoded or resized: a few copies of it fit into the memory that a process may take
MOST_SAID = 200  # most characters of a library's message


class UnusableImage(Exception):
    """An image can't be used; the message continues a sentence that begins with its name."""


def words(error: Exception) -> str:
    """A library's error message."""
    return " ".join(str(error).split())[:MOST_SAID] or type(error).__name__


class PreprocessedImage:
    """A preprocessed image: values [1, colours, height, width], or [patches, colours, side, side]. Or those of its tiles, in `grid`
    rows and columns, with the whole image last; each has `rows` and `columns` tokens."""

    def __init__(
        self,
        parts: Sequence[Any],
        rows: int,
        columns: int,
        grid: tuple[int, int] = (0, 0),
        size: tuple[int, ...] = (),
        whole: tuple[int, int] | None = None,
    ) -> None:
        """size: see Image in shard.proto; whole: rows and columns of the last part, if they differ."""
        self.parts, self.grid, self.size = parts, grid, size
        # Per part: rows and columns.
        self.tokens = [*[(rows, columns)] * (len(parts) - 1), whole or (rows, columns)]


class ImageResizer(ABC):
    """Resizing by one image processor of transformers."""

    fixed = False  # all images get the same size, whatever the operator's pixel limit

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    @abstractmethod
    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        """image: Pillow's; most: pixel limit after resizing. Raises UnusableImage, or ValueError where the limit is too small for
        any image."""

    def among(self, image: Any, most: int) -> PreprocessedImage:
        """The same, where the prompt has several images."""
        return self(image, most)

    def _run(self, images: Any, **how: Any) -> Any:
        """The processor's output for one image, or several."""
        try:
            return self._processor(images, do_rescale=False, do_normalize=False, return_tensors="np", **how)
        except ValueError as error:  # for images that are much longer than wide
            raise UnusableImage(f"can't be prepared: {words(error)}") from None

    def _sized(self, image: Any, height: int, width: int) -> Any:
        """Pixels of an image resized to exactly that size, [1, colours, height, width]."""
        return self._run(image, size={"height": height, "width": width})["pixel_values"]


def check_limit(most: int, needed: int) -> None:
    """Raises ValueError for a pixel limit below what every image of this model has."""
    if most < needed:
        raise ValueError(f"--max-image-pixels must be at least {needed} for this model")


def nothing_left(longest: int) -> UnusableImage:
    """The error for an image whose shorter side would have no pixel."""
    return UnusableImage(f"is too thin: nothing of it is left where its longer side has {longest} pixels")


class QwenPatches(ImageResizer):
    """Qwen's and GLM's: sizes are bounded by pixels, and images cut into patches."""

    behind = 0  # tokens that end each row

    def __init__(self, processor: Any) -> None:
        super().__init__(processor)
        self._merged, self._patch, self._frames = processor.merge_size, processor.patch_size, processor.temporal_patch_size

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        found = self._run(image, **self._bounds(most))
        _, high, wide = (int(number) for number in found["image_grid_thw"][0])
        patches = found["pixel_values"].reshape(high * wide, -1, self._frames, self._patch, self._patch)
        # A still image: all frames are equal.
        return PreprocessedImage([patches[:, :, 0]], high // self._merged, wide // self._merged + self.behind)

    def _bounds(self, most: int) -> dict[str, Any]:
        """GLM counts pixels of all frames of a patch, and a still image is so many equal frames."""
        size = self._processor.size
        most *= self._frames if type(self._processor).__name__.startswith("Glm") else 1
        longest = min(size.longest_edge, most)
        return {"size": {"shortest_edge": min(size.shortest_edge, longest), "longest_edge": longest}}


class TokenBoundPatches(QwenPatches):
    """GLM 5 Next's: sizes are bounded by tokens. Missing parts of whole tokens are black."""

    def _bounds(self, most: int) -> dict[str, Any]:
        unit = (self._merged * self._patch) ** 2
        longest = min(self._processor.max_image_tokens, most // unit)
        check_limit(longest * unit, unit)
        return {"min_image_tokens": min(self._processor.min_image_tokens, longest), "max_image_tokens": longest}


class EndedPatches(QwenPatches):
    """Hy 4's: patches with a token that ends each row."""

    behind = 1


class LongestSide(ImageResizer):
    """Mistral's: sizes are bounded by the longer side, and then rounded up."""

    def __init__(self, processor: Any, files: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """files: the folder's processor config, which may have the pixels of a token; else the model's config has. In LLaVA a
        token is a patch. LightOnOCR's sides are rounded up to the image processor's patch size, and what exceeds whole tokens
        has none."""
        super().__init__(processor)
        patch = files.get("patch_size") or model["vision_config"]["patch_size"]
        merged = 1 if model.get("model_type") == "llava" else files.get("spatial_merge_size") or model["spatial_merge_size"]
        self._token = _side(patch) * int(merged)
        self._unit = _side(processor.patch_size) if model.get("model_type") == "lighton_ocr" else self._token

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        longest = longest_side(self._processor.size.longest_edge, self._unit, image.size, most)
        if not rounded(longest, self._unit, image.size):
            raise nothing_left(longest)
        values = self._run(image, size={"longest_edge": longest}, patch_size=self._unit)["pixel_values"]
        rows, columns = (length // self._token for length in values.shape[-2:])
        if not rows or not columns:
            what = "thin" if max(image.size) >= self._token else "small"
            raise UnusableImage(f"is too {what}: a token is of {self._token} x {self._token} pixels")
        return PreprocessedImage([values], rows, columns)


def _side(patch: Any) -> int:
    """Patch size in pixels."""
    return int(patch["height"] if isinstance(patch, Mapping) else getattr(patch, "height", patch))


def longest_side(longest: int, unit: int, size: tuple[int, int], most: int) -> int:
    """The largest bound of an image's sides, up to `longest`, that leaves no more than `most` pixels."""
    larger = max(size)
    longest = min(longest, larger)
    if rounded(longest, unit, size) > most:
        longest = min(longest, math.ceil(larger * math.sqrt(most / (size[0] * size[1]))))
        while longest > 1 and rounded(longest, unit, size) > most:
            longest -= 1
    return longest


def rounded(longest: int, unit: int, size: tuple[int, int]) -> int:
    """Pixels of an image after resizing, as transformers' Pixtral computes it."""
    ratio = max(1, max(size) / longest)
    return math.prod(((math.floor(length / ratio) - 1) // unit + 1) * unit for length in size)


class Square(ImageResizer):
    """Gemma 3's and LLaVA's: all images have the same size."""

    fixed = True

    def __init__(self, processor: Any, side: int) -> None:
        """side: of each, in tokens."""
        super().__init__(processor)
        if getattr(processor, "do_pan_and_scan", False):
            raise ValueError("do_pan_and_scan is not supported: each image is shown once")
        self._side = side
        self._shorter = getattr(processor.size, "shortest_edge", None) or 0  # CLIP's: what is longer than that is then cut off

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        if self._shorter**2 * max(image.size) // min(image.size) > MOST_PIXELS:
            raise UnusableImage(f"is too thin: with {self._shorter} pixels on its shorter side it has more than {MOST_PIXELS}")
        return PreprocessedImage([self._run(image)["pixel_values"]], self._side, self._side)


class InternVlTiles(ImageResizer):
    """InternVL's: tiles of one size, as many as the image has room for in proportions near to its own, and the whole image."""

    def __init__(self, processor: Any, model: Mapping[str, Any]) -> None:
        super().__init__(processor)
        self._tokens = math.isqrt(model.get("image_seq_length", 256))  # along each side of a tile
        self._pixels = processor.size.height * processor.size.width

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        check_limit(most, self._pixels)
        tiles = min(self._processor.max_patches, max(1, most // self._pixels - 1))
        found = self._run(image, crop_to_patches=True, min_patches=min(self._processor.min_patches, tiles), max_patches=tiles)
        values = found["pixel_values"]
        return PreprocessedImage([values], len(values) * self._tokens, self._tokens)


class LlavaNextTiles(ImageResizer):
    """LLaVA-NeXT's: the whole image, and tiles of the best-matching resolution, see `proto.tiling`."""

    def __init__(self, processor: Any, model: Mapping[str, Any]) -> None:
        super().__init__(processor)
        vision, said = model["vision_config"], model.get("image_grid_pinpoints") or processor.image_grid_pinpoints
        self._tiling = tiling(said, vision["image_size"], vision["patch_size"], model.get("vision_aspect_ratio", ""))

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        check_limit(most, self._tiling.least)
        within, size = self._tiling.within(most), (image.height, image.width)
        found = self._run(image, image_grid_pinpoints=[[*one] for one in within.resolutions])
        return PreprocessedImage([found["pixel_values"][0]], 1, within.length(size), size=size)


class OneVisionTiles(LlavaNextTiles):
    """LLaVA-OneVision's: where a prompt has several images, each is one tile with a token after it, as in transformers' chats."""

    def among(self, image: Any, most: int) -> PreprocessedImage:
        check_limit(most, self._tiling.least)
        values = self._run([[image, image]])["pixel_values"][0]
        return PreprocessedImage([values], 1, self._tiling.tokens**2 + 1, size=(image.height, image.width))


class IdeficsTiles(ImageResizer):
    """Idefics 3's and SmolVLM's: as many tiles as the image's longer side has room for, and the whole image."""

    def __init__(self, processor: Any, model: Mapping[str, Any]) -> None:
        super().__init__(processor)
        self._tile, self._longest = (size["longest_edge"] for size in (processor.max_image_size, processor.size))
        self._side = self._tile // model["vision_config"]["patch_size"] // model["scale_factor"]  # tokens

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        check_limit(most, self._tile**2)
        width, height = image.size
        for longest in (self._longest, *range((self._longest - 1) // self._tile * self._tile, 0, -self._tile)):
            size = {"longest_edge": longest}
            tiles, rows, columns = self._processor.get_number_of_image_patches(height, width, {"size": size})
            if max(1, tiles) * self._tile**2 <= most:
                break
        found = self._run(image, size=size, return_row_col_info=True)
        return PreprocessedImage(found["pixel_values"][0][:, None], self._side, self._side, (rows, columns))


class IdeficsQuarters(ImageResizer):
    """Idefics 2's: variable sizes; with image splitting, four quarters of each image come like images of their own before the
    whole."""

    PARTS = 5

    def __init__(self, processor: Any, model: Mapping[str, Any]) -> None:
        super().__init__(processor)
        self._shortest, self._longest = processor.size.shortest_edge, processor.size.longest_edge
        self._tokens = model.get("perceiver_config", {}).get("resampler_n_latents", 64)

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        """The longest side is as long as possible: with all sides at their minimum, a part has the least pixels."""
        least = self._shortest**2
        check_limit(most, least)
        splits = self._processor.do_image_splitting and most >= self.PARTS * least and min(image.size) > 1
        parts = [image.size, *(quarters(*image.size) if splits else ())]
        bounds = range(self._shortest, self._longest + 1)
        longest = bounds[bisect_right(bounds, most, key=lambda one: sum(bounded(part, self._shortest, one) for part in parts)) - 1]
        size = {"shortest_edge": self._shortest, "longest_edge": longest}
        found = self._run(image, size=size, do_image_splitting=splits, do_pad=True)
        each = zip(found["pixel_values"][0], found["pixel_attention_mask"][0], strict=True)
        values = [padded[None, :, : mask[:, 0].sum(), : mask[0].sum()] for padded, mask in each]
        return PreprocessedImage(values, 1, self._tokens, (2, 2) if splits else (0, 0))


def quarters(width: int, height: int) -> list[tuple[int, int]]:
    """Sizes of an image's quarters."""
    return [(wide, high) for high in (height // 2, height - height // 2) for wide in (width // 2, width - width // 2)]


def bounded(size: tuple[int, int], shortest: int, longest: int) -> int:
    """Pixels of an image after resizing, as transformers' Idefics 2 computes it: the bound of the shorter side takes precedence."""
    width, height = size
    ratio = width / height
    if max(width, height) > longest:
        width, height = (longest, int(longest / ratio)) if width >= height else (int(longest * ratio), longest)
    return max(width, shortest) * max(height, shortest)


LLAMA4 = {"image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5}  # transformers' defaults


class Llama4Tiles(ImageResizer):
    """Llama 4's: tiles of the best-matching canvas, black where the image doesn't reach, and the whole image, if there is more than
    one tile. Sizes are computed as in transformers: in float32 what follows from the canvas."""

    def __init__(self, processor: Any, model: Mapping[str, Any]) -> None:
        super().__init__(processor)
        vision: Mapping[str, Any] = LLAMA4 | model["vision_config"]
        self._tile, self._most, self._largest = processor.size.height, processor.max_patches, processor.resize_to_max_canvas
        if processor.size.width != self._tile or vision["image_size"] != self._tile:
            raise ValueError(f"size must be {vision['image_size']} x {vision['image_size']}, as the model sees tiles")
        if type(self._most) is not int or self._most < 1 or type(self._largest) is not bool:
            raise ValueError("max_patches must be an integer, 1 at least, and resize_to_max_canvas true or false")
        self._side = int(self._tile // vision["patch_size"] * float(vision["pixel_shuffle_ratio"]))  # tokens

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        import numpy

        check_limit(most, self._tile**2)
        tiles = most // self._tile**2
        rows, columns = canvas((image.height, image.width), self._tile, min(self._most, max(1, tiles - 1)), self._largest)
        room = numpy.float32(rows * self._tile), numpy.float32(columns * self._tile)
        if not self._largest:
            room = min(max(image.height, self._tile), room[0]), min(max(image.width, self._tile), room[1])
        height, width = fitted((image.height, image.width), room)
        values = numpy.zeros((1, COLOURS, rows * self._tile, columns * self._tile), numpy.uint8)
        values[:, :, :height, :width] = self._sized(image, height, width)
        if (rows, columns) == (1, 1):
            return PreprocessedImage([values], self._side, self._side)
        cut = values.reshape(COLOURS, rows, self._tile, columns, self._tile).transpose(1, 3, 0, 2, 4)
        parts = [*cut.reshape(-1, 1, COLOURS, self._tile, self._tile), self._sized(image, self._tile, self._tile)]
        return PreprocessedImage(parts, self._side, self._side, (rows, columns))


def canvas(size: tuple[int, int], tile: int, most: int, largest: bool) -> tuple[int, int]:
    """Rows and columns of the canvas, of up to `most` tiles, that suits an image of that height and width: on which it is enlarged
    least; or most, if `largest`, or if it fits on none."""
    import numpy

    found: dict[float, list[tuple[int, int]]] = {}  # by their proportions, in order of discovery
    for count in range(most, 0, -1):
        for rows in (one for one in range(1, count + 1) if count % one == 0):
            found.setdefault(rows / (count // rows), []).append((rows, count // rows))
    every = [one for alike in found.values() for one in alike]
    sides = numpy.array(every, numpy.float32) * numpy.float32(tile)
    scales = (sides / numpy.array(size, numpy.float32)).min(1)
    enlarging = scales[scales >= 1]
    chosen = (enlarging.max() if largest else enlarging.min()) if len(enlarging) else scales.max()
    return min((one for one, scale in zip(every, scales, strict=True) if scale == chosen), key=math.prod)


def fitted(size: tuple[int, int], room: tuple[Any, Any]) -> tuple[int, int]:
    """The largest height and width in the image's proportions that fit the room."""
    (high, wide), (height, width) = room, size
    if wide / width < high / height:
        return max(1, min(math.floor(height * (wide / width)), int(high))), int(wide)
    return int(high), max(1, min(math.floor(width * (high / height)), int(wide)))


class DeepseekViews(ImageResizer):
    """DeepSeek-OCR 2's: tiles in proportions near to the image's own, if it is larger than one, and the whole image, padded with
    grey."""

    UNIT = 16 * 4  # pixels per token side

    def __init__(self, processor: Any, model: Mapping[str, Any]) -> None:
        super().__init__(processor)
        self._tile, self._whole = processor.tile_size, processor.size.height
        if (self._tile, self._whole) != (12 * self.UNIT, 16 * self.UNIT) or not processor.crop_to_patches:
            raise ValueError("tile_size must be 768, size 1024, and crop_to_patches true")
        if (side := model["vision_config"].get("sam_config", {}).get("image_size", self._whole)) != self._whole:
            raise ValueError(f"image_size {side!r} of sam_config is not supported: 1024 is")

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        check_limit(most, self._whole**2)
        if round(min(image.size) * self._whole / max(image.size)) == 0:
            raise nothing_left(self._whole)
        tiles = min(self._processor.max_patches, (most - self._whole**2) // self._tile**2)
        how = {"max_patches": tiles} if tiles >= self._processor.min_patches else {"tile_size": max(image.size)}
        found = self._run(image, **how)
        parts = [values[None] for values in found.get("pixel_values_local", ())]
        grid, whole = (min(1, len(parts)), len(parts)), (1, (self._whole // self.UNIT) ** 2 + 1)
        return PreprocessedImage([*parts, found["pixel_values"]], 1, (self._tile // self.UNIT) ** 2, grid, whole=whole)


class StepWindows(ImageResizer):
    """Step 3.7's: the whole image, and tiles from a sliding window whose size depends on the image's proportions."""

    SIDE = 14 * 4  # of a token, in pixels
    THIN, SHORT = 4, 32  # thinner images with a shorter side than this are padded to a square
    FILLED = 8192  # most pixels of the longer side when padding: the result is in memory a few times
    STEP = 8  # pixels: with too many tiles, the bound of the longer side is lowered in such steps

    def __init__(self, processor: Any, model: Mapping[str, Any]) -> None:
        super().__init__(processor)
        self._whole, self._tile, self._longest = processor.size.height, processor.patch_size, processor.max_image_size
        if model["vision_config"].get("image_size", 728) != self._whole or not self.SIDE <= self._tile <= self._whole:
            raise ValueError(f"size must be the model's image_size, and patch_size no more than that, and {self.SIDE} at least")
        if self._tile % self.SIDE or self._whole % self.SIDE:
            raise ValueError(f"size and patch_size must be multiples of {self.SIDE}, the pixels of a token")

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        """If even the lowest bound leaves too many tiles, only the whole image is used."""
        check_limit(most, self._whole**2)
        image, room = self._filled(image), (most - self._whole**2) // self._tile**2
        for longest in (self._longest, *range(self._longest - self.STEP, self._whole - self.STEP, -self.STEP)):
            size, crop, window = windows(image.size, longest, self._whole, self._tile)
            columns, rows = (max(1, side // window) if window else 0 for side in crop)
            if rows * columns <= room:
                break
        else:
            size, rows, columns = windows(image.size, self._longest, self._whole, self._tile)[0], 0, 0
        views = [image.resize(size, self._processor.resample)]
        if rows:
            cropped = image.resize(crop, self._processor.resample)
            corners = [(column * window, row * window) for row in range(rows) for column in range(columns)]
            tiles = [(left, top, min(left + window, crop[0]), min(top + window, crop[1])) for left, top in corners]
            views = [*map(cropped.crop, tiles), *views]
        sides = [self._tile] * (len(views) - 1) + [self._whole]
        values = [self._sized(view, side, side) for view, side in zip(views, sides, strict=True)]
        tile, whole = self._tile // self.SIDE, self._whole // self.SIDE
        return PreprocessedImage(values, tile, tile, (rows, columns), whole=(whole, whole))

    def _filled(self, image: Any) -> Any:
        from PIL import Image

        if min(image.size) >= self.SHORT or max(image.size) <= self.THIN * min(image.size):
            return image
        if max(image.size) > self.FILLED:
            raise UnusableImage(f"is too thin: a picture of less than {self.SHORT} pixels may be {self.FILLED} long")
        found = Image.new("RGB", (max(image.size),) * 2)
        found.paste(image)
        return found


def windows(size: tuple[int, int], longest: int, whole: int, tile: int) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Sizes that an image of that width and height is resized to, for the whole and for tiles, and the window of the tiles; 0:
    there are none. As transformers computes it."""
    if max(size) > longest:
        scale = longest / max(size)
        size = int(size[0] * scale), int(size[1] * scale)
    short, long = max(1, min(size)), max(size)
    window = min(short, tile) if long / short > 4 else tile
    if long <= whole:
        window = short if long / short > 1.5 else 0
    if not window:
        return size, size, 0
    wide, high = (window * (side // window + (side % window > 0.2 * window)) if side >= window else max(1, side) for side in size)
    return (max(1, size[0]), max(1, size[1])), (wide, high), window


class PatchBudget(ImageResizer):
    """Gemma 4's: each image has about the same number of tokens, in its own proportions."""

    BUDGETS = (1120, 560, 280, 140, 70)  # tokens

    def __init__(self, processor: Any) -> None:
        super().__init__(processor)
        self._patch, self._pooled = processor.patch_size, processor.pooling_kernel_size
        self._unit = self._patch * self._pooled

    def __call__(self, image: Any, most: int) -> PreprocessedImage:
        tokens = min(self._processor.max_soft_tokens, most // self._unit**2)
        check_limit(tokens * self._unit**2, self.BUDGETS[-1] * self._unit**2)
        budget = next(budget for budget in self.BUDGETS if budget <= tokens)
        found = self._run(image, max_soft_tokens=budget)
        places = found["image_position_ids"][0]
        wide, high = (int(number) + 1 for number in places.max(0))
        patches = found["pixel_values"][0][: high * wide].reshape(1, high, wide, self._patch, self._patch, -1)
        values = patches.transpose(0, 5, 1, 3, 2, 4).reshape(1, -1, high * self._patch, wide * self._patch)
        return PreprocessedImage([values], high // self._pooled, wide // self._pooled)


BY_TYPE: dict[str, Callable[[Any, Mapping[str, Any]], ImageResizer]] = {
    "deepseek_ocr2": DeepseekViews,
    "llama4": Llama4Tiles,
    "step3p7": StepWindows,
}  # see proto.processors


def resizing_of(processor: Any, files: Mapping[str, Any], model: Mapping[str, Any]) -> ImageResizer:
    """The resizing for an image processor. files: the folder's processor config; model: its config.json. Raises ValueError, or
    KeyError, for an unknown kind, or settings that are not supported."""
    if getattr(processor, "do_resize", True) is not True:
        raise ValueError(f"do_resize {processor.do_resize!r} is not supported: each picture is resized")
    if model.get("model_type") in BY_TYPE:
        return BY_TYPE[model["model_type"]](processor, model)
    if hasattr(processor, "max_image_tokens"):
        return TokenBoundPatches(processor)
    if hasattr(processor, "merge_size"):
        return (EndedPatches if type(processor).__name__.startswith("HYV4VL") else QwenPatches)(processor)
    if hasattr(processor, "max_soft_tokens"):
        return PatchBudget(processor)
    if hasattr(processor, "max_image_size"):
        return IdeficsTiles(processor, model)
    if hasattr(processor, "do_image_splitting"):
        return IdeficsQuarters(processor, model)
    if hasattr(processor, "image_grid_pinpoints"):
        return (OneVisionTiles if hasattr(processor, "pad_to_square") else LlavaNextTiles)(processor, model)
    if hasattr(processor, "crop_to_patches"):
        return InternVlTiles(processor, model)
    if hasattr(processor, "do_pan_and_scan"):
        return Square(processor, math.isqrt(model.get("mm_tokens_per_image", 256)))
    if model.get("model_type") == "llava" and model["vision_config"].get("model_type") != "pixtral":
        return Square(processor, model["vision_config"]["image_size"] // model["vision_config"]["patch_size"])
    return LongestSide(processor, files, model)
