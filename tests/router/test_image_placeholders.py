"""Images in prompts: image tokens and their positions, text around tiles, limits, and memory held for pixels."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.proto.images import FORMS
from penstock.router.commands import group
from penstock.router.config import Misconfigured, RouterConfig
from penstock.router.image_placeholders import TIMES, expanded, marked, own_ids
from penstock.router.pixels import Pixels
from penstock.router.prefix_keys import PrefixKeys
from penstock.router.request import Limits, Overloaded, Refused, Request
from penstock.router.text import Tokenizer
from penstock.router.validation import Parameters, Validator
from penstock.tests.router.vision_models import encoded, make_image_model, noise_image

LIMITS = Limits(max_input_tokens=4000, max_total_tokens=4200, vocabulary=300, images=True)
IMAGE = encoded(noise_image(112, 56))  # 2 rows of 4 tokens
OTHER_IMAGE = encoded(noise_image(112, 56, seed=1))
PLACEHOLDER = "<|image_pad|>"


def pixels(rows: int, columns: int, digest: bytes = b"a") -> Pixels:
    return Pixels(rows, columns, (1,), b"x", digest)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return make_image_model(folder)


def validate(
    folder: Path, tokenizer: Tokenizer, prompt: Any, limits: Limits = LIMITS, max_images: int = 3, speculate: int = 4, **given: Any
) -> Request:
    config = RouterConfig(folder=str(folder), model="m", max_images=max_images, speculate=speculate)
    return asyncio.run(Validator(config, tokenizer).request(prompt, Parameters(**given), limits))


def test_image_token_ids_depend_only_on_the_digest_and_are_outside_the_vocabulary() -> None:
    ids = own_ids(b"a", 10_000, 300)
    assert ids == own_ids(b"a", 10_000, 300)
    assert ids[:100] == own_ids(b"a", 100, 300)
    assert sum(one == other for one, other in zip(ids, own_ids(b"b", 10_000, 300), strict=True)) < 5
    assert 300 <= min(ids) < 1 << 22
    assert (1 << 32) - (1 << 22) < max(ids) < 1 << 32
    assert len(set(ids)) > 9_990
    assert all(1 << 31 <= id < 1 << 32 for id in own_ids(b"a", 1000, 1 << 31))


def test_placeholder_is_replaced_by_the_images_tokens() -> None:
    first, second = pixels(2, 3), pixels(1, 2, b"b")
    prompt, images = expanded([1, 9, 2, 9, 3], 9, [first, second], (), 300)
    assert prompt == [1, *own_ids(b"a", 6, 300), 2, *own_ids(b"b", 2, 300), 3]
    assert [(one.start, one.rows, one.columns) for one in images] == [(1, 2, 3), (8, 1, 2)]


def test_row_and_image_end_tokens_are_inserted() -> None:
    prompt, images = expanded([9, 1], 9, [pixels(2, 3)], (7, 8), 300)
    ids = own_ids(b"a", 6, 300)
    assert prompt == [*ids[:3], 7, *ids[3:], 8, 1]
    assert (len(prompt), images[0].start) == (1 + FORMS["mistral3"].length(2, 3), 0)


# The text that transformers puts in place of a template's placeholder.
REPLACED_PLACEHOLDERS = {
    "gemma3": "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    **dict.fromkeys(("gemma4", "gemma4_unified"), "<|image><|image|><image|>"),
    "internvl": "<img><IMG_CONTEXT></img>",
    "minimax_m3_vl": "]<]start of image[>[]<]image[>[]<]end of image[>[",
}


@pytest.mark.parametrize(
    "family",
    [
        "qwen2_vl",
        "glm4v",
        "mistral3",
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "internvl",
        "llava",
        "llava_onevision",
        "pixtral",
        "paddleocr_vl",
        "lighton_ocr",
        "minimax_m3_vl",
        "hy_v4_vl",
        "glm5_next",
    ],
)
def test_request_has_image_tokens_and_pixels_in_the_order_of_placeholders(tmp_path: Path, family: str) -> None:
    tokenizer = make_image_model(tmp_path, family)
    validator = Validator(RouterConfig(folder=str(tmp_path), model="m", max_images=3), tokenizer)
    assert validator.image_placer is not None
    word = validator.image_placer.text
    request = asyncio.run(validator.request(f"a{word}b{word}{word}", Parameters(images=[IMAGE, OTHER_IMAGE, IMAGE]), LIMITS))
    first, second, third = request.images
    assert first.columns == 17 or family != "llava_onevision"  # with several images, each is one tile
    length = FORMS["mistral3" if family == "pixtral" else family].length(first.rows, first.columns)
    image_ids = [request.prompt[one.start : one.start + length] for one in request.images]
    assert image_ids[0] == image_ids[2] != image_ids[1]
    rest = [
        id for position, id in enumerate(request.prompt) if not any(0 <= position - one.start < length for one in request.images)
    ]
    word = REPLACED_PLACEHOLDERS.get(family, word)
    assert rest == [id for id in tokenizer.encode(f"a{word}b{word}{word}") if id != validator.image_placer._place]
    assert first.pixels == third.pixels != second.pixels
    message = group(1, request)
    assert [one.start for one in message.images] == [one.start for one in request.images]
    assert {tuple(one.size) for one in message.images} == {(56, 112) if family == "llava_onevision" else ()}
    assert tuple(message.tokens) == request.prompt


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_idefics_3_tiles_have_transformers_text_between_them(tmp_path: Path, family: str) -> None:
    """Each tile is an image of the request."""
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    tokenizer = make_image_model(tmp_path, family)
    validator = Validator(RouterConfig(folder=str(tmp_path), model="m", max_images=2), tokenizer)
    small = encoded(noise_image(60, 60))
    request = asyncio.run(validator.request("a<image>b<image>", Parameters(images=[OTHER_IMAGE, small]), LIMITS))
    wide, square = (
        get_image_prompt_string(rows, columns, 16, "<fake_token_around_image>", "<image>", "<global-img>")
        for rows, columns in ((2, 4), (4, 4))
    )
    image_id = tokenizer.added_id("<image>")
    expected = tokenizer.encode(f"a{wide}b{square}")
    assert [id if id < 300 else image_id for id in request.prompt] == expected
    assert [(one.rows, one.columns, one.shape) for one in request.images] == [(4, 4, (1, 3, 64, 64))] * (9 + 17)
    starts = [at for at, id in enumerate(expected) if id == image_id][::16]
    assert [one.start for one in request.images] == starts
    assert len({request.prompt[start : start + 16] for start in starts}) == 9 + 17
    assert validator.image_placer is not None
    assert sum(len(one.pixels) for one in request.images) == validator.image_placer._held


def test_llama_4_tiles_have_transformers_text_between_them(tmp_path: Path) -> None:
    """Each tile is an image of the request."""
    from transformers import Llama4Processor

    tokenizer = make_image_model(tmp_path, "llama4")
    validator = Validator(RouterConfig(folder=str(tmp_path), model="m", max_images=2), tokenizer)
    small = encoded(noise_image(60, 60))
    request = asyncio.run(validator.request("a<|image|>b<|image|>", Parameters(images=[OTHER_IMAGE, small]), LIMITS))
    wide, square = (Llama4Processor._prompt_split_image(None, tiles, 16) for tiles in ((1, 2), (1, 1)))
    image_id = tokenizer.added_id("<|patch|>")
    expected = tokenizer.encode(f"a{wide}b{square}")
    assert [id if id < 300 else image_id for id in request.prompt] == expected
    assert [(one.rows, one.columns, one.shape) for one in request.images] == [(4, 4, (1, 3, 64, 64))] * 4
    with pytest.raises(Refused, match="2 places for images"):
        asyncio.run(validator.request("a<|image|><|patch|>", Parameters(images=[OTHER_IMAGE]), LIMITS))


def test_step_3_tiles_have_transformers_text_between_them(tmp_path: Path) -> None:
    """Each tile is an image of the request; the global view has more tokens than a tile."""
    from transformers import Step3p7Processor

    tokenizer = make_image_model(tmp_path, "step3p7")
    validator = Validator(RouterConfig(folder=str(tmp_path), model="m", max_images=2, max_image_pixels=1 << 21), tokenizer)
    large, small = (encoded(noise_image(*size)) for size in ((1000, 700), (60, 60)))
    request = asyncio.run(validator.request("a<im_patch>b<im_patch>", Parameters(images=[large, small]), LIMITS))
    stub = SimpleNamespace(patch_feature_placeholder="<im_patch>" * 81, image_feature_placeholder="<im_patch>" * 169)
    masks = {"num_local_patches": [4, 0], "patch_newline_masks": [[False, True, False, False], [False] * 4]}
    texts = [Step3p7Processor.replace_image_token(stub, masks, number) for number in range(2)]
    image_id = tokenizer.added_id("<im_patch>")
    assert [id if id < 300 else image_id for id in request.prompt] == tokenizer.encode(f"a{texts[0]}b{texts[1]}")
    assert [(one.rows, one.columns) for one in request.images] == [(9, 9)] * 4 + [(13, 13)] * 2


def test_deepseek_ocr_2_tiles_follow_each_other_without_text_between(tmp_path: Path) -> None:
    tokenizer = make_image_model(tmp_path, "deepseek_ocr2")
    config = RouterConfig(folder=str(tmp_path), model="m", max_images=2, max_image_pixels=1 << 23)
    request = asyncio.run(
        Validator(config, tokenizer).request("a<image>b", Parameters(images=[encoded(noise_image(1600, 800))]), LIMITS)
    )
    assert [one.columns for one in request.images] == [144, 144, 257]
    assert [one.start for one in request.images] == [2, 146, 290]
    assert len(request.prompt) == 3 + 144 * 2 + 257


def test_idefics_2_quarters_share_the_token_between_them(tmp_path: Path) -> None:
    """Each quarter is an image of the request; the token between adjacent images is there once."""
    tokenizer = make_image_model(tmp_path, "idefics2")
    validator = Validator(RouterConfig(folder=str(tmp_path), model="m", max_images=3), tokenizer)
    request = asyncio.run(
        validator.request("a<image><image>b<image>", Parameters(images=[OTHER_IMAGE, IMAGE, OTHER_IMAGE]), LIMITS)
    )
    around, image_id = "<fake_token_around_image>", tokenizer.added_id("<image>")
    text = "a<image><image>b<image>".replace("<image>", f"{around}{'<image>' * 6}{around}" * 5).replace(around * 2, around)
    assert [id if id < 300 else image_id for id in request.prompt] == tokenizer.encode(text)
    assert len(request.images) == 15
    image_ids = [request.prompt[one.start : one.start + 6] for one in request.images]
    assert image_ids[:5] == image_ids[10:] != image_ids[5:10]


def test_image_token_id_null_means_the_tokenizers_own(tmp_path: Path) -> None:
    tokenizer = make_image_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_token_id": None}))
    [image] = validate(tmp_path, tokenizer, PLACEHOLDER, images=[IMAGE]).images
    assert image.rows


def test_image_token_id_that_is_not_the_placeholders_is_refused_at_startup(tmp_path: Path) -> None:
    tokenizer = make_image_model(tmp_path, "smolvlm")
    model = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model | {"image_token_id": 1000}))
    with pytest.raises(Misconfigured, match="image_token_id 1000, which the tokenizer does not make of <image>"):
        Validator(RouterConfig(folder=str(tmp_path), model="m", max_images=2, images_asked=True), tokenizer)


def test_placeholder_in_a_prompt_without_images_is_ordinary_text(folder: Path, tokenizer: Tokenizer) -> None:
    request = validate(folder, tokenizer, PLACEHOLDER)
    assert request.prompt == tuple(tokenizer.encode(PLACEHOLDER))
    assert (request.images, request.drafts) == ((), 4)


def test_speculation_is_off_for_prompts_with_images(folder: Path, tokenizer: Tokenizer) -> None:
    assert validate(folder, tokenizer, PLACEHOLDER, images=[IMAGE]).drafts == 0
    assert validate(folder, tokenizer, PLACEHOLDER, images=[IMAGE], speculate=4).drafts == 0


@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        (
            "hi",
            {"images": [IMAGE]},
            "`inputs` has 0 places for images (<|image_pad|>), and 1 images: a text must not have <|image_pad|> itself, and a chat "
            "template must write it for each",
        ),
        (
            PLACEHOLDER * 3,
            {"images": [IMAGE, OTHER_IMAGE]},
            "`inputs` has 3 places for images (<|image_pad|>), and 2 images: a text must not have <|image_pad|> itself, and a chat "
            "template must write it for each",
        ),
        (PLACEHOLDER * 4, {"images": [IMAGE] * 4}, "`inputs` must have at most 3 images (--max-images). Given: 4"),
        (PLACEHOLDER, {"images": [IMAGE], "truncate": 5}, "`truncate` together with images is not supported"),
        (PLACEHOLDER, {"images": [IMAGE], "prompt_logprobs": True}, "`prompt_logprobs` together with images is not supported"),
        (PLACEHOLDER, {"images": [b"nothing"]}, "image 1 is no image that can be read: PNG, JPEG, WEBP, GIF, BMP can"),
        (
            PLACEHOLDER,
            {"images": [IMAGE], "max_images": 0},
            "`inputs` has an image, and only text is supported: the model sees no images, or the server was started without "
            "(--max-images)",
        ),
        # 1 + 8 tokens, though 2 without the image
        (
            PLACEHOLDER,
            {"images": [IMAGE], "limits": Limits(9, 10, 300, images=True), "max_new_tokens": 2},
            "`inputs` tokens + `max_new_tokens` must be ",
        ),
        (
            PLACEHOLDER,
            {"images": [IMAGE], "limits": Limits(8, 100, 300, images=True)},
            "`inputs` must have less than 8 tokens. Given: 9",
        ),
        # The image is invalid too, but the text is checked before it is read.
        (
            "x" * 10 + PLACEHOLDER,
            {"images": [b""], "limits": Limits(8, 100, 300, images=True)},
            "`inputs` must have less than 8 tokens",
        ),
        # The shards' model accepts no images, whatever the router's configuration.
        (PLACEHOLDER, {"images": [IMAGE], "limits": Limits(100, 100, 300)}, "`inputs` has an image, and only text is supported"),
        ([0, 300], {}, "`inputs` has the token id 300; the model knows 0 to 299"),  # image token ids can't be sent
    ],
)
def test_invalid_prompt_with_images_is_refused(
    folder: Path, tokenizer: Tokenizer, prompt: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused) as refused:
        validate(folder, tokenizer, prompt, **given)
    assert str(refused.value).startswith(message)
    assert refused.value.parameter is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "--max-images 1: models of type 'llama' see no images here; leave it out"),
        ({"model_type": "mistral3"}, "has no ('[IMG_BREAK]', '[IMG_END]'), which a prompt with images needs"),
        ({"image_token_id": -200}, "config.json says image_token_id -200, the id of a token is needed"),
        ({"image_token_id": 1 << 32}, "config.json says image_token_id 4294967296, the id of a token is needed"),
        ({"image_token_id": True}, "config.json says image_token_id True, the id of a token is needed"),
    ],
)
def test_max_images_for_a_model_without_images_is_refused_at_startup(
    tmp_path: Path, changes: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only if the option was given; otherwise text alone is served."""
    make_image_model(tmp_path)
    if "mistral3" in changes.values():
        text = (tmp_path / "tokenizer.json").read_text().replace("[IMG_", "[NOT_")
        (tmp_path / "tokenizer.json").write_text(text)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(Misconfigured) as error:
        Validator(RouterConfig(folder=str(tmp_path), model="m", max_images=1, images_asked=True), Tokenizer(tmp_path))
    assert message in str(error.value)
    with pytest.raises(Refused, match="only text is supported"):
        validate(tmp_path, Tokenizer(tmp_path), PLACEHOLDER, max_images=1, images=[IMAGE])
    assert "text alone is served" in caplog.text
    assert message in caplog.text


