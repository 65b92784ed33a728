"""`penstock plan --cluster "2 x 8 x H200"`: the ways to lay out a model (ranks x replicas) over machines that need not be here, and
which is best for latency and for throughput.

Knows accelerators by name. What fits is computed by `plan.divide`, what it can reach by `roofline`. Pure.
"""

import dataclasses
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..shard import graph_sizes
from ..shard.models.families import shape
from ..shard.models.shape import Shape
from . import plan, roofline
from .adapters import Adapter
from .checkpoint import Checkpoint
from .errors import UsageError
from .gpus import Gpus
from .machine import Machine
from .options import Options
from .plan import Plan, size
from .roofline import Accelerator, Group

EXAMPLE = '"2 x 8 x H200", "4 x A100-80GB" or "2 x 4 x mine memory=48GB bandwidth=864GB/s flops=181T"'
CONTEXTS = (1024, 8192, 32768)
STREAMS = (1, 8, 64, 512, 4096, 32768)


def _accelerator(mebibytes: int, bandwidth: float, flops: float, nvlink: float, network: float) -> Accelerator:
    """An accelerator from a data sheet's units: GB/s of memory, dense TFLOP/s, GB/s of NVLink in both directions together, GB/s of
    network."""
    return Accelerator(
        memory=mebibytes << 20,
        bandwidth=bandwidth * 1e9,
        flops=flops * 1e12,
        link=nvlink / 2 * 1e9,
        network=network * 1e9,
        # NCCL's all-reduce of a few KiB in a CUDA graph: 6 us over 2 H100, more over 8 (NVIDIA/nccl#1259). Between nodes it is a
        # guess.
        latency=12e-6,
        network_latency=30e-6,
    )


