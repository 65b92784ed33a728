"""What the router process is told by the launcher. Standard library only."""

import re
from dataclasses import dataclass

ANY_ORIGIN, NO_ORIGIN = "*", "none"  # what --cors-allow-origin may say beside origins
# What --tool-call-parser and --reasoning-parser may say; `router/parsing` knows what the names mean.
AUTO, NONE = "auto", "none"
TOOL_CALL_PARSERS = (
    *(AUTO, NONE, "hermes", "llama3_json", "json", "granite", "jamba", "internlm", "phi4_mini_json", "mistral", "mistral_args"),
    *("cohere", "nemotron_json", "pythonic", "lfm2", "olmo3", "deepseek_v3", "deepseek_v31", "kimi_k2", "qwen3_coder", "glm45"),
    *("seed_oss", "minimax_m2", "deepseek_v32", "gemma4", "harmony"),
)
REASONING_PARSERS = (
    *(AUTO, NONE, "deepseek_r1", "qwen3", "glm45", "kimi_k2", "mistral", "granite", "seed_oss", "cohere", "gemma4", "harmony"),
    *("hunyuan_a13b", "ernie45"),
)
BACKLOG = 1024  # connections that wait to be accepted
USUAL_BATCH = 1024  # sequences that run at once where only requests in flight are limited: each needs memory for its logits
ADDRESS = re.compile(r"unix:/[^,;\s]+|[\w.-]+:\d{1,5}|\[[\da-fA-F:.]+\]:\d{1,5}", re.ASCII)  # of a rank's service


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of the router. 0 stands for "decide after warm-up" where a comment says so. TGI's meaning where TGI has the name."""

    folder: str  # with tokenizer.json, tokenizer_config.json, chat template, config.json: the model's, or one that stands in
    model: str  # model id that clients see
    revision: str = ""
    adapters: tuple[str, ...] = ()  # names of those that the shards have
    max_loras: int = 0  # adapters at once, these included, if others may be loaded while the server runs
    groups: tuple[tuple[str, ...], ...] = ()  # rank groups (replicas): of each the addresses of its ranks' services, rank 0 first
    hostname: str = "0.0.0.0"
    port: int = 3000
    api_keys: tuple[str, ...] = ()  # none: no authorization asked. Each is a tenant; tenants share the server fairly
    admin_key: str = ""  # of those who let replicas join and leave; "": nobody may
    max_concurrent_requests: int = 128  # of each replica
    max_best_of: int = 16  # most choices of a request: TGI's best_of, OpenAI's n, num_return_sequences
    num_beams: int = 1  # of a request that names no number and draws nothing
    max_num_beams: int = 8  # widest beam search of a request
    speculate: int = 0  # the most tokens that a step guesses of each answer, by whatever proposers the shards have; 0: none
    max_images: int = 0  # of a request; 0: images are refused
    images_asked: bool = False  # by the operator: where there can be none, the server does not start
    max_image_pixels: int = 1 << 20  # of each: larger ones are scaled down
    image_hosts: str = "public"  # from where those come that clients name by http(s) URLs: "public" addresses, "none", or hosts
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    max_input_tokens: int = 0  # 0: max_total_tokens - 1
    max_total_tokens: int = 0  # 0: min(pool's capacity, model's positions)
    max_batch_prefill_tokens: int = 0  # most query tokens in a step; may be smaller than a prompt; 0: by the shards' device
    max_batch_size: int = 0  # most sequences that run at once; 0: see `most_sequences`
    prefill_policy: str = "mixed"  # "mixed": prompts ride with decodes; "pause": decodes pause for whole prompts, as in TGI
    itl_target: float = 0.0  # seconds that a step may take while streams run ("mixed"); 0: by the measured speed of decoding
    max_waiting_tokens: int = 20  # "pause": decode steps after which those that wait are computed however few they are
    waiting_served_ratio: float = 0.3  # "pause": waiting per running request from which decodes pause
    payload_limit: int = 2_000_000  # bytes of a request's body
    payload_limit_total: int = 512_000_000  # bytes of the bodies of all requests that are read or answered
    unknown_fields: str = "ignore"  # what to do with those of a body on /v1 that nobody has heard of: "ignore" or "refuse"
    disable_grammar_support: bool = False  # requests with a grammar are refused
    isolate_tenants: bool = False  # no tenant's request finds keys and values that another's has left
    aip_predict_route: str = ""  # path at which Vertex AI sends what /vertex takes; "": at /vertex only
    aip_health_route: str = ""  # path at which it asks for /health
    chat_template: str = ""  # a file with the operator's, instead of the model's own
    trust_request_chat_template: bool = False  # clients may send templates: programs, which run in a process with limits
    tool_call_parser: str = AUTO  # how the model writes calls of tools; "auto": as its chat template tells
    reasoning_parser: str = AUTO  # how it writes what it thinks before it answers
    graceful_termination_timeout: float = 90.0  # seconds that running streams get after SIGTERM
    idle_timeout: float = 75.0  # seconds that a connection may be without a whole head of a request
    slow_client_timeout: float = 60.0  # seconds in which a stream's client may read nothing of what is there for it
    batch_invariant: bool = False  # shards that don't promise it are not served with
    step_timeout: float = 60.0  # seconds without an answer after which the shards are lost, at least
    tls_cert: str = ""  # PEM files by which this process and shards on other machines trust each other; "": no TLS
    tls_key: str = ""
    tls_ca: str = ""
    complaints: str = ""  # a named pipe in which whoever started the shards is told that they hang; "": nobody is told
    cors_allow_origin: str = ANY_ORIGIN  # origins whose pages may use the server from a browser, with commas between them
    otlp_endpoint: str = ""  # URL of a collector of traces (OTLP/HTTP); "": no traces
    otlp_service_name: str = "text-generation-inference.router"  # who they say they come from
    log_level: str = "info"  # least level of log lines: "debug", "info", "warning", "error"
    json_output: bool = False  # log lines as JSON

    @property
    def sequences(self) -> int:
        """Most that run at once."""
        return most_sequences(self.max_batch_size, self.max_concurrent_requests, self.max_best_of)

    @property
    def most_prompts(self) -> int:
        """In one body: all of them are in flight at once."""
        return min(self.max_client_batch_size, self.max_concurrent_requests)

    @property
    def most_choices(self) -> int:
        """Answers to one prompt: all of them run at once."""
        return min(self.max_best_of, self.max_batch_size or self.max_best_of)

    @property
    def most_beams(self) -> int:
        """Of a request: all of them run at once."""
        return min(self.max_num_beams, self.sequences)


def most_sequences(batch: int, requests: int, answers: int) -> int:
    """How many run at once if `batch` is 0: one for each request in flight, so many that one request may ask for, but not more than
    a step's memory allows for however many may wait."""
    return batch or max(min(requests, USUAL_BATCH), answers)


def addresses_of(text: str) -> tuple[str, ...]:
    """Of a rank group's ranks, rank 0 first, with commas between them. Raises ValueError."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(ADDRESS.fullmatch(part) for part in found):
        raise ValueError("host:port or unix:/path of each rank of a group is needed, with commas between them")
    for part in found:
        if not part.startswith("unix:") and not 0 < int(part.rpartition(":")[2]) < 1 << 16:
            raise ValueError(f"the port of {part} is none, it must be from 1 to 65535")
    if len(set(found)) < len(found):
        raise ValueError("the same rank is named twice")
    return found


class Misconfigured(Exception):
    """The operator's settings contradict the model, the memory or each other. One line that says what would do."""
