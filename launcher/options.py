"""Every flag of `penstock serve` and `penstock plan`, once: its name, environment variable, default, check and help.

Names and meanings are text-generation-inference's where it has the flag. Knows nothing of models or processes.
"""

import argparse
import dataclasses
import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..proto.speculation import Speculation
from ..proto.speculation import parse as parse_speculation
from ..router.config import (
    ANY_ORIGIN,
    NO_ORIGIN,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    USUAL_BATCH,
    RouterConfig,
    addresses_of,
    most_sequences,
)
from ..shard.config import ShardConfig
from ..shard.rooms import parse as parse_sizes
from .mistake import Mistake

ROUTER = RouterConfig(folder="", model="")  # their defaults are ours
SHARD = ShardConfig(folder="", model="")

MODEL = "model"
REQUESTS = "limits of a request"
CHATS = "chats"
BATCHING = "batching and memory"
COMPUTE = "where and how it computes"
NODES = "several machines"
HTTP = "HTTP and operation"

# Flags of text-generation-inference that penstock lacks: who moves is not pointed to a flag that only looks alike.
TGI_ONLY = (
    "--validation-workers --quantize --trust-remote-code --prometheus-port "
    "--weights-cache-override --disable-custom-kernels --rope-scaling --rope-factor "
    "--watermark-gamma --watermark-delta --tokenizer-config-path "
    "--lora-adapters --usage-stats --enable-prefill-logprobs --disable-usage-stats --disable-crash-reports"
)


MOST = 1 << 31  # of tokens, pages, requests...
LONGEST = 1e9  # seconds: more than anybody waits, and less than clocks and locks can count
THREADS = 4  # for each core, at most; and 64 wherever it is


def count(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, 1)


def limit(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, 0)


def size(text: str) -> int:
    """Bytes."""
    return _whole(text, 1, 1 << 50)


def _whole(text: str, least: int, most: int = MOST) -> int:
    digits = text.lstrip("0")
    if not text.isascii() or not text.isdigit() or int(digits[:20] or "0") < least:
        raise ValueError(f"a whole number from {least} is needed")
    if int(digits[:20] or "0") > most:
        raise ValueError(f"{most:,} is the most there can be")
    return int(digits or "0")


def threads(text: str) -> int:
    """As many as this machine starts without harm."""
    value, cores = count(text), os.cpu_count() or 1
    if value > max(64, THREADS * cores):
        raise ValueError(f"{max(64, THREADS * cores)} is the most there can be: this machine has cores: {cores}")
    return value


def port(text: str) -> int:
    value = count(text)
    if value > 65535:
        raise ValueError("a port is at most 65535")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number is needed") from None


def fraction(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise ValueError("a number above 0 and up to 1 is needed")
    return value


def seconds(text: str) -> float:
    value = number(text)
    if not value >= 0:
        raise ValueError("a number from 0 is needed")
    return _bounded(value)


def positive(text: str) -> float:
    value = number(text)
    if not value > 0:
        raise ValueError("a number above 0 is needed")
    return _bounded(value)


def _bounded(value: float) -> float:
    if value > LONGEST:
        raise ValueError(f"{LONGEST:,.0f} is the most there can be")
    return value


def milliseconds(text: str) -> float:
    """In seconds."""
    value = number(text)
    if not 0 < value < float("inf"):
        raise ValueError("a number of milliseconds above 0 is needed")
    return value / 1000


def boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise ValueError("true or false is needed")
    return values[text.lower()]


def path(text: str) -> str:
    """Of a route."""
    if not re.fullmatch(r"/[\w./:~-]*", text):
        raise ValueError("a path that begins with / is needed")
    return text


def graphs(text: str) -> str:
    """As the shards read it."""
    parse_sizes(text)
    return text


def speculation(text: str) -> str:
    """As the shards read it, but for the draft model's name."""
    return text if parse_speculation(text).most else ""


def rank_groups(text: str) -> str:
    """Addresses as the router reads them; groups with semicolons between them."""
    for group in text.split(";"):
        addresses_of(group)
    return text


def place(text: str) -> str:
    """host:port, one that can be listened at."""
    host, _, number = text.rpartition(":")
    if not host or text.startswith("unix:"):
        raise ValueError("host:port is needed")
    port(number)
    return text


def file(text: str) -> str:
    """One that is there, wherever the server is started from."""
    found = Path(text).expanduser().resolve()
    if not found.is_file():
        raise ValueError("there is no such file")
    return str(found)


def origins(text: str) -> str:
    """Of web pages, with commas between them."""
    for origin in text.split(","):
        if text not in (ANY_ORIGIN, NO_ORIGIN) and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/,\s*]+/?", origin.strip()):
            raise ValueError(f"origins such as https://chat.example, with commas between them, or {ANY_ORIGIN}, or {NO_ORIGIN}")
    return text