# Memory as nvidia-smi shows it; the rest from NVIDIA's data sheets (SXM unless the name says otherwise): bandwidth, dense bfloat16,
# NVLink or else PCIe in both directions. Network: 400 Gb/s for each GPU as in DGX H100 to B200, 200 as in DGX A100; for PCIe cards
# 100, which is a guess.
ACCELERATORS = {
    "B200": _accelerator(183359, 7700, 2250, 1800, 50),
    "H200": _accelerator(143771, 4800, 989, 900, 50),
    "H100": _accelerator(81559, 3350, 989, 900, 50),
    "H100-PCIE": _accelerator(81559, 2000, 756, 128, 12.5),
    "H100-NVL": _accelerator(95830, 3900, 835, 600, 12.5),
    "A100-80GB": _accelerator(81920, 2039, 312, 600, 25),
    "A100-40GB": _accelerator(40960, 1555, 312, 600, 25),
    "L40S": _accelerator(46068, 864, 362, 64, 12.5),
    "L4": _accelerator(23034, 300, 121, 64, 12.5),
    "A10": _accelerator(23028, 600, 125, 64, 12.5),
    "A10G": _accelerator(23028, 600, 70, 64, 12.5),
}
BARE = _accelerator(0, 0, 0, 64, 12.5)  # a kind without an entry, for which the operator gives the rest
OWN = {"memory": "48GB", "bandwidth": "864GB/s", "flops": "181T"}  # what must be given for a kind without an entry, with examples
KEYS = tuple(field.name for field in dataclasses.fields(Accelerator))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster of identical machines."""

    nodes: int
    gpus: int  # of a node
    kind: str
    accelerator: Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layout of a model over a cluster: a number of replicas, each over `plan.ranks` GPUs of `nodes` nodes."""

    plan: Plan
    nodes: int
    replicas: int

    @property
    def group(self) -> Group:
        """The ranks of a replica, for the roofline."""
        made, item = self.plan, plan.ITEM_BYTES[self.plan.dtype]
        return Group(
            shape=made.shape, ranks=made.ranks, nodes=self.nodes, item=item, dtype=made.dtype, token_bytes=made.token_bytes
        )

    def room(self, context: int) -> int:
        """The number of sequences of that length that a replica runs at once."""
        return min(self.plan.sequences, self.plan.pages // -(-context // self.plan.page_size))


def parse(text: str) -> Cluster:
    """Parses [NODES x] [GPUS x] KIND [KEY=VALUE ...]. Raises UsageError."""
    head, *words = re.split(r"\s+(?=[\w-]+=)", text.strip())
    found = re.fullmatch(r"(?:(\d{1,9})\s*x\s*)?(?:(\d{1,9})\s*x\s*)?([A-Za-z][\w.-]*)", head)
    if not found:
        raise UsageError(f"--cluster {text}: nodes x GPUs of each x kind is needed, such as {EXAMPLE}")
    counts = [int(count) for count in found.groups()[:2] if count is not None]
    nodes, gpus = [1, 1, *counts][-2:]
    if not 1 <= nodes * gpus <= 1 << 16:
        raise UsageError(f"--cluster {text}: {nodes} nodes of {gpus} GPUs are none, or more than {1 << 16:,} together")
    kind = found[3].upper() if found[3].upper() in ACCELERATORS else found[3]
    values = dict(_assignment(word, text) for word in words)
    missing = [f"{key}={example}" for key, example in OWN.items() if kind not in ACCELERATORS and key not in values]
    if missing:
        known = ", ".join(ACCELERATORS)
        raise UsageError(f"--cluster {text}: no kind {kind}; say what it has, such as {' '.join(missing)}, or take one of {known}")
    return Cluster(nodes=nodes, gpus=gpus, kind=kind, accelerator=dataclasses.replace(ACCELERATORS.get(kind, BARE), **values))


def _assignment(word: str, text: str) -> tuple[str, float]:
    name, _, value = word.partition("=")
    key = name.replace("-", "_")
    if key not in KEYS:
        raise UsageError(f"--cluster {text}: no {name}; {', '.join(KEYS).replace('_', '-')} can be said")
    found = (_seconds if "latency" in key else _amount)(value)
    if not found:
        unit = "20us" if "latency" in key else OWN.get(key, "50GB/s or 400Gb/s")
        raise UsageError(f"--cluster {text}: {name}={value} is no number with its unit, such as {unit}")
    return key, found


def _amount(text: str) -> float:
    """The value of 141GB, 4.8TB/s, 80GiB, 989T, 989TFLOP/s, 400Gb/s (bits); 0 if it is none of these."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)([MGTP])(i?)(B|b|FLOP|FLOPS)?(?:/s)?", text)
    if not found:
        return 0.0
    base = 1024.0 if found[3] else 1000.0
    return float(found[1]) * math.pow(base, " KMGTP".index(found[2])) / (8 if found[4] == "b" else 1)


def _seconds(text: str) -> float:
    """The value of 20us, 0.02ms; 0 if it is none of these."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)(us|ms)", text)
    return float(found[1]) * (1e-6 if found[2] == "us" else 1e-3) if found else 0.0


def layouts(
    options: Options, model: Checkpoint, cluster: Cluster, draft: Checkpoint | None = None, loras: Sequence[Adapter] = ()
) -> list[Layout]:
    """Every layout that fits, by the number of ranks. Raises UsageError if there is none."""
    if options.device == "cpu" or options.dtype == "float32":
        raise UsageError("--cluster is for accelerators and 16-bit numbers: leave --device cpu and --dtype float32 out")
    try:
        form = shape(model.config)
        if options.num_shard:
            form.check_ranks(options.num_shard)
    except ValueError as error:
        raise UsageError(f"{model.folder}: {error}") from None
    possible = [ranks for ranks in _sizes(form, cluster) if options.num_shard in (0, ranks)]
    if not possible:
        fitting = ", ".join(str(ranks) for ranks in _sizes(form, cluster))
        raise UsageError(f"--num-shard {options.num_shard} does not divide nodes of {cluster.gpus} GPUs evenly: {fitting} do")
    found, refusal = [], UsageError()
    for ranks in possible:
        try:
            found.append(_layout(options, model, cluster, ranks, draft, loras))
        except UsageError as error:  # most likely that it does not fit over so few
            refusal = error
    if not found:
        raise UsageError(f"over {possible[-1]} ranks: {refusal}")
    return found


def _sizes(form: Shape, cluster: Cluster) -> list[int]:
    """Numbers of ranks that divide the model, and such that several replicas fill a node, or one replica fills several nodes."""
    whole = range(cluster.gpus, cluster.gpus * cluster.nodes + 1, cluster.gpus)
    return sorted({*range(1, cluster.gpus + 1), *whole}.intersection(form.fitting))


