"""Every flag of `penstock serve` and `penstock plan`, once: its name, environment variable, default, kind and help; and which of
them contradict each other.

Names and meanings are text-generation-inference's where it has the flag. Knows nothing of models or processes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from ..proto.speculation import RULES, Speculation
from ..proto.speculation import parse as parse_speculation
from ..router.config import REASONING_PARSERS, TOOL_CALL_PARSERS, USUAL_BATCH, RouterConfig, addresses_of, most_sequences
from ..shard.config import ShardConfig
from . import option_types
from .errors import UsageError

ROUTER = RouterConfig(folder="", model="")  # the defaults of the two configurations are the flags' defaults
SHARD = ShardConfig(folder="", model="")

MODEL = "model"
REQUESTS = "limits of a request"
CHATS = "chats"
BATCHING = "batching and memory"
COMPUTE = "where and how it computes"
NODES = "several machines"
HTTP = "HTTP and operation"


def option(
    group: str,
    help: str,
    *,
    default: Any,
    kind: Callable[[str], Any] = str,
    choices: tuple[str, ...] = (),
    short: str = "",
    also: str = "",
    environment: bool = True,
) -> Any:
    """A field of `Options`. `choices` replaces `kind`; a `default` of bool False without `kind` makes a switch."""
    details = {
        "group": group,
        "help": help,
        "kind": kind,
        "choices": choices,
        "short": short,
        "also": also,
        "environment": environment,
        "switch": default is False and kind is str,
    }
    return dataclasses.field(default=default, metadata=details)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a server. 0, "" and None mean that penstock decides."""

    model_id: str = option(MODEL, "what MODEL says: a folder, or a model id of the Hugging Face hub", default="")
    revision: str = option(MODEL, "branch, tag or commit of a hub model (default: main)", default="")
    huggingface_hub_cache: str = option(MODEL, "folder for downloads (default: the hub's own, ~/.cache/...)", default="")
    load_format: str = option(
        MODEL, "dummy: random weights from config.json alone", default=SHARD.load_format, choices=("auto", "dummy")
    )
    dtype: str = option(
        MODEL,
        "number format of weights and KV cache. auto: float32 on a CPU without bfloat16 units, else as stored (never "
        "float32 on cuda)",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
    )

    quantize: str = option(
        MODEL,
        "quantize the weights of the layers' matrices while loading: to int4 (groups of 64), int8 or fp8; activations "
        "stay in --dtype. Quantized checkpoints say so themselves: gptq, awq and compressed-tensors only require that "
        "this one is",
        default=SHARD.quantize,
        choices=("int4", "int8", "fp8", "gptq", "awq", "compressed-tensors"),
    )

    lora_adapters: str = option(
        MODEL,
        "LoRA adapters, batched together, each request with its own: NAME=FOLDER, NAME=OWNER/MODEL of the hub or "
        "OWNER/MODEL alone, @REVISION appended, separated by commas. Requests name one as adapter_id, on OpenAI's routes "
        "as model",
        default="",
    )

    max_loras: int = option(
        MODEL,
        "most adapters at once, including --lora-adapters: further ones are loaded and unloaded while the server runs "
        "(POST /v1/load_lora_adapter, with the admin key if there is one); 0: no others",
        default=ROUTER.max_loras,
        kind=option_types.limit,
    )
    max_lora_rank: int = option(
        MODEL,
        "highest rank of an adapter that is loaded while the server runs: memory for it is reserved",
        default=SHARD.max_lora_rank,
        kind=option_types.count,
    )

    max_input_tokens: int = option(
        REQUESTS,
        "longest prompt (also --max-input-length; default: --max-total-tokens - 1)",
        default=ROUTER.max_input_tokens,
        kind=option_types.count,
        also="max_input_length",
    )
    max_total_tokens: int = option(
        REQUESTS,
        "most tokens of prompt and answer together (default: what the model's positions and the KV cache allow)",
        default=ROUTER.max_total_tokens,
        kind=option_types.count,
    )
    max_best_of: int = option(
        REQUESTS,
        "most answers to one prompt (best_of, n, num_return_sequences)",
        default=ROUTER.max_best_of,
        kind=option_types.count,
    )
    num_beams: int = option(
        REQUESTS,
        "beam width of requests that give none (num_beams, use_beam_search, best_of, n) and don't sample: on TGI's routes "
        "without sampling parameters, on OpenAI's with temperature 0; 1: greedy decoding, as for those that have no room "
        "for beams",
        default=ROUTER.num_beams,
        kind=option_types.count,
    )
    max_num_beams: int = option(
        REQUESTS, "widest beam search of a request (num_beams)", default=ROUTER.max_num_beams, kind=option_types.count
    )
    speculate: str = option(
        REQUESTS,
        "speculative decoding: draft tokens are verified in one step, which saves steps and changes no token. N: N drafts "
        "by n-gram lookup in prompt and answer. Or a comma-separated list of draft=MODEL (a small model, or heads of "
        "EAGLE-3, Medusa or an MLP speculator: a folder, a hub id, demo-draft or demo-eagle; mtp: the model's own "
        "multi-token-prediction layer), tokens=K (a chain of K drafts), tree=4x2x2x1 (children by depth), nodes=N (a tree "
        "of the most probable), ngram=N, verify=gumbel|rejection|typical (typical is lossy: it changes answers), such as "
        "draft=demo-draft,tokens=4. `speculate` in a request lowers it; 0: none",
        default="",
        kind=option_types.speculation,
    )
    max_images: int | None = option(
        REQUESTS,
        "most images of a request, for vision models; 0: text alone, the vision encoder is not loaded (default: 8 with "
        "the extra images: pip install -e '.[images]' in the checkout)",
        default=None,
        kind=option_types.limit,
    )
    max_image_pixels: int = option(
        REQUESTS,
        "most pixels of an image: larger ones are scaled down",
        default=ROUTER.max_image_pixels,
        kind=option_types.pixels,
    )
    image_hosts: str = option(
        REQUESTS,
        "hosts from which images given by URL may be fetched. public: any public address; none: only data: URLs are "
        "accepted; or host names separated by commas, which may be private",
        default=ROUTER.image_hosts,
        kind=option_types.hosts,
    )
    max_stop_sequences: int = option(
        REQUESTS, "most stop strings of a request", default=ROUTER.max_stop_sequences, kind=option_types.limit
    )
    max_top_n_tokens: int = option(
        REQUESTS,
        "most alternatives per token (top_n_tokens, top_logprobs)",
        default=ROUTER.max_top_n_tokens,
        kind=option_types.limit,
    )
    max_client_batch_size: int = option(
        REQUESTS, "most prompts in one /v1/completions", default=ROUTER.max_client_batch_size, kind=option_types.count
    )
    payload_limit: int = option(REQUESTS, "most bytes of a request body", default=ROUTER.payload_limit, kind=option_types.size)
    payload_limit_total: int = option(
        REQUESTS,
        "most bytes of the bodies of all requests in flight together; beyond that requests get 429",
        default=ROUTER.payload_limit_total,
        kind=option_types.size,
    )
    unknown_fields: str = option(
        REQUESTS,
        "unknown fields in bodies on /v1: ignore names them in the header x-ignored-fields, refuse answers 400",
        default=ROUTER.unknown_fields,
        choices=("ignore", "refuse"),
    )
    disable_grammar_support: bool = option(
        REQUESTS, "refuse requests with a grammar (structured output)", default=ROUTER.disable_grammar_support
    )

    chat_template: str = option(
        CHATS, "a file with a chat template, instead of the model's own", default=ROUTER.chat_template, kind=option_types.file
    )
    trust_request_chat_template: bool = option(
        CHATS,
        "let clients send chat templates of their own: these are programs, run in a process with limited time and memory",
        default=ROUTER.trust_request_chat_template,
    )
    tool_call_parser: str = option(
        CHATS,
        "format of the model's tool calls; auto: detected from its chat template",
        default=ROUTER.tool_call_parser,
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        CHATS,
        "format of the model's reasoning before an answer; auto: detected from its chat template; none: reasoning is part "
        "of the answer",
        default=ROUTER.reasoning_parser,
        choices=REASONING_PARSERS,
    )

    max_concurrent_requests: int = option(
        BATCHING,
        "most requests in flight per replica; beyond that requests get 429",
        default=ROUTER.max_concurrent_requests,
        kind=option_types.count,
    )
    max_batch_prefill_tokens: int = option(
        BATCHING,
        "most tokens computed in a step; longer prompts are prefilled in chunks (default: 4096 on a GPU, 512 on a CPU)",
        default=ROUTER.max_batch_prefill_tokens,
        kind=option_types.count,
    )
    max_batch_total_tokens: int = option(
        BATCHING,
        "size of the KV cache in tokens; --kv-pages is the same in pages, and has the default",
        default=0,
        kind=option_types.count,
    )
    max_batch_size: int = option(
        BATCHING,
        f"most sequences that run at once (default: as --max-concurrent-requests, up to {USUAL_BATCH:,})",
        default=ROUTER.max_batch_size,
        kind=option_types.count,
    )
    prefill_policy: str = option(
        BATCHING,
        "mixed: chunked prefill, prompts are computed in chunks beside running streams, which never stall; pause: streams "
        "wait for whole prompts",
        default=ROUTER.prefill_policy,
        choices=("mixed", "pause"),
    )
    itl_target: float = option(
        BATCHING,
        "mixed: most milliseconds between two tokens of a running stream (default: twice a pure decode step, at least 50)",
        default=ROUTER.itl_target,
        kind=option_types.milliseconds,
    )
    max_waiting_tokens: int | None = option(
        BATCHING,
        f"pause: decode steps after which waiting prompts are computed (default: {ROUTER.max_waiting_tokens})",
        default=None,
        kind=option_types.limit,
    )
    waiting_served_ratio: float | None = option(
        BATCHING,
        f"pause: waiting per running request from which prompts are computed (default: {ROUTER.waiting_served_ratio})",
        default=None,
        kind=option_types.seconds,
    )
    prefix_caching: str = option(
        BATCHING,
        "on: the KV cache of earlier prompts and answers is reused for common prefixes",
        default="on" if SHARD.prefix_caching else "off",
        choices=("on", "off"),
    )
    isolate_tenants: bool = option(
        BATCHING,
        "each API key (without --api-key: each bearer token) finds only its own requests in the prefix cache, so that "
        "nobody learns from response times what others have asked",
        default=ROUTER.isolate_tenants,
    )
    page_size: int = option(BATCHING, "tokens per page of the KV cache", default=SHARD.page_size, kind=option_types.count)
    kv_pages: int = option(
        BATCHING,
        "pages of the KV cache (default: what fits into the memory left after warm-up, and no more than --max-batch-size "
        "sequences of --max-total-tokens fill)",
        default=SHARD.kv_pages,
        kind=option_types.count,
    )
    kv_offload_gib: float = option(
        BATCHING,
        "host memory per replica for pages evicted from the KV cache: prompts that come again, and preempted requests, "
        "are copied back instead of recomputed",
        default=SHARD.kv_offload_gib,
        kind=option_types.positive,
    )
    cuda_memory_fraction: float = option(
        BATCHING,
        "share of the device's memory to use; on a CPU, of the available memory",
        default=SHARD.memory_fraction,
        kind=option_types.fraction,
    )

    device: str = option(COMPUTE, "auto: cuda where there is a GPU", default="auto", choices=("auto", "cpu", "cuda"))
    kv_cache_dtype: str = option(
        BATCHING,
        "number format of the KV cache; fp8_e4m3fn: 8 bits, half the memory, slightly different answers",
        default=SHARD.kv_cache_dtype,
        choices=("auto", "fp8_e4m3fn"),
    )
    cuda_graphs: str = option(
        COMPUTE,
        "batch sizes whose steps are captured as CUDA graphs, such as 1,2,4,8; 0: none; auto: for decode and mixed steps",
        default=SHARD.cuda_graphs,
        kind=option_types.graphs,
    )
    overlap: str = option(
        COMPUTE,
        "overlap scheduling: launch a step before the tokens of the last one are on the host, so that the device need not "
        "wait; auto: on GPUs",
        default=SHARD.overlap,
        choices=("auto", "on", "off"),
    )
    batch_invariant: bool = option(
        COMPUTE,
        "answers don't depend, to the last bit, on the rest of the batch, chunking, preemption or drafts: the same "
        "request and seed give the same answer, in 16-bit numbers too. Slower; checked at start",
        default=SHARD.batch_invariant,
    )
    penstock_kernels: str = option(
        COMPUTE,
        "for tests. reference: plain torch everywhere; triton: Triton everywhere, on a CPU in its (very slow) interpreter",
        default=SHARD.kernels,
        choices=("reference", "triton"),
    )
    num_shard: int = option(
        COMPUTE,
        "tensor-parallel ranks, on all nodes together (default: 1; with --sharded true, and on several nodes, all GPUs, "
        "one rank per node if there are none)",
        default=0,
        kind=option_types.count,
    )
    sharded: bool | None = option(
        COMPUTE,
        "true: one rank per GPU, at least 2; false: one rank (default: as --num-shard says)",
        default=None,
        kind=option_types.boolean,
    )
    replicas: int | None = option(
        COMPUTE,
        "replicas started here, of --num-shard ranks each, which share the GPUs, or cores and memory; a request goes to "
        "the replica that has most of its prompt cached, as far as load allows (default: 1; 0 with --replica)",
        default=None,
        kind=option_types.limit,
    )
    replica: str = option(
        COMPUTE,
        "a rank group started elsewhere (--no-router), as one more replica: host:port or unix:/path of each rank, rank 0 "
        "first, separated by commas; may be given several times",
        default="",
        kind=option_types.rank_groups,
    )
    no_router: bool = option(
        COMPUTE, "start rank groups without a router, at --shard-uds-path or --shard-listen, for a router elsewhere", default=False
    )
    shard_listen: str = option(
        COMPUTE,
        "with --no-router: host:port on which rank 0 listens instead of a socket; each further rank uses the next port",
        default="",
        kind=option_types.place,
    )
    threads: int = option(
        COMPUTE,
        "compute threads per rank (default: the cores divided among ranks; fewer for small models)",
        default=0,
        kind=option_types.threads,
    )
    master_addr: str = option(
        NODES, "address of node 0, where nodes and their ranks rendezvous; not needed for one node", default=""
    )
    master_port: int = option(
        NODES,
        f"its port, where nodes meet (default: {SHARD.master_port}); one node does without",
        default=0,
        kind=option_types.port,
    )
    nnodes: int = option(
        NODES,
        "machines whose ranks share the model; start penstock on each with the same flags",
        default=0,
        kind=option_types.count,
    )
    node_rank: int | None = option(
        NODES, "this machine's number, from 0; node 0 serves HTTP", default=None, kind=option_types.limit, environment=False
    )
    node_addr: str = option(
        NODES, "address at which the other nodes reach this one (default: that of the route to node 0)", default=""
    )
    node_timeout: float = option(
        NODES, "seconds that nodes wait for each other, at start and after a failure", default=300.0, kind=option_types.positive
    )
    insecure_nodes: bool = option(
        NODES, "allow unencrypted connections between machines, without --tls-...: for private networks only", default=False
    )
    tls_cert: str = option(
        NODES,
        "certificate of this node (PEM), valid for the name penstock, from the same authority as the others'; peers "
        "without one are refused",
        default=ROUTER.tls_cert,
        kind=option_types.file,
    )
    tls_key: str = option(NODES, "its key (PEM)", default=ROUTER.tls_key, kind=option_types.file)
    tls_ca: str = option(NODES, "the authority's certificate (PEM)", default=ROUTER.tls_ca, kind=option_types.file)
    shard_uds_path: str = option(
        COMPUTE, "prefix of the shards' Unix sockets, PREFIX-RANK (default: in a private folder)", default=""
    )
    cluster: str = option(
        COMPUTE,
        'for penstock plan: a cluster to plan for, such as "2 x 8 x H200": which ranks and replicas fit, and their throughput',
        default="",
        environment=False,
    )

    hostname: str = option(
        HTTP,
        "address to listen on; read from the environment only if it is an IP address, as shells and containers set it to "
        "the machine's name",
        default=ROUTER.hostname,
        kind=option_types.address,
    )
    port: int = option(HTTP, "port to listen on", default=ROUTER.port, kind=option_types.port, short="-p")
    api_key: str = option(
        HTTP,
        "require `Authorization: Bearer KEY`; several keys, separated by commas, share the server fairly; the environment "
        "keeps them out of `ps`",
        default="",
        kind=option_types.keys,
    )
    admin_key: str = option(
        HTTP,
        "key for /admin/replicas, where replicas join and leave, which nobody can use without it; the environment keeps "
        "it out of `ps`",
        default="",
        kind=option_types.keys,
    )
    graceful_termination_timeout: float = option(
        HTTP,
        "seconds that running streams get to finish after SIGTERM or Ctrl-C",
        default=ROUTER.graceful_termination_timeout,
        kind=option_types.seconds,
        short="-g",
    )
    idle_timeout: float = option(
        HTTP,
        "seconds after which an idle keep-alive connection is closed; a load balancer in front must close its idle ones sooner",
        default=ROUTER.idle_timeout,
        kind=option_types.positive,
    )
    slow_client_timeout: float = option(
        HTTP,
        "seconds after which a stream is closed whose client does not read it",
        default=ROUTER.slow_client_timeout,
        kind=option_types.positive,
    )
    max_restarts: int = option(
        HTTP,
        "restarts of dead shards, or of the router, within ten minutes, before the server gives up",
        default=20,
        kind=option_types.limit,
    )
    step_timeout: float = option(
        HTTP,
        "seconds without a reply after which hanging shards are killed and restarted; at least ten times their longest step so far",
        default=ROUTER.step_timeout,
        kind=option_types.positive,
    )
    aip_predict_route: str = option(
        HTTP,
        "path at which Vertex AI sends its requests, beside /vertex",
        default=ROUTER.aip_predict_route,
        kind=option_types.path,
    )
    aip_health_route: str = option(
        HTTP, "path at which Vertex AI checks health, beside /health", default=ROUTER.aip_health_route, kind=option_types.path
    )
    cors_allow_origin: str = option(
        HTTP,
        "origins whose web pages may use the server from a browser, separated by commas; none: only its own",
        default=ROUTER.cors_allow_origin,
        kind=option_types.origins,
    )
    otlp_endpoint: str = option(
        HTTP,
        "URL of a collector for traces over OTLP/HTTP, such as http://localhost:4318; needs the extra otel: pip install "
        "-e '.[otel]' in the checkout",
        default=ROUTER.otlp_endpoint,
        kind=option_types.url,
    )
    otlp_service_name: str = option(HTTP, "service.name of the traces", default=ROUTER.otlp_service_name)
    log_level: str = option(
        HTTP,
        "lowest level of the router's log lines; not read from the environment, where other programs use LOG_LEVEL",
        default=ROUTER.log_level,
        choices=("debug", "info", "warning", "error"),
        environment=False,
    )
    json_output: bool = option(HTTP, "log lines as JSON", default=ROUTER.json_output)
    env: bool = option(HTTP, "print versions and machine first, for a bug report", default=False, short="-e", environment=False)

    @property
    def speculation(self) -> Speculation:
        """The parsed value of `speculate`."""
        return parse_speculation(self.speculate or "0")

    @property
    def local_replicas(self) -> int:
        """The number of rank groups that are started here."""
        return (0 if self.replica else 1) if self.replicas is None else self.replicas

    @property
    def remote_replicas(self) -> tuple[tuple[str, ...], ...]:
        """The addresses of the ranks of each rank group that is started elsewhere (--replica)."""
        return tuple(addresses_of(group) for group in self.replica.split(";")) if self.replica else ()

    @property
    def sequences(self) -> int:
        """The most sequences that run at once."""
        return most_sequences(self.max_batch_size, self.max_concurrent_requests, self.max_best_of)

    @property
    def pool_pages(self) -> int:
        """Pages of the key/value pool, if the operator sets its size in pages or in tokens; else 0."""
        return self.kv_pages or (max(1, self.max_batch_total_tokens // self.page_size) if self.max_batch_total_tokens else 0)


PAUSING = ("max_waiting_tokens", "waiting_served_ratio")  # settings that only --prefill-policy pause reads
FIELDS = {field.name: field for field in dataclasses.fields(Options)}
# Settings that only shards read, and so only launchers that start shards: some by other names, and none of several nodes', which
# always have shards.
RENAMED = {"cuda_memory_fraction", "max_batch_total_tokens", "num_shard", "penstock_kernels", "shard_uds_path"}
READ = dataclasses.asdict(SHARD).keys() - dataclasses.asdict(ROUTER).keys() - {"master_addr", "master_port"} | RENAMED
SHARDS = [name for name in FIELDS if name in READ]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check(options: Options) -> Options:
    """Returns the options unchanged. Raises UsageError where two of them contradict each other."""
    if options.max_total_tokens and options.max_input_tokens >= options.max_total_tokens:
        raise UsageError(
            f"--max-input-tokens {options.max_input_tokens} must be below --max-total-tokens {options.max_total_tokens}: "
            "an answer has at least one token"
        )
    if options.payload_limit > options.payload_limit_total:
        raise UsageError(
            f"--payload-limit {options.payload_limit} is more than all bodies together may have: raise --payload-limit-total "
            f"{options.payload_limit_total}, or a body of that size is told to come again for ever"
        )
    if options.max_batch_total_tokens and options.kv_pages not in (0, max(1, options.max_batch_total_tokens // options.page_size)):
        raise UsageError(
            f"--kv-pages {options.kv_pages} of {options.page_size} tokens and --max-batch-total-tokens "
            f"{options.max_batch_total_tokens} both say how large the pool is: set one of them"
        )
    if options.kv_offload_gib and options.prefix_caching == "off":
        raise UsageError("--kv-offload-gib keeps what --prefix-caching off forgets: set one of them")
    if options.itl_target and options.prefill_policy == "pause":
        raise UsageError("--itl-target is for --prefill-policy mixed: under pause, streams wait for whole prompts")
    if options.max_batch_size and options.max_batch_size < options.max_best_of and options.max_best_of != ROUTER.max_best_of:
        raise UsageError(
            f"--max-best-of {options.max_best_of} answers could not run at once: raise --max-batch-size {options.max_batch_size}"
        )
    if options.batch_invariant and not options.speculation.chain:
        raise UsageError("--batch-invariant needs a chain of drafts: --speculate with a draft model's tokens=K, or ngram=K")
    if options.batch_invariant and options.threads > 1:
        raise UsageError(
            "--batch-invariant has one thread for each rank, lest sums be divided: leave --threads out, take --num-shard"
        )
    if options.batch_invariant and options.speculation.verify != RULES[0]:
        raise UsageError(f"--batch-invariant and --speculate verify={options.speculation.verify}: take verify={RULES[0]}")
    if options.num_beams > options.max_num_beams:
        raise UsageError(
            f"--num-beams {options.num_beams} is more than --max-num-beams {options.max_num_beams}: lower it, or raise the other"
        )
    beams = options.max_num_beams if options.max_num_beams != ROUTER.max_num_beams else options.num_beams
    if beams > options.sequences:
        raise UsageError(f"{beams} beams of a request could not run at once: raise --max-batch-size to {beams}")
    _check_replicas(options)
    if options.sharded is False and options.num_shard > 1:
        raise UsageError(f"--sharded false and --num-shard {options.num_shard} contradict each other: leave one out")
    if options.sharded and options.num_shard == 1:
        raise UsageError("--sharded true and --num-shard 1 contradict each other: leave one out")
    return options


def _check_replicas(options: Options) -> None:
    """Raises UsageError where it is unclear who starts which rank groups, or who reaches them."""
    if options.replicas == 0 and not options.replica:
        raise UsageError("--replicas 0 leaves nobody to compute: name a rank group that runs with --replica ADDRESS")
    if options.nnodes > 1 and options.local_replicas != 1:
        raise UsageError(
            f"--replicas {options.local_replicas} of --nnodes {options.nnodes}: a rank group of several nodes is one replica"
        )
    if options.no_router and options.replica:
        raise UsageError("--no-router and --replica contradict each other: whoever has a router names its replicas")
    if options.no_router and bool(options.shard_listen) == bool(options.shard_uds_path):
        raise UsageError("--no-router needs --shard-uds-path PREFIX or --shard-listen HOST:PORT, where a router finds the shards")
    if options.shard_listen and not options.no_router:
        raise UsageError("--shard-listen is for --no-router: a router of this machine reaches its shards by sockets")
    if options.no_router and options.nnodes > 1:
        raise UsageError("--no-router and --nnodes contradict each other: the router of several nodes is on node 0")