def url(text: str) -> str:
    """Of HTTP."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", text):
        raise ValueError("a URL such as http://localhost:4318 is needed")
    return text


def address(text: str) -> str:
    """What the router can bind: an IP address, or localhost."""
    if text != "localhost":
        ipaddress.ip_address(text)
    return text


def keys_of(text: str) -> tuple[str, ...]:
    """Those that stand in it, with commas between them."""
    return tuple(key for part in text.split(",") if (key := part.strip()))


def keys(text: str) -> str:
    """With at least one in it: a server whose operator wants a key must not be open because its file is empty."""
    if not keys_of(text):
        raise ValueError("there is no key in it; leave it out for a server that asks for none")
    return text


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
    """What the operator asks for. 0, "" and None mean that penstock decides."""

    model_id: str = option(MODEL, "what MODEL says: a folder, or a model id of the Hugging Face hub", default="")
    revision: str = option(MODEL, "branch, tag or commit of a hub model (default: main)", default="")
    huggingface_hub_cache: str = option(MODEL, "folder that downloads go to (default: the hub's own, ~/.cache/...)", default="")
    load_format: str = option(
        MODEL, "dummy: random weights from config.json alone", default=SHARD.load_format, choices=("auto", "dummy")
    )
    dtype: str = option(
        MODEL,
        "of weights and keys/values. auto: float32 on a CPU without bfloat16 units, else as stored (never float32 on cuda)",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
    )

    max_input_tokens: int = option(
        REQUESTS,
        "longest prompt (also --max-input-length; default: --max-total-tokens - 1)",
        default=ROUTER.max_input_tokens,
        kind=count,
        also="max_input_length",
    )
    max_total_tokens: int = option(
        REQUESTS,
        "longest prompt and answer together (default: what the model's positions and the pool allow)",
        default=ROUTER.max_total_tokens,
        kind=count,
    )
    max_best_of: int = option(
        REQUESTS, "most answers to one prompt (best_of, n, num_return_sequences)", default=ROUTER.max_best_of, kind=count
    )
    num_beams: int = option(
        REQUESTS,
        "beams of requests that say no number (num_beams, use_beam_search, best_of, n) and draw nothing: without parameters that "
        "sample on TGI's routes, with temperature 0 on OpenAI's; 1: they are greedy",
        default=ROUTER.num_beams,
        kind=count,
    )
    max_num_beams: int = option(REQUESTS, "widest beam search of a request (num_beams)", default=ROUTER.max_num_beams, kind=count)
    speculate: str = option(
        REQUESTS,
        "guesses what follows, and checks all guesses in one step: that saves steps and changes no token. N: tokens of each answer "
        "that are looked up, by what followed its last ones before. Or some of draft=MODEL (a folder, a hub id, or demo-draft), "
        "tokens=K (a chain of guesses), tree=4x2x2x1 (children by depth), nodes=N (a tree of the most probable), ngram=N, "
        "verify=gumbel|rejection|typical (typical is lossy: it changes answers), with commas between them, such as "
        "draft=demo-draft,tokens=4. `speculate` in a request lowers it; 0: none",
        default="",
        kind=speculation,
    )
    max_stop_sequences: int = option(REQUESTS, "most stop strings", default=ROUTER.max_stop_sequences, kind=count)
    max_top_n_tokens: int = option(REQUESTS, "most alternatives per token", default=ROUTER.max_top_n_tokens, kind=count)
    max_client_batch_size: int = option(
        REQUESTS, "most prompts in one /v1/completions", default=ROUTER.max_client_batch_size, kind=count
    )
    payload_limit: int = option(REQUESTS, "most bytes of a body", default=ROUTER.payload_limit, kind=size)
    payload_limit_total: int = option(
        REQUESTS,
        "most bytes of the bodies of all requests that are read or answered; one more is answered 429",
        default=ROUTER.payload_limit_total,
        kind=size,
    )
    unknown_fields: str = option(
        REQUESTS,
        "fields of a body on /v1 that nobody has heard of: ignore names them in the header x-ignored-fields, refuse answers 400",
        default=ROUTER.unknown_fields,
        choices=("ignore", "refuse"),
    )
    disable_grammar_support: bool = option(REQUESTS, "refuse requests with a grammar", default=ROUTER.disable_grammar_support)

    chat_template: str = option(
        CHATS, "a file with a chat template, instead of the model's own", default=ROUTER.chat_template, kind=file
    )
    trust_request_chat_template: bool = option(
        CHATS,
        "let clients send templates of their own: programs, which run in a process with limits of time and memory",
        default=ROUTER.trust_request_chat_template,
    )
    tool_call_parser: str = option(
        CHATS,
        "how the model writes calls of tools; auto: as its chat template tells",
        default=ROUTER.tool_call_parser,
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        CHATS,
        "how the model writes what it thinks before it answers; none: that is part of the answer",
        default=ROUTER.reasoning_parser,
        choices=REASONING_PARSERS,
    )

    max_concurrent_requests: int = option(
        BATCHING,
        "requests in flight, for each replica; one more is answered 429",
        default=ROUTER.max_concurrent_requests,
        kind=count,
    )
    max_batch_prefill_tokens: int = option(
        BATCHING,
        "most tokens computed in a step; longer prompts are computed in chunks (default: 4096 on a GPU, 512 on a CPU)",
        default=ROUTER.max_batch_prefill_tokens,
        kind=count,
    )
    max_batch_total_tokens: int = option(
        BATCHING,
        "size of the key/value pool in tokens; --kv-pages says the same in pages (default: what fits into memory)",
        default=0,
        kind=count,
    )
    max_batch_size: int = option(
        BATCHING,
        f"most sequences that run at once (default: as --max-concurrent-requests, up to {USUAL_BATCH:,})",
        default=ROUTER.max_batch_size,
        kind=count,
    )
    prefill_policy: str = option(
        BATCHING,
        "mixed: prompts are computed in chunks beside running streams, which never stall; pause: streams pause for whole prompts",
        default=ROUTER.prefill_policy,
        choices=("mixed", "pause"),
    )
    itl_target: float = option(
        BATCHING,
        "mixed: most milliseconds between two tokens of a running stream (default: twice what decoding alone takes, at least 50)",
        default=ROUTER.itl_target,
        kind=milliseconds,
    )
    max_waiting_tokens: int | None = option(
        BATCHING,
        f"pause: decode steps after which waiting prompts are computed (default: {ROUTER.max_waiting_tokens})",
        default=None,
        kind=count,
    )
    waiting_served_ratio: float | None = option(
        BATCHING,
        f"pause: waiting per running request from which prompts are computed (default: {ROUTER.waiting_served_ratio})",
        default=None,
        kind=seconds,
    )
    prefix_caching: str = option(
        BATCHING,
        "on: keys and values of earlier prompts and answers are used again",
        default="on" if SHARD.prefix_caching else "off",
        choices=("on", "off"),
    )
    isolate_tenants: bool = option(
        BATCHING,
        "each API key (without --api-key: each bearer token) finds again only what its own requests have computed, so that nobody "
        "learns from the time of an answer what others have asked",
        default=ROUTER.isolate_tenants,
    )
    page_size: int = option(BATCHING, "tokens per page of the key/value pool", default=SHARD.page_size, kind=count)
    kv_pages: int = option(
        BATCHING, "pages of the pool (default: what memory is left after warm-up)", default=SHARD.kv_pages, kind=count
    )
    cuda_memory_fraction: float = option(
        BATCHING,
        "share of the device's memory that may be used; on a CPU, of the memory available",
        default=SHARD.memory_fraction,
        kind=fraction,
    )

    device: str = option(COMPUTE, "auto: cuda where there is a GPU", default="auto", choices=("auto", "cpu", "cuda"))
    kv_cache_dtype: str = option(
        BATCHING,
        "number format of keys and values; fp8_e4m3fn: 8 bits, half the memory, not quite the same answers",
        default=SHARD.kv_cache_dtype,
        choices=("auto", "fp8_e4m3fn"),
    )
    cuda_graphs: str = option(
        COMPUTE,
        "sizes of batches whose steps are recorded as CUDA graphs, such as 1,2,4,8; 0: none; auto: of decoding and of mixed steps",
        default=SHARD.cuda_graphs,
        kind=graphs,
    )
    overlap: str = option(
        COMPUTE,
        "begin a step before the tokens of the last one are on the host, so that the device need not wait for it; auto: on GPUs",
        default=SHARD.overlap,
        choices=("auto", "on", "off"),
    )
    penstock_kernels: str = option(
        COMPUTE,
        "for tests: reference: plain torch everywhere; triton: Triton everywhere, on a CPU in its (very slow) interpreter",
        default=SHARD.kernels,
        choices=("reference", "triton"),
    )
    num_shard: int = option(
        COMPUTE,
        "ranks that share the model, on all nodes together (default: 1; with --sharded true, and on several nodes, all GPUs, one "
        "a node if there are none)",
        default=0,
        kind=count,
    )
    sharded: bool | None = option(
        COMPUTE,
        "true: one rank per GPU, at least 2; false: one rank (default: as --num-shard says)",
        default=None,
        kind=boolean,
    )
    replicas: int | None = option(
        COMPUTE,
        "rank groups that are started here, of --num-shard ranks each, which divide the GPUs, or cores and memory, between them; a "
        "request goes to the one that has most of its prompt cached, as long as its load allows (default: 1; 0 with --replica)",
        default=None,
        kind=limit,
    )
    replica: str = option(
        COMPUTE,
        "a rank group that somebody else has started (--no-router), as one more replica: host:port or unix:/path of each of its "
        "ranks, rank 0 first, with commas between them; may be given several times",
        default="",
        kind=rank_groups,
    )
    no_router: bool = option(
        COMPUTE, "start the rank groups alone, at --shard-uds-path or --shard-listen, for a router elsewhere", default=False
    )
    shard_listen: str = option(
        COMPUTE,
        "with --no-router: host:port at which rank 0 listens instead of at a socket; each further rank at the next port",
        default="",
        kind=place,
    )
    threads: int = option(
        COMPUTE,
        "compute threads of a rank (default: the cores divided between ranks; fewer for small models)",
        default=0,
        kind=threads,
    )
    master_addr: str = option(
        NODES, "address of node 0, where nodes and their ranks meet; those of one node do without", default=""
    )
    master_port: int = option(
        NODES, f"its port, where nodes meet (default: {SHARD.master_port}); one node does without", default=0, kind=port
    )
    nnodes: int = option(
        NODES, "machines whose ranks share the model; penstock is started on each, with the same flags", default=0, kind=count
    )
    node_rank: int | None = option(
        NODES, "which of them this is, from 0; node 0 serves HTTP", default=None, kind=limit, environment=False
    )
    node_addr: str = option(NODES, "address at which the other nodes reach this one (default: of the route to node 0)", default="")
    node_timeout: float = option(
        NODES, "seconds that nodes wait for each other, at start and after a loss", default=300.0, kind=positive
    )
    insecure_nodes: bool = option(
        NODES, "let ranks be reached from other machines without --tls-...: for networks where nobody else is", default=False
    )
    tls_cert: str = option(
        NODES,
        "certificate of this node (PEM), valid for the name penstock, of one authority with the others': who has none is refused",
        default=ROUTER.tls_cert,
        kind=file,
    )
    tls_key: str = option(NODES, "its key (PEM)", default=ROUTER.tls_key, kind=file)
    tls_ca: str = option(NODES, "the authority's certificate (PEM)", default=ROUTER.tls_ca, kind=file)
    shard_uds_path: str = option(COMPUTE, "prefix of the shards' sockets, PREFIX-RANK (default: in a private folder)", default="")
    cluster: str = option(
        COMPUTE,
        'for penstock plan: machines elsewhere, such as "2 x 8 x H200": which ranks and replicas fit, and what they reach',
        default="",
        environment=False,
    )

    hostname: str = option(
        HTTP,
        "address to listen on; from the environment only if it is an IP address, as shells and containers set it to the "
        "machine's name",
        default=ROUTER.hostname,
        kind=address,
    )
    port: int = option(HTTP, "port to listen on", default=ROUTER.port, kind=port, short="-p")
    api_key: str = option(
        HTTP,
        "ask clients for `Authorization: Bearer KEY`; several with commas between them, which share the server fairly; the "
        "environment keeps them out of `ps`",
        default="",
        kind=keys,
    )
    admin_key: str = option(
        HTTP,
        "key of those who let replicas join and leave (/admin); without it only a server on a loopback address that asks clients "
        "for no key has these routes; the environment keeps it out of `ps`",
        default="",
        kind=keys,
    )
    graceful_termination_timeout: float = option(
        HTTP,
        "seconds that running streams get after SIGTERM or Ctrl-C",
        default=ROUTER.graceful_termination_timeout,
        kind=seconds,
        short="-g",
    )
    idle_timeout: float = option(
        HTTP,
        "seconds after which a connection is closed that has not sent the whole head of its next request; a load balancer in front "
        "has to close its idle ones sooner",
        default=ROUTER.idle_timeout,
        kind=positive,
    )
    slow_client_timeout: float = option(
        HTTP,
        "seconds after which a stream is closed whose client reads nothing of it",
        default=ROUTER.slow_client_timeout,
        kind=positive,
    )
    max_restarts: int = option(
        HTTP,
        "times within ten minutes that the shards, or the router, are started again after they have died; then the server ends",
        default=20,
        kind=limit,
    )
    step_timeout: float = option(
        HTTP,
        "seconds after which shards that answer nothing are lost and started again; slow ones get ten times their longest step",
        default=ROUTER.step_timeout,
        kind=positive,
    )
    aip_predict_route: str = option(
        HTTP, "path at which Vertex AI sends its requests, beside /vertex", default=ROUTER.aip_predict_route, kind=path
    )
    aip_health_route: str = option(HTTP, "path at which Vertex AI asks for /health", default=ROUTER.aip_health_route, kind=path)
    cors_allow_origin: str = option(
        HTTP,
        "origins whose web pages may use the server from a browser, with commas between them; none: no other than its own",
        default=ROUTER.cors_allow_origin,
        kind=origins,
    )
    otlp_endpoint: str = option(
        HTTP,
        "URL of a collector to which traces go over OTLP/HTTP, such as http://localhost:4318; needs penstock[otel]",
        default=ROUTER.otlp_endpoint,
        kind=url,
    )
    otlp_service_name: str = option(HTTP, "the traces' service.name", default=ROUTER.otlp_service_name)
    log_level: str = option(
        HTTP,
        "least level of the router's log lines; not read from the environment, where LOG_LEVEL is many programs'",
        default=ROUTER.log_level,
        choices=("debug", "info", "warning", "error"),
        environment=False,
    )
    json_output: bool = option(HTTP, "log lines as JSON", default=ROUTER.json_output)
    env: bool = option(HTTP, "print versions and machine first, for a bug report", default=False, short="-e", environment=False)

    @property
    def speculation(self) -> Speculation:
        """What `speculate` says."""
        return parse_speculation(self.speculate or "0")

    @property
    def local_replicas(self) -> int:
        """Rank groups that are started here."""
        return (0 if self.replica else 1) if self.replicas is None else self.replicas

    @property
    def remote_replicas(self) -> tuple[tuple[str, ...], ...]:
        """The addresses of the others."""
        return tuple(addresses_of(group) for group in self.replica.split(";")) if self.replica else ()

    @property
    def sequences(self) -> int:
        """Most that run at once."""
        return most_sequences(self.max_batch_size, self.max_concurrent_requests, self.max_best_of)

    @property
    def pool_pages(self) -> int:
        """Pages of the key/value pool, if the operator says how large it is, in one way or the other; else 0."""
        return self.kv_pages or (max(1, self.max_batch_total_tokens // self.page_size) if self.max_batch_total_tokens else 0)


PAUSING = ("max_waiting_tokens", "waiting_served_ratio")  # settings that only --prefill-policy pause reads
FIELDS = {field.name: field for field in dataclasses.fields(Options)}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise Mistake(f"{message} ({self.prog} --help lists what there is)")


class Joined(argparse.Action):
    """A flag that may be given several times: what it says each time, with semicolons between them."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        """See argparse."""
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before};{values}")


class Formatter(argparse.HelpFormatter):
    """Aligned wide enough that most flags take one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=118)


