"""Images over real HTTP with a fake batcher, on all routes that accept or refuse them."""

import base64
import logging
import weakref
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from penstock.router.record import begin
from penstock.router.request import Item, Limits, Request, Sink
from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import Server, serve, until
from penstock.tests.router.vision_models import encoded, make_image_model, noise_image

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
LIMITS = Limits(max_input_tokens=100, max_total_tokens=128, vocabulary=300, images=True)


def data_url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


RED, BLUE = (data_url(encoded(noise_image(112, 56, seed=seed))) for seed in (1, 2))  # 2 rows of 4 tokens
TEXT = {"type": "text", "text": "What is in "}
PART = {"type": "image_url", "image_url": {"url": RED}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return make_image_model(folder)


def prompt_text(tokenizer: Tokenizer, request: Request) -> str:
    """The prompt, with I for each image token."""
    return "".join("I" if id >= LIMITS.vocabulary else tokenizer.token_text(id) for id in request.prompt)


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 10}


@pytest.mark.parametrize(
    "part",
    [
        PART,
        {"type": "image_url", "image_url": RED},
        {"type": "image_url", "image_url": {"url": RED, "detail": "low"}},
        {"type": "input_image", "image_url": RED, "detail": "auto"},
        {"type": "image", "image": RED},
    ],
)
def test_chat_has_image_tokens_at_the_positions_of_its_images(folder: Path, tokenizer: Tokenizer, part: dict[str, Any]) -> None:
    async def test(server: Server) -> None:
        other = {"type": "image_url", "image_url": {"url": BLUE}}
        status, answer, _ = await server.post(CHAT, user(TEXT, part, other, {"type": "text", "text": "?"}))
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello you")
        [request] = server.batcher.requests
        image = f"<|vision_start|>{'I' * 8}<|vision_end|>"
        assert prompt_text(tokenizer, request) == f"[user]What is in {image}{image}?[assistant]"
        first, second = request.images
        assert request.prompt[first.start : first.start + 8] != request.prompt[second.start : second.start + 8]
        assert all(id >= 300 for one in request.images for id in request.prompt[one.start : one.start + 8])
        assert (first.rows, first.columns, first.shape) == (2, 4, (32, 3, 14, 14))
        assert answer["usage"]["prompt_tokens"] == len(request.prompt)
        chunks = await server.events(CHAT, user(part) | {"stream": True})
        assert chunks.pop() == "[DONE]"
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello you"
        assert server.batcher.requests[1].images[0].pixels == first.pixels

    serve(tokenizer, test, settings={"folder": str(folder), "max_images": 2}, limits=LIMITS)


