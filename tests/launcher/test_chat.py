"""`penstock chat` against a fake server with scripted answers: in a pipe, with scripted input, and in a pseudo-terminal."""

import http.server
import json
import os
import pty
import select
import signal
import socket
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

from penstock.launcher import chat
from penstock.launcher.chat import AnswerSpeed, Conversation, Failed, Server, StreamDelta, Terminal, parsed, pipe
from penstock.launcher.errors import UsageError

WAIT = 30.0  # seconds for a terminal to show something, on a busy machine
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("API_KEY", "OPENAI_API_KEY")}


class FakeHandler(http.server.BaseHTTPRequestHandler):
    """Answers every chat with `events`, and records the requests."""

    protocol_version = "HTTP/1.1"
    events: ClassVar[list[Any]] = []
    status = 200
    pause = 0.0  # seconds before each event
    requests: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []
    client_left = threading.Event()  # set when a client has disconnected in the middle of an answer

    def do_GET(self) -> None:
        self._send_json({"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        FakeHandler.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        FakeHandler.keys.append(self.headers["Authorization"])
        if self.status != 200:
            self._send_json({"error": {"message": "no such thing"}})
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
            FakeHandler.client_left.set()
        self.close_connection = True

    def _send_json(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Writes no access log."""


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
def fake_server(events: Sequence[Any] = ANSWER, status: int = 200, pause: float = 0.0) -> Iterator[str]:
    """Runs the fake server, and yields its URL."""
    FakeHandler.events, FakeHandler.status, FakeHandler.pause = list(events), status, pause
    FakeHandler.requests.clear()
    FakeHandler.keys.clear()
    FakeHandler.client_left.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_chat(*arguments: str, question: str = "Hi", **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command with the question on stdin, and pipes as stdout and stderr."""
    command = [sys.executable, "-m", "penstock.launcher", "chat", *arguments]
    return subprocess.run(command, input=question, capture_output=True, text=True, timeout=WAIT, env={**ENVIRONMENT, **environment})


def run_conversation(url: str, lines: Sequence[str], conversation: Conversation | None = None) -> tuple[str, Conversation]:
    """Runs a conversation with these lines as input. Returns what the terminal shows, and the conversation afterwards."""
    conversation, out, lines_left = conversation or Conversation(), StringIO(), iter(lines)

    def read(prompt: str) -> str:
        line = next(lines_left, None)
        if line is None:
            raise EOFError
        return line

    Terminal(Server(url, ""), conversation, Console(file=out, width=100), read).run()
    return out.getvalue(), conversation


def test_question_on_stdin_is_sent_and_the_answer_printed() -> None:
    with fake_server() as url:
        answer = run_chat(url + "/v1", "--system", "Be brief.", "--set", "temperature=0.7", question="Hi\nthere")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "Hello\n", "")
    [body] = FakeHandler.requests
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\nthere"}]
    assert (body["model"], body["temperature"], body["stream"]) == ("fake", 0.7, True)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_are_removed_only_for_a_terminal(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`echo Hi | penstock chat` may write to a terminal, which would obey them. If stdout is a file, the answer is not changed."""

    class FakeClient:
        def stream(self, body: dict[str, object]) -> Iterator[StreamDelta]:
            yield StreamDelta("a\x1b]0;title\x07\tb\n")

    out = StringIO()
    out.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", out)
    assert pipe(FakeClient(), Conversation(), "Hi") == 0  # type: ignore[arg-type]
    assert out.getvalue() == ("a]0;title\tb\n\n" if is_terminal else "a\x1b]0;title\x07\tb\n\n")


@pytest.mark.parametrize(
    ("arguments", "environment", "header"),
    [
        ([], {}, None),
        (["--api-key", "one"], {"API_KEY": "two"}, "Bearer one"),
        ([], {"API_KEY": "two", "OPENAI_API_KEY": "three"}, "Bearer two"),
        ([], {"OPENAI_API_KEY": "three"}, "Bearer three"),
        # several keys, as a server takes them: the first one that is not empty
        ([], {"API_KEY": " , two,four", "OPENAI_API_KEY": "three"}, "Bearer two"),
    ],
)
def test_api_key_is_taken_from_the_flag_or_the_environment(
    arguments: list[str], environment: dict[str, str], header: str | None
) -> None:
    with fake_server() as url:
        run_chat(url, *arguments, **environment)
    assert FakeHandler.keys == [header]


@pytest.mark.parametrize("command", ["chat", "bench", "top"])
@pytest.mark.parametrize("key", ["hush\nhush", "hush\u20ac"])
def test_api_key_with_characters_not_allowed_in_headers_is_refused(command: str, key: str) -> None:
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


def test_first_of_several_choices_is_shown_and_always_streamed() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "Bye"}, "finish_reason": "stop"}]}
    with fake_server([other, *ANSWER]) as url:
        answer = run_chat(url, "--set", "n=2", "--set", "stream=false")
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "Hello\n", "")
    assert [(body["n"], body["stream"]) for body in FakeHandler.requests] == [(2, True)]


def test_empty_question_is_refused() -> None:
    with fake_server() as url:
        answer = run_chat(url, question=" \n")
    assert answer.returncode == 2
    assert "there is no question on stdin" in answer.stderr
    assert FakeHandler.requests == []


def test_errors_in_a_pipe_are_one_line() -> None:
    with fake_server([delta("Hel"), {"error": {"message": "it\nbroke\x1b"}}]) as url:
        answer = run_chat(url)
    assert (answer.returncode, answer.stdout, answer.stderr) == (1, "Hel", "penstock chat: it broke \n")
    with fake_server([delta("Hel")]) as url:
        answer = run_chat(url)
    assert (answer.returncode, answer.stderr) == (1, "penstock chat: the answer was cut off\n")
    for arguments, text in (
        (["http://127.0.0.1:9"], "nobody answers at http://127.0.0.1:9"),
        (["localhost:port"], "http://HOST:PORT is needed"),
        (["127.0.0.1:9/v1"], "nobody answers at http://127.0.0.1:9 (Connection refused): start"),  # as `bench` and `top` take it
        (["--set", "x"], "--set x: NAME=VALUE is needed"),
        (["--nonsense"], "--nonsense"),
    ):
        answer = run_chat(*arguments)
        assert answer.returncode == 2, arguments
        assert text in answer.stderr
        assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "event",
    [
        *("5", "null", "[]", '{"choices": [5]}', '{"choices": [{"delta": "x"}]}', '{"usage": 5}', "[" * 100_000),
        *('{"usage": {"completion_tokens": Infinity}}', '{"usage": {"completion_tokens": [1]}}'),
        *('{"choices": [{"delta": {"content": [{"text": "a"}]}}]}', '{"choices": [{"delta": {"reasoning": 1}}]}'),
    ],
)
def test_event_of_another_form_is_a_failed_answer(event: str) -> None:
    with (
        fake_server([f"data: {event}\n\n".encode()]) as url,
        pytest.raises(Failed, match="the answer was cut off: no event of a chat"),
    ):
        list(Server(url, "").stream({}))


def test_response_that_is_cut_short_is_no_traceback() -> None:
    def cut(self: FakeHandler) -> None:
        self.send_response(FakeHandler.status)
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b"{")
        self.close_connection = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeHandler, "do_GET", cut)
        patch.setattr(FakeHandler, "do_POST", cut)
        with fake_server() as url:
            assert Server(url, "").model() == ""
        with fake_server(status=500) as url, pytest.raises(Failed, match=r"\(status 500\)"):
            list(Server(url, "").stream({}))


def test_characters_that_stdout_cannot_encode_are_escaped() -> None:
    with fake_server([delta("a\ud800\u20ac", "stop")]) as url:
        assert run_chat(url).stdout == "a\\ud800\u20ac\n"
        assert run_chat(url, PYTHONIOENCODING="ascii").stdout == "a\\ud800\\u20ac\n"


def test_conversation_with_set_system_and_reset_commands() -> None:
    with fake_server() as url:
        shown, conversation = run_conversation(
            url, ["Hi", "And", "/set temperature 0.5", "/set", "/system Be kind.", "More\\", "lines", "/reset", "New"]
        )
    assert shown.count("Hello") == 4
    assert "2 tokens, first after" in shown
    prompts = [[message["content"] for message in body["messages"]] for body in FakeHandler.requests]
    assert prompts == [
        ["Hi"],
        ["Hi", "Hello", "And"],
        ["Be kind.", "Hi", "Hello", "And", "Hello", "More\nlines"],
        ["Be kind.", "New"],
    ]
    assert FakeHandler.requests[-1]["temperature"] == 0.5
    assert "temperature 0.5" in shown
    assert len(conversation.messages) == 2


def test_retry_unset_and_multiline_blocks() -> None:
    with fake_server() as url:
        shown, conversation = run_conversation(
            url, ["/retry", '"""', "a", "", "b", '"""', "/set seed 7", "/unset seed", "/unset seed", "/retry", "/nope"]
        )
        shown_after_null, _ = run_conversation(url, ["/set seed null", "/unset seed"])
    assert "nothing was asked yet" in shown
    assert "seed was not set" in shown
    assert "/nope is no command" in shown
    assert "seed is not sent any more" in shown_after_null
    assert [body["messages"] for body in FakeHandler.requests] == [[{"role": "user", "content": "a\n\nb"}]] * 2
    assert "seed" not in FakeHandler.requests[-1]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]


def test_failed_answer_keeps_only_what_has_come() -> None:
    with fake_server(status=400) as url:
        shown, conversation = run_conversation(url, ["Hi"])
    assert "no such thing (status 400)" in shown
    assert conversation.messages == []
    with fake_server([delta("Hel"), {"error": "it broke"}]) as url:
        shown, conversation = run_conversation(url, ["Hi"])
    assert "it broke" in shown
    assert [message["content"] for message in conversation.messages] == ["Hi", "Hel"]


def test_conversation_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    with fake_server() as url:
        run_conversation(
            url, ["Hi", "/system Be kind.", f"/save {path}", "/save", "/save /nowhere/talk.json", "/save ~nobody-has-this-name/x"]
        )
        shown, conversation = run_conversation(url, [f"/load {path}", "/load nowhere.json"])
    assert conversation.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert conversation.system == "Be kind."
    assert "No such file" in shown
    path.write_text("[" * 100_000)
    assert "recursion" in run_conversation("http://127.0.0.1:9", [f"/load {path}"])[0]
    for other in ("[]", '{"messages": ["Hi"]}', '{"messages": [{}]}', '{"messages": [], "fields": [1]}'):
        path.write_text(other)
        with pytest.raises(ValueError, match=r"no talk|no object"):
            Conversation().load(path)


def test_half_of_a_surrogate_pair_is_saved_and_loaded(tmp_path: Path) -> None:
    """As a server sends it that cuts a character in two; UTF-8 has none."""
    path = tmp_path / "talk.json"
    Conversation(messages=[{"role": "assistant", "content": "a\ud83d"}]).save(path)
    loaded = Conversation()
    loaded.load(path)
    assert loaded.messages == [{"role": "assistant", "content": "a\ud83d"}]
    path.write_text('{"system": null, "messages": []}')
    loaded.load(path)
    assert loaded.system == ""


def test_control_characters_and_markup_of_an_answer_have_no_effect() -> None:
    """Control characters are removed, and rich's markup is shown as text."""
    with fake_server([delta("a\x1b[2Jb\x07\r\x9b1m[red]c[/red] :smile:\td\n"), delta(reason="x\x1b[2J")]) as url:
        shown, _ = run_conversation(url, ["Hi"])
    assert "a[2Jb1m[red]c[/red] :smile:" in shown
    assert "\x1b" not in shown


def test_reasoning_is_shown_but_not_sent_again() -> None:
    with fake_server([delta(None, reasoning_content="hm"), delta("yes"), delta(reason="stop")]) as url:
        shown, conversation = run_conversation(url, ["Hi"])
    assert "hmyes" in shown
    assert conversation.messages[-1]["content"] == "yes"


def test_answer_speed_counts_tokens_and_times() -> None:
    speed = AnswerSpeed(asked=1.0, first=1.5, last=3.5, events=3, tokens=5)
    assert str(speed) == "5 tokens, first after 500 ms, 2.0 tokens/s"
    assert str(AnswerSpeed(asked=1.0, first=1.5, last=1.5, events=1)) == "1 tokens, first after 500 ms"
    speed.came(StreamDelta(tokens=9))
    assert (speed.events, speed.tokens) == (3, 9)


def test_invalid_url_is_refused_and_an_unreachable_or_silent_server_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("ftp://host", "http://", "http://host:port", "host:0", "http://[::1", "http://a..b", f"http://{'a' * 70}"):
        with pytest.raises(UsageError):
            Server(url, "")
    with pytest.raises(Failed, match="nobody answers"):
        Server("http://127.0.0.1:9/v1/", "").model()
    monkeypatch.setattr(chat, "CONNECT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Failed, match=r"nobody answers .*timed out"):
        Server(f"http://127.0.0.1:{silent.getsockname()[1]}", "").model()
    assert Server("http://host/ä b%20c/v1", "").base == "http://host/%C3%A4%20b%20c"  # as browsers do


def test_nested_value_of_a_field_that_python_cannot_read_is_a_text() -> None:
    assert parsed("[" * 100_000) == "[" * 100_000


class PseudoTerminal:
    """The command in a pseudo-terminal, which is closed at the end of the context."""

    def __init__(self, url: str) -> None:
        self._output = b""
        self._pid, self._file = pty.fork()
        if not self._pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored if the tests run in the background of a shell
            os.execve(sys.executable, [sys.executable, "-m", "penstock.launcher", "chat", url], {**ENVIRONMENT, "TERM": "xterm"})

    def __enter__(self) -> "PseudoTerminal":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)  # the command gets SIGHUP
        os.waitpid(self._pid, 0)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait_for(self, text: str) -> None:
        """Reads until `text` comes, after what earlier calls have waited for."""
        deadline = time.monotonic() + WAIT
        while text.encode() not in self._output:
            assert time.monotonic() < deadline, self._output
            if select.select([self._file], [], [], 0.1)[0]:
                self._output += os.read(self._file, 65536)
        self._output = self._output.partition(text.encode())[2]

    def wait_for_end(self) -> None:
        """Reads until the other end is closed, which Linux reports as an error (EIO)."""
        deadline = time.monotonic() + WAIT
        with suppress(OSError):
            while os.read(self._file, 65536):
                assert time.monotonic() < deadline


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation() -> None:
    with fake_server([delta("tick ") for _ in range(10_000)], pause=0.01) as url, PseudoTerminal(url) as terminal:
        terminal.wait_for("> ")
        terminal.type("Hi\n")
        terminal.wait_for("tick tick tick")
        terminal.type("\x03")
        terminal.wait_for("stopped")
        assert FakeHandler.client_left.wait(WAIT)  # the client has disconnected, so the server can stop
        terminal.wait_for("> ")
        FakeHandler.events = list(ANSWER)
        terminal.type("Again\n")
        terminal.wait_for("Hello")
        terminal.wait_for("> ")
        time.sleep(0.3)  # Python notices a signal that comes just before it waits for a line only at the next key
        terminal.type("\x03")
        terminal.wait_for("ends the talk")
        terminal.wait_for("> ")
        terminal.type("\x04")
        terminal.wait_for_end()
    roles = [message["role"] for message in FakeHandler.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert FakeHandler.requests[-1]["messages"][1]["content"].startswith("tick tick")