METAVARS: dict[Any, str] = {
    count: "N",
    threads: "N",
    port: "PORT",
    fraction: "X",
    seconds: "X",
    milliseconds: "MS",
    boolean: "{true,false}",
    address: "ADDRESS",
    graphs: "SIZES",
    speculation: "N|KEY=VALUE,...",
    rank_groups: "ADDRESS[,...]",
    place: "HOST:PORT",
    path: "PATH",
    origins: "ORIGINS",
    url: "URL",
    file: "FILE",
}


def add(parser: argparse.ArgumentParser) -> None:
    """Gives `parser` every flag, in groups, and the positional MODEL."""
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help="folder or hub id (default: the embedded demo model)")
    groups = {title: parser.add_argument_group(title) for title in (MODEL, REQUESTS, CHATS, BATCHING, COMPUTE, NODES, HTTP)}
    for name, field in FIELDS.items():
        details = field.metadata
        group = groups[details["group"]]
        names = [details["short"], flag(name)] if details["short"] else [flag(name)]
        default = "" if field.default in (0, "", None) else f" (default: {field.default})"
        help = (details["help"] + default).replace("%", "%%")
        if details["switch"]:
            group.add_argument(*names, dest=name, action="store_const", const="true", help=help)
            continue
        action: type[argparse.Action] | str = Joined if details["kind"] is rank_groups else "store"
        metavar = "{" + ",".join(details["choices"]) + "}" if details["choices"] else METAVARS.get(details["kind"], "TEXT")
        group.add_argument(*names, dest=name, metavar=metavar, help=help, action=action)
        if details["also"]:
            group.add_argument(flag(details["also"]), dest=details["also"], help=argparse.SUPPRESS)


