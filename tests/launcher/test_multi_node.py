"""One node of a multi-node group, from options to its ranks' settings; contradictions that are refused before anything starts."""

import dataclasses
import importlib.metadata
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.launcher import checkpoint, children, cli, machine, multi_node, plan
from penstock.launcher.console import Console
from penstock.launcher.errors import UsageError
from penstock.launcher.gpus import Gpus
from penstock.launcher.machine import Machine
from penstock.launcher.node_messages import Orders
from penstock.launcher.options import Options
from penstock.launcher.parts import Command
from penstock.launcher.replicas import Place
from penstock.proto import settings
from penstock.proto.images import DESCRIPTIONS
from penstock.shard.config import ShardConfig
from penstock.tests.certificates import Authority, authorities, make

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
}
MACHINE = Machine(cores=4, memory=1 << 30, fast_bfloat16=False)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    return authorities(tmp_path_factory.mktemp("certificates"))


def planned(options: Options, machine: Machine = MACHINE) -> plan.Plan:
    model = checkpoint.Checkpoint(folder=Path("/model"), config=CONFIG, dtype="float32", bytes=0, files=0)
    return plan.divide(options, model, machine)


def make_node(folder: Path, environment: Mapping[str, str] = {}, **settings: Any) -> multi_node.Node:
    """A node of a group of two nodes with two ranks each."""
    options = Options(nnodes=2, num_shard=4, **settings)
    place = Place(0, True, [str(folder / name) for name in ("a", "b")], str(folder / "relay"), "", (), {})
    shards = children.shard_configs(options, "m", planned(options), place)
    return multi_node.Node(options, shards, "digest", folder, environment, Console(False))


def shard_config_of(command: Command) -> ShardConfig:
    """The settings that a process is started with. They are in a file, as arguments could be seen by others."""
    *_, module, argument = command.arguments
    assert (module, argument[:1]) == ("penstock.shard", "@")
    return settings.load(ShardConfig, argument)


