"""The HTTP client: sends one request and records when its tokens arrive. It never retries, and never waits for other requests.

aiohttp alone handles 117,000 to 188,000 events a second (x86, one core); parsing them here costs more.
"""

import asyncio
import json
import time
from collections import Counter
from typing import Any

import aiohttp
import msgspec

from .prompts import Prompt
from .protocols import AnswerState, Api, SseParser
from .record import Record

NOT_AWAITED, REFUSED = "not awaited", "connect"  # kinds of errors
CONNECT = 30.0  # seconds until connected, and until the models are listed, at most
DETAIL = 200  # characters of an error that are kept
CLOCK = time.perf_counter


class Unreachable(Exception):
    """The server does not answer properly before anything is measured. The message is one line that says what would help."""


class Client:
    """A client of the server at a URL. `running` and `tokens` are current counts, for the progress line."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api: Api, fields: dict[str, Any], timeout: float) -> None:
        self.running = 0
        self.tokens = 0
        self.errors: Counter[str] = Counter()
        self._session = session
        self._base = url.rstrip("/").removesuffix("/v1")
        self._api = api
        self._fields = fields
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, CONNECT))

    async def model(self) -> str:
        """The model's name as the server lists it; "" if it does not."""
        limit = min(self._timeout.total or CONNECT, CONNECT)  # nothing is computed
        try:
            async with self._session.get(self._base + "/v1/models", timeout=aiohttp.ClientTimeout(total=limit)) as reply:
                if reply.status == 401:
                    raise Unreachable(f"{self._base} wants an API key: --api-key")
                content = await reply.json(content_type=None) if reply.status == 200 else {}
            return str(content["data"][0]["id"]) if isinstance(content, dict) and content.get("data") else ""
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error  # without aiohttp's settings
            why = getattr(cause, "strerror", None) or str(cause) or f"within {limit:g} s"
            raise Unreachable(f"nobody answers at {self._base} ({why}): start the server, or give another URL") from None
        except (ValueError, KeyError, TypeError, RecursionError, aiohttp.ClientError):
            return ""

    def named(self, model: str) -> None:
        """Sets the model's name in later requests."""
        if model and self._api.path.startswith("/v1"):
            self._fields = {"model": model, **self._fields}

    async def ask(self, prompt: Prompt, record: Record) -> None:
        """Sends a request, and returns when the answer has ended in any way. `record` gets the measurements."""
        record.wanted = prompt.output
        body = json.dumps(self._api.body(prompt, self._fields)).encode()  # msgspec's has no halves of surrogate pairs, and no NaN
        headers = {"Content-Type": "application/json"}
        self.running += 1
        record.sent = CLOCK()
        try:
            async with self._session.post(self._base + self._api.path, data=body, headers=headers, timeout=self._timeout) as reply:
                if reply.status != 200:
                    _fail(record, f"status {reply.status}", await reply.text(errors="replace"))
                else:
                    await self._stream(reply, record)
        except asyncio.CancelledError:
            _fail(record, NOT_AWAITED, "it had not ended when the load had")
            raise
        except TimeoutError as error:  # with words while it connects, which has a time of its own
            _fail(record, "timeout", str(error) or f"no end within {self._timeout.total:g} s")
        except aiohttp.ClientConnectorError as error:
            _fail(record, REFUSED, str(error))
        except (aiohttp.ClientError, ConnectionError) as error:
            _fail(record, "cut", str(error) or type(error).__name__)
        except msgspec.MsgspecError as error:
            _fail(record, "no event", str(error))
        finally:
            self.running -= 1
            record.ended = CLOCK()
            if record.error:
                self.errors[record.error] += 1

    async def _stream(self, reply: aiohttp.ClientResponse, record: Record) -> None:
        lines, state, last = SseParser(), AnswerState(), 0.0
        feed, read, readany = lines.feed, self._api.read, reply.content.readany
        moments, counts = record.moments, record.counts
        while data := await readany():
            now, before = CLOCK(), len(moments)
            for payload in feed(data):
                count = read(payload, state, bool(moments))
                if count > 0:
                    moments.append(now)
                    counts.append(count)
                    self.tokens += count
                elif count < 0:
                    last = now
            record.reads += len(moments) > before
        record.prompt_tokens, record.told_tokens = state.prompt_tokens, state.output_tokens
        # the event with the finish reason was the last token's, which has no text
        if last and state.output_tokens == sum(counts) + 1:
            moments.append(last)
            counts.append(1)
        if state.error:
            _fail(record, "error event", state.error)
        elif not state.finished:
            _fail(record, "cut", "the stream ended before the answer did")
        elif not moments:
            _fail(record, "no tokens", "the answer was empty")


def _fail(record: Record, kind: str, detail: str) -> None:
    line = "".join(each if each.isprintable() else " " for each in detail)  # a page of HTML, or what controls a terminal
    record.error, record.detail = kind, " ".join(line.split())[:DETAIL]
