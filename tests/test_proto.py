"""The generated module belongs to shard.proto, and every field says what it means."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.proto import shard_pb2

PROTO = Path(__file__).parents[1] / "proto"


def test_the_generated_module_is_fresh(tmp_path: Path) -> None:
    """`make proto` was run, and its result committed."""
    pytest.importorskip("grpc_tools")
    command = ["-m", "grpc_tools.protoc", f"-Ipenstock/proto={PROTO}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([sys.executable, *command, "penstock/proto/shard.proto"], check=True, timeout=60)
    made = tmp_path / "penstock" / "proto"
    assert (made / "shard_pb2.pyi").read_text() == (PROTO / "shard_pb2.pyi").read_text()
    assert meaning((made / "shard_pb2.py").read_text()) == meaning((PROTO / "shard_pb2.py").read_text())


def meaning(module: str) -> str:
    """The serialized descriptor in a generated module. What is around it depends on protoc's version, which is not pinned."""
    found = re.search(r"AddSerializedFile\((.*)\)", module)
    assert found
    return found.group(1)


def test_the_generated_module_stands_alone() -> None:
    assert shard_pb2.DESCRIPTOR.name == "penstock/proto/shard.proto"
    assert list(shard_pb2.DESCRIPTOR.dependencies) == []


def test_every_call_of_the_service_says_what_it_does() -> None:
    lines = (PROTO / "shard.proto").read_text().splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith(("rpc Info", "rpc Health", "rpc Warmup", "rpc ClearCache", "rpc Steps")):
            assert lines[number - 1].strip().startswith("//"), line
