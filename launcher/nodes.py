"""Determines which of several machines this is: by flags, else from the environment of torchrun, Slurm or LeaderWorkerSet.

Pure. A server that is started on one machine only is never made part of a group by a variable that happens to be set: of a Slurm
job only a step counts (`srun`), of torchrun and LeaderWorkerSet only a complete set of variables.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..proto import link
from .command_line import stripped
from .errors import UsageError
from .options import SHARD, Options, check, flag

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """What a process launcher says about the nodes, each value with the name of its variable."""

    nodes: tuple[str, int]
    node: tuple[str, int]
    address: tuple[str, str]
    port: tuple[str, int]


ALONE = Found(("", 1), ("", 0), ("", ""), ("default", SHARD.master_port))  # nothing says that there are several nodes


def settle(asked: Options, environment: Environment) -> tuple[Options, str]:
    """The options with `nnodes`, `node_rank`, `master_addr` and `master_port` decided, and, with several nodes, a line for the
    operator that says where each was taken from. Raises UsageError."""
    environment = stripped(environment)
    found = _torchrun(environment) or _slurm(environment) or _leader_worker_set(environment) or ALONE
    nodes = asked.nnodes or found.nodes[1]
    port = _free_of_agent(asked.master_port, environment)
    if nodes == 1:
        if asked.node_rank:
            raise UsageError(f"--node-rank {asked.node_rank} of one node: say with --nnodes how many there are")
        return dataclasses.replace(asked, nnodes=1, node_rank=0, master_port=port), ""
    rank, rank_from = _rank(asked, environment, found)
    if rank >= nodes:
        raise UsageError(f"{rank_from} says node {rank}, but nodes are counted from 0 and there are {nodes}")
    address = asked.master_addr or found.address[1]
    if not address:
        raise UsageError(f"--nnodes {nodes} needs --master-addr, the address of node 0, on each of them")
    port = port or found.port[1]
    sources = [
        _source("nnodes", asked.nnodes, environment, found.nodes[0]),
        rank_from,
        _source("master_addr", asked.master_addr, environment, found.address[0]),
        "MASTER_PORT + 1, as torchrun holds that one"
        if port == asked.master_port + 1
        else _source("master_port", asked.master_port, environment, found.port[0]),
    ]
    line = f"node {rank} of {nodes}, node 0 is at {link.joined(address, port)}"
    names = ("nodes", "rank", "address", "port")
    description = f"{line} ({', '.join(f'{name}: {source}' for name, source in zip(names, sources, strict=True))})"
    return check(dataclasses.replace(asked, nnodes=nodes, node_rank=rank, master_addr=address, master_port=port)), description


def _rank(asked: Options, environment: Environment, found: Found) -> tuple[int, str]:
    """The node's rank, and where it was found."""
    if asked.node_rank is not None:
        return asked.node_rank, "--node-rank"
    if environment.get("NODE_RANK"):
        return _number(environment, "NODE_RANK"), "NODE_RANK"
    if found is ALONE:
        raise UsageError(f"--nnodes {asked.nnodes} needs --node-rank, a number from 0 of its own on each of them")
    return found.node[1], found.node[0]


def _source(name: str, value: object, environment: Environment, otherwise: str) -> str:
    """The flag or variable that a value came from."""
    if not value:
        return otherwise
    variable = name.upper()
    return variable if environment.get(variable) == str(value) else flag(name)


def _torchrun(environment: Environment) -> Found | None:
    """torchrun's variables. It starts `LOCAL_WORLD_SIZE` processes a node: one launcher, which starts the ranks itself."""
    if any(not environment.get(name) for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    here, nodes = _number(environment, "LOCAL_WORLD_SIZE"), _number(environment, "WORLD_SIZE")
    if nodes > here > 1:
        raise UsageError(
            f"torchrun starts {here} processes on each node (LOCAL_WORLD_SIZE): say --nproc-per-node 1, and --num-shard"
        )
    port = _free_of_agent(_number(environment, "MASTER_PORT"), environment)
    return Found(
        ("WORLD_SIZE", max(1, nodes // max(1, here))),
        ("GROUP_RANK", _number(environment, "GROUP_RANK")),
        ("MASTER_ADDR", environment["MASTER_ADDR"]),
        ("MASTER_PORT", port),
    )


def _free_of_agent(port: int, environment: Environment) -> int:
    """The port to use: torchrun itself listens at MASTER_PORT while it runs us, so then the next one."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get("MASTER_PORT") == str(port):
        return port + 1
    return port


def _slurm(environment: Environment) -> Found | None:
    """The variables of a Slurm step, which `srun` starts. A batch script has the job's variables too, but runs on one node
    alone."""
    if not environment.get("SLURM_STEP_ID") or not environment.get("SLURM_NODEID"):
        return None
    nodes = "SLURM_STEP_NUM_NODES" if environment.get("SLURM_STEP_NUM_NODES") else "SLURM_NNODES"
    hosts = "SLURM_STEP_NODELIST" if environment.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    if not environment.get(nodes) or not environment.get(hosts):
        return None
    count = _number(environment, nodes)
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or str(count)
    if count > 1 and tasks != str(count):
        raise UsageError(f"Slurm starts {tasks} tasks on {count} nodes: say srun --ntasks-per-node=1, and --num-shard")
    return Found(
        (nodes, count),
        ("SLURM_NODEID", _number(environment, "SLURM_NODEID")),
        (hosts, first_host(environment[hosts])),
        ("default", SHARD.master_port),
    )


def first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it: node[07-09,12],other -> node07."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", head[0] if head else hosts)


def _leader_worker_set(environment: Environment) -> Found | None:
    """The variables of a LeaderWorkerSet, a group of pods in Kubernetes."""
    if any(not environment.get(name) for name in ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")):
        return None
    return Found(
        ("LWS_GROUP_SIZE", _number(environment, "LWS_GROUP_SIZE")),
        ("LWS_WORKER_INDEX", _number(environment, "LWS_WORKER_INDEX")),
        ("LWS_LEADER_ADDRESS", environment["LWS_LEADER_ADDRESS"]),
        ("default", SHARD.master_port),
    )


def _number(environment: Environment, name: str) -> int:
    text = environment[name]
    if not text.isascii() or not text.isdigit():
        raise UsageError(
            f"{name}={text}: a whole number is needed; --nnodes, --node-rank and --master-addr do without such variables"
        )
    return int(text)
