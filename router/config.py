"""Configuration of the router process, sent by the launcher. Standard library only."""

import re
from dataclasses import dataclass

ANY_ORIGIN, NO_ORIGIN = "*", "none"  # values of --cors-allow-origin beside origins
# Values of --tool-call-parser and --reasoning-parser; `router/parsing` implements them.
AUTO, NONE = "auto", "none"
TOOL_CALL_PARSERS = (
    *(AUTO, NONE, "hermes", "llama3_json", "json", "granite", "jamba", "internlm", "phi4_mini_json", "mistral", "mistral_args"),
    *("cohere", "nemotron_json", "pythonic", "lfm2", "olmo3", "deepseek_v3", "deepseek_v31", "kimi_k2", "qwen3_coder", "glm45"),
    *("seed_oss", "minimax_m2", "minimax_m3", "deepseek_v32", "deepseek_v4", "hy_v3", "gigachat3", "apertus", "gemma4", "harmony"),
    *("kimi_k3", "solar_open", "solar_open2", "minicpm5", "step3", "functiongemma", "longcat", "longcat_json", "gigachat35"),
    *("command_r", "functionary_v31", "functionary_v32", "hy_v3_preview", "hy_v4", "deepseek_v41", "hyperclovax"),
)
REASONING_PARSERS = (
    *(AUTO, NONE, "deepseek_r1", "qwen3", "glm45", "kimi_k2", "mistral", "granite", "seed_oss", "cohere", "gemma4", "harmony"),
    *("hunyuan_a13b", "ernie45", "hy_v3", "minimax_m3", "kimi_k3", "solar_open", "solar_open2", "longcat", "hy_v4", "hyperclovax"),
)
BACKLOG = 1024  # connections that wait to be accepted
USUAL_BATCH = 1024  # sequences that run at once where only requests in flight are limited: each needs memory for its logits
ADDRESS = re.compile(r"unix:/[^,;\s]+|[\w.-]+:\d{1,5}|\[[\da-fA-F:.]+\]:\d{1,5}", re.ASCII)  # of a rank's service


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of the router. 0 stands for "decide after warm-up" where a comment says so. TGI's meaning where TGI has the name."""

    folder: str  # with tokenizer.json, tokenizer_config.json, chat template, config.json: the model's, or a substitute
    model: str  # model id that clients see
    revision: str = ""
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters that the shards start with
    max_loras: int = 0  # most LoRA adapters at once, those above included, if others may be loaded while the server runs
    groups: tuple[tuple[str, ...], ...] = ()  # rank groups (replicas): of each the addresses of its ranks' services, rank 0 first
    hostname: str = "0.0.0.0"
    port: int = 3000
    api_keys: tuple[str, ...] = ()  # none: no authorization. Each is a tenant; tenants share the server fairly
    admin_key: str = ""  # of operators who let replicas join and leave; "": nobody may
    max_concurrent_requests: int = 128  # of each replica
    max_best_of: int = 16  # most choices of a request: TGI's best_of, OpenAI's n, num_return_sequences
    num_beams: int = 1  # default beam width of requests that neither name one nor sample
    max_num_beams: int = 8  # widest beam search of a request
    speculate: int = 0  # most draft tokens per answer and step (speculative decoding), whatever proposers the shards have; 0: none
    max_images: int = 0  # per request; 0: images are refused
    images_asked: bool = False  # the operator requires images: if they are not supported, the server does not start
    max_image_pixels: int = 1 << 20  # of each: larger ones are scaled down
    image_hosts: str = "public"  # where http(s) URLs of images may lead: "public" addresses, "none", or hosts
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    max_input_tokens: int = 0  # 0: max_total_tokens - 1
    max_total_tokens: int = 0  # 0: min(pool's capacity, model's positions)
    # most query tokens in a step; may be smaller than a prompt (chunked prefill); 0: by the shards' device
    max_batch_prefill_tokens: int = 0
    max_batch_size: int = 0  # most sequences that run at once; 0: see `most_sequences`
    # "mixed": prompt chunks share steps with decodes; "pause": decodes pause for whole prompts, as in TGI
    prefill_policy: str = "mixed"
    itl_target: float = 0.0  # seconds that a step may take while streams run ("mixed"); 0: by the measured speed of decoding
    max_waiting_tokens: int = 20  # "pause": decode steps after which waiting requests are computed however few they are
    waiting_served_ratio: float = 0.3  # "pause": waiting per running request from which decodes pause
    payload_limit: int = 2_000_000  # bytes of a request's body
    payload_limit_total: int = 512_000_000  # bytes of the bodies of all requests being read or answered
    unknown_fields: str = "ignore"  # what to do with unknown fields of a body on /v1: "ignore" or "refuse"
    disable_grammar_support: bool = False  # requests with a grammar are refused
    isolate_tenants: bool = False  # tenants don't share cached prefixes
    aip_predict_route: str = ""  # path at which Vertex AI sends what /vertex takes; "": at /vertex only
    aip_health_route: str = ""  # path at which it asks for /health
    chat_template: str = ""  # a file with the operator's template, instead of the model's own
    trust_request_chat_template: bool = False  # clients may send templates: programs, which run in a process with limits
    tool_call_parser: str = AUTO  # format of the model's tool calls; "auto": detected from its chat template
    reasoning_parser: str = AUTO  # format of the model's reasoning
    graceful_termination_timeout: float = 90.0  # seconds that running streams get after SIGTERM
    idle_timeout: float = 75.0  # seconds that a connection may be without a complete request head
    slow_client_timeout: float = 60.0  # seconds for which a stream's client may read nothing of what is sent to it
    batch_invariant: bool = False  # shards without batch invariance are refused
    step_timeout: float = 60.0  # seconds without an answer after which the shards count as lost, at least
    tls_cert: str = ""  # PEM files for mutual TLS with shards on other machines; "": no TLS
    tls_key: str = ""
    tls_ca: str = ""
    hang_reports: str = ""  # named pipe by which the launcher is notified that shards hang; "": none
    cors_allow_origin: str = ANY_ORIGIN  # origins whose pages may use the server from a browser, separated by commas
    otlp_endpoint: str = ""  # URL of a collector of traces (OTLP/HTTP); "": no traces
    otlp_service_name: str = "text-generation-inference.router"  # service name in traces
    log_level: str = "info"  # least level of log lines: "debug", "info", "warning", "error"
    json_output: bool = False  # log lines as JSON

    @property
    def sequences(self) -> int:
        """Most sequences that run at once."""
        return most_sequences(self.max_batch_size, self.max_concurrent_requests, self.max_best_of)

    @property
    def most_prompts(self) -> int:
        """Most prompts in one body: all of them are in flight at once."""
        return min(self.max_client_batch_size, self.max_concurrent_requests)

    @property
    def most_choices(self) -> int:
        """Most answers to one prompt: all of them run at once."""
        return min(self.max_best_of, self.max_batch_size or self.max_best_of)

    @property
    def most_beams(self) -> int:
        """Widest beam search of a request: all beams run at once."""
        return min(self.max_num_beams, self.sequences)


def most_sequences(batch: int, requests: int, answers: int) -> int:
    """How many sequences run at once if `batch` is 0: one for each request in flight, at least as many as one request may ask for,
    but not more than a step's memory allows, however many wait."""
    return batch or max(min(requests, USUAL_BATCH), answers)


def addresses_of(text: str) -> tuple[str, ...]:
    """Parses the addresses of a rank group's ranks, rank 0 first, separated by commas. Raises ValueError."""
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
    """The operator's settings contradict the model, the memory or each other. One line that says what would help."""