def _layout(
    options: Options, model: Checkpoint, cluster: Cluster, ranks: int, draft: Checkpoint | None, loras: Sequence[Adapter]
) -> Layout:
    free = int(cluster.accelerator.memory)
    machine = Machine(cores=ranks, memory=free, fast_bfloat16=True, gpus=Gpus((free,) * ranks))
    asked = dataclasses.replace(options, device="cuda", num_shard=ranks, sharded=None, nnodes=1)
    nodes = max(1, ranks // cluster.gpus)
    replicas = cluster.nodes // nodes * (cluster.gpus // ranks or 1)
    return Layout(plan=plan.divide(asked, model, machine, draft, loras), nodes=nodes, replicas=replicas)


def served(layout: Layout, cluster: Cluster, context: int, target: float) -> tuple[int, float]:
    """The most sequences of all replicas together, and seconds of a decode step with them, which is at most `target` if that is not
    0."""

    def seconds(streams: int) -> float:
        return roofline.decode(layout.group, cluster.accelerator, streams, context)

    room = layout.room(context)
    streams = bisect_right(range(1, room + 1), target, key=seconds) if target else room
    return streams * layout.replicas, seconds(streams) if streams else 0.0


def table(
    options: Options,
    model: Checkpoint,
    name: str,
    cluster: Cluster,
    draft: Checkpoint | None = None,
    loras: Sequence[Adapter] = (),
) -> str:
    """The whole report as aligned tables for people. Raises UsageError."""
    found = layouts(options, model, cluster, draft, loras)
    longest = options.max_total_tokens or found[0].plan.shape.max_positions
    contexts = [context for context in CONTEXTS if context <= longest] or [longest]
    parts = [_head(name, found[0].plan, cluster), _memory(found, cluster)]
    parts += [_decode(found, cluster, context, options.itl_target) for context in contexts]
    parts += [
        _prefill(found, cluster, contexts),
        _best(found, cluster, contexts[0], options.itl_target),
        f"how\n{roofline.FORMULA}",
    ]
    return "\n\n".join(parts)


def _head(name: str, first: Plan, cluster: Cluster) -> str:
    on, form = cluster.accelerator, first.shape
    said = f"{on.memory / 2**30:,.1f} GiB, {on.bandwidth / 1e12:.2f} TB/s, {on.flops / 1e12:,.0f} TFLOP/s"
    wires = f"within a node {on.link / 1e9:,.1f} GB/s and {on.latency * 1e6:.0f} us"
    if cluster.nodes > 1:
        wires += f", between nodes {on.network / 1e9:,.1f} GB/s a GPU and {on.network_latency * 1e6:.0f} us"
    return (
        f"model         {name}, {form.described}, {first.dtype}\n"
        f"cluster       {cluster.nodes} x {cluster.gpus} x {cluster.kind}: {said}\n"
        f"wires         {wires}"
    )


def _memory(found: Sequence[Layout], cluster: Cluster) -> str:
    drafts = any(layout.plan.draft for layout in found)
    rows = [
        ["ranks", "nodes", "replicas", "GPUs idle", "weights", "graphs", *["draft"] * drafts, "keys/values", "capacity", "of all"]
    ]
    for layout in found:
        own, used = layout.plan, layout.plan.ranks * layout.replicas
        rows.append(
            [
                *(f"{own.ranks}", f"{layout.nodes}", f"{layout.replicas}", f"{cluster.nodes * cluster.gpus - used}"),
                *(size(own.weight_bytes + own.adapter_bytes), size(own.graphs * graph_sizes.GRAPH_BYTES)),
                *[size(own.draft_bytes + own.capacity * own.draft_token_bytes)] * drafts,
                *(size(own.capacity * own.token_bytes), f"{own.capacity:,}", f"{own.capacity * layout.replicas:,}"),
            ]
        )
    usable = f"of each rank, which may use {size(found[0].plan.memory)}; capacity: tokens of a replica, and of all"
    usable += "; a draft model is on rank 0 alone" * drafts
    fitting = [layout.plan.ranks for layout in found]
    few = ", ".join(str(ranks) for ranks in _sizes(found[0].plan.shape, cluster) if ranks < fitting[0])
    return f"memory {usable}\n{_aligned(rows)}" + (f"\ntoo little memory with ranks: {few}" if few and len(fitting) > 1 else "")


def _decode(found: Sequence[Layout], cluster: Cluster, context: int, target: float) -> str:
    """Decode times: a row for each number of streams in the cluster, a column for each layout; * marks the best of a row."""
    rows = [["streams", *(_titles(found))]]
    most = [served(layout, cluster, context, target) for layout in found]
    for streams in STREAMS:
        each = [-(-streams // layout.replicas) for layout in found]
        times = [
            roofline.decode(layout.group, cluster.accelerator, own, context) if own <= layout.room(context) else None
            for layout, own in zip(found, each, strict=True)
        ]
        if any(times):
            rows.append([f"{streams:,}", *_marked(times, min, lambda seconds: f"{seconds * 1e3:,.2f}")])
    rows.append(["most", *(f"{streams:,}" for streams, _ in most)])
    speeds = [streams / seconds if streams else None for streams, seconds in most]
    rows.append(["tokens/s", *_marked(speeds, max, lambda speed: f"{speed:,.0f}")])
    bound = f", of at most {target * 1e3:,.0f} ms" if target else ""
    return (
        f"decode, context {context:,}: ms from token to token; the most streams{bound}, and their tokens a second\n{_aligned(rows)}"
    )


def _prefill(found: Sequence[Layout], cluster: Cluster, lengths: Iterable[int]) -> str:
    rows = [["prompt", *(_titles(found))]]
    for tokens in lengths:
        times = [roofline.prefill(layout.group, cluster.accelerator, tokens) for layout in found]
        rows.append([f"{tokens:,}", *_marked(times, min, lambda seconds: f"{seconds * 1e3:,.1f}")])
        speeds = [tokens * layout.replicas / seconds for layout, seconds in zip(found, times, strict=True)]
        rows.append(["tokens/s", *_marked(speeds, max, lambda speed: f"{speed:,.0f}")])
    return f"prefill: ms of a prompt alone; tokens a second of all replicas\n{_aligned(rows)}"


def _best(layouts: Sequence[Layout], cluster: Cluster, context: int, target: float) -> str:
    def alone(layout: Layout) -> float:
        return roofline.decode(layout.group, cluster.accelerator, 1, context)

    def speed(layout: Layout) -> float:
        streams, seconds = served(layout, cluster, context, target)
        return streams / seconds if streams else 0.0

    found = [layout for layout in layouts if layout.room(context)]
    if not found:
        return f"no room for a sequence of {context:,} tokens"
    quick, strong = min(found, key=alone), max(found, key=speed)
    streams, seconds = served(strong, cluster, context, target)
    rate = f"{speed(strong):,.0f} tokens/s with {streams:,} streams"
    lines = [
        f"best for latency     {_named(quick)}: {alone(quick) * 1e3:.2f} ms a token for one stream, context {context:,}",
        f"best for throughput  {_named(strong)}: {rate}, {seconds * 1e3:.1f} ms a token",
    ]
    if strong.room(context) == strong.plan.sequences:
        lines.append(f"more than {strong.plan.sequences} streams of a replica: raise --max-concurrent-requests")
    return "\n".join(lines)


def _titles(found: Sequence[Layout]) -> list[str]:
    return [f"{layout.plan.ranks} x {layout.replicas}" for layout in found]


def _named(layout: Layout) -> str:
    nodes = f" over {layout.nodes} nodes" if layout.nodes > 1 else ""
    return f"--num-shard {layout.plan.ranks}{nodes}, {layout.replicas} replica{'' if layout.replicas == 1 else 's'}"


def _marked(values: Sequence[float | None], best: Callable[[Iterable[float]], float], show: Callable[[float], str]) -> list[str]:
    """A cell for each value, - for none; where there is a choice the best has a *."""
    there = [value for value in values if value is not None]
    first = best(there) if len(there) > 1 else None
    return ["-" if value is None else f"{'*' if value == first else ''}{show(value)}" for value in values]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
