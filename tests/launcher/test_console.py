"""What the operator sees."""

import io
import json
import re

from penstock.launcher.console import Console


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
