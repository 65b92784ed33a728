"""`penstock chat` against a server that says what it is told to: in a pipe, and in a terminal of its own."""

import http.server
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from penstock.launcher.chat import AnswerSpeed, Conversation, Failed, Server, StreamDelta, Terminal, pipe
from penstock.launcher.mistake import Mistake

WAIT = 30.0  # seconds for a terminal to show something, on a busy machine
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("API_KEY", "OPENAI_API_KEY")}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers every chat with the events that stand here, and keeps what it was asked."""

    protocol_version = "HTTP/1.1"
    events: ClassVar[list[Any]] = []
    status = 200
    pause = 0.0  # seconds before each event
    asked: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []
    left = threading.Event()  # a client has gone in the middle

    def do_GET(self) -> None:
        self._whole({"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        Handler.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        Handler.keys.append(self.headers["Authorization"])
        if self.status != 200:
            self._whole({"error": {"message": "no such thing"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for event in self.events:
                time.sleep(self.pause)
                self.wfile.write(event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode())
        except OSError:
            Handler.left.set()
        self.close_connection = True

    def _whole(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


def delta(text: str | None = None, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text, **more}, "finish_reason": reason}]}


ANSWER = [
    b": a comment\n\n",
    delta("", role="assistant"),
    delta("Hel"),
    delta("lo"),
    delta(reason="stop"),
    {"choices": [], "usage": {"completion_tokens": 2}},
    b"data: [DONE]\n\n",
]


@contextmanager
def saying(events: Sequence[Any] = ANSWER, status: int = 200, pause: float = 0.0) -> Iterator[str]:
    """A server's URL."""
    Handler.events, Handler.status, Handler.pause = list(events), status, pause
    Handler.asked.clear()
    Handler.keys.clear()
    Handler.left.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chat(*arguments: str, question: str = "Hi", **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command, in a pipe."""
    command = [sys.executable, "-m", "penstock.launcher", "chat", *arguments]
    return subprocess.run(command, input=question, capture_output=True, text=True, timeout=WAIT, env={**ENVIRONMENT, **environment})


def typed(url: str, lines: Sequence[str], conversation: Conversation | None = None) -> tuple[str, Conversation]:
    """What a terminal shows, and what is left of the talk."""
    conversation, out, left = conversation or Conversation(), StringIO(), iter(lines)

    def read(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    Terminal(Server(url, ""), conversation, Console(file=out, width=100), read).run()
    return out.getvalue(), conversation


def test_a_question_in_a_pipe() -> None:
    with saying() as url:
        answer = chat(url + "/v1", "--system", "Be brief.", "--set", "temperature=0.7", question="Hi\nthere")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "Hello\n", "")
    [body] = Handler.asked
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}]
    assert (body["model"], body["temperature"], body["stream"]) == ("fake", 0.7, True)


@pytest.mark.parametrize("seen", [False, True])
def test_a_terminal_behind_a_pipe_gets_no_control_characters(seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`echo Hi | penstock chat` shows answers in a terminal, which would obey them; a file gets what was said."""

    class Told:
        def stream(self, body: dict[str, object]) -> Iterator[StreamDelta]:
            yield StreamDelta("a\x1b]0;title\x07\tb\n")

    out = StringIO()
    out.isatty = lambda: seen  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", out)
    assert pipe(Told(), Conversation(), "Hi") == 0  # type: ignore[arg-type]
    assert out.getvalue() == ("a]0;title\tb\n\n" if seen else "a\x1b]0;title\x07\tb\n\n")


@pytest.mark.parametrize(
    ("arguments", "environment", "sent"),
    [
        ([], {}, None),
        (["--api-key", "one"], {"API_KEY": "two"}, "Bearer one"),
        ([], {"API_KEY": "two", "OPENAI_API_KEY": "three"}, "Bearer two"),
        ([], {"OPENAI_API_KEY": "three"}, "Bearer three"),
        ([], {"API_KEY": " , two,four", "OPENAI_API_KEY": "three"}, "Bearer two"),  # as a server has several
    ],
)
def test_the_key(arguments: list[str], environment: dict[str, str], sent: str | None) -> None:
    with saying() as url:
        chat(url, *arguments, **environment)
    assert Handler.keys == [sent]


@pytest.mark.parametrize("command", ["chat", "bench", "top"])
@pytest.mark.parametrize("key", ["hush\nhush", "hush\u20ac"])
def test_a_key_that_no_header_carries(command: str, key: str) -> None:
    for arguments, environment, source in (
        (["--api-key", key], {}, "--api-key"),
        ([], {"API_KEY": key}, "API_KEY"),
        ([], {"OPENAI_API_KEY": key}, "OPENAI_API_KEY"),
    ):
        answer = subprocess.run(
            [sys.executable, "-m", "penstock.launcher", command, "http://127.0.0.1:9", *arguments],
            capture_output=True,
            input="Hi",
            text=True,
            env=ENVIRONMENT | environment,
        )
        assert answer.returncode == 2
        assert answer.stderr == (
            f"penstock: error: {source}: a key has letters, digits and signs of ASCII only, since HTTP carries no others\n"
        )


def test_of_several_answers_the_first_is_shown_whatever_is_set() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "Bye"}, "finish_reason": "stop"}]}
    with saying([other, *ANSWER]) as url:
        answer = chat(url, "--set", "n=2", "--set", "stream=false")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "Hello\n", "")
    assert [(body["n"], body["stream"]) for body in Handler.asked] == [(2, True)]


