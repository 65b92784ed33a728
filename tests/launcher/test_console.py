"""What the operator sees."""

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

LINES = 20_000  # of 100 characters: more than what waits and a pipe take together
ENDS = """
import sys
from penstock.launcher.console import Console
console = Console({json_output})
console.say("begins")
console.detach()
for number in range({lines}):
    console.relay("router", f"{{number:0100}}", error=False)
console.complain("ends")
sys.exit(3)
"""


def written(json_output: bool) -> tuple[list[str], list[str]]:
    """Lines on stdout and stderr."""
    out, error = io.StringIO(), io.StringIO()
    console = Console(json_output, out, error)
    console.say("hello")
    console.complain("alas")
    console.relay("shard 0", '{"message": "as it is"}', error=False)
    console.relay("shard 1", "Traceback", error=True)
    return out.getvalue().splitlines(), error.getvalue().splitlines()


def test_for_people() -> None:
    assert written(json_output=False) == (
        ["penstock: hello", '[shard 0] {"message": "as it is"}'],
        ["penstock: alas", "[shard 1] Traceback"],
    )


def test_for_machines() -> None:
    out, error = written(json_output=True)
    assert out[1] == '{"message": "as it is"}'
    lines = [json.loads(line) for line in (out[0], *error)]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["timestamp"]) for line in lines)  # as the others'
    assert [(line["level"], line["name"], line["message"]) for line in lines] == [
        ("INFO", "launcher", "hello"),
        ("ERROR", "launcher", "alas"),
        ("INFO", "shard 1", "Traceback"),
    ]


def test_a_reader_that_has_gone_does_not_stop_the_server() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Console(json_output=False, out=Gone()).say("anybody?")


@pytest.fixture
def unread() -> Iterator[tuple[TextIO, TextIO]]:
    """A pipe: who reads, and who writes."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as writer:
        yield reader, writer


def test_who_does_not_read_costs_lines_and_holds_nobody_up(unread: tuple[TextIO, TextIO]) -> None:
    reader, writer = unread
    console = Console(json_output=False, out=writer, error=io.StringIO())
    console.say("begins")
    console.detach()
    for number in range(LINES):
        console.relay("router", f"{number:0100}", error=False)
    assert reader.readline() == "penstock: begins\n"
    found = []
    while (line := reader.readline()).startswith("[router] "):
        found.append(int(line.removeprefix("[router] ")))
    # The first ones in order, then how many are missing, then those that come afterwards.
    assert found == list(range(len(found)))
    assert line == f"penstock: {LINES - len(found)} lines were dropped here: nobody read them in time\n"
    assert module.ROOM // 200 < len(found) < LINES
    console.relay("router", "again", error=False)
    assert reader.readline() == "[router] again\n"


def test_a_line_longer_than_the_room(unread: tuple[TextIO, TextIO]) -> None:
    reader, writer = unread
    console = Console(json_output=False, out=writer, error=writer)
    console.detach()
    console.relay("router", "x" * (module.ROOM + 1), error=True)
    assert reader.readline() == f"[router] {'x' * (module.ROOM + 1)}\n"


def test_a_pipe_that_shall_not_block(unread: tuple[TextIO, TextIO]) -> None:
    reader, writer = unread
    os.set_blocking(writer.fileno(), False)
    console = Console(json_output=False, out=writer, error=writer)
    console.detach()
    for number in range(2000):
        console.relay("router", f"{number:0100}", error=False)
    assert [int(reader.readline().removeprefix("[router] ")) for _ in range(2000)] == list(range(2000))


def test_a_child_whose_lines_nobody_reads_ends(unread: tuple[TextIO, TextIO]) -> None:
    console = Console(json_output=False, out=unread[1], error=unread[1])
    talks = f"import sys\nfor stream in (sys.stdout, sys.stderr): stream.write(('x' * 100 + '\\n') * {LINES})"
    child = processes.start("talker", [sys.executable, "-S", "-c", talks], os.environ)
    ended = threading.Event()
    processes.follow(child, console, lambda child: ended.set())
    assert ended.wait(60)
    assert child.process.returncode == 0


@pytest.mark.parametrize("json_output", [False, True])
def test_lines_come_out_when_the_launcher_ends(json_output: bool) -> None:
    """Both streams in one, in order."""
    script = ENDS.format(lines=5000, json_output=json_output)
    answer = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert answer.returncode == 3
    lines = answer.stdout.splitlines()
    assert "begins" in lines[0]
    assert [int(re.findall("[0-9]{100}", line)[0]) for line in lines[1:-1]] == list(range(5000))
    assert "ends" in lines[-1]


def test_who_does_not_read_keeps_the_launcher_from_no_end(unread: tuple[TextIO, TextIO], tmp_path: Path) -> None:
    script = ENDS.format(lines=LINES, json_output=False)
    with (tmp_path / "error").open("w+") as error:
        answer = subprocess.run([sys.executable, "-c", script], stdout=unread[1], stderr=error, timeout=60)
        error.seek(0)
        assert error.read() == "penstock: ends\n"  # and no word of Python's
    assert answer.returncode == 3
