"""Images from outside: a server of two ranks sees in them what transformers does, by all routes, also after a shard was killed."""

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
from penstock.tests.router.vision_models import encoded, make_folder, picture
from penstock.tests.serving import Server, serve
from penstock.tests.shard.configurations import SMALL
from penstock.tests.shard.test_images import SECTIONS

COUNT = 24
BOS = {"add_special_tokens": True}
PICTURES = [picture(112, 84), picture(61, 90, seed=1), picture(300, 40, seed=2)]
URLS = [f"data:image/png;base64,{base64.b64encode(encoded(one)).decode()}" for one in PICTURES]
TEXT = SMALL | {"vocab_size": 300, "rope_parameters": SECTIONS}
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
    """Of a tiny random model, whose tokenizer has a token for each byte."""
    with serving.scratch() as found:
        tokenizer = make_folder(found)
        word = tokenizer.special_id("<|image_pad|>")
        config = transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, image_token_id=word)
        torch.manual_seed(3)
        model: Any = transformers.Qwen2_5_VLForConditionalGeneration(config)
        with torch.no_grad():
            for values in model.parameters():
                if values.dim() > 1:
                    values.normal_(0, 0.1)
        model.save_pretrained(found)
        yield found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    flags = ("--num-shard", "2", "--kv-pages", "1024", "--page-size", "4", "--max-batch-prefill-tokens", "32")
    with serve(str(folder), *flags, stop=signal.SIGTERM) as found:
        yield found


class Expected:
    """What transformers says of pictures."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self._processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.tokenizer = Tokenizer(folder)

    @torch.inference_mode()
    def __call__(self, text: str, numbers: list[int]) -> list[int]:
        """Tokens behind a prompt with these pictures where it says I."""
        found = self._processor([PICTURES[number] for number in numbers], return_tensors="pt")
        counts = [int(grid.prod()) // 4 for grid in found["image_grid_thw"]]
        words = [f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in counts]
        first, *rest = text.split("I")
        ids = self.tokenizer.encode(first + "".join(word + part for word, part in zip(words, rest, strict=True)))
        kinds = [[int(id == self._model.config.image_token_id) for id in ids]]
        settings = transformers.GenerationConfig(max_new_tokens=COUNT, do_sample=False, eos_token_id=[1 << 20], pad_token_id=0)
        given = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids)),
            "mm_token_type_ids": torch.tensor(kinds),
        }
        answer = self._model.generate(**given, **found, generation_config=settings)
        tokens: list[int] = answer[0, len(ids) :].tolist()
        return tokens


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    return Expected(folder)


def ask(server: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def generate(server: Server, text: str, numbers: list[int]) -> list[int]:
    """The tokens that TGI's route tells."""
    first, *rest = text.split("I")
    inputs = first + "".join(f"![]({URLS[number]}){part}" for number, part in zip(numbers, rest, strict=True))
    parameters = {"max_new_tokens": COUNT, "details": True}
    status, found = ask(server, "/generate", {"inputs": inputs, "parameters": parameters})
    assert status == 200, found
    return [token["id"] for token in found["details"]["tokens"]]


ASKED = [("What is I?", [0]), ("I and I", [1, 2]), ("I, I and I again", [0, 1, 0]), ("Tall, or wide: I", [2])]


def test_tokens_equal_transformers(server: Server, expected: Expected) -> None:
    """All at once, twice each: some of it is found in the cache."""
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda each: generate(server, *each), ASKED * 2))
    assert found == [expected(*each) for each in ASKED] * 2
    assert len({tuple(tokens) for tokens in found}) == len(ASKED)


def test_openais_client(server: Server, expected: Expected) -> None:
    """Whole and streamed; usage counts an image's tokens."""
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
    told = [generate(server, prompt, [0])]
    assert told == [expected(prompt, [0])]
    assert whole.choices[0].message.content == streamed
    status, plain = ask(
        server, "/generate", {"inputs": f"[user]What is ![]({URLS[0]})[assistant]", "parameters": {"max_new_tokens": COUNT}}
    )
    assert (status, plain["generated_text"]) == (200, streamed)


def test_it_goes_on_where_a_shard_was_killed(server: Server, expected: Expected) -> None:
    shard = next(pid for pid, line in server.children().items() if "penstock.shard" in line)
    with ThreadPoolExecutor(8) as threads:
        going = [threads.submit(generate, server, *each) for each in ASKED * 2]
        os.kill(shard, signal.SIGKILL)
        assert [each.result() for each in going] == [expected(*each) for each in ASKED] * 2


def test_text_is_served_where_images_can_not_be(folder: Path, server: Server) -> None:
    """And an image is refused."""
    with serving.scratch() as other:
        for path in folder.iterdir():
            if path.is_file():
                (other / path.name).write_bytes(path.read_bytes())
        (other / "preprocessor_config.json").write_text('{"image_processor_type": "Nothing"}')
        with serve(str(other), "--kv-pages", "64", stop=signal.SIGTERM) as blind:
            assert "text alone is served" in blind.log
            body: dict[str, Any] = {"inputs": "What is this?", "parameters": {"max_new_tokens": COUNT}}
            assert ask(blind, "/generate", body) == ask(server, "/generate", body)
            parts = [{"type": "image_url", "image_url": {"url": URLS[0]}}]
            status, found = ask(blind, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
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
def test_what_is_refused(server: Server, body: dict[str, Any], words: str) -> None:
    status, found = ask(server, "/generate", body)
    assert status == 422
    assert words in found["error"]