def test_num_shard_counts_the_ranks_of_all_nodes_and_must_divide_evenly() -> None:
    planned_layout = planned(Options(nnodes=2, num_shard=4, node_rank=1, threads=2))
    assert (planned_layout.ranks, planned_layout.local_ranks, planned_layout.threads) == (4, 2, 2)
    assert planned_layout.memory == int(MACHINE.memory // 2 * 0.9)
    assert "4, 2 on each node, 2 threads each" in plan.table(planned_layout, "m")
    assert planned(Options(nnodes=2)).ranks == 2
    gpus = dataclasses.replace(MACHINE, gpus=Gpus((1 << 30,) * 2))
    assert (planned(Options(nnodes=2), gpus).ranks, planned(Options(), gpus).ranks) == (4, 1)
    with pytest.raises(UsageError, match="--num-shard 3 counts the ranks of all nodes, which share them evenly: --nnodes is 2"):
        planned(Options(nnodes=2, num_shard=3))
    with pytest.raises(UsageError, match="--num-shard 8, 4 of them on this node, but there are 2 GPUs"):
        planned(Options(nnodes=2, num_shard=8), gpus)


def test_node_0_starts_the_first_ranks_on_unix_sockets(tmp_path: Path) -> None:
    node = make_node(tmp_path, node_rank=0, master_addr="127.0.0.1", master_port=machine.free_port(), step_timeout=7.0)
    leader, addresses = multi_node.lead(node)
    try:
        assert addresses == [*(f"unix:{tmp_path / name}" for name in "ab"), *(f"file:{tmp_path}/address-{rank}" for rank in (2, 3))]
        first, second = map(shard_config_of, leader._commands)
        assert [(shard.rank, shard.local_rank, shard.socket, shard.listen) for shard in (first, second)] == [
            (0, 0, str(tmp_path / "a"), ""),
            (1, 1, str(tmp_path / "b"), ""),
        ]
        assert (first.ranks, first.local_ranks, first.neighbours) == (4, 2, 2)
        assert first.relay == second.relay == str(tmp_path / "relay")
        assert (first.link_timeout, first.master_addr) == (7.0, "127.0.0.1")
        assert len(first.token) == 32
        assert [command.environment for command in leader._commands] == [
            {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
        ] * 2
        with pytest.raises(UsageError, match=r"127.0.0.1:\d+ is in use: choose another --master-port, on all nodes"):
            multi_node.lead(node)
    finally:
        leader.close(0)


def test_other_nodes_start_the_other_ranks_on_tcp_ports(tmp_path: Path, authority: tuple[Authority, Authority]) -> None:
    files = dict(zip(("tls_cert", "tls_key", "tls_ca"), authority[0].files, strict=True))
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    node = make_node(tmp_path, environment, node_rank=1, master_addr="127.0.0.1", master_port=5, **files)
    ranks = multi_node.Ranks(node)
    hello = ranks.hello("127.0.0.1")
    assert (hello.node, hello.address, len(set(hello.ports))) == (1, "127.0.0.1", 2)
    assert ranks.hello("127.0.0.1") == hello  # the same when it registers again
    orders = Orders(epoch=1, relay_address="127.0.0.2:9", token="secret", store=8)
    commands = ranks.commands(orders, hello)
    third, fourth = map(shard_config_of, commands)
    assert [(shard.rank, shard.local_rank, shard.listen) for shard in (third, fourth)] == [
        (2, 0, f"127.0.0.1:{hello.ports[0]}"),
        (3, 1, f"127.0.0.1:{hello.ports[1]}"),
    ]
    assert (third.socket, third.relay, third.relay_address, third.token) == ("", "", "127.0.0.2:9", "secret")
    assert (third.master_addr, third.master_port) == ("127.0.0.2", 8)
    assert (third.tls_cert, third.tls_key, third.tls_ca) == authority[0].files
    assert [command.environment for command in commands] == [{"GLOO_SOCKET_IFNAME": "lo"}] * 2


def test_terms_of_all_nodes_are_equal_but_for_settings_of_their_own(tmp_path: Path) -> None:
    first = make_node(tmp_path, node_rank=0, master_addr="a", threads=1).terms
    assert first == make_node(tmp_path / "elsewhere", node_rank=1, master_addr="b", threads=2).terms
    assert first != make_node(tmp_path, node_rank=1, page_size=4).terms
    assert {"penstock", "torch", "weights", "nodes", "dtype", "page_size", "kv_cache_dtype", "ranks"} <= set(first)


def test_terms_include_transformers_and_preprocessing_if_images_are_taken(tmp_path: Path) -> None:
    """They must also preprocess images in the same way (preprocessor_config.json)."""
    node = make_node(tmp_path, node_rank=0, master_addr="a", threads=1)
    folder = tmp_path / "model"
    folder.mkdir()

    def terms(pixels: int, preprocessor_config: str) -> dict[str, str]:
        (folder / DESCRIPTIONS[0]).write_text(preprocessor_config)
        shards = [dataclasses.replace(shard, folder=str(folder), image_pixels=pixels) for shard in node.shards]
        return dataclasses.replace(node, shards=shards).terms

    assert "transformers" not in terms(0, "a")
    assert terms(0, "a") == terms(0, "b")
    assert terms(100, "a")["transformers"] == importlib.metadata.version("transformers")
    assert terms(100, "a") == terms(100, "a") != terms(100, "b")


def test_digest_depends_on_config_and_weight_sizes(tmp_path: Path) -> None:
    def digest(name: str, config: dict[str, Any], weights: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / checkpoint.SINGLE).write_bytes(weights)
        return checkpoint.digest(checkpoint.Checkpoint(folder=folder, config=config, dtype="float32", bytes=len(weights), files=1))

    same = digest("a", {"x": 1, "y": 2}, b"1234")
    assert same == digest("b", {"y": 2, "x": 1}, b"4321")
    assert len({same, digest("c", {"x": 1, "y": 2}, b"12345"), digest("d", {"x": 1, "y": 3}, b"1234")}) == 3


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"master_addr": "10.0.0.1"}, "ranks would obey anybody who reaches 10.0.0.1: name certificates with --tls-cert"),
        ({"master_addr": "node07"}, "or say --insecure-nodes where nobody else is in the network"),
        ({"master_addr": "127.0.0.1", "tls_cert": "x"}, "--tls-cert, --tls-key and --tls-ca belong together"),
    ],
)
def test_listening_without_certificates_must_be_allowed_unless_on_loopback(settings: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError) as caught:
        multi_node.checked(Options(**settings), settings["master_addr"])
    assert error in str(caught.value)
    assert multi_node.checked(Options(master_addr="10.0.0.1", insecure_nodes=True), "10.0.0.1") is None
    assert multi_node.checked(Options(master_addr="::1"), "::1") is None
    assert multi_node.checked(Options(shard_listen="[::1]:7000"), "[::1]") is None
    assert multi_node.checked(Options()) is None


