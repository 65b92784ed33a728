"""Number of nodes, node rank and master address, from flags and from the environments of torchrun, Slurm and LeaderWorkerSet."""

import pytest

from penstock.launcher import cli, command_line, nodes, options
from penstock.launcher.errors import UsageError
from penstock.launcher.options import Options

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}
JOB = {  # the environment of a batch script
    "SLURM_JOB_ID": "7",
    "SLURM_NNODES": "3",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-09],other",
}
STEP = {  # the environment of srun within it
    **JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_NODEID": "2",
}
LWS = {"LWS_LEADER_ADDRESS": "group-0.group.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}


def settle_nodes(line: str = "", **environment: str) -> tuple[tuple[int, int | None, str, int], str]:
    """Nodes, rank, address and port that flags and environment give, and the message to the operator."""
    options = command_line.parse(cli._parsers()[1]["serve"], line.split(), environment)
    found, message = nodes.settle(options, environment)
    return (found.nnodes, found.node_rank, found.master_addr, found.master_port), message


def test_node_settings_by_flags() -> None:
    found, message = settle_nodes("--nnodes 2 --node-rank 1 --master-addr fd00::1 --master-port 7")
    assert found == (2, 1, "fd00::1", 7)
    assert message == (
        "node 1 of 2, node 0 is at [fd00::1]:7 (nodes: --nnodes, rank: --node-rank, address: --master-addr, port: --master-port)"
    )


def test_node_settings_by_penstocks_variables() -> None:
    found, message = settle_nodes(NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1", MASTER_PORT="7")
    assert found == (2, 1, "10.0.0.1", 7)
    assert message.endswith("(nodes: NNODES, rank: NODE_RANK, address: MASTER_ADDR, port: MASTER_PORT)")


def test_whitespace_around_variables_is_stripped() -> None:
    found, _ = settle_nodes(NNODES="2\n", NODE_RANK="1\n", MASTER_ADDR="10.0.0.1\n", MASTER_PORT="7\n")
    assert found == (2, 1, "10.0.0.1", 7)


def test_next_port_is_used_if_torchruns_agent_holds_master_port() -> None:
    found, message = settle_nodes(**TORCHRUN)
    assert found == (2, 1, "10.0.0.1", 29401)
    assert "rank: GROUP_RANK" in message
    assert settle_nodes(**{**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"})[0] == (2, 1, "10.0.0.1", 29400)
    assert settle_nodes("--master-port 5", **TORCHRUN)[0] == (2, 1, "10.0.0.1", 5)
    single_node = {**TORCHRUN, "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    assert settle_nodes(**single_node) == ((1, 0, "10.0.0.1", 29401), "")


def test_node_settings_by_slurm_step() -> None:
    found, message = settle_nodes(**STEP)
    assert found == (3, 2, "gpu07", options.SHARD.master_port)
    assert message.endswith("(nodes: SLURM_STEP_NUM_NODES, rank: SLURM_NODEID, address: SLURM_STEP_NODELIST, port: default)")
    older = {name: text for name, text in STEP.items() if not name.startswith("SLURM_STEP_N")}
    assert settle_nodes("--master-port 9", **older)[0] == (3, 2, "gpu07", 9)


def test_node_settings_by_leader_worker_set() -> None:
    found, message = settle_nodes(**LWS)
    assert found == (4, 3, "group-0.group.default", options.SHARD.master_port)
    assert "nodes: LWS_GROUP_SIZE, rank: LWS_WORKER_INDEX, address: LWS_LEADER_ADDRESS" in message


@pytest.mark.parametrize(
    "environment",
    [
        JOB,  # a batch script itself runs on one node
        {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"},
        {**LWS, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
        {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"},
        {"NODE_RANK": "3"},
        {"RANK": "3", "WORLD_SIZE": "4"},
        {"MASTER_PORT": "29500", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"},
    ],
)
def test_environment_of_a_single_node_gives_one_node(environment: dict[str, str]) -> None:
    (count, rank, address, _), message = settle_nodes(**environment)
    assert (count, rank, address, message) == (1, 0, "", "")


@pytest.mark.parametrize("environment", [STEP, LWS, TORCHRUN])
def test_nnodes_1_overrides_the_environment(environment: dict[str, str]) -> None:
    assert settle_nodes("--nnodes 1", **environment)[0][:2] == (1, 0)


def test_flags_override_the_environment() -> None:
    assert settle_nodes("--nnodes 5 --node-rank 4 --master-addr here --master-port 3", **LWS)[0] == (5, 4, "here", 3)
    assert settle_nodes("--node-rank 0", **STEP)[0][1] == 0


@pytest.mark.parametrize(
    ("line", "environment", "error"),
    [
        ("--nnodes 2", {}, "--nnodes 2 needs --node-rank, a number from 0"),
        ("--nnodes 2 --node-rank 0", {}, "--nnodes 2 needs --master-addr, the address of node 0"),
        ("--nnodes 2 --node-rank 2 --master-addr a", {}, "--node-rank says node 2, but nodes are counted from 0 and there are 2"),
        ("--node-rank 1", {}, "--node-rank 1 of one node: say with --nnodes how many there are"),
        ("", {**LWS, "LWS_GROUP_SIZE": "many"}, "LWS_GROUP_SIZE=many: a whole number is needed"),
        ("--nnodes 2", LWS, "LWS_WORKER_INDEX says node 3"),
        ("", {**STEP, "SLURM_STEP_NUM_TASKS": "24"}, "Slurm starts 24 tasks on 3 nodes: say srun --ntasks-per-node=1"),
        ("", {**TORCHRUN, "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "torchrun starts 8 processes on each node"),
    ],
)
def test_invalid_node_settings_are_refused(line: str, environment: dict[str, str], error: str) -> None:
    with pytest.raises(UsageError) as caught:
        settle_nodes(line, **environment)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a,b", "a"), ("node[07-09,12],other", "node07"), ("r[1-2]n[03,05]-x,z", "r1n03-x"), ("n[5]", "n5")],
)
def test_first_host_of_a_slurm_node_list(hosts: str, first: str) -> None:
    assert nodes.first_host(hosts) == first


def test_default_options_have_one_node() -> None:
    assert nodes.settle(Options(), {})[0].nnodes == 1
