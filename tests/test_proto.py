"""The generated protobuf module is up to date with shard.proto, and each call of the service has a comment."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.proto import shard_pb2

PROTO = Path(__file__).parents[1] / "proto"


def test_generated_module_is_up_to_date_with_shard_proto(tmp_path: Path) -> None:
    """`make proto` was run, and its result committed."""
    pytest.importorskip("grpc_tools")
    command = ["-m", "grpc_tools.protoc", f"-Ipenstock/proto={PROTO}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    subprocess.run([sys.executable, *command, "penstock/proto/shard.proto"], check=True, timeout=60)
    generated = tmp_path / "penstock" / "proto"
    assert (generated / "shard_pb2.pyi").read_text() == (PROTO / "shard_pb2.pyi").read_text()
    assert descriptor((generated / "shard_pb2.py").read_text()) == descriptor((PROTO / "shard_pb2.py").read_text())


def descriptor(module: str) -> str:
    """The serialized descriptor in a generated module. The code around it depends on protoc's version, which is not pinned."""
    found = re.search(r"AddSerializedFile\((.*)\)", module)
    assert found
    return found.group(1)


def test_generated_module_has_no_dependencies() -> None:
    assert shard_pb2.DESCRIPTOR.name == "penstock/proto/shard.proto"
    assert list(shard_pb2.DESCRIPTOR.dependencies) == []


def test_every_rpc_in_shard_proto_has_a_comment() -> None:
    lines = (PROTO / "shard.proto").read_text().splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith(("rpc Info", "rpc Health", "rpc Warmup", "rpc ClearCache", "rpc Steps")):
            assert lines[number - 1].strip().startswith("//"), line
