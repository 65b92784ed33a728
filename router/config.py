"""What the router process is told by the launcher. Standard library only."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of the router. 0 stands for "decide after warm-up" where a comment says so. TGI's meaning where TGI has the name."""

    folder: str  # with tokenizer.json, tokenizer_config.json, chat template, config.json: the model's, or one that stands in
    model: str  # model id that clients see
    revision: str = ""
    shards: tuple[str, ...] = ()  # unix sockets of the ranks' services, rank 0 first
    hostname: str = "0.0.0.0"
    port: int = 3000
    api_keys: tuple[str, ...] = ()  # none: no authorization asked. Each is a tenant; tenants share the server fairly
    max_concurrent_requests: int = 128
    max_best_of: int = 16  # most choices of a request: TGI's best_of, OpenAI's n
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    max_input_tokens: int = 0  # 0: max_total_tokens - 1
    max_total_tokens: int = 0  # 0: min(pool's capacity, model's positions)
    max_batch_prefill_tokens: int = 0  # most query tokens in a step; may be smaller than a prompt; 0: by the shards' device
    max_batch_size: int = 0  # most sequences that run at once; 0: as max_concurrent_requests, at least max_best_of
    prefill_policy: str = "mixed"  # "mixed": prompts ride with decodes; "pause": decodes pause for whole prompts, as in TGI
    itl_target: float = 0.0  # seconds that a step may take while streams run ("mixed"); 0: by the measured speed of decoding
    max_waiting_tokens: int = 20  # "pause": decode steps after which those that wait are computed however few they are
    waiting_served_ratio: float = 0.3  # "pause": waiting per running request from which decodes pause
    payload_limit: int = 2_000_000  # bytes of a request's body
    graceful_termination_timeout: float = 90.0  # seconds that running streams get after SIGTERM
    json_output: bool = False  # log lines as JSON