def test_no_question_is_none() -> None:
    with saying() as url:
        answer = chat(url, question=" \n")
    assert answer.returncode == 2
    assert "there is no question on stdin" in answer.stderr
    assert Handler.asked == []


def test_what_goes_wrong_in_a_pipe() -> None:
    with saying([delta("Hel"), {"error": {"message": "it broke"}}]) as url:
        answer = chat(url)
    assert (answer.returncode, answer.stdout, answer.stderr) == (1, "Hel", "penstock chat: it broke\n")
    with saying([delta("Hel")]) as url:
        answer = chat(url)
    assert (answer.returncode, answer.stderr) == (1, "penstock chat: the answer was cut off\n")
    for arguments, text in (
        (["http://127.0.0.1:9"], "nobody answers at http://127.0.0.1:9"),
        (["localhost:3000"], "http://HOST:PORT is needed"),
        (["--set", "x"], "--set x: NAME=VALUE is needed"),
        (["--nonsense"], "--nonsense"),
    ):
        answer = chat(*arguments)
        assert answer.returncode == 2, arguments
        assert text in answer.stderr
        assert answer.stderr.count("\n") == 1


def test_a_talk() -> None:
    with saying() as url:
        shown, conversation = typed(
            url, ["Hi", "And", "/set temperature 0.5", "/set", "/system Be kind.", "More\\", "lines", "/reset", "New"]
        )
    assert shown.count("Hello") == 4
    assert "2 tokens, first after" in shown
    asked = [[message["content"] for message in body["messages"]] for body in Handler.asked]
    assert asked == [
        ["Hi"],
        ["Hi", "Hello", "And"],
        ["Be kind.", "Hi", "Hello", "And", "Hello", "More\nlines"],
        ["Be kind.", "New"],
    ]
    assert Handler.asked[-1]["temperature"] == 0.5
    assert "temperature 0.5" in shown
    assert len(conversation.messages) == 2


def test_retry_and_unset_and_blocks() -> None:
    with saying() as url:
        shown, conversation = typed(
            url, ["/retry", '"""', "a", "", "b", '"""', "/set seed 7", "/unset seed", "/unset seed", "/retry", "/nope"]
        )
        nothing, _ = typed(url, ["/set seed null", "/unset seed"])
    assert "nothing was asked yet" in shown
    assert "seed was not set" in shown
    assert "/nope is no command" in shown
    assert "seed is not sent any more" in nothing
    assert [body["messages"] for body in Handler.asked] == [[{"role": "user", "content": "a\n\nb"}]] * 2
    assert "seed" not in Handler.asked[-1]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_a_failed_answer_leaves_the_talk_as_it_was() -> None:
    with saying(status=400) as url:
        shown, conversation = typed(url, ["Hi"])
    assert "no such thing (status 400)" in shown
    assert conversation.messages == []
    with saying([delta("Hel"), {"error": "it broke"}]) as url:
        shown, conversation = typed(url, ["Hi"])
    assert "it broke" in shown
    assert [message["content"] for message in conversation.messages] == ["Hi", "Hel"]