def stripped(environment: Mapping[str, str]) -> dict[str, str]:
    """Without white space around values: files that become variables, such as mounted secrets, end with a newline. A value that is
    nothing else stays: it is a mistake, and not silence."""
    return {name: text.strip() or text for name, text in environment.items()}


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """The options that a command line gives, and the environment where the command line is silent. Raises Mistake."""
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise Mistake(_unknown(parser.prog, unknown))
    given: dict[str, Any] = {}
    environment = stripped(environment)
    for name, field in FIELDS.items():
        sources = [(flag(spelling), getattr(values, spelling, None)) for spelling in _spellings(field)]
        if field.metadata["environment"] and not any(text is not None for _, text in sources):
            sources = [(spelling.upper(), environment.get(spelling.upper()) or None) for spelling in _spellings(field)]
            if name == "hostname":
                sources = [(source, text) for source, text in sources if text and _is_address(text)]
        found = [(source, text) for source, text in sources if text is not None]
        if len(found) > 1:
            raise Mistake(f"{found[0][0]} and {found[1][0]} mean the same: set one of them")
        if found:
            given[name] = _value(field, *found[0])
    if values.model:
        if getattr(values, "model_id", None) not in (None, values.model):
            raise Mistake(f"MODEL says {values.model} and --model-id says {values.model_id}: give one of them")
        given["model_id"] = values.model
    return check(Options(**given))