def test_certificates_that_other_nodes_would_refuse_are_refused(authority: tuple[Authority, Authority], tmp_path: Path) -> None:
    def assert_accepted(certificate: str, key: str, ca: str) -> None:
        assert multi_node.checked(Options(tls_cert=certificate, tls_key=key, tls_ca=ca), "10.0.0.1") is not None

    own_files, foreign_files = (each.files for each in authority)
    assert_accepted(*own_files)
    misnamed = make(tmp_path / "misnamed", "node07").files
    for files, error in (
        ((foreign_files[0], foreign_files[1], own_files[2]), "certificate"),
        (misnamed, "certificate is not valid for 'penstock'"),
        ((own_files[0], foreign_files[1], own_files[2]), "key values mismatch"),
    ):
        with pytest.raises(UsageError) as caught:
            assert_accepted(*files)
        assert error in str(caught.value)
        assert "would be refused by other nodes" in str(caught.value)


def test_master_addr_must_be_an_address_of_node_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lead(name: str, address: str = "") -> None:
        address_info = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address or name, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **named: address_info)
        settings = {"master_addr": name, "master_port": 1, "insecure_nodes": True, "node_timeout": 0.1}
        multi_node.lead(make_node(tmp_path, node_rank=0, **settings))

    with pytest.raises(UsageError, match=r"--master-addr 192.0.2.1 is no address of this machine, which is node 0"):
        lead("192.0.2.1")
    with pytest.raises(
        UsageError, match=r"--master-addr node07 is 127.0.1.1 here \(/etc/hosts says so\), where no other node comes"
    ):
        lead("node07", "127.0.1.1")
    monkeypatch.undo()
    monkeypatch.setattr(socket, "getaddrinfo", raise_unknown_host)
    with pytest.raises(UsageError, match="--master-addr node07 has no address: is its name known here"):
        multi_node.lead(make_node(tmp_path, node_rank=0, master_addr="node07", insecure_nodes=True, node_timeout=0.1))


def raise_unknown_host(*arguments: object, **named: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--nnodes 2 --node-rank 0 --master-addr 10.0.0.1", "ranks would obey anybody who reaches 10.0.0.1"),
        ("--nnodes 2 --node-rank 1 --master-addr 10.0.0.1", "ranks would obey anybody who reaches 10.0.0.1"),
        ("--nnodes 2 --master-addr 127.0.0.1", "--nnodes 2 needs --node-rank"),
        ("--tls-key /etc/hostname", "--tls-cert, --tls-key and --tls-ca belong together"),
        (
            "--nnodes 2 --node-rank 0 --master-addr 192.0.2.1 --insecure-nodes",
            "--master-addr 192.0.2.1 is no address of this machine",
        ),
        (
            "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --node-addr 192.0.2.1",
            "--node-addr 192.0.2.1 is no address of this machine: name one at which the others reach it",
        ),
        (
            "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --node-addr nowhere.invalid --node-timeout 0.1",
            "--node-addr nowhere.invalid has no address: is its name known here?",
        ),
        ("--nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --num-shard 3", "--num-shard 3 counts the ranks of all nodes"),
    ],
)
def test_contradictory_node_flags_end_with_exit_code_2(flags: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--device", "cpu", "--port", str(machine.free_port()), *flags.split()]) == 2
    error_output = capsys.readouterr().err
    assert error in error_output
    assert error_output.count("\n") == 1


def test_interface_and_free_ports_of_an_address() -> None:
    assert machine.interface("127.0.0.1") == "lo"
    assert machine.interface("192.0.2.1") == ""
    assert machine.interface("2001:db8::1") == ""
    ports = machine.free_ports("127.0.0.1", 3)
    assert len(set(ports)) == 3
    with pytest.raises(OSError, match="assign"):
        machine.free_ports("192.0.2.1", 1)
