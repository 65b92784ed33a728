"""Image preprocessing: pixels and token counts equal transformers', pixel limits hold, unusable images are refused."""

import asyncio
import json
import logging
import math
import random
import struct
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from PIL import Image

from penstock.proto.processors import image_processor
from penstock.router import pixels
from penstock.router.pixels import MOST_PIXELS, ImagePreparer, Pixels
from penstock.router.request import Refused
from penstock.router.resizing import UnusableImage, longest_side, rounded
from penstock.tests.router.vision_models import PATCH_SIZES, PROCESSORS, encoded, make_image_model, noise_image, oversized_png

MAX_PIXELS = 1 << 20
SIZES = [(57, 211), (640, 480), (33, 30), (901, 1099), (28, 28), (1000, 9)]


def prepared(folder: Path, *images: bytes, max_pixels: int = MAX_PIXELS, seconds: float = 10.0) -> list[Pixels]:
    async def run() -> list[Pixels]:
        preparer = ImagePreparer(str(folder), max_pixels, seconds)
        found = [await preparer.prepare(image, f"image {number}") for number, image in enumerate(images, 1)]
        return [one for each in found for one in each.parts]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    make_image_model(found)
    return found


def transformers_processor(folder: Path) -> Any:
    from transformers import AutoImageProcessor, Gemma4ImageProcessorPil, Qwen2VLImageProcessorPil

    kind = json.loads((folder / "config.json").read_text())["model_type"]
    if kind == "minimax_m3_vl":  # its own processor needs torchvision, as the next one's does
        return Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 451_584})
    if kind == "gemma4_unified":
        return Gemma4ImageProcessorPil(patch_size=16, pooling_kernel_size=3)

    auto_class: Any = AutoImageProcessor  # has no type annotations
    return auto_class.from_pretrained(folder, backend="pil")


def normalized(found: Pixels, processor: Any) -> numpy.ndarray[Any, Any]:
    """Pixels normalized as the shards do it."""
    values = numpy.frombuffer(found.pixels, numpy.uint8).reshape(found.shape).astype(numpy.float64) / 255
    each = [-1 if length == 3 and axis == 1 else 1 for axis, length in enumerate(found.shape)]
    mean, deviation = (numpy.reshape(numbers, each) for numbers in (processor.image_mean, processor.image_std))
    normal: numpy.ndarray[Any, Any] = (values - mean) / deviation
    return normal


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen3_vl", "glm4v", "glm5_next", "paddleocr_vl", "minimax_m3_vl", "hy_v4_vl", "lfm3_vl"]
)
def test_patches_equal_transformers(tmp_path: Path, family: str) -> None:
    make_image_model(tmp_path, family)
    processor = transformers_processor(tmp_path)
    max_pixels = 1 << 26  # the processor's own limit is lower
    images = [noise_image(*size, seed=seed) for seed, size in enumerate(SIZES)]
    side = PATCH_SIZES[family]
    for image, found in zip(images, prepared(tmp_path, *map(encoded, images), max_pixels=max_pixels), strict=True):
        expected = processor(image, return_tensors="np")
        columns = found.columns - (family == "hy_v4_vl")  # its rows end with a token
        assert (1, 2 * found.rows, 2 * columns) == tuple(expected["image_grid_thw"][0])
        assert found.shape == (4 * found.rows * columns, 3, side, side)
        _assert_equal_patches(found, processor, expected["pixel_values"])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v", "paddleocr_vl", "minimax_m3_vl"])
def test_large_image_is_resized_to_the_pixel_limit(tmp_path: Path, family: str) -> None:
    make_image_model(tmp_path, family)
    processor = transformers_processor(tmp_path)
    image = noise_image(1601, 1999)
    [found] = prepared(tmp_path, encoded(image), max_pixels=200_000)
    frames = 2 if family == "glm4v" else 1
    expected = processor(image, size={"shortest_edge": 4096, "longest_edge": 200_000 * frames}, return_tensors="np")
    assert (1, 2 * found.rows, 2 * found.columns) == tuple(expected["image_grid_thw"][0])
    assert 150_000 < len(found.pixels) // 3 <= 200_000
    _assert_equal_patches(found, processor, expected["pixel_values"])


@pytest.mark.parametrize(("max_pixels", "tokens"), [(200_000, 255), (20 * 28 * 28, 20), (3 * 28 * 28 + 5, 3)])
def test_glm_5_next_image_is_resized_to_the_limit_in_tokens(tmp_path: Path, max_pixels: int, tokens: int) -> None:
    """Even if the limit is below the processor's own minimum."""
    make_image_model(tmp_path, "glm5_next")
    processor, image = transformers_processor(tmp_path), noise_image(1601, 1999)
    [found] = prepared(tmp_path, encoded(image), max_pixels=max_pixels)
    expected = processor(image, min_image_tokens=min(16, tokens), max_image_tokens=tokens, return_tensors="np")
    assert (1, 2 * found.rows, 2 * found.columns) == tuple(expected["image_grid_thw"][0])
    assert found.rows * found.columns <= tokens
    _assert_equal_patches(found, processor, expected["pixel_values"])
    with pytest.raises(ValueError, match="--max-image-pixels must be at least 784 for this model"):
        pixels._resizing.__wrapped__(str(tmp_path))(image, 783)


