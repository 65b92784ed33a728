"""Upper limits of request parameters on all routes: exceeding one is refused quickly, by name, before any work is done."""

import time
from typing import Any

import pytest

from penstock.router.text import Tokenizer
from penstock.tests.router.fake_batcher import Server, make_tokenizer, serve

HUGE = 10**9
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = [{"type": "function", "function": {"name": f"f{number}", "parameters": SCHEMA}} for number in range(3000)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


def tgi(**parameters: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"inputs": "Hi", "parameters": parameters}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "Hi", **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **fields}


EXCESSIVE = [
    ("best_of", tgi(best_of=HUGE, do_sample=True)),
    ("best_of", tgi(best_of=17, do_sample=True)),
    ("num_beams", tgi(num_beams=HUGE)),
    ("num_beams", tgi(num_beams=9)),
    ("num_return_sequences", tgi(num_beams=2, num_return_sequences=HUGE)),
    ("top_n_tokens", tgi(top_n_tokens=6)),
    ("stop", tgi(stop=["x"] * 5)),
    ("stop", tgi(stop=["x" * 1025])),
    ("stop", tgi(stop=["x"] * 100_000)),
    ("logit_bias", tgi(logit_bias={str(id): 1 for id in range(300, 20_000)})),
    ("max_new_tokens", tgi(max_new_tokens=HUGE)),
    ("grammar", tgi(grammar={"type": "regex", "value": "a" * 70_000})),
    ("n", completion(n=HUGE)),
    ("n", completion(n=17)),
    ("best_of", completion(n=1, best_of=HUGE)),
    ("prompt", completion(prompt=["Hi"] * 5)),
    ("prompt", completion(prompt=["Hi"] * 100_000)),
    ("logprobs", completion(logprobs=21)),
    ("prompt_logprobs", completion(prompt_logprobs=21)),
    ("stop", completion(stop=["x"] * 5)),
    ("stop_token_ids", completion(stop_token_ids=[300])),
    ("n", chat(n=HUGE)),
    ("top_logprobs", chat(logprobs=True, top_logprobs=21)),
    ("stop", chat(stop=["x"] * 5)),
    ("logit_bias", chat(logit_bias={"300": 1})),
    ("tools", chat(tools=TOOLS, tool_choice="required")),
    ("response_format", chat(response_format={"type": "json_object", "value": None} | {"type": "regex", "value": "a" * 70_000})),
]


@pytest.mark.parametrize(
    "index", range(len(EXCESSIVE)), ids=[f"{path} {name} {index}" for index, (name, (path, _)) in enumerate(EXCESSIVE)]
)
def test_excessive_parameter_is_refused_quickly_and_by_name(tokenizer: Tokenizer, index: int) -> None:
    name, (path, body) = EXCESSIVE[index]

    async def test(server: Server) -> None:
        start = time.process_time()  # of test and server, however busy the machine is
        status, answer, _ = await server.post(path, body)
        assert time.process_time() - start < 2
        assert 400 <= status < 500, answer
        assert name in str(answer)
        assert server.batcher.requests == []

    serve(tokenizer, test)
