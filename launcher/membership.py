"""Node 0's register of a multi-node group: which nodes are there before anything is loaded, which are missing, and which differ.
Pure.

Each other node announces itself by a `Hello`: which one it is, where its ranks will listen, and its terms, all settings that must
be the same on every node.
"""

import dataclasses
from collections.abc import Mapping

from ..proto.images import DESCRIPTIONS
from ..shard.config import ShardConfig
from .node_messages import Hello

# Settings of a rank that are its own, or its machine's. All others must be the same on all nodes.
OWN = {
    *("folder", "model", "name", "rank", "local_rank", "memory_fraction", "threads", "socket", "listen", "relay", "relay_address"),
    *("meeting", "token", "link_timeout", "tls_cert", "tls_key", "tls_ca", "master_addr", "master_port", "json_output"),
}
FLAGS = {
    **{"ranks": "--num-shard", "nodes": "--nnodes", "kernels": "--penstock-kernels", "local_ranks": "--num-shard"},
    **{"image_pixels": "--max-images and --max-image-pixels", "images_asked": "--max-images"},
}
VERSIONS = ("penstock", "torch", "transformers", "weights", DESCRIPTIONS[0])  # what differs by installation or files, not by flags


def terms(config: ShardConfig, nodes: int, weights: str, versions: Mapping[str, str]) -> dict[str, str]:
    """All that must be the same on every node. weights: a digest of the model's files."""
    same = {name: str(value) for name, value in dataclasses.asdict(config).items() if name not in OWN}
    return {**versions, "weights": weights, "nodes": str(nodes), **same}


class Membership:
    """The nodes that are there, as node 0 knows them."""

    def __init__(self, nodes: int, terms: Mapping[str, str]) -> None:
        self._nodes = nodes
        self._terms = terms
        self.present: dict[int, Hello] = {}
        self._idle: set[int] = set()  # nodes on which no ranks run

    def objection(self, hello: Hello) -> str:
        """Why a node cannot belong to this group, "" if it can."""
        name = named(hello.node, hello.address)
        if not 0 < hello.node < self._nodes:
            return f"{name} is none of the nodes 1 to {self._nodes - 1}: --nnodes is {self._nodes} on node 0, look at --node-rank"
        differing = [_difference(key, hello.terms.get(key), self._terms.get(key)) for key in {**self._terms, **hello.terms}]
        found = [difference for difference in differing if difference]
        return f"{name} differs from node 0: {'; '.join(found)}" if found else ""

    def rival(self, hello: Hello) -> str:
        """Why a node cannot be registered yet: another start of the same node is. Its end will be noticed sooner or later."""
        there = self.present.get(hello.node)
        if there is None or there.start == hello.start:
            return ""
        return f"node {hello.node} is there already, from {there.address}: this one, from {hello.address}, waits for its end"

    def enter(self, hello: Hello) -> None:
        """Registers a node, none of whose ranks runs."""
        self.present[hello.node] = hello
        self._idle.add(hello.node)

    def leave(self, node: int) -> None:
        """Removes a lost node."""
        self.present.pop(node, None)
        self._idle.discard(node)

    def halted(self, node: int) -> None:
        """Records that none of the node's ranks runs any more."""
        if node in self.present:
            self._idle.add(node)

    def started(self) -> None:
        """Records that ranks run on all nodes."""
        self._idle.clear()

    @property
    def complete(self) -> bool:
        """Whether all nodes are there and can be started."""
        return len(self._idle) == self._nodes - 1

    def missing(self) -> str:
        """The nodes that cannot be started, for people."""
        late = [node for node in range(1, self._nodes) if node not in self._idle]
        names = [named(node, self.present[node].address) if node in self.present else f"node {node}" for node in late]
        return f"{' and '.join(names)} of {self._nodes}"

    def late(self, seconds: float) -> str:
        """The error message when they have taken too long."""
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
