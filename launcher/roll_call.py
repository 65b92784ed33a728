"""Which of several nodes are there before anything is loaded, which are missing, and which don't fit. Pure.

Node 0 keeps the roll. Each other node comes with a `Hello`: which one it is, where its ranks will listen, and its terms, all that
has to be the same on every node.
"""

import dataclasses
from collections.abc import Mapping

from ..proto.images import DESCRIPTIONS
from ..shard.config import ShardConfig
from .node_messages import Hello

# Settings of a rank that are its own, or its machine's. All others have to be the same on all nodes.
OWN = {
    *("folder", "model", "name", "rank", "local_rank", "memory_fraction", "threads", "socket", "listen", "relay", "relay_address"),
    *("meeting", "token", "link_timeout", "tls_cert", "tls_key", "tls_ca", "master_addr", "master_port", "json_output"),
}
FLAGS = {
    **{"ranks": "--num-shard", "nodes": "--nnodes", "kernels": "--penstock-kernels", "local_ranks": "--num-shard"},
    **{"image_pixels": "--max-images and --max-image-pixels", "images_asked": "--max-images"},
}
VERSIONS = ("penstock", "torch", "transformers", "weights", DESCRIPTIONS[0])  # what differs by what is installed, or lies there


def terms(config: ShardConfig, nodes: int, weights: str, versions: Mapping[str, str]) -> dict[str, str]:
    """What has to be the same everywhere. weights: a digest of the model's files."""
    same = {name: str(value) for name, value in dataclasses.asdict(config).items() if name not in OWN}
    return {**versions, "weights": weights, "nodes": str(nodes), **same}


class RollCall:
    """Which nodes are there, as node 0 knows it."""

    def __init__(self, nodes: int, terms: Mapping[str, str]) -> None:
        self._nodes = nodes
        self._terms = terms
        self.present: dict[int, Hello] = {}
        self._idle: set[int] = set()  # of these nothing runs

    def objection(self, hello: Hello) -> str:
        """Why a node can't be one of this group, "" if it can."""
        name = named(hello.node, hello.address)
        if not 0 < hello.node < self._nodes:
            return f"{name} is none of the nodes 1 to {self._nodes - 1}: --nnodes is {self._nodes} on node 0, look at --node-rank"
        differing = [_difference(key, hello.terms.get(key), self._terms.get(key)) for key in {**self._terms, **hello.terms}]
        found = [difference for difference in differing if difference]
        return f"{name} differs from node 0: {'; '.join(found)}" if found else ""

    def rival(self, hello: Hello) -> str:
        """Why it can't be one yet: another start of the same node is there. Its end is noticed sooner or later."""
        there = self.present.get(hello.node)
        if there is None or there.start == hello.start:
            return ""
        return f"node {hello.node} is there already, from {there.address}: this one, from {hello.address}, waits for its end"

    def enter(self, hello: Hello) -> None:
        """It is there, and nothing of it runs."""
        self.present[hello.node] = hello
        self._idle.add(hello.node)

    def leave(self, node: int) -> None:
        """It is lost."""
        self.present.pop(node, None)
        self._idle.discard(node)

    def halted(self, node: int) -> None:
        """Nothing of it runs any more."""
        if node in self.present:
            self._idle.add(node)

    def started(self) -> None:
        """All run."""
        self._idle.clear()

    @property
    def complete(self) -> bool:
        """All are there, and can be started."""
        return len(self._idle) == self._nodes - 1

    def missing(self) -> str:
        """Those that can't be started, for people."""
        late = [node for node in range(1, self._nodes) if node not in self._idle]
        names = [named(node, self.present[node].address) if node in self.present else f"node {node}" for node in late]
        return f"{' and '.join(names)} of {self._nodes}"

    def late(self, seconds: float) -> str:
        """When it has taken too long."""
        several = self._nodes - 1 - len(self._idle) > 1
        return (
            f"{self.missing()} {'have' if several else 'has'} not come within {seconds:g} s (--node-timeout): is penstock started "
            "there with this --master-addr and --master-port, and does a firewall let it through?"
        )


def named(node: int, address: str) -> str:
    return f"node {node} ({address})"


def _difference(key: str, there: str | None, here: str | None) -> str:
    if there == here:
        return ""
    if key == "weights":
        return "the model's config.json, or names and sizes of its weights, are others there: copy the same files to both"
    remedy = "install the same" if key in VERSIONS else f"say {FLAGS.get(key, '--' + key.replace('_', '-'))} on both"
    return f"{key} is {there or 'unknown'} there and {here or 'unknown'} on node 0 ({remedy})"
