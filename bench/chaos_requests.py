"""The requests of `penstock bench --chaos`, and the comparison of their answers. Knows no server."""

import json
import time
from typing import Any

import aiohttp

Json = dict[str, Any]

LENGTH = 80  # tokens of an answer
TOKENS, COUNT = "list of tokens", "count of tokens"  # keys of an answer beside the texts of its choices
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "legs": {"type": "integer", "maximum": 8}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}


def requests() -> list[tuple[str, Json]]:
    """Deterministic requests, one for each kind of decoding."""
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    endless = {"max_tokens": LENGTH, "ignore_eos": True, **streamed}
    schema = {"type": "json_schema", "json_schema": {"name": "record", "schema": RECORD}}
    chat = {"messages": [{"role": "user", "content": "Give me a record of a dog as JSON."}], "max_tokens": LENGTH, **streamed}
    stops = {"max_new_tokens": LENGTH, "details": True, "stop": ["ear"], "seed": 3, "temperature": 0.9}
    numbers = {"type": "regex", "value": "(one|two|three)( and (one|two|three))*"}
    bound = {"max_new_tokens": LENGTH, "details": True, "grammar": numbers}
    again = "One dog, two dogs, three dogs. " * 6  # easily predicted by drafts
    return [
        ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, **endless}),
        ("/v1/completions", {"prompt": "Tell me a story of a dog. " * 8, "temperature": 0.9, "seed": 1, "top_p": 0.9, **endless}),
        ("/v1/completions", {"prompt": "There was", "n": 2, "temperature": 1.0, "seed": 2, "presence_penalty": 0.5, **endless}),
        ("/v1/completions", {"prompt": "Once there was a", "num_beams": 3, "n": 2, **endless}),
        ("/v1/completions", {"prompt": again, "temperature": 0, **endless}),
        ("/v1/completions", {"prompt": again, "n": 2, "temperature": 0.5, "seed": 5, **endless}),
        ("/generate_stream", {"inputs": "The end is", "parameters": stops}),
        ("/generate_stream", {"inputs": again, "parameters": {**bound, "seed": 6, "temperature": 0.7}}),
        ("/v1/chat/completions", {**chat, "temperature": 1.0, "seed": 4, "response_format": schema}),
        ("/v1/chat/completions", {**chat, "temperature": 1.0, "n": 2, "seed": 7, "response_format": schema}),
        *(("/v1/completions", {"prompt": f"Number {n}", "temperature": n % 2, "seed": n, **endless}) for n in range(4)),
    ]


def undrafted(body: Json) -> Json:
    """The same request without speculative decoding."""
    if "parameters" in body:
        return {**body, "parameters": {**body["parameters"], "speculate": 0}}
    return {**body, "speculate": 0}


class Stream:
    """The events of an answer, as they come."""

    def __init__(self) -> None:
        self.data = b""
        self.pause = 0.0  # the longest between two reads of events; keep-alives do not count

    async def read(self, response: aiohttp.ClientResponse, leave_after: int = 0) -> bool:
        """Reads the whole answer. Stops after `leave_after` reads, if that is not 0, and then returns False."""
        last, count = 0.0, 0
        async for chunk in response.content.iter_any():
            self.data += chunk
            if not chunk.strip():  # blank lines keep the connection alive
                continue
            now = time.monotonic()
            self.pause, last, count = max(self.pause, now - last if last else 0.0), now, count + 1
            if count == leave_after:
                return False
        return True

    def answer(self) -> dict[str, str]:
        """The text of each choice with its finish reason, and the number of tokens, some of which have no text. Raises ValueError
        for what is no complete answer."""
        texts: dict[str, str] = {}
        open_choices: set[str] = set()
        done = False
        for line in self.data.decode().split("\n"):  # and nowhere else: JSON may have line separators of Unicode in it
            if not line.startswith("data:"):
                continue
            if done:
                raise ValueError(f"something after the end: {line}")
            if line.rstrip() == "data: [DONE]":
                done = True
                continue
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                raise ValueError(f"an error event: {line}")
            if "token" in event:
                texts["0"] = texts.get("0", "") + event["token"]["text"] + (event["generated_text"] or "")
                texts[TOKENS] = f"{texts.get(TOKENS, '')} {event['token']['id']}"
                done = event["generated_text"] is not None
                if details := event.get("details"):
                    texts[COUNT] = f"{details['finish_reason']} {details['generated_tokens']} {details['input_length']}"
            for choice in event.get("choices", ()):
                text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                index = str(choice["index"])
                texts[index] = texts.get(index, "") + text + (choice["finish_reason"] or "")
                (open_choices.discard if choice["finish_reason"] else open_choices.add)(index)
            if usage := event.get("usage"):
                texts[COUNT] = f"{usage['completion_tokens']} {usage['prompt_tokens']}"
        if open_choices or not (done and texts):
            raise ValueError(f"the stream ended before the answer did: {self.data[-200:].decode(errors='replace')}")
        return texts


def difference(came: dict[str, str], expected: dict[str, str]) -> str:
    """Describes the first choice that differs, or the list or count of tokens, and where."""
    for index in sorted(came.keys() | expected.keys()):
        own, other = came.get(index, ""), expected.get(index, "")
        if own != other:
            shorter = min(len(own), len(other))
            same = next((place for place in range(shorter) if own[place] != other[place]), shorter)
            which = f"choice {index}" if index.isdigit() else f"the {index}"
            return f"{which} has {own[same : same + 40]!r} after {same} characters, not {other[same : same + 40]!r}"
    return "nothing differs"