def check(options: Options) -> Options:
    """The same options. Raises Mistake where two of them contradict each other."""
    if options.max_total_tokens and options.max_input_tokens >= options.max_total_tokens:
        raise Mistake(
            f"--max-input-tokens {options.max_input_tokens} must be below --max-total-tokens {options.max_total_tokens}: "
            "an answer has at least one token"
        )
    by_tokens = dataclasses.replace(options, kv_pages=0).pool_pages
    if options.kv_pages and by_tokens and options.kv_pages != by_tokens:
        raise Mistake(
            f"--kv-pages {options.kv_pages} of {options.page_size} tokens and --max-batch-total-tokens "
            f"{options.max_batch_total_tokens} both say how large the pool is: set one of them"
        )
    if options.itl_target and options.prefill_policy == "pause":
        raise Mistake("--itl-target is for --prefill-policy mixed: under pause, streams wait for whole prompts")
    if options.max_batch_size and options.max_batch_size < options.max_best_of and options.max_best_of != ROUTER.max_best_of:
        raise Mistake(
            f"--max-best-of {options.max_best_of} answers could not run at once: raise --max-batch-size {options.max_batch_size}"
        )
    if options.num_beams > options.max_num_beams:
        raise Mistake(
            f"--num-beams {options.num_beams} is more than --max-num-beams {options.max_num_beams}: lower it, or raise the other"
        )
    beams = options.max_num_beams if options.max_num_beams != ROUTER.max_num_beams else options.num_beams
    if beams > options.sequences:
        raise Mistake(f"{beams} beams of a request could not run at once: raise --max-batch-size to {beams}")
    _check_replicas(options)
    if options.sharded is False and options.num_shard > 1:
        raise Mistake(f"--sharded false and --num-shard {options.num_shard} contradict each other: leave one out")
    if options.sharded and options.num_shard == 1:
        raise Mistake("--sharded true and --num-shard 1 contradict each other: leave one out")
    return options


