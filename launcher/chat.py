"""`penstock chat`: an interactive client for any server with OpenAI's API, in a terminal or in a pipe. Knows HTTP, and nothing
inside a server.

In a terminal answers stream as they come, and Ctrl-C stops one and keeps the conversation. In a pipe all of stdin is one question.
"""

import argparse
import http.client
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from .command_line import Parser
from .errors import UsageError
from .paths import expanded
from .url import connection, split

DEFAULT_URL = "http://localhost:3000"
CONNECT, ANSWER = 10.0, 600.0  # seconds: until connected, and until the models are listed; and between two events
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters that could control the terminal
BLOCK = '"""'
HELP = """/help                 this
/reset                forget the talk, keep the system prompt and the settings
/system [TEXT]        set the system prompt, or take it away
/set [NAME VALUE]     send a field with every request, such as /set temperature 0.7; alone: show them
/unset NAME           send it no more
/retry                ask the last question again
/save FILE            write the talk as JSON
/load FILE            go on with one that was saved
/quit                 or Ctrl-D

A line that ends in a backslash goes on; a text of many lines stands between two lines of \"\"\".
Ctrl-C stops an answer. What has come of it stays in the talk."""

Message = dict[str, Any]


class Failed(Exception):
    """The server gave no answer this time. The message is one line for people."""


@dataclass(slots=True)
class StreamDelta:
    """The content of one stream event."""

    text: str = ""
    thought: str = ""  # reasoning, where the model shows it
    tokens: int = 0  # of the whole answer so far; 0: unknown
    reason: str = ""  # finish reason


@dataclass(slots=True)
class AnswerSpeed:
    """The speed of an answer: when its first and last pieces came, and how many tokens."""

    asked: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    events: int = 0
    tokens: int = 0  # as counted by the server

    def came(self, piece: StreamDelta) -> None:
        """Records a piece that has just come."""
        self.tokens = piece.tokens or self.tokens
        if piece.text or piece.thought:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.events += 1

    def __str__(self) -> str:
        if not self.events:
            return "no token"
        count = self.tokens or self.events
        text = f"{count} tokens, first after {(self.first - self.asked) * 1e3:.0f} ms"
        return f"{text}, {(count - 1) / (self.last - self.first):.1f} tokens/s" if self.last > self.first else text


