"""The console: the launcher's own lines and those of its children, as text or JSON, for readers that are slow or gone, too."""

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from penstock.launcher import console as module
from penstock.launcher import processes
from penstock.launcher.console import Console

LINES = 20_000  # of 100 characters: more than the console's buffer and the pipe hold together
WRITE_AND_EXIT = """
import sys
from penstock.launcher.console import Console
console = Console({json_output})
console.info("begins")
console.detach()
for number in range({lines}):
    console.relay("router", f"{{number:0100}}", error=False)
console.error("ends")
sys.exit(3)
"""


def lines_written(json_output: bool) -> tuple[list[str], list[str]]:
    """The lines that a console writes to stdout and to stderr."""
    out, error = io.StringIO(), io.StringIO()
    console = Console(json_output, out, error)
    console.info("hello")
    console.error("alas")
    console.relay("shard 0", '{"timestamp": "as it is"}', error=False)
    console.relay("shard 0", "{'no': JSON}", error=False)
    console.relay("shard 1", "Traceback", error=True)
    return out.getvalue().splitlines(), error.getvalue().splitlines()


def test_text_output_prefixes_lines_with_the_process_name() -> None:
    assert lines_written(json_output=False) == (
        ["penstock: hello", '[shard 0] {"timestamp": "as it is"}', "[shard 0] {'no': JSON}"],
        ["penstock: alas", "[shard 1] Traceback"],
    )


def test_json_output_wraps_lines_that_are_not_json() -> None:
    out, error = lines_written(json_output=True)
    assert out.pop(1) == '{"timestamp": "as it is"}'
    lines = [json.loads(line) for line in (*out, *error)]
    assert all(
        re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["timestamp"]) for line in lines
    )  # the format of the router's and the shards' timestamps
    assert [(line["level"], line["name"], line["message"]) for line in lines] == [
        ("INFO", "launcher", "hello"),
        ("INFO", "shard 0", "{'no': JSON}"),
        ("ERROR", "launcher", "alas"),
        ("INFO", "shard 1", "Traceback"),
    ]


def test_json_output_is_valid_in_any_encoding() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    Console(True, out, out).info("ü, \U0001f600, \udcff")
    assert json.loads(out.buffer.getvalue())["message"] == "ü, \U0001f600, \udcff"


def test_broken_pipe_on_stdout_is_ignored() -> None:
    class BrokenPipe(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Console(json_output=False, out=BrokenPipe()).info("anybody?")


@pytest.fixture
def unread_pipe() -> Iterator[tuple[TextIO, TextIO]]:
    """A pipe that is read only if the test does so: its reading and its writing end."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as writer:
        yield reader, writer


def test_lines_to_an_unread_pipe_are_dropped_and_counted_without_blocking(unread_pipe: tuple[TextIO, TextIO]) -> None:
    reader, writer = unread_pipe
    console = Console(json_output=False, out=writer, error=io.StringIO())
    console.info("begins")
    console.detach()
    for number in range(LINES):
        console.relay("router", f"{number:0100}", error=False)
    assert reader.readline() == "penstock: begins\n"
    numbers_read = []
    while (line := reader.readline()).startswith("[router] "):
        numbers_read.append(int(line.removeprefix("[router] ")))
    # The first lines in order, then the number of dropped ones, then the lines that come afterwards.
    assert numbers_read == list(range(len(numbers_read)))
    assert line == f"penstock: {LINES - len(numbers_read)} lines were dropped here: nobody read them in time\n"
    assert module.ROOM // 200 < len(numbers_read) < LINES
    console.relay("router", "again", error=False)
    assert reader.readline() == "[router] again\n"


def test_line_longer_than_the_buffer_is_written_whole(unread_pipe: tuple[TextIO, TextIO]) -> None:
    reader, writer = unread_pipe
    console = Console(json_output=False, out=writer, error=writer)
    console.detach()
    console.relay("router", "x" * (module.ROOM + 1), error=True)
    assert reader.readline() == f"[router] {'x' * (module.ROOM + 1)}\n"


def test_all_lines_reach_a_nonblocking_pipe(unread_pipe: tuple[TextIO, TextIO]) -> None:
    reader, writer = unread_pipe
    os.set_blocking(writer.fileno(), False)
    console = Console(json_output=False, out=writer, error=writer)
    console.detach()
    for number in range(2000):
        console.relay("router", f"{number:0100}", error=False)
    assert [int(reader.readline().removeprefix("[router] ")) for _ in range(2000)] == list(range(2000))


def test_child_is_not_blocked_by_an_unread_pipe(unread_pipe: tuple[TextIO, TextIO]) -> None:
    console = Console(json_output=False, out=unread_pipe[1], error=unread_pipe[1])
    code = f"import sys\nfor stream in (sys.stdout, sys.stderr): stream.write(('x' * 100 + '\\n') * {LINES})"
    child = processes.start("talker", [sys.executable, "-S", "-c", code], os.environ)
    ended = threading.Event()
    processes.follow(child, console, lambda child: ended.set())
    assert ended.wait(60)
    assert child.process.returncode == 0


@pytest.mark.parametrize("json_output", [False, True])
def test_buffered_lines_are_written_when_the_launcher_ends(json_output: bool) -> None:
    """stdout and stderr go to one pipe here, and keep their order."""
    script = WRITE_AND_EXIT.format(lines=5000, json_output=json_output)
    answer = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert answer.returncode == 3
    lines = answer.stdout.splitlines()
    assert "begins" in lines[0]
    assert [int(re.findall("[0-9]{100}", line)[0]) for line in lines[1:-1]] == list(range(5000))
    assert "ends" in lines[-1]


def test_launcher_exits_although_its_stdout_is_not_read(unread_pipe: tuple[TextIO, TextIO], tmp_path: Path) -> None:
    script = WRITE_AND_EXIT.format(lines=LINES, json_output=False)
    with (tmp_path / "error").open("w+") as error:
        answer = subprocess.run([sys.executable, "-c", script], stdout=unread_pipe[1], stderr=error, timeout=60)
        error.seek(0)
        assert error.read() == "penstock: ends\n"  # nothing from Python's own shutdown
    assert answer.returncode == 3