def _check_replicas(options: Options) -> None:
    """Raises Mistake where it isn't clear who starts which rank groups, or who reaches them."""
    if options.replicas == 0 and not options.replica:
        raise Mistake("--replicas 0 leaves nobody to compute: name a rank group that runs with --replica ADDRESS")
    if options.nnodes > 1 and options.local_replicas != 1:
        raise Mistake(
            f"--replicas {options.local_replicas} of --nnodes {options.nnodes}: a rank group of several nodes is one replica"
        )
    if options.no_router and options.replica:
        raise Mistake("--no-router and --replica contradict each other: whoever has a router names its replicas")
    if options.no_router and bool(options.shard_listen) == bool(options.shard_uds_path):
        raise Mistake("--no-router needs --shard-uds-path PREFIX or --shard-listen HOST:PORT, where a router finds the shards")
    if options.shard_listen and not options.no_router:
        raise Mistake("--shard-listen is for --no-router: a router of this machine reaches its shards by sockets")
    if options.no_router and options.nnodes > 1:
        raise Mistake("--no-router and --nnodes contradict each other: the router of several nodes is on node 0")


def _spellings(field: "dataclasses.Field[Any]") -> list[str]:
    return [field.name, field.metadata["also"]] if field.metadata["also"] else [field.name]