@dataclass(slots=True)
class Conversation:
    """The conversation so far, and the fields that go with every request."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The body of a request for the next answer."""
        head: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        options = {"stream_options": {"include_usage": True}}
        return {"messages": [*head, *self.messages], **options, **self.fields, "stream": True}  # only streams are read here

    def back(self) -> bool:
        """Removes messages back to the last question. Returns whether there is one."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return bool(self.messages)

    def save(self, path: Path) -> None:
        """Writes the conversation as /load reads it."""
        content = {"system": self.system, "messages": self.messages, "fields": self.fields}
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # half of a surrogate pair becomes JSON's escape

    def load(self, path: Path) -> None:
        """Reads a saved conversation. Raises OSError, ValueError, RecursionError."""
        content = json.loads(path.read_text(encoding="utf-8"))
        kept = content if isinstance(content, dict) else {}
        messages, fields = kept.get("messages"), kept.get("fields", {})
        if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
            raise ValueError(f"{path} holds no talk that was saved here")
        if not isinstance(fields, dict):
            raise ValueError(f"{path}: fields is no object")
        self.system, self.messages, self.fields = str(kept.get("system") or ""), messages, fields


class Server:
    """A client of the server at a URL."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = split(url)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self.base = self._url.geturl()

    def model(self) -> str:
        """The first model that the server lists; "" if it lists none. Raises Failed when nobody answers."""
        with self._ask("GET", "/v1/models") as reply:
            if reply.status in (401, 403):
                raise Failed(_message(reply))
            with suppress(OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
                return str(json.loads(reply.read())["data"][0]["id"]) if reply.status == 200 else ""
        return ""

    def stream(self, body: dict[str, Any]) -> Iterator[StreamDelta]:
        """Streams an answer. Closing the iterator cancels it on the server, too. Raises Failed."""
        with self._ask("POST", "/v1/chat/completions", body) as reply:
            if reply.status != 200:
                raise Failed(_message(reply))
            ended = False
            try:
                for line in reply:
                    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                        piece = _piece(data)
                        ended = ended or bool(piece.reason)
                        yield piece
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise Failed(f"the answer was cut off: {error}") from None
            if not ended:
                raise Failed("the answer was cut off")

    @contextmanager
    def _ask(self, method: str, route: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """The response, whose connection is closed when the context ends. Raises Failed."""
        with closing(connection(self._url, CONNECT)) as connected:
            try:
                connected.connect()
                connected.sock.settimeout(ANSWER if body else CONNECT)
                connected.request(method, self._url.path + route, None if body is None else json.dumps(body), self._headers)
                reply = connected.getresponse()
            except (OSError, http.client.HTTPException) as error:
                why = getattr(error, "strerror", None) or error
                raise Failed(f"nobody answers at {self.base} ({why}): start `penstock serve`, or give another URL") from None
            yield reply


def _piece(data: bytes) -> StreamDelta:
    """The content of an event. Raises Failed for an error in the middle of a stream, ValueError for what is no event."""
    try:
        return _delta(json.loads(data))
    except (AttributeError, TypeError, OverflowError, RecursionError):
        raise ValueError(f"no event of a chat: {data[:80].decode(errors='replace')}") from None


def _delta(event: dict[str, Any]) -> StreamDelta:
    if event.get("error"):
        error = event["error"]
        raise Failed(str(error.get("message", error) if isinstance(error, dict) else error))
    tokens = int((event.get("usage") or {}).get("completion_tokens") or 0)
    choice = next((one for one in event.get("choices") or () if not one.get("index")), None)  # of several choices the first
    if choice is None:
        return StreamDelta(tokens=tokens)
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return StreamDelta("" + (delta.get("content") or ""), "" + thought, tokens, choice.get("finish_reason") or "")


def _message(reply: http.client.HTTPResponse) -> str:
    """The error message of an error response."""
    data = b""
    try:
        data = reply.read()
        content = json.loads(data)
        error = content.get("error", content) if isinstance(content, dict) else content
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        text = data.decode(errors="replace").strip()[:200] or reply.reason
    return f"{text} (status {reply.status})"


class Terminal:
    """A conversation with somebody at a terminal."""

    def __init__(self, server: Server, conversation: Conversation, console: Console, read: Callable[[str], str] = input) -> None:
        self._server = server
        self._conversation = conversation
        self._console = console
        self._read = read

    def run(self) -> None:
        """Runs until /quit or Ctrl-D. Ctrl-C only interrupts."""
        while True:
            try:
                text = self._typed()
                if text == "/quit":
                    return
                self._take(text)
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._say("Ctrl-D or /quit ends the talk")

    def _take(self, text: str) -> None:
        if text.startswith("/"):
            self._command(text)
        elif text.strip():
            self._conversation.messages.append({"role": "user", "content": text})
            self._answer()

    def _typed(self) -> str:
        """A line, or several that belong together."""
        line = self._read("> ")
        if line.strip() == BLOCK:
            lines = []
            while (line := self._read("… ")).strip() != BLOCK:
                lines.append(line)
            return "\n".join(lines)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read("… "))
        return "\n".join(lines)

    def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        rest = rest.strip()
        match name:
            case "help":
                self._say(HELP)
            case "reset":
                self._conversation.messages.clear()
                self._say("forgotten")
            case "system":
                self._conversation.system = rest
                self._say("the system prompt is set" if rest else "no system prompt")
            case "set":
                self._set(rest)
            case "unset":
                known = rest in self._conversation.fields  # null is a value
                self._conversation.fields.pop(rest, None)
                self._say(f"{rest} is not sent any more" if known else f"{rest} was not set")
            case "retry":
                if self._conversation.back():
                    self._answer()
                else:
                    self._say("nothing was asked yet")
            case "save":
                self._with_file(rest, self._conversation.save, "written to")
            case "load":
                self._with_file(rest, self._conversation.load, "going on with")
            case _:
                self._say(f"/{name} is no command; /help lists them. A question that begins with a slash needs a space before it")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if value:
            self._conversation.fields[name] = parsed(value.strip())
        elif name:
            self._say(f"/set {name} needs a value; /unset {name} takes it away")
            return
        self._say(", ".join(f"{key} {json.dumps(value)}" for key, value in self._conversation.fields.items()) or "nothing is set")

    def _with_file(self, name: str, do: Callable[[Path], None], done: str) -> None:
        if not name:
            self._say("which file?")
            return
        try:
            do(expanded(name))
            self._say(f"{done} {name}")
        except (OSError, ValueError, RecursionError) as error:
            self._complain(str(error))

    def _answer(self) -> None:
        """Requests the next answer and shows it as it comes. The conversation keeps what has come; if nothing has, it drops the
        question, too."""
        text, pace, end = "", AnswerSpeed(), ""
        pressed: list[int] = []  # checked as well: where Ctrl-C comes while an object is finalized, Python drops the exception

        def press(number: int, frame: object) -> None:
            pressed.append(number)
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, press)
        try:
            for piece in self._server.stream(self._conversation.body()):
                if pressed:
                    raise KeyboardInterrupt
                pace.came(piece)
                text += piece.text
                end = piece.reason or end
                self._show(piece.thought, "dim italic")
                self._show(piece.text)
        except KeyboardInterrupt:
            end = "stopped"
        except Failed as failed:
            self._console.print()
            self._complain(str(failed))
        finally:
            signal.signal(signal.SIGINT, before)
        if text:
            self._conversation.messages.append({"role": "assistant", "content": text})
        if pace.events:
            self._console.print()
            self._say(f"{pace}{'' if end in ('', 'stop') else f', {end}'}")
        else:
            self._conversation.messages.pop()

    def _show(self, text: str, style: str = "") -> None:
        if text:
            clean = CONTROL.sub("", text)
            self._console.print(clean, end="", style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{escape(tame(text))}[/dim]", highlight=False)

    def _complain(self, text: str) -> None:
        self._console.print(tame(text), style="red", markup=False, highlight=False)


def tame(text: str) -> str:
    """A server's text without characters that could control the terminal."""
    return CONTROL.sub(" ", text)


def parsed(value: str) -> Any:
    """A value as JSON, else as a text."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def pipe(server: Server, conversation: Conversation, question: str) -> int:
    """Asks one question, and streams its answer to stdout. Returns the exit code."""
    conversation.messages.append({"role": "user", "content": question})
    seen = sys.stdout.isatty()  # a terminal obeys control characters
    try:
        for piece in server.stream(conversation.body()):
            sys.stdout.write(CONTROL.sub("", piece.text) if seen else piece.text)
            sys.stdout.flush()
    except Failed as failed:
        sys.stdout.flush()
        print(f"penstock chat: {tame(' '.join(str(failed).split()))}", file=sys.stderr)
        return 1
    sys.stdout.write("\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of all flags."""
    parser = Parser(
        prog="penstock chat",
        usage="penstock chat [URL] [FLAG ...]",
        description="Talks to a server, ours or any with OpenAI's API. In a terminal Ctrl-C stops an answer, and keeps the talk.\n"
        "In a pipe all of stdin is one question: echo 'Who are you?' | penstock chat",
        epilog="In a terminal, /help lists what can be typed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"of the server, with or without /v1 (default {DEFAULT_URL})")
    add("--model", default="", help="name of the model (default: the first that the server lists)")
    add("--api-key", default="", help="(default: API_KEY or OPENAI_API_KEY of the environment)")
    add("--system", default="", metavar="TEXT", help="the system prompt")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of every request, such as temperature=0.7")
    return parser


def main(arguments: Sequence[str], key: Callable[[str], str] = str) -> int:
    """Runs the command. key: the API key to send, given the value of `--api-key`. Returns the exit code."""
    options = make_parser().parse_args(arguments)
    server = Server(options.url, key(options.api_key))
    conversation = Conversation(options.system)
    for pair in options.set:
        name, sign, value = pair.partition("=")
        if not name or not sign:
            raise UsageError(f"--set {pair}: NAME=VALUE is needed, such as temperature=0.7")
        conversation.fields[name] = parsed(value)
    try:
        conversation.fields = {"model": options.model or server.model() or "default", **conversation.fields}
    except Failed as failed:
        raise UsageError(str(failed)) from None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        question = sys.stdin.buffer.read().decode(errors="replace")
        if not question.strip():
            raise UsageError("there is no question on stdin: echo 'Who are you?' | penstock chat")
        return pipe(server, conversation, question)
    with suppress(ImportError):
        import readline  # noqa: F401 (makes `input` editable, with a history; not available everywhere)
    console = Console()
    model = escape(tame(str(conversation.fields["model"])))
    console.print(f"[bold]{model}[/bold] at {escape(server.base)}. /help lists commands.", highlight=False)
    Terminal(server, conversation, console).run()
    return 0