def test_images_of_several_messages_are_in_order(folder: Path, tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        other = {"type": "image_url", "image_url": {"url": BLUE}}
        messages = [
            {"role": "user", "content": [PART]},
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": [{"type": "text", "text": "and "}, other, PART]},
        ]
        status, _, _ = await server.post(CHAT, {"messages": messages, "max_tokens": 5})
        assert status == 200
        [request] = server.batcher.requests
        first, second, third = request.images
        assert first.pixels == third.pixels != second.pixels
        assert first.start < second.start < third.start

    serve(tokenizer, test, settings={"folder": str(folder), "max_images": 3}, limits=LIMITS)


def test_responses_route_accepts_input_images(folder: Path, tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        parts = [{"type": "input_text", "text": "What is in "}, {"type": "input_image", "image_url": RED, "detail": "high"}]
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 10}
        status, answer, _ = await server.post(RESPONSES, body)
        assert (status, answer["output"][0]["content"][0]["text"]) == (200, "Hello you")
        [request] = server.batcher.requests
        assert prompt_text(tokenizer, request) == f"[user]What is in <|vision_start|>{'I' * 8}<|vision_end|>[assistant]"
        assert answer["usage"]["input_tokens"] == len(request.prompt)

    serve(tokenizer, test, settings={"folder": str(folder), "max_images": 1}, limits=LIMITS)


def test_markdown_images_in_tgis_inputs(folder: Path, tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        inputs = f"![]({RED})What is ![](b)?"
        status, answer, _ = await server.post("/generate", {"inputs": inputs})
        assert (status, answer["error"]) == (
            422,
            "Input validation error: image 2 must be a URL that begins with data:, http:// or https://",
        )
        inputs = f"![]({RED})What is in ![]({BLUE})?"
        status, answer, response = await server.post("/generate", {"inputs": inputs, "parameters": {"return_full_text": True}})
        assert (status, answer["generated_text"]) == (200, inputs + "Hello you")
        assert response.headers["x-compute-characters"] == str(len(inputs))
        image = f"<|vision_start|>{'I' * 8}<|vision_end|>"
        assert prompt_text(tokenizer, server.batcher.requests[0]) == f"<s>{image}What is in {image}?"
        assert len(await server.events("/generate_stream", {"inputs": inputs})) == 10
        assert server.batcher.requests[1].prompt == server.batcher.requests[0].prompt
        body = {"inputs": inputs, "parameters": {"decoder_input_details": True}}
        status, answer, _ = await server.post("/generate", body)
        assert answer["error"] == "Input validation error: `decoder_input_details` together with images is not supported"
        status, answer, _ = await server.post("/vertex", {"instances": [{"inputs": inputs}, user(PART)]})
        assert (status, answer) == (200, {"predictions": ["Hello you"] * 2})
        assert [len(request.images) for request in server.batcher.requests[2:]] == [2, 1]

    serve(tokenizer, test, settings={"folder": str(folder), "max_images": 2}, limits=LIMITS)


def test_markdown_is_text_if_the_model_has_no_images(tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, _, _ = await server.post("/generate", {"inputs": "![](http://x) <|image_pad|>"})
        assert status == 200
        assert prompt_text(tokenizer, server.batcher.requests[0]) == "<s>![](http://x) <|image_pad|>"
        assert (await server.post("/tokenize", {"inputs": "![](http://x)"}))[0] == 200

    serve(tokenizer, test, limits=LIMITS)


TOO_MANY = "`messages` must have at most 2 images (--max-images). Given: 3"
TOO_MANY_PLACEHOLDERS = (
    "`messages` has 2 places for images (<|image_pad|>), and 1 images: a text must not have <|image_pad|> itself, and a chat "
    "template must write it for each"
)
INVALID_SCHEME = "image 1 must be a URL that begins with data:, http:// or https://"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, user(PART, PART, PART), TOO_MANY),
        (CHAT, user(PART, {"type": "text", "text": "<|image_pad|>"}), TOO_MANY_PLACEHOLDERS),
        (CHAT, user(PART) | {"truncate_prompt_tokens": 5}, "`truncate_prompt_tokens` together with images is not supported"),
        (CHAT, user(PART) | {"prompt_logprobs": 1}, "`prompt_logprobs` together with images is not supported"),
        (CHAT, user({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), INVALID_SCHEME),
        (CHAT, user({"type": "image_url"}), "`messages[0].content` has an image without a URL in `image_url`"),
        (
            CHAT,
            user({"type": "image_url", "image_url": {"url": 5}}),
            "`messages[0].content` has an image without a URL in `image_url`",
        ),
        (CHAT, user({"type": "image"}), "`messages[0].content` has an image without a URL in `image`"),
        (
            CHAT,
            user({"type": "video_url", "video_url": {"url": RED}}),
            "`messages[0].content` has a part that is neither a text nor an image: only these are supported",
        ),
        (CHAT, user({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}), "image 1 is no image that can be read"),
        (
            CHAT,
            user({"type": "image_url", "image_url": "http://127.0.0.1:1/?x"}),
            "image 1 can't be had from 127.0.0.1: it can't be reac",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "`input[0].content` has an image without a URL in `image_url`",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": RED}] * 3}]},
            TOO_MANY.replace("messages", "input"),
        ),
        ("/tokenize", user(PART), "Input validation error: `messages` with images is not supported on this route"),
        ("/tokenize", {"inputs": f"![]({RED})hi"}, "Input validation error: `inputs` with images is not supported on this route"),
        ("/chat_tokenize", user(PART), "Input validation error: `messages` with images is not supported on this route"),
        ("/generate", {"inputs": f"![]({RED})" * 3}, "Input validation error: " + TOO_MANY.replace("messages", "inputs")),
    ],
)
def test_invalid_or_unsupported_images_are_refused(
    folder: Path, tokenizer: Tokenizer, path: str, body: dict[str, Any], message: str
) -> None:
    async def test(server: Server) -> None:
        status, answer, _ = await server.post(path, body)
        assert status == (400 if path.startswith("/v1") else 422)
        error = answer["error"]["message"] if path.startswith("/v1") else answer["error"]
        assert error.startswith(message)
        assert not server.batcher.requests

    serve(tokenizer, test, settings={"folder": str(folder), "max_images": 2}, limits=LIMITS)


def test_image_is_refused_if_the_chat_template_takes_only_text(tmp_path: Path) -> None:
    make_image_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    tokenizer = Tokenizer(tmp_path)

    async def test(server: Server) -> None:
        _, answer, _ = await server.post(CHAT, user(PART))
        assert answer["error"]["message"] == "a message's content has a part of type 'image': the chat template takes only text"

    serve(tokenizer, test, settings={"folder": str(tmp_path), "max_images": 1})


def test_timeout_includes_image_preprocessing(folder: Path, tokenizer: Tokenizer) -> None:
    async def test(server: Server) -> None:
        status, _, _ = await server.post(CHAT, user(PART) | {"timeout": 0.001})
        assert status == 504

    serve(tokenizer, test, settings={"folder": str(folder), "max_images": 1}, limits=LIMITS)


def test_images_are_released_after_the_response(folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even though the result of checking the request's grammar is cached."""

    async def test(server: Server) -> None:
        submit = server.batcher.submit

        def recorded(request: Request, sink: Sink | None = None) -> AsyncGenerator[list[Item], None]:
            begin(request, 0.0)
            return submit(request, sink)

        monkeypatch.setattr(server.batcher, "submit", recorded)
        format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        status, _, _ = await server.post(CHAT, user(PART) | {"response_format": format})
        assert status == 200
        image = weakref.ref(server.batcher.requests.pop().images[0])
        await until(lambda: image() is None)

    serve(tokenizer, test, settings={"folder": str(folder), "max_images": 1}, limits=LIMITS)


def test_failing_image_preprocessing_is_logged_at_startup_and_refuses_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_image_model(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()

    async def test(server: Server) -> None:
        await until(lambda: "images can't be prepared, and requests with any are refused" in caplog.text)
        status, answer, _ = await server.post(CHAT, user(PART))
        assert (status, answer["error"]["message"]) == (400, "the server can't prepare images: its log says why")
        status, _, _ = await server.post(CHAT, user(TEXT))
        assert status == 200

    with caplog.at_level(logging.ERROR):
        serve(tokenizer, test, settings={"folder": str(tmp_path), "max_images": 1}, limits=LIMITS)