def test_pixels_of_all_requests_are_limited_and_released_with_the_requests(folder: Path, tokenizer: Tokenizer) -> None:
    """They count while anything refers to them, however the request ends. The images have 112 x 56 pixels in three colours."""
    image_bytes = 3 * 112 * 56

    async def test() -> None:
        config = RouterConfig(folder=str(folder), model="m", max_images=3, payload_limit_total=-(-3 * image_bytes // TIMES))
        validator = Validator(config, tokenizer)
        placer = validator.image_placer
        assert placer is not None

        async def ask(count: int, limits: Limits = LIMITS, last: bytes = IMAGE) -> Request:
            return await validator.request(PLACEHOLDER * count, Parameters(images=[IMAGE] * (count - 1) + [last]), limits)

        first = await ask(1)
        assert placer._held == image_bytes
        with pytest.raises(Overloaded, match=f"more than {TIMES * config.payload_limit_total} bytes together"):
            await ask(3)
        with pytest.raises(Refused, match="image 2 is no image"):
            await ask(2, last=b"")
        with pytest.raises(Refused, match="less than 8 tokens"):
            await ask(1, Limits(8, 100, 300, images=True))
        cancelled = asyncio.create_task(ask(2))
        while placer._held == image_bytes:  # until its first image is prepared  # noqa: ASYNC110
            await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        del cancelled
        assert placer._held == image_bytes
        second = await ask(2)
        assert placer._held == 3 * image_bytes
        del first, second
        assert placer._held == 0
        placer._most_together = image_bytes
        assert len((await ask(3)).images) == 3  # alone
        assert placer._held == 0

    asyncio.run(test())


@pytest.mark.usefixtures("own_processes")
def test_cancelled_request_keeps_the_image_process_alive(folder: Path, tokenizer: Tokenizer) -> None:
    async def test() -> None:
        validator = Validator(RouterConfig(folder=str(folder), model="m", max_images=1), tokenizer)
        assert validator.image_placer is not None
        await validator.image_placer.start()
        workers = validator.image_placer._preparer._workers
        [process] = workers._idle
        cancelled = asyncio.create_task(validator.request(PLACEHOLDER, Parameters(images=[IMAGE]), LIMITS))
        while not workers._jobs:  # noqa: ASYNC110
            await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        request = await validator.request(PLACEHOLDER, Parameters(images=[IMAGE]), LIMITS)
        assert len(request.images) == 1
        assert process in workers._idle
        assert process.alive

    asyncio.run(test())


def test_text_after_images_is_detokenized(tokenizer: Tokenizer) -> None:
    ids = own_ids(b"a", 8, 300)
    before = len(tokenizer._pieces)
    stream = tokenizer.stream(ids)
    assert "".join(stream.push(id).delta for id in tokenizer.encode("née", False)) + stream.end() == "née"
    tokenizer.stream(own_ids(b"b", 8, 300))
    assert len(tokenizer._pieces) - before <= 4  # those of the text
    assert [tokenizer.token_text(id) for id in ids] == [""] * 8


def test_prefix_keys_of_prompts_with_different_images_differ() -> None:
    """Replicas are chosen by what they have cached."""
    prefix_keys = PrefixKeys(4, 16)

    def keys(digest: bytes) -> list[tuple[int, int]]:
        prompt, _ = expanded([1, 2, 3, 4, 9, 5], 9, [pixels(2, 4, digest)], (), 300)
        return prefix_keys.of(tuple(prompt), "")

    assert keys(b"a") == keys(b"a")
    assert keys(b"a")[0] == keys(b"b")[0]
    assert keys(b"a")[1] != keys(b"b")[1]


@pytest.mark.parametrize(
    ("text", "expected", "urls"),
    [
        ("a ![](http://x/y?z=1) b", "a IMG b", ["http://x/y?z=1"]),
        ("![](data:image/png;base64,AA==)![](b))", "IMGIMG)", ["data:image/png;base64,AA==", "b"]),
        ("![x](y) [](z) ![](", "![x](y) [](z) ![](", []),
        ("![](![](a)", "IMG", ["![](a"]),
        ("![]()", "IMG", [""]),
    ],
)
def test_markdown_images_are_found_like_tgi_does(text: str, expected: str, urls: list[str]) -> None:
    assert marked(text, "IMG") == (expected, urls)


def test_unfinished_markdown_images_are_read_in_linear_time() -> None:
    text = "![](" * 500_000
    assert marked(text, "IMG") == (text, [])