def test_talks_are_kept_in_files(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    with saying() as url:
        typed(
            url, ["Hi", "/system Be kind.", f"/save {path}", "/save", "/save /nowhere/talk.json", "/save ~nobody-has-this-name/x"]
        )
        shown, conversation = typed(url, [f"/load {path}", "/load nowhere.json"])
    assert conversation.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert conversation.system == "Be kind."
    assert "No such file" in shown
    for other in ("[]", '{"messages": ["Hi"]}', '{"messages": [{}]}', '{"messages": [], "fields": [1]}'):
        path.write_text(other)
        with pytest.raises(ValueError, match=r"no talk|no object"):
            Conversation().load(path)


def test_an_answer_cannot_reach_the_terminal() -> None:
    """Escape sequences are taken out, and what looks like rich's markup is text."""
    with saying([delta("a\x1b[2Jb\x07\r\x9b1m[red]c[/red] :smile:\td\n"), delta(reason="stop")]) as url:
        shown, _ = typed(url, ["Hi"])
    assert "a[2Jb1m[red]c[/red] :smile:" in shown
    assert "\x1b" not in shown


def test_thoughts_are_shown_and_not_sent_again() -> None:
    with saying([delta(None, reasoning_content="hm"), delta("yes"), delta(reason="stop")]) as url:
        shown, conversation = typed(url, ["Hi"])
    assert "hmyes" in shown
    assert conversation.messages[-1]["content"] == "yes"


def test_pace() -> None:
    pace = AnswerSpeed(asked=1.0, first=1.5, last=3.5, events=3, tokens=5)
    assert str(pace) == "5 tokens, first after 500 ms, 2.0 tokens/s"
    assert str(AnswerSpeed(asked=1.0, first=1.5, last=1.5, events=1)) == "1 tokens, first after 500 ms"
    pace.came(StreamDelta(tokens=9))
    assert (pace.events, pace.tokens) == (3, 9)


def test_urls() -> None:
    for url in ("ftp://host", "http://", "http://host:port", "host"):
        with pytest.raises(Mistake):
            Server(url, "")
    with pytest.raises(Failed, match="nobody answers"):
        Server("http://127.0.0.1:9/v1/", "").model()


class Tty:
    """The command in a terminal, which is closed in the end, however that comes."""

    def __init__(self, url: str) -> None:
        self._seen = b""
        self._pid, self._file = pty.fork()
        if not self._pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what runs the tests in the background has it ignored
            os.execve(sys.executable, [sys.executable, "-m", "penstock.launcher", "chat", url], {**ENVIRONMENT, "TERM": "xterm"})

    def __enter__(self) -> "Tty":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)  # which hangs up on the command
        os.waitpid(self._pid, 0)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait_for(self, text: str) -> None:
        """Until that has come since the last time."""
        deadline = time.monotonic() + WAIT
        while text.encode() not in self._seen:
            assert time.monotonic() < deadline, self._seen
            if select.select([self._file], [], [], 0.1)[0]:
                self._seen += os.read(self._file, 65536)
        self._seen = self._seen.partition(text.encode())[2]

    def wait_for_end(self) -> None:
        """Linux says so with an error."""
        deadline = time.monotonic() + WAIT
        with suppress(OSError):
            while os.read(self._file, 65536):
                assert time.monotonic() < deadline


def test_ctrl_c_stops_the_answer_and_keeps_the_talk() -> None:
    with saying([delta("tick ") for _ in range(10_000)], pause=0.01) as url, Tty(url) as terminal:
        terminal.wait_for("> ")
        terminal.type("Hi\n")
        terminal.wait_for("tick tick tick")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        assert Handler.left.wait(WAIT)  # the server is not left to answer nobody
        terminal.wait_for("> ")
        Handler.events = list(ANSWER)
        terminal.type("Again\n")
        terminal.wait_for("Hello")
        terminal.wait_for("> ")
        time.sleep(0.3)  # a signal that comes while Python goes to wait for a line is noticed with the next key only
        terminal.type("\x03")
        terminal.wait_for("ends the talk")
        terminal.wait_for("> ")
        terminal.type("\x04")
        terminal.wait_for_end()
    roles = [message["role"] for message in Handler.asked[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert Handler.asked[-1]["messages"][1]["content"].startswith("tick tick")
