"""Images over HTTP: a server with two ranks generates transformers' tokens for prompts with images, by TGI's and OpenAI's
routes, also after a shard was killed.
"""

import base64
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

from penstock.router.text import Tokenizer
from penstock.tests import serving
from penstock.tests.router.vision_models import encoded, make_image_model, noise_image
from penstock.tests.serving import Server, serve
from penstock.tests.shard.configurations import SMALL
from penstock.tests.shard.test_multimodal_text import MROPE

COUNT = 24
BOS = {"add_special_tokens": True}
PICTURES = [noise_image(112, 84), noise_image(61, 90, seed=1), noise_image(300, 40, seed=2)]
URLS = [f"data:image/png;base64,{base64.b64encode(encoded(one)).decode()}" for one in PICTURES]
TEXT = SMALL | {"vocab_size": 300, "rope_parameters": MROPE}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """The folder of a tiny random model, whose tokenizer has a token for each byte."""
    with serving.scratch() as model_folder:
        tokenizer = make_image_model(model_folder)
        image_token = tokenizer.special_id("<|image_pad|>")
        config = transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, image_token_id=image_token)
        torch.manual_seed(3)
        model: Any = transformers.Qwen2_5_VLForConditionalGeneration(config)
        with torch.no_grad():
            for values in model.parameters():
                if values.dim() > 1:
                    values.normal_(0, 0.1)
        model.save_pretrained(model_folder)
        yield model_folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    flags = ("--num-shard", "2", "--kv-pages", "1024", "--page-size", "4", "--max-batch-prefill-tokens", "32")
    with serve(str(folder), *flags, stop=signal.SIGTERM) as started:
        yield started


class Reference:
    """transformers' greedy tokens for prompts with images."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self._processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.tokenizer = Tokenizer(folder)

    @torch.inference_mode()
    def __call__(self, text: str, numbers: list[int]) -> list[int]:
        """The tokens generated for a prompt in which each I stands for an image, given by its number in PICTURES."""
        images = self._processor([PICTURES[number] for number in numbers], return_tensors="pt")
        counts = [int(grid.prod()) // 4 for grid in images["image_grid_thw"]]
        image_texts = [f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts]
        first, *rest = text.split("I")
        ids = self.tokenizer.encode(first + "".join(image_text + part for image_text, part in zip(image_texts, rest, strict=True)))
        kinds = [[int(id == self._model.config.image_token_id) for id in ids]]
        settings = transformers.GenerationConfig(max_new_tokens=COUNT, do_sample=False, eos_token_id=[1 << 20], pad_token_id=0)
        inputs = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids)),
            "mm_token_type_ids": torch.tensor(kinds),
        }
        answer = self._model.generate(**inputs, **images, generation_config=settings)
        tokens: list[int] = answer[0, len(ids) :].tolist()
        return tokens


@pytest.fixture(scope="module")
def expected(folder: Path) -> Reference:
    return Reference(folder)


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def generate(server: Server, text: str, numbers: list[int]) -> list[int]:
    """The tokens that /generate returns. Each I in `text` stands for an image, given by its number in PICTURES."""
    first, *rest = text.split("I")
    inputs = first + "".join(f"![]({URLS[number]}){part}" for number, part in zip(numbers, rest, strict=True))
    parameters = {"max_new_tokens": COUNT, "details": True}
    status, found = post(server, "/generate", {"inputs": inputs, "parameters": parameters})
    assert status == 200, found
    return [token["id"] for token in found["details"]["tokens"]]


PROMPTS = [("What is I?", [0]), ("I and I", [1, 2]), ("I, I and I again", [0, 1, 0]), ("Tall, or wide: I", [2])]


def test_prompts_with_images_get_transformers_tokens(server: Server, expected: Reference) -> None:
    """Each prompt is sent twice, all at once, so that some are found in the prefix cache."""
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda each: generate(server, *each), PROMPTS * 2))
    assert found == [expected(*each) for each in PROMPTS] * 2
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)


def test_openai_client_gets_the_same_answer_whole_and_streamed(server: Server, expected: Reference) -> None:
    """The usage counts the image's tokens."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    parts = [{"type": "text", "text": "What is "}, {"type": "image_url", "image_url": {"url": URLS[0]}}]
    messages: Any = [{"role": "user", "content": parts}]
    whole = client.chat.completions.create(model="m", messages=messages, max_tokens=COUNT, temperature=0, extra_body=BOS)
    stream = client.chat.completions.create(
        model="m", messages=messages, max_tokens=COUNT, temperature=0, extra_body=BOS, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    prompt = "[user]What is I[assistant]"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(expected.tokenizer.encode(prompt)) - 1 + 2 + 12
    answers = [generate(server, prompt, [0])]
    assert answers == [expected(prompt, [0])]
    assert whole.choices[0].message.content == streamed
    status, plain = post(
        server, "/generate", {"inputs": f"[user]What is ![]({URLS[0]})[assistant]", "parameters": {"max_new_tokens": COUNT}}
    )
    assert (status, plain["generated_text"]) == (200, streamed)


def test_requests_with_images_continue_after_a_shard_is_killed(server: Server, expected: Reference) -> None:
    shard = next(pid for pid, line in server.children().items() if "penstock.shard" in line)
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(generate, server, *each) for each in PROMPTS * 2]
        os.kill(shard, signal.SIGKILL)
        assert [each.result() for each in running] == [expected(*each) for each in PROMPTS] * 2


def test_text_is_served_and_images_are_refused_if_the_image_processor_is_unknown(folder: Path, server: Server) -> None:
    """An image is refused with status 400."""
    with serving.scratch() as copy:
        for path in folder.iterdir():
            if path.is_file():
                (copy / path.name).write_bytes(path.read_bytes())
        (copy / "preprocessor_config.json").write_text('{"image_processor_type": "Nothing"}')
        with serve(str(copy), "--kv-pages", "64", stop=signal.SIGTERM) as text_only_server:
            assert "text alone is served" in text_only_server.log
            body: dict[str, Any] = {"inputs": "What is this?", "parameters": {"max_new_tokens": COUNT}}
            assert post(text_only_server, "/generate", body) == post(server, "/generate", body)
            parts = [{"type": "image_url", "image_url": {"url": URLS[0]}}]
            status, found = post(text_only_server, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
            assert status == 400
            assert "only text is supported" in found["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"inputs": "![](data:image/png;base64,AAAA)"}, "image 1 is no image that can be read"),
        ({"inputs": "![](http://127.0.0.1/a.png)"}, "public address"),
        ({"inputs": f"![]({URLS[0]})" * 9}, "9"),
        ({"inputs": f"![]({URLS[0]})", "parameters": {"decoder_input_details": True}}, "decoder_input_details"),
    ],
)
def test_unreadable_private_or_too_many_images_are_refused_with_422(server: Server, body: dict[str, Any], words: str) -> None:
    status, found = post(server, "/generate", body)
    assert status == 422
    assert words in found["error"]