@pytest.mark.usefixtures("own_processes")
def test_processor_that_fails_for_every_image_is_logged_at_startup(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_image_model(tmp_path, "minimax_m3_vl")
    path = tmp_path / "preprocessor_config.json"

    def startup_log() -> str:
        caplog.clear()
        asyncio.run(ImagePreparer(str(tmp_path), MAX_PIXELS).start())
        return caplog.text

    assert startup_log() == ""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": {"shortest_edge": 3136}}))
    assert "images can't be prepared, and requests with any are refused" in startup_log()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_pixels": 200_704}, (3136, 200_704)),
        ({"size": {"shortest_edge": 6272, "longest_edge": 100_000}}, (6272, 100_000)),
        ({"size": None}, (3136, 451_584)),
    ],
)
def test_minimax_m3_processor_settings_are_read_from_the_folder(
    tmp_path: Path, changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    import transformers

    make_image_model(tmp_path, "minimax_m3_vl")
    settings = {name: value for name, value in (PROCESSORS["minimax_m3_vl"] | changes).items() if name in changes or name != "size"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.1, 0.2, 0.3], "crop_size": 7}))
    found = image_processor(transformers, tmp_path)
    assert (found.size.shortest_edge, found.size.longest_edge) == expected
    assert [*found.image_mean] == [0.1, 0.2, 0.3]


def _assert_equal_patches(found: Pixels, processor: Any, expected: numpy.ndarray[Any, Any]) -> None:
    """Compares patches, repeated for as many frames as the processor makes of a still image."""
    frames = numpy.repeat(normalized(found, processor)[:, :, None], processor.temporal_patch_size, axis=2)
    numpy.testing.assert_allclose(frames.reshape(len(frames), -1), expected.reshape(len(expected), -1), atol=1e-6)


@pytest.mark.parametrize(("family", "longest", "side"), [("mistral3", 1540, 28), ("pixtral", 1024, 16)])
def test_images_of_any_aspect_ratio_equal_transformers(tmp_path: Path, family: str, longest: int, side: int) -> None:
    make_image_model(tmp_path, family)
    processor = transformers_processor(tmp_path)
    images = [noise_image(*size, seed=seed) for seed, size in enumerate([*SIZES, (30, 1600)])]
    for image, found in zip(images, prepared(tmp_path, *map(encoded, images), max_pixels=1 << 24), strict=True):
        expected = processor(image, patch_size=side, return_tensors="np")["pixel_values"]
        assert found.shape == expected.shape == (1, 3, side * found.rows, side * found.columns)
        numpy.testing.assert_allclose(normalized(found, processor), expected, atol=1e-6)
    [small] = prepared(tmp_path, encoded(images[3]), max_pixels=100_000)
    bound = {"longest_edge": longest_side(longest, side, images[3].size, 100_000)}
    expected = processor(images[3], patch_size=side, size=bound, return_tensors="np")["pixel_values"]
    numpy.testing.assert_allclose(normalized(small, processor), expected, atol=1e-6)