def _is_address(text: str) -> bool:
    try:
        address(text)
    except ValueError:
        return False
    return True


def _value(field: "dataclasses.Field[Any]", source: str, text: str) -> Any:
    """`text` as the field's type. `source` is the flag or the variable, for the complaint."""
    choices = field.metadata["choices"]
    if choices and text not in choices:
        raise Mistake(f"{source}={text}: one of {', '.join(choices)} is needed")
    try:
        return (boolean if field.metadata["switch"] else field.metadata["kind"])(text)
    except ValueError as error:
        raise Mistake(f"{source}={' '.join(text.split())}: {error}") from None


def _unknown(program: str, arguments: Sequence[str]) -> str:
    """A complaint about the first of `arguments`, with the flag that was probably meant."""
    name = arguments[0].partition("=")[0]
    if not name.startswith("-"):
        return f"{arguments[0]} is one argument too many: {program} takes one MODEL"
    if name in TGI_ONLY.split():
        return f"{name} is text-generation-inference's, penstock has no such flag ({program} --help lists what there is)"
    spellings = [flag(spelling) for field in FIELDS.values() for spelling in _spellings(field)]
    close = difflib.get_close_matches(name, spellings, n=1)
    return f"no flag {name}" + (f": did you mean {close[0]}?" if close else f" ({program} --help lists what there is)")
