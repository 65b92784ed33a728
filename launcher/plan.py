"""The plan of a server: ranks, dtype, threads, and how each rank's memory divides into weights and KV cache pages.

It is an estimate made before any process starts, so that what cannot work fails at once and in one line. The shards measure, once
the model is loaded, what the KV pool really gets. Pure, apart from `make`, which inspects the machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..shard import graph_sizes
from ..shard.models.draft_families import DraftShape, borrowed_elements, draft_shape
from ..shard.models.families import shape
from ..shard.models.shape import Shape
from . import machine, replicas, vision
from .adapters import Adapter
from .checkpoint import ITEM_BYTES as STORED
from .checkpoint import Checkpoint
from .errors import UsageError
from .gpus import Gpus
from .machine import Machine
from .options import SHARD, Options
from .vision import Vision

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Parameters of a rank for each compute thread of a CPU. With fewer, threads wait for each other longer than they compute: every
# matrix product of a step wakes all of them. Measured 2026-11-22 on 2 cores of an EPYC, bfloat16, ms of a step of 1 / 8 / 32 rows
# by one thread and by two: 3.5 M 1.1 / 2.0 / 4.8 and 3.1 / 4.6 / 7.5; 75 M 11 / 13 / 29 and 14 / 16 / 37; 155 M 14 / 22 / 54 and
# 18 / 20 / 50.
PER_THREAD = 1 << 26
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a model is to run on a machine: ranks, dtype and memory. Bytes are per rank."""

    shape: Shape
    checkpoint: Checkpoint
    device: str
    gpus: Gpus = field(default_factory=Gpus)  # of this machine, for all groups of ranks; none where `device` is the CPU
    unused: str = ""  # why GPUs of this machine are not used; "" if they are, or if the operator wants it so
    ranks: int
    local_ranks: int  # on this machine
    replicas: int = 1  # groups of ranks on this machine, each with all that is said here
    dtype: str
    threads: int
    weight_bytes: int
    adapter_bytes: int
    vision: Vision = field(default_factory=Vision)
    encoder_bytes: int = 0  # weights of the image encoder, which are not in `weight_bytes`
    token_bytes: int  # KV cache of one token
    state_bytes: int = 0  # recurrent states of all sequences that run at once
    draft: DraftShape | None = None  # the draft model, which is whole on rank 0
    draft_bytes: int = 0  # the draft model's weights
    draft_token_bytes: int = 0
    memory: int  # memory that the rank may use
    page_size: int
    pages: int  # the same number on every rank, for the same tokens
    offload_bytes: int = 0  # host memory for KV pages that the pool evicts
    graphs: int = 0  # number of captured CUDA graphs
    sequences: int  # most sequences that run at once
    longest: int  # most tokens of a sequence

    @property
    def capacity(self) -> int:
        """The number of tokens whose KV fits."""
        return self.pages * self.page_size

    @property
    def ample(self) -> bool:
        """Whether the pool is as large as is useful: all sequences that run at once have room for their last token, and more pages
        would only keep cached prefixes."""
        return self.pages >= self.sequences * -(-self.longest // self.page_size)


def make(options: Options, model: Checkpoint, draft: Checkpoint | None = None, changes: Sequence[Adapter] = ()) -> Plan:
    """The plan for `model` on this machine; see `divide`."""
    here = replicas.share(options, machine.inspect())
    if options.kv_offload_gib * GIB > here.memory:
        raise UsageError(f"--kv-offload-gib {options.kv_offload_gib:g}: of this machine's memory {size(here.memory)} can be taken")
    return divide(options, model, here, draft, changes)


def divide(
    options: Options, model: Checkpoint, machine: Machine, draft: Checkpoint | None = None, changes: Sequence[Adapter] = ()
) -> Plan:
    """The plan for `model` on `machine`, with a draft model and LoRA adapters if there are any. Raises UsageError."""
    seen = vision.resolve(options, model)
    device = _device(options, machine)
    ranks = _ranks(options, device, machine)
    local = ranks // max(1, options.nnodes)
    form = _form(options, model, ranks)
    dtype = _dtype(options, model, device, machine)
    item = ITEM_BYTES[dtype]
    packed = device == "cpu" and (dtype == "float32" or (dtype == "bfloat16" and (machine.fast_bfloat16 or machine.packs_bfloat16)))
    weights = form.weight_bytes(ranks, item, device, dtype, packed)
    # Each adapter takes the space of the largest. Where a matrix is stored fused with others, its LoRA has zeros for these.
    largest = 2 * max((change.elements for change in changes), default=0)
    later = options.max_lora_rank * form.adapted(ranks) if options.max_loras > len(changes) else 0
    adapted = max(len(changes), options.max_loras) * max(largest, later) * item
    token = form.kv_elements(ranks) * (item if options.kv_cache_dtype == "auto" else 1)
    small = draft_shape(draft.config, form, own=draft is model) if draft else None
    draft_bytes = small.weight_bytes(1, item, device, dtype, packed) + borrowed_elements(small, form, ranks) * item if small else 0
    draft_token = (small.kv_elements(1) + small.feature_elements) * item if small else 0
    total = min(machine.gpus.memory[:local]) if device == "cuda" else machine.memory // local
    usable = int(total * options.cuda_memory_fraction)
    graphs = _graphs(options, form, small) if device == "cuda" else 0
    left = usable - graphs * graph_sizes.GRAPH_BYTES
    encoder = sum(size // STORED[kind] for kind, size in model.encoder.items()) * item if seen.images else 0
    fixed, page = weights + adapted + draft_bytes + encoder, (token + draft_token) * options.page_size
    caching = options.prefix_caching == "on"
    sequences = form.sequences(options.sequences, left - fixed, ranks, item, caching)
    states = form.states_bytes(ranks, item, sequences, caching)
    fixed += states
    longest = options.max_total_tokens or form.max_positions
    # More pages than all requests together can fill would only keep cached prefixes.
    pages = options.pool_pages or min(sequences * -(-longest // options.page_size), (left - fixed) // page)
    if pages < 1 or fixed + pages * page > left:
        raise _refusal(options, total, left, fixed, page, _remedy(options, form, ranks, dtype))
    return Plan(
        shape=form,
        checkpoint=model,
        device=device,
        gpus=machine.gpus if device == "cuda" else Gpus(),
        unused=machine.gpus.obstacle if options.device == "auto" else "",
        ranks=ranks,
        replicas=options.local_replicas,
        local_ranks=local,
        dtype=dtype,
        threads=_threads(options, device, form.parameters(ranks), machine.cores // local),
        weight_bytes=weights,
        adapter_bytes=adapted,
        vision=seen,
        encoder_bytes=encoder,
        token_bytes=token,
        state_bytes=states,
        draft=small,
        draft_bytes=draft_bytes,
        draft_token_bytes=draft_token,
        memory=usable,
        page_size=options.page_size,
        pages=pages,
        offload_bytes=int(options.kv_offload_gib * GIB) // local,
        graphs=graphs,
        sequences=sequences,
        longest=longest,
    )


def _form(options: Options, model: Checkpoint, ranks: int) -> Shape:
    """The model's shape as it is to be served. Raises UsageError if the options ask for more than it has."""
    try:
        form = shape(model.config).within(options.max_total_tokens).quantized(options.quantize)
        form.check_ranks(ranks)
        form.check_pages(options.page_size)
        form.check_cache(options.kv_cache_dtype, options.kv_offload_gib > 0)
    except ValueError as error:
        raise UsageError(f"{model.folder}: {error}") from None
    if options.max_total_tokens > form.max_positions:
        raise UsageError(f"--max-total-tokens {options.max_total_tokens} is more than the model's {form.max_positions} positions")
    if options.max_input_tokens >= form.max_positions:
        given, most = options.max_input_tokens, form.max_positions
        raise UsageError(f"--max-input-tokens {given} leaves no room for an answer within the model's {most} positions")
    return form


def _refusal(options: Options, total: int, left: int, fixed: int, page: int, remedy: str) -> UsageError:
    """The error that a rank's memory, `left`, is too little for `fixed` and pages. remedy: used unless the default memory fraction
    is enough."""
    asked = f"{options.pool_pages} pages" if options.pool_pages else "one page"
    pool = page * max(1, options.pool_pages)
    allowed = f"{size(max(0, left))} may be used ({100 * options.cuda_memory_fraction:.4g}% of {size(total)})"
    more = int(total * SHARD.memory_fraction) - int(total * options.cuda_memory_fraction)
    remedy = "raise --cuda-memory-fraction" if fixed + pool <= left + more else remedy
    return UsageError(f"weights take {size(fixed)} and {asked} {size(pool)} per rank, but {allowed}: {remedy}")


def _threads(options: Options, device: str, parameters: int, cores: int) -> int:
    """Compute threads of a rank with so many parameters and cores."""
    if options.batch_invariant:
        return 1
    return options.threads or max(1, cores if device == "cuda" else min(cores, parameters // PER_THREAD))


def _graphs(options: Options, form: Shape, draft: DraftShape | None) -> int:
    """The number of steps that will be captured as CUDA graphs."""
    if not form.replayed:
        return 0
    chosen = graph_sizes.parse(options.cuda_graphs)
    speculation = options.speculation
    tokens = options.max_batch_prefill_tokens or graph_sizes.MIXED[-1]
    remembers = [one.recurrent is not None for one in (form, draft) if isinstance(one, Shape)]
    return len(graph_sizes.recorded(chosen, options.sequences, tokens, speculation.most > 0, remembers, options.batch_invariant))


def _device(options: Options, machine: Machine) -> str:
    if options.device == "cuda" and not machine.gpus.memory:
        none = "nvidia-smi shows no GPU here (or CUDA_VISIBLE_DEVICES hides it), and the kernel none of AMD's"
        raise UsageError(f"--device cuda, but {machine.gpus.obstacle or none}; or use --device cpu")
    if options.device != "auto":
        return options.device
    return "cuda" if machine.gpus.memory else "cpu"


def _ranks(options: Options, device: str, machine: Machine) -> int:
    gpus = len(machine.gpus.memory)
    if options.sharded and (gpus < 2 if device == "cuda" else not options.num_shard):
        found = f"{gpus} GPU{'' if gpus == 1 else 's'} here" if device == "cuda" else "a CPU"
        raise UsageError(f"--sharded true needs at least 2 GPUs, and there is {found}: say how many ranks with --num-shard")
    nodes = max(1, options.nnodes)
    all_gpus = bool(options.sharded) or (nodes > 1 and device == "cuda")
    ranks = options.num_shard or nodes * (gpus if all_gpus else 1)
    if ranks % nodes:
        raise UsageError(f"--num-shard {ranks} counts the ranks of all nodes, which share them evenly: --nnodes is {nodes}")
    if device == "cuda" and ranks // nodes > gpus:
        here = f", {ranks // nodes} of them on this node" if nodes > 1 else ""
        raise UsageError(f"--num-shard {ranks}{here}, but there are {gpus} GPUs: at most one rank per GPU")
    return ranks


def _dtype(options: Options, model: Checkpoint, device: str, machine: Machine) -> str:
    """The compute dtype: float32 on a CPU unless it has bfloat16 units and the weights are bfloat16; on a GPU float32 only if
    asked."""
    if options.dtype != "auto":
        return options.dtype
    if device == "cuda":
        return "float16" if model.dtype == "float16" else "bfloat16"
    return "bfloat16" if machine.fast_bfloat16 and model.dtype == "bfloat16" else "float32"


def _remedy(options: Options, form: Shape, ranks: int, dtype: str) -> str:
    if options.pool_pages:
        return "lower --kv-pages" if options.kv_pages else "lower --max-batch-total-tokens"
    if ITEM_BYTES[dtype] > 2:
        return "free memory, or halve the weights with --dtype bfloat16"
    rounding = "" if form.quantization else ", round the weights with --quantize int4"
    other = "take more ranks with --num-shard" if form.fitting[-1] > ranks else "take a smaller model"
    return f"free memory{rounding}, or {other}"


def table(plan: Plan, name: str) -> str:
    """The plan as an aligned table for people."""
    form, model = plan.shape, plan.checkpoint
    rows = [
        ("model", name),
        ("folder", str(model.folder)),
        ("architecture", f"{form.described}, {form.max_positions:,} positions"),
        ("weights", f"{_stored(form, model)}{_few_bits(plan)}"),
        ("device", f"{plan.device}, {plan.dtype}"),
        *([("", f"a GPU is not used: {plan.unused}")] if plan.unused else []),
        (
            "ranks",
            f"{plan.ranks}"
            + (f", {plan.local_ranks} on each node" if plan.local_ranks < plan.ranks else "")
            + (f", {plan.threads} thread{'' if plan.threads == 1 else 's'} each" if plan.device == "cpu" else ""),
        ),
        *([("replicas", f"{plan.replicas} of these ranks; pages and capacity are each one's")] if plan.replicas > 1 else []),
        ("", ""),
        ("of each rank", ""),
        ("  memory", f"{size(plan.memory):>10}  may be used"),
        ("  weights", f"{size(plan.weight_bytes):>10}"),
        *([("  adapters", f"{size(plan.adapter_bytes):>10}  at most")] if plan.adapter_bytes else []),
        *_vision(plan),
        *(
            [("  graphs", f"{size(plan.graphs * graph_sizes.GRAPH_BYTES):>10}  {plan.graphs} recorded steps")]
            if plan.graphs
            else []
        ),
        ("  keys/values", f"{size(plan.pages * plan.page_size * plan.token_bytes):>10}  {size(plan.token_bytes)} per token"),
        *([("  offloaded", f"{size(plan.offload_bytes):>10}  of the host's memory")] if plan.offload_bytes else []),
        *_states(plan),
        *_draft(plan),
        ("", ""),
        ("pages", f"{plan.pages:,} of {plan.page_size} token{'' if plan.page_size == 1 else 's'}"),
        *_ample(plan),
        ("capacity", f"{plan.capacity:,} tokens (an estimate: the shards measure at start what activations leave)"),
    ]
    return "\n".join(f"{left:<14}{right}".rstrip() for left, right in rows)


def _ample(plan: Plan) -> list[tuple[str, str]]:
    """Why the pool takes no more of the memory, where it could."""
    if not plan.ample:
        return []
    room = f"all sequences that run at once fit, {plan.sequences:,} (--max-batch-size) of {plan.longest:,} tokens"
    return [("", f"{room} (--max-total-tokens): more would only keep prefixes, see --kv-pages")]


def _vision(plan: Plan) -> list[tuple[str, str]]:
    """The row of the image encoder."""
    if not plan.vision.images:
        return [("  images", f"none: {plan.vision.why}")] if plan.vision.why else []
    if not plan.encoder_bytes:
        found = f"{'?':>10}  for what encodes them, which only weights tell: leave room for that"
    else:
        found = f"{size(plan.encoder_bytes):>10}  for what encodes them"
    return [("  images", f"{found}, up to {plan.vision.images} of a request (--max-images)")]


def _states(plan: Plan) -> list[tuple[str, str]]:
    """The row of the recurrent states of linear attention and convolution layers."""
    if not plan.state_bytes:
        return []
    return [("  states", f"{size(plan.state_bytes):>10}  of {plan.sequences:,} sequences at once (--max-batch-size)")]


def _draft(plan: Plan) -> list[tuple[str, str]]:
    """The rows of the draft model's memory, on the rank that has it."""
    if plan.draft is None:
        return []
    cache = plan.pages * plan.page_size * plan.draft_token_bytes
    keyed = isinstance(plan.draft, Shape)
    with_features = " with the model's features" if isinstance(plan.draft, Shape) and plan.draft.features else ""
    return [
        ("", ""),
        ("draft model", plan.draft.described),
        ("  weights", f"{size(plan.draft_bytes):>10}  on rank 0 alone"),
        (
            "  keys/values" if keyed else "  features",
            f"{size(cache):>10}  {size(plan.draft_token_bytes)} per token{with_features}, in pages of the same numbers",
        ),
    ]


def _stored(form: Shape, model: Checkpoint) -> str:
    """The weights as they are stored."""
    if model.random:
        return "random"
    if not model.files:
        item = ITEM_BYTES[model.dtype]
        estimate = form.parameters() * item - (0 if _rounding(form) else form.saved(1, item, "cuda", model.dtype))
        return f"{model.dtype}, about {size(estimate)}, estimated from config.json; not downloaded"
    there = "" if model.here else "; not downloaded"
    return f"{model.dtype}, {size(model.bytes)} in {model.files} file{'' if model.files == 1 else 's'}{there}"


def _rounding(form: Shape) -> bool:
    """Whether the weights are quantized when loaded, from a checkpoint with more bits."""
    return form.quantization is not None and form.quantization.at_load


def _few_bits(plan: Plan) -> str:
    experts = (mixture.quantization for mixture in plan.shape.mixtures if mixture)
    found = plan.shape.quantization or next(experts, None)
    if found is None:
        return ""
    by = "" if found.method == found.kind else f" by {found.method}"
    what = f"; rounded to {found.kind}" if found.at_load else f"; {found.kind}{by}"

    def kept(dtype: str) -> bool:
        return plan.shape.saved(plan.ranks, ITEM_BYTES[dtype], plan.device, dtype) > 0

    if kept(plan.dtype):
        return what
    remedy = "; --dtype bfloat16 would keep them" if kept("bfloat16") else ""
    return f"{what}, unpacked to {plan.dtype} when loaded{remedy}"


def size(count: int) -> str:
    """Bytes for people: 1536 -> 1.5 KiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