@pytest.mark.parametrize("unit", [14, 28])
def test_lighton_ocr_images_equal_transformers_and_have_a_token_per_28_pixels(tmp_path: Path, unit: int) -> None:
    """What an image has beyond whole tokens of 28 x 28 pixels has no token."""
    make_image_model(tmp_path, "lighton_ocr")
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": unit}))
    processor = transformers_processor(tmp_path)
    images = [noise_image(*size, seed=seed) for seed, size in enumerate([(90, 90), (310, 200), (57, 211), (28, 28)])]
    for image, found in zip(images, prepared(tmp_path, *map(encoded, images), max_pixels=1 << 24), strict=True):
        expected = processor(image, return_tensors="np")["pixel_values"]
        assert found.shape == expected.shape
        assert (found.rows, found.columns) == tuple(length // 28 for length in expected.shape[2:])
        numpy.testing.assert_allclose(normalized(found, processor), expected, atol=1e-6)
    [small] = prepared(tmp_path, encoded(images[1]), max_pixels=10_000)
    assert 7_000 < len(small.pixels) // 3 <= 10_000
    if unit == 14:
        for size, fault in (((1000, 9), "thin"), ((9, 14), "small")):
            with pytest.raises(Refused, match=f"is too {fault}: a token is of 28 x 28 pixels"):
                prepared(tmp_path, encoded(noise_image(*size)))


@pytest.mark.parametrize(("family", "tokens", "side"), [("gemma3", 16, 896), ("llava", 24, 336)])
def test_square_images_of_fixed_size_equal_transformers(tmp_path: Path, family: str, tokens: int, side: int) -> None:
    """Their size doesn't depend on the pixel limit."""
    make_image_model(tmp_path, family)
    processor = transformers_processor(tmp_path)
    images = [noise_image(*size, seed=seed) for seed, size in enumerate(SIZES)]
    for image, found in zip(images, prepared(tmp_path, *map(encoded, images), max_pixels=1000), strict=True):
        assert (found.rows, found.columns, found.shape) == (tokens, tokens, (1, 3, side, side))
        numpy.testing.assert_allclose(
            normalized(found, processor), processor(image, return_tensors="np")["pixel_values"], atol=1e-6
        )


@pytest.mark.parametrize(
    ("family", "max_pixels", "budget"),
    [
        *(("gemma4", MAX_PIXELS, 280), ("gemma4", 645_119, 140), ("gemma4", 280 * 48**2, 280), ("gemma4", 70 * 48**2, 70)),
        *(("gemma4_unified", MAX_PIXELS, 140), ("gemma4_unified", 70 * 48**2, 70)),
    ],
)
def test_gemma_4_images_equal_transformers_for_each_token_budget(tmp_path: Path, family: str, max_pixels: int, budget: int) -> None:
    """transformers returns patches; they are put together again for the comparison."""
    make_image_model(tmp_path, family)
    processor = transformers_processor(tmp_path)
    images = [noise_image(*size, seed=seed) for seed, size in enumerate(SIZES)]
    for image, found in zip(images, prepared(tmp_path, *map(encoded, images), max_pixels=max_pixels), strict=True):
        expected = processor(image, max_soft_tokens=budget, return_tensors="np")
        assert found.rows * found.columns == expected["num_soft_tokens_per_image"][0] <= budget
        assert found.shape == (1, 3, 48 * found.rows, 48 * found.columns)
        values = numpy.frombuffer(found.pixels, numpy.uint8).reshape(3, 3 * found.rows, 16, 3 * found.columns, 16) / 255
        patches = values.transpose(1, 3, 2, 4, 0).reshape(9 * found.rows * found.columns, -1)
        numpy.testing.assert_allclose(patches, expected["pixel_values"][0][: len(patches)], atol=1e-6)


@pytest.mark.parametrize(
    ("max_pixels", "longest", "count"),
    [
        (MAX_PIXELS, 256, 5),
        (17 * 64**2, 256, 5),
        (17 * 64**2 - 1, 192, 5),
        (10 * 64**2 - 1, 128, 5),
        (5 * 64**2 - 1, 64, 4),
        (64**2, 64, 1),
    ],
)
@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_idefics_3_tiles_equal_transformers(tmp_path: Path, family: str, max_pixels: int, longest: int, count: int) -> None:
    """longest: longest edge of a square image within the pixel limit; count: parts that a longer image is split into."""
    make_image_model(tmp_path, family)
    processor = transformers_processor(tmp_path)
    image = noise_image(301, 299)
    found = prepared(tmp_path, encoded(image), max_pixels=max_pixels)
    expected = processor(image, size={"longest_edge": longest}, return_tensors="np")["pixel_values"][0]
    assert [(one.rows, one.columns, one.shape) for one in found] == [(4, 4, (1, 3, 64, 64))] * len(expected)
    for one, values in zip(found, expected, strict=True):
        numpy.testing.assert_allclose(normalized(one, processor), values[None], atol=1e-6)
    assert sum(len(one.pixels) for one in found) <= 3 * max_pixels
    assert len(prepared(tmp_path, encoded(noise_image(400, 90)), max_pixels=max_pixels)) == count


def test_idefics_3_tiles_with_a_longest_edge_that_is_no_multiple_of_the_tile(tmp_path: Path) -> None:
    """The processor's own size is tried first, then smaller ones."""
    make_image_model(tmp_path, "smolvlm")
    settings = PROCESSORS["smolvlm"] | {"size": {"longest_edge": 150}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    processor, image = transformers_processor(tmp_path), noise_image(301, 299)
    for max_pixels, longest in ((MAX_PIXELS, 150), (10 * 64**2 - 1, 128), (5 * 64**2 - 1, 64)):
        found = prepared(tmp_path, encoded(image), max_pixels=max_pixels)
        expected = processor(image, size={"longest_edge": longest}, return_tensors="np")["pixel_values"][0]
        numpy.testing.assert_allclose([normalized(one, processor)[0] for one in found], expected, atol=1e-6)


@pytest.mark.parametrize(("max_pixels", "tiles"), [(1 << 26, 12), (1 << 20, 4), (3 * 448**2 - 1, 1), (448**2, 1)])
def test_internvl_tiles_equal_transformers(tmp_path: Path, max_pixels: int, tiles: int) -> None:
    make_image_model(tmp_path, "internvl")
    processor = transformers_processor(tmp_path)
    images = [noise_image(*size, seed=seed) for seed, size in enumerate([*SIZES, (900, 450)])]
    counts = set()
    for image, found in zip(images, prepared(tmp_path, *map(encoded, images), max_pixels=max_pixels), strict=True):
        expected = processor(image, crop_to_patches=True, max_patches=tiles, return_tensors="np")["pixel_values"]
        assert (found.rows, found.columns) == (16 * len(expected), 16)
        assert len(found.pixels) <= 3 * max_pixels
        numpy.testing.assert_allclose(normalized(found, processor), expected, atol=1e-6)
        counts.add(len(expected))
    assert (len(counts) > 1) == (tiles > 1)


@pytest.mark.parametrize(("max_pixels", "tiles"), [(1 << 26, 6), (1024**2 + 4 * 768**2, 4), (MAX_PIXELS, 0), (1024**2 + 768**2, 0)])
def test_deepseek_ocr_2_views_equal_transformers(tmp_path: Path, max_pixels: int, tiles: int) -> None:
    """The fewest tiles are two: an image that would have one has only the global view."""
    make_image_model(tmp_path, "deepseek_ocr2")
    processor = transformers_processor(tmp_path)
    images = [noise_image(*size, seed=seed) for seed, size in enumerate([(57, 211), (901, 1099), (2000, 300), (768, 768)])]
    resizing = pixels._resizing.__wrapped__(str(tmp_path))
    for image in images:
        found = pixels._prepared(resizing, image, max_pixels)
        expected = processor(image, max_patches=tiles or 6, tile_size=768 if tiles else 5000, return_tensors="np")
        count = int(expected["num_local_patches"][0])
        assert [(one.rows, one.columns) for one in found.parts] == [(1, 144)] * count + [(1, 257)]
        assert count <= tiles
        assert found.grid == (min(count, 1), count)
        views = [normalized(one, processor)[0] for one in found.parts]
        numpy.testing.assert_allclose(views.pop(), expected["pixel_values"][0], atol=1e-6)
        numpy.testing.assert_allclose(views, [*expected.get("pixel_values_local", ())], atol=1e-6)
    with pytest.raises(ValueError, match="--max-image-pixels must be at least 1048576 for this model"):
        resizing(images[0], 1024**2 - 1)


@pytest.mark.parametrize(
    ("size", "max_tiles", "largest", "tiles", "resized"),
    [
        ((336, 336), 16, False, (1, 1), (336, 336)),
        ((337, 336), 16, False, (2, 1), (337, 336)),
        ((300, 500), 16, False, (1, 2), (300, 500)),
        ((50, 30), 16, False, (1, 1), (336, 201)),
        ((1000, 700), 16, False, (3, 3), (1000, 700)),
        ((1999, 57), 16, False, (6, 1), (1999, 57)),
        ((1500, 2000), 16, False, (3, 4), (1008, 1344)),
        ((9, 1000), 16, False, (1, 3), (9, 1000)),
        ((336, 336), 16, True, (4, 4), (1344, 1344)),
        ((337, 336), 16, True, (4, 4), (1344, 1340)),
        ((300, 500), 16, True, (3, 5), (1008, 1680)),
        ((50, 30), 16, True, (5, 3), (1680, 1007)),
        ((1000, 700), 16, True, (5, 3), (1440, 1008)),
        ((1999, 57), 16, True, (16, 1), (5376, 153)),
        ((9, 1000), 16, True, (1, 16), (48, 5376)),
        ((1000, 700), 5, False, (2, 2), (672, 470)),
        ((1999, 57), 5, False, (5, 1), (1680, 47)),
        ((3000, 4000), 5, False, (2, 2), (504, 672)),
    ],
)
def test_llama_4_tiles_and_padding(
    tmp_path: Path, size: tuple[int, int], max_tiles: int, largest: bool, tiles: tuple[int, int], resized: tuple[int, int]
) -> None:
    """Expected values are from transformers 5.24 with torchvision, which is not needed here: rows and columns of tiles, and the
    part that is not black padding. 40,000 sizes were equal (2026-11-26), and pixels up to rounding, by 1 of 255."""
    make_image_model(tmp_path, "llama4")
    changes = {"size": {"height": 336, "width": 336}, "max_patches": max_tiles, "resize_to_max_canvas": largest}
    for name, settings in (("preprocessor_config.json", changes), ("config.json", {})):
        content = json.loads((tmp_path / name).read_text())
        if name == "config.json":
            content["vision_config"] |= {"image_size": 336, "patch_size": 14}
        (tmp_path / name).write_text(json.dumps(content | settings))
    image = noise_image(size[1], size[0])
    found = pixels._prepared(pixels._resizing.__wrapped__(str(tmp_path)), image, 1 << 26)
    values = [numpy.frombuffer(one.pixels, numpy.uint8).reshape(one.shape)[0] for one in found.parts]
    assert {(one.rows, one.columns, one.shape) for one in found.parts} == {(12, 12, (1, 3, 336, 336))}
    if tiles != (1, 1):
        assert found.grid == tiles
        numpy.testing.assert_array_equal(values.pop(), _resized(image, (336, 336)))
    else:
        assert found.grid == (0, 0)
    rows = [numpy.concatenate(values[start : start + tiles[1]], 2) for start in range(0, len(values), tiles[1])]
    canvas = numpy.concatenate(rows, 1)
    assert canvas.shape == (3, 336 * tiles[0], 336 * tiles[1])
    numpy.testing.assert_array_equal(canvas[:, : resized[0], : resized[1]], _resized(image, resized))
    assert not canvas[:, resized[0] :].any()
    assert not canvas[:, :, resized[1] :].any()


@pytest.mark.parametrize(
    ("size", "global_size", "crop", "window", "tiles"),
    [
        ((30, 50), (30, 50), (30, 60), 30, (2, 1)),
        ((1000, 700), (1000, 700), (1008, 1008), 504, (2, 2)),
        ((672, 672), (672, 672), (672, 672), 0, (0, 0)),
        ((57, 1999), (57, 1999), (57, 1995), 57, (35, 1)),
        ((20, 300), (300, 300), (300, 300), 0, (0, 0)),
        ((729, 728), (729, 728), (1008, 1008), 504, (2, 2)),
        ((2000, 1500), (2000, 1500), (2016, 1512), 504, (3, 4)),
        ((4000, 3000), (3024, 2268), (3024, 2520), 504, (5, 6)),
        ((600, 380), (600, 380), (760, 380), 380, (1, 2)),
        ((1008, 100), (1008, 100), (1000, 100), 100, (1, 10)),
        ((504, 1110), (504, 1110), (504, 1512), 504, (3, 1)),
    ],
)
def test_step_3_tiles_and_resized_sizes(
    tmp_path: Path,
    size: tuple[int, int],
    global_size: tuple[int, int],
    crop: tuple[int, int],
    window: int,
    tiles: tuple[int, int],
) -> None:
    """Expected values are from transformers 5.24 with torchvision, which is not needed here: the sizes (width and height) that an
    image is resized to for the global view and for tiles. 40,000 sizes were equal (2026-11-26), and pixels up to rounding, by 2 of
    255."""
    make_image_model(tmp_path, "step3p7")
    image = noise_image(*size)
    found = pixels._prepared(pixels._resizing.__wrapped__(str(tmp_path)), image, 1 << 26)
    assert found.grid == tiles
    assert [(one.rows, one.columns) for one in found.parts] == [(9, 9)] * (tiles[0] * tiles[1]) + [(13, 13)]
    if size == (20, 300):  # padded with black
        filled = Image.new("RGB", (max(size),) * 2)
        filled.paste(image)
        image = filled
    values = [numpy.frombuffer(one.pixels, numpy.uint8).reshape(one.shape)[0] for one in found.parts]
    numpy.testing.assert_array_equal(values.pop(), _resized(image.resize(global_size, Image.Resampling.BILINEAR), (728, 728)))
    cropped = image.resize(crop, Image.Resampling.BILINEAR)
    for number, tile in enumerate(values):
        left, top = (number % tiles[1]) * window, (number // tiles[1]) * window
        box = left, top, min(left + window, crop[0]), min(top + window, crop[1])
        numpy.testing.assert_array_equal(tile, _resized(cropped.crop(box), (504, 504)))


@pytest.mark.parametrize(("family", "size"), [("deepseek_ocr2", (1, 3000)), ("step3p7", (9000, 31))])
def test_too_thin_image_is_refused(family: str, size: tuple[int, int], tmp_path: Path) -> None:
    make_image_model(tmp_path, family)
    resizing = pixels._resizing.__wrapped__(str(tmp_path))
    with pytest.raises(UnusableImage, match="is too thin"):
        resizing(noise_image(*size), 1 << 26)


def test_hy_v4_images_stay_within_the_models_token_limit(tmp_path: Path) -> None:
    """Each row has a token for its end besides those of its pixels."""
    make_image_model(tmp_path, "hy_v4_vl")
    resizing = pixels._resizing.__wrapped__(str(tmp_path))
    for max_pixels in (300_000, 1 << 20):
        tokens = max_pixels // 32**2
        for wide, high in ((40, 7960), (47, 9400), (60, 12_000), (79, 15_800), (80, 16_000)):
            [one] = pixels._prepared(resizing, noise_image(wide, high), max_pixels).parts
            assert one.rows * one.columns <= tokens + math.isqrt(300 * tokens)


@pytest.mark.parametrize(("size", "grids"), [((2000, 1500), [(3, 4), (2, 2), (1, 2), (0, 0)]), ((1999, 57), [(1, 35), (0, 0)])])
def test_step_3_pixel_limit_counts_tiles_and_global_view(
    tmp_path: Path, size: tuple[int, int], grids: list[tuple[int, int]]
) -> None:
    """Above the limit the longer side is reduced; if that doesn't suffice, there are no tiles."""
    make_image_model(tmp_path, "step3p7")
    resizing, image = pixels._resizing.__wrapped__(str(tmp_path)), noise_image(*size)
    for grid in grids:
        max_pixels = 728**2 + 504**2 * grid[0] * grid[1]
        found = pixels._prepared(resizing, image, max_pixels)
        assert found.grid == grid
        assert sum(len(one.pixels) for one in found.parts) == 3 * max_pixels
    bounded = image.resize((728, 546), Image.Resampling.BILINEAR) if size == (2000, 1500) else image
    last = numpy.frombuffer(found.parts[0].pixels, numpy.uint8).reshape(3, 728, 728)
    numpy.testing.assert_array_equal(last, _resized(bounded, (728, 728)))
    with pytest.raises(ValueError, match="--max-image-pixels must be at least 529984 for this model"):
        resizing(image, 728**2 - 1)


def _resized(image: Image.Image, size: tuple[int, int]) -> numpy.ndarray[Any, Any]:
    return numpy.asarray(image.resize((size[1], size[0]), Image.Resampling.BILINEAR)).transpose(2, 0, 1)


def test_llama_4_pixel_limit_counts_tiles_and_global_view(tmp_path: Path) -> None:
    make_image_model(tmp_path, "llama4")
    resizing, image = pixels._resizing(str(tmp_path)), noise_image(190, 120)
    counts = {max_pixels: len(pixels._prepared(resizing, image, max_pixels * 64**2).parts) for max_pixels in (1, 2, 3, 6, 7, 20)}
    assert counts == {1: 1, 2: 1, 3: 3, 6: 5, 7: 7, 20: 7}
    with pytest.raises(ValueError, match="--max-image-pixels must be at least 4096 for this model"):
        resizing(image, 64**2 - 1)


def images_of_many_sizes(seed: int) -> list[Image.Image]:
    """For tests that call `pixels._prepared` directly: the worker process runs the same code."""
    rng = random.Random(seed)
    sizes = [*SIZES, (1, 5000), *((rng.randrange(8, 300), rng.randrange(8, 300)) for _ in range(40))]
    return [noise_image(*size, seed=seed) for seed, size in enumerate(sizes)]


def transformers_token_count(family: str, processor: Any, image: Image.Image) -> int:
    """Image tokens by transformers' processor of text and images."""
    import transformers

    processor_class = transformers.LlavaNextProcessor if family == "llava_next" else transformers.LlavaOnevisionProcessor
    settings = {"num_image_tokens": 16, "num_additional_image_tokens": 0, "patch_size": 14, "vision_aspect_ratio": "anyres_max_5"}
    stub = SimpleNamespace(image_processor=processor, **settings)
    stub._get_unpadded_features = partial(processor_class._get_unpadded_features, stub)
    found: int = processor_class._get_number_of_features(stub, image.height, image.width, 56, 56)
    return found


@pytest.mark.parametrize(
    ("family", "max_pixels", "tiles"),
    [
        ("llava_next", MAX_PIXELS, 4),
        ("llava_next", 4 * 56**2 - 1, 2),
        ("llava_onevision", MAX_PIXELS, 16),
        ("llava_onevision", 9 * 56**2, 8),
    ],
)
def test_llava_next_and_onevision_tiles_and_token_counts_equal_transformers(
    tmp_path: Path, family: str, max_pixels: int, tiles: int
) -> None:
    """tiles: number in the largest resolution within the pixel limit."""
    make_image_model(tmp_path, family)
    processor, resizing = transformers_processor(tmp_path), pixels._resizing(str(tmp_path))
    least = 56**2 * (1 + min(one[0] * one[1] for one in processor.image_grid_pinpoints) // 56**2)
    processor.image_grid_pinpoints = [one for one in processor.image_grid_pinpoints if one[0] * one[1] <= tiles * 56**2]
    tile_counts = set()
    for image in images_of_many_sizes(max_pixels):
        [found] = pixels._prepared(resizing, image, max_pixels).parts
        expected = processor(image, return_tensors="np")
        assert found.size == (image.height, image.width) == tuple(expected["image_sizes"][0])
        assert (found.rows, found.columns) == (1, transformers_token_count(family, processor, image))
        numpy.testing.assert_allclose(normalized(found, processor), expected["pixel_values"][0], atol=1e-6)
        tile_counts.add(len(expected["pixel_values"][0]))
    assert max(tile_counts) == 1 + tiles
    with pytest.raises(ValueError, match=f"--max-image-pixels must be at least {least} for this model"):
        resizing(image, least - 1)


@pytest.mark.parametrize(("splits", "max_pixels"), [(True, MAX_PIXELS), (True, 9000), (True, 4500), (True, 4499), (False, 900)])
def test_idefics_2_quarters_equal_transformers(tmp_path: Path, splits: bool, max_pixels: int) -> None:
    """At the largest size whose parts are within the pixel limit together; if five parts exceed it at any size, there is one."""
    make_image_model(tmp_path, "idefics2")
    settings = PROCESSORS["idefics2"] | {"do_image_splitting": splits}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    processor, resizing = transformers_processor(tmp_path), pixels._resizing(str(tmp_path))
    options: dict[str, Any] = {"return_tensors": "np"}
    for image in [*images_of_many_sizes(max_pixels)[-5:], noise_image(1, 40)]:
        found = pixels._prepared(resizing, image, max_pixels)
        sizes = list[int]()
        for longest in range(98, 29, -1):
            options |= {"size": {"shortest_edge": 30, "longest_edge": longest}, "do_image_splitting": len(found.parts) == 5}
            expected = processor(image, **options)
            sizes.append(int(expected["pixel_attention_mask"].sum()))
            if sizes[-1] <= max_pixels:
                break
        assert found.grid == ((2, 2) if splits and max_pixels >= 4500 and image.width > 1 else (0, 0))
        for one, values, mask in zip(found.parts, expected["pixel_values"][0], expected["pixel_attention_mask"][0], strict=True):
            high, wide = one.shape[-2:]
            assert (one.rows, one.columns, mask[:high, :wide].sum(), mask.sum()) == (1, 6, high * wide, high * wide)
            numpy.testing.assert_allclose(normalized(one, processor)[0], values[:, :high, :wide], atol=1e-6)
    with pytest.raises(ValueError, match="--max-image-pixels must be at least 900 for this model"):
        resizing(image, 899)


def test_llava_onevision_has_one_tile_per_image_if_there_are_several(tmp_path: Path) -> None:
    make_image_model(tmp_path, "llava_onevision")
    processor, resizing = transformers_processor(tmp_path), pixels._resizing(str(tmp_path))
    images = images_of_many_sizes(1)
    expected = processor([images], return_tensors="np")["pixel_values"]
    for image, values in zip(images, expected, strict=True):
        [found] = pixels._prepared(resizing, image, MAX_PIXELS, alone=False).parts
        assert (found.rows, found.columns, found.shape) == (1, 17, (1, 3, 56, 56))
        numpy.testing.assert_allclose(normalized(found, processor), values, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "changes", "max_pixels", "reason"),
    [
        ("internvl", {}, 448**2 - 1, "--max-image-pixels must be at least 200704 for this model"),
        ("gemma4", {}, 161_279, "--max-image-pixels must be at least 161280 for this model"),
        ("gemma3", {"do_pan_and_scan": True}, MAX_PIXELS, "do_pan_and_scan is not supported"),
        ("llama4", {"size": {"height": 336, "width": 336}}, MAX_PIXELS, "size must be 64 x 64, as the model sees tiles"),
        ("llama4", {"max_patches": "16"}, MAX_PIXELS, "max_patches must be an integer, 1 at least"),
        ("llama4", {"resize_to_max_canvas": "no"}, MAX_PIXELS, "resize_to_max_canvas true or false"),
        ("minimax_m3_vl", {"do_resize": False}, MAX_PIXELS, "do_resize False is not supported: each picture is resized"),
        ("deepseek_ocr2", {"tile_size": 640}, MAX_PIXELS, "tile_size must be 768, size 1024"),
        ("step3p7", {"patch_size": 500}, MAX_PIXELS, "size and patch_size must be multiples of 56"),
        ("step3p7", {"patch_size": 1000}, MAX_PIXELS, "patch_size no more than that"),
    ],
)
def test_unsupported_processor_settings_refuse_images_and_log_why(
    tmp_path: Path, family: str, changes: dict[str, Any], max_pixels: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_image_model(tmp_path, family)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(Refused, match="its log says why"):
        prepared(tmp_path, encoded(noise_image(84, 84)), max_pixels=max_pixels)
    assert reason in caplog.text


def test_longest_side_is_the_largest_within_the_pixel_limit() -> None:
    for size in [(1601, 1999), (1024, 1024), (1025, 1000), (5000, 40), (10, 10)]:
        for max_pixels in (1 << 20, 100_000, 30_000):
            longest = longest_side(1540, 28, size, max_pixels)
            assert rounded(longest, 28, size) <= max_pixels
            longer = range(longest + 1, min(1540, max(size)) + 1)
            assert all(rounded(length, 28, size) > max_pixels for length in longer)


@pytest.mark.usefixtures("own_processes")
def test_processor_config_of_transformers_5_is_read(tmp_path: Path) -> None:
    """It saves one file, with the image processor within it."""
    make_image_model(tmp_path, "mistral3")
    [expected] = prepared(tmp_path, encoded(noise_image(99, 120)))
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "mistral3"}')
    settings = {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings | {"image_processor": PROCESSORS["mistral3"]}))
    assert prepared(tmp_path, encoded(noise_image(99, 120))) == [expected]


def test_all_image_formats_and_colour_modes_are_read(folder: Path) -> None:
    image = noise_image(84, 112)
    others = [image.rotate(180), image.rotate(90)]
    first = encoded(image.convert("P"), "GIF", save_all=True, append_images=[one.convert("P") for one in others])
    lossless = prepared(
        folder,
        encoded(image),
        encoded(image, "BMP"),
        encoded(image, "WEBP", lossless=True),
        encoded(image.convert("RGBA")),
        encoded(image.convert("P")),
        first,
    )
    assert {(one.rows, one.columns) for one in lossless} == {(4, 3)}
    assert len({one.digest for one in lossless[:4]}) == 1
    assert lossless[4] == lossless[5]
    forms = [("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "1"), ("PNG", "LA"), ("PNG", "I;16")]
    assert len(prepared(folder, *(encoded(image.convert(mode), form) for form, mode in forms))) == len(forms)


def test_16_bit_grey_images_keep_their_shades(folder: Path) -> None:
    grey = noise_image(84, 112).convert("L")
    wide = Image.fromarray(numpy.asarray(grey).astype(numpy.uint16) * 257)
    [found, expected] = prepared(folder, encoded(wide), encoded(grey))
    assert found == expected


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_broken_exif_is_ignored(folder: Path, form: str) -> None:
    image = noise_image(56, 112)
    [found, expected] = prepared(folder, encoded(image, form, lossless=True, exif=b"Exif\0\0junkjunk"), encoded(image))
    assert found == expected


def test_orientation_is_applied_where_the_rest_of_exif_is_broken(folder: Path) -> None:
    """Pillow writes EXIF again without the orientation, and fails where a value is not of its tag's type."""
    image = noise_image(56, 112)
    entries = (struct.pack("<HHII", *entry) for entry in ((0x0112, 3, 1, 6), (0x0101, 5, 1, 26)))
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + b"".join(entries) + bytes(20)
    [found, expected] = prepared(folder, encoded(image, exif=exif), encoded(image.transpose(Image.Transpose.ROTATE_270)))
    assert found == expected


def test_exif_orientation_is_applied(folder: Path) -> None:
    image, exif = noise_image(56, 112), Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    [turned, expected] = prepared(folder, encoded(image, exif=exif), encoded(image.transpose(Image.Transpose.ROTATE_270)))
    assert (turned.rows, turned.columns) == (2, 4)
    assert turned == expected


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is no image that can be read: PNG, JPEG, WEBP, GIF, BMP can"),
        (b"<svg/>", "is no image that can be read: PNG, JPEG, WEBP, GIF, BMP can"),
        (encoded(noise_image(64, 64), "TIFF"), "is no image that can be read: PNG, JPEG, WEBP, GIF, BMP can"),
        (encoded(noise_image(64, 64))[:2000], "can't be read: image file is truncated"),
        (encoded(noise_image(64, 64), "JPEG")[:500], "can't be read: Truncated File Read"),
        (oversized_png(30000, 20000), "has too many pixels: at most 67108864 are read"),
        (oversized_png(8193, 8192), f"has 8193 x 8192 pixels: at most {MOST_PIXELS} are read"),
        (oversized_png(64, 64), "can't be read: image file is truncated (0 bytes not processed)"),
        (encoded(noise_image(1000, 4)), "can't be prepared: absolute aspect ratio must be smaller than 200, got 250.0"),
    ],
)
def test_unusable_image_is_refused_with_its_number_and_the_reason(folder: Path, data: bytes, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        prepared(folder, encoded(noise_image(60, 60)), data)
    assert str(refused.value).partition(" (")[0] == f"image 2 {reason}".partition(" (")[0]
    assert refused.value.parameter == "inputs"


def test_image_too_thin_for_the_pixel_limit_is_refused(folder: Path) -> None:
    with pytest.raises(Refused, match="image 1 is too thin"):
        prepared(folder, encoded(noise_image(3000, 20)), max_pixels=20_000)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        *[(name, "nothing of it is left where its longer side has") for name in ("mistral3", "pixtral", "lighton_ocr")],
        ("llava", "with 336 pixels on its shorter side it has more than"),
    ],
)
def test_image_of_one_column_is_refused_as_too_thin(family: str, why: str, tmp_path: Path) -> None:
    """For LLaVA it would have 564 million pixels before most of them are cut off."""
    make_image_model(tmp_path, family)
    with pytest.raises(Refused, match=f"image 2 is too thin: {why}"):
        prepared(tmp_path, encoded(noise_image(99, 120)), encoded(noise_image(1, 5000)))


def test_image_that_takes_longer_than_the_time_limit_is_refused(folder: Path) -> None:
    with pytest.raises(Refused, match=r"takes more than 0\.001 s to be read"):
        prepared(folder, encoded(noise_image(2000, 2000), "JPEG"), seconds=0.001)


def test_digests_of_images_depend_on_pixels_and_shape(folder: Path) -> None:
    one, again, other = prepared(folder, *(encoded(noise_image(60, 90, seed=seed)) for seed in (1, 1, 2)))
    assert one == again
    assert one.digest != other.digest
    tall, wide = prepared(folder, encoded(Image.new("RGB", (56, 112))), encoded(Image.new("RGB", (112, 56))))
    assert tall.pixels == wide.pixels
    assert tall.digest != wide.digest


@pytest.mark.usefixtures("own_processes")
def test_code_in_a_models_folder_is_never_run(tmp_path: Path) -> None:
    """Nor does transformers ask whether it may: its question would go to the pipe to the router."""
    make_image_model(tmp_path)
    (tmp_path / "canary.py").write_text(f"open({str(tmp_path / 'sings')!r}, 'w')\nclass Canary: pass\n")
    code = {"auto_map": {"AutoImageProcessor": "canary.Canary", "AutoConfig": "canary.Canary"}}
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(PROCESSORS["qwen2_vl"] | code))
    assert prepared(tmp_path, encoded(noise_image(60, 60)))
    path.write_text(json.dumps(code | {"image_processor_type": "Canary"}))
    with pytest.raises(Refused, match="the server can't prepare images: its log says why"):
        prepared(tmp_path, encoded(noise_image(60, 60)))
    assert not (tmp_path / "sings").exists()


def test_processor_of_the_wrong_type_refuses_images_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_image_model(tmp_path, "mistral3")
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor"}')
    with caplog.at_level(logging.ERROR), pytest.raises(Refused, match="the server can't prepare images"):
        prepared(tmp_path, encoded(noise_image(60, 60)))
    assert "images can't be prepared" in caplog.text


@pytest.mark.usefixtures("own_processes")
def test_folder_without_a_processor_refuses_images_and_is_logged_at_startup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_image_model(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with caplog.at_level(logging.ERROR):
        asyncio.run(ImagePreparer(str(tmp_path), MAX_PIXELS).start())
    assert f"images can't be prepared, and requests with any are refused: {tmp_path} has neither preprocessor_config" in caplog.text
    with pytest.raises(Refused, match="the server can't prepare images: its log says why"):
        prepared(tmp_path, encoded(noise_image(60, 60)))
