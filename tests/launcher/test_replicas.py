"""Replicas (several rank groups): their shares of the machine, their addresses, shards that are started separately, and flags that
contradict each other."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.launcher import banner, checkpoint, children, command_line, hub, plan, replicas, serve
from penstock.launcher.console import Console
from penstock.launcher.errors import UsageError
from penstock.launcher.gpus import Gpus
from penstock.launcher.machine import Machine
from penstock.launcher.options import Options
from penstock.router.config import addresses_of
from penstock.tests.launcher.test_cli import CONFIG

GPUS = Machine(cores=16, memory=800, fast_bfloat16=True, gpus=Gpus((80, 70, 60, 50)))
CPU = Machine(cores=5, memory=1 << 31, fast_bfloat16=False)


def test_replicas_share_cores_and_memory_equally() -> None:
    assert replicas.share(Options(), CPU) is CPU
    shared = replicas.share(Options(replicas=2), CPU)
    assert (shared.cores, shared.memory) == (2, 1 << 30)
    assert replicas.share(Options(replicas=8), CPU).cores == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"replicas": 2}, (70,)),
        ({"replicas": 4}, (50,)),
        ({"replicas": 2, "num_shard": 2}, (60, 50)),
        ({"replicas": 2, "sharded": True}, (60, 50)),
        ({"replicas": 8, "device": "cpu"}, (50,)),  # GPUs that are not used
    ],
)
def test_gpu_memory_of_a_rank_is_the_smallest_among_the_replicas(settings: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert replicas.share(Options(**settings), GPUS).gpus.memory == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 5}, "--replicas 5 of 1 rank each need 5 GPUs, and there are 4: lower one of them"),
        ({"replicas": 2, "num_shard": 3}, "--replicas 2 of 3 ranks each need 6 GPUs"),
        ({"replicas": 3, "sharded": True}, "--replicas 3 of 2 ranks each need 6 GPUs"),
    ],
)
def test_too_few_gpus_for_the_replicas_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replicas.share(Options(**settings), GPUS)


def test_each_replica_sees_only_its_own_gpus() -> None:
    def gpus_of_replicas(**environment: str) -> list[dict[str, str]]:
        options = Options(replicas=2, num_shard=2)
        return [dict(place.environment) for place in replicas.divide(options, 2, "/p", environment, GPUS.gpus)]

    assert gpus_of_replicas() == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert gpus_of_replicas(CUDA_VISIBLE_DEVICES="7, GPU-a,5,2") == [
        {"CUDA_VISIBLE_DEVICES": "7,GPU-a"},
        {"CUDA_VISIBLE_DEVICES": "5,2"},
    ]


def test_replicas_have_distinct_names_sockets_and_files() -> None:
    first, second = replicas.divide(Options(replicas=2), 2, "/p", {}, Gpus())
    assert (second.name, second.title, second.process(1)) == ("1", "replica 1", "replica 1 shard 1")
    assert (second.addresses, second.relay, second.meeting) == (["unix:/p-1-0", "unix:/p-1-1"], "/p-1-relay", "/p-1-meeting")
    assert addresses_of(",".join(second.addresses)) == tuple(second.addresses), "as an operator names them to join them again"
    assert set(first.files).isdisjoint(second.files)
    assert second.environment == {}
    [only] = replicas.divide(Options(), 1, "/p", {}, GPUS.gpus)
    assert (only.title, only.process(0), only.environment) == ("the shards", "shard 0", {})
    assert [str(path) for path in only.files] == ["/p-0", "/p-relay", "/p-meeting"]


def test_without_a_router_ranks_listen_at_consecutive_ports(tmp_path: Path) -> None:
    options = Options(
        replicas=2, num_shard=2, no_router=True, shard_listen="10.0.0.1:7000", insecure_nodes=True, cuda_memory_fraction=0.8
    )
    places = replicas.divide(options, 2, "/p", {}, Gpus())
    assert [place.addresses for place in places] == [["10.0.0.1:7000", "10.0.0.1:7001"], ["10.0.0.1:7002", "10.0.0.1:7003"]]
    model = checkpoint.Checkpoint(folder=tmp_path, config=CONFIG, dtype="float32", bytes=0, files=0)
    planned = plan.divide(options, model, replicas.share(options, CPU))
    configs = [children.shard_configs(options, "n", planned, place) for place in places]
    assert [shard.listen for shards in configs for shard in shards] == [f"10.0.0.1:{port}" for port in range(7000, 7004)]
    assert [(shard.rank, shard.socket, shard.memory_fraction) for shard in configs[1]] == [(0, "", 0.4), (1, "", 0.4)]
    assert [{shard.meeting for shard in shards} for shards in configs] == [{"/p-0-meeting"}, {"/p-1-meeting"}]
    text = banner.shards([place.addresses for place in places])
    assert "say when they have loaded" in text
    assert text.endswith("--replica 10.0.0.1:7000,10.0.0.1:7001 --replica 10.0.0.1:7002,10.0.0.1:7003")
    assert banner.shards([["unix:/p-0"]]).endswith("--replica unix:/p-0")


def parsed(*flags: str, **environment: str) -> Options:
    parser = command_line.Parser(prog="penstock serve", formatter_class=command_line.Formatter, allow_abbrev=False)
    command_line.add(parser)
    return command_line.parse(parser, flags, environment)


def test_router_alone_reports_options_without_effect_on_its_shards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "_supervisor", lambda *given: SimpleNamespace(run=lambda: 0))
    options = Options(replica="unix:/x", quantize="fp8", num_beams=2)
    assert serve._route(options, "demo", hub.DEMO_FOLDER, {}, Console(False), 0.0) == 0
    assert "no effect on shards that somebody else starts: --quantize\n" in capsys.readouterr().out


def test_replica_flag_may_be_repeated_or_list_rank_groups_with_semicolons() -> None:
    for options in (
        parsed("--replica", "a:1,a:2", "--replica", "unix:/b"),
        parsed("--replica", "a:1,a:2;unix:/b"),
        parsed(REPLICA="a:1,a:2;unix:/b"),
    ):
        assert options.remote_replicas == (("a:1", "a:2"), ("unix:/b",))
        assert options.local_replicas == 0
    assert (parsed().local_replicas, parsed().remote_replicas) == (1, ())
    assert parsed("--replica", "a:1", "--replicas", "2").local_replicas == 2
    assert children.router_config(parsed("--replicas", "2"), "n", Path(), [["a", "b"], ["c"]]).groups == (("a", "b"), ("c",))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "0"], "name a rank group that runs with --replica"),
        (["--replica", "somewhere"], "--replica=somewhere: host:port or unix:/path"),
        (["--replica", "a:1", "--replica", ""], "host:port or unix:/path"),
        (["--replica", "a:1,b:0"], "the port of b:0 is none"),
        (["--replica", "a:1,a:1"], "named twice"),
        (["--replica", "a:1,a:2", "--replica", "a:2"], "named twice"),
        (["--replicas", "2", "--nnodes", "2"], "a rank group of several nodes is one replica"),
        (["--no-router"], "--no-router needs --shard-uds-path PREFIX or --shard-listen"),
        (["--no-router", "--shard-uds-path", "/p", "--shard-listen", "127.0.0.1:1"], "--no-router needs"),
        (["--no-router", "--shard-uds-path", "/p", "--replica", "a:1"], "--no-router and --replica contradict"),
        (["--shard-listen", "127.0.0.1:1"], "--shard-listen is for --no-router"),
        (["--no-router", "--shard-listen", "unix:/p"], "--shard-listen=unix:/p: host:port is needed"),
        (["--no-router", "--shard-listen", "127.0.0.1:0"], "whole number from 1"),
    ],
)
def test_contradictory_replica_flags_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parsed(*flags)
