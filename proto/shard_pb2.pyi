from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoReply(_message.Message):
    __slots__ = ("rank", "ranks", "model", "dtype", "device", "page_size", "vocabulary", "max_positions", "loaded", "stage", "overlaps", "adapters", "quantize", "kv_cache_dtype", "batch_invariant", "prefix_caching", "later", "max_loras")
    RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    OVERLAPS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    ranks: int
    model: str
    dtype: str
    device: str
    page_size: int
    vocabulary: int
    max_positions: int
    loaded: bool
    stage: str
    overlaps: bool
    adapters: _containers.RepeatedScalarFieldContainer[str]
    quantize: str
    kv_cache_dtype: str
    batch_invariant: bool
    prefix_caching: bool
    later: _containers.RepeatedCompositeFieldContainer[LoadedAdapter]
    max_loras: int
    def __init__(self, rank: _Optional[int] = ..., ranks: _Optional[int] = ..., model: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., page_size: _Optional[int] = ..., vocabulary: _Optional[int] = ..., max_positions: _Optional[int] = ..., loaded: _Optional[bool] = ..., stage: _Optional[str] = ..., overlaps: _Optional[bool] = ..., adapters: _Optional[_Iterable[str]] = ..., quantize: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., batch_invariant: _Optional[bool] = ..., prefix_caching: _Optional[bool] = ..., later: _Optional[_Iterable[_Union[LoadedAdapter, _Mapping]]] = ..., max_loras: _Optional[int] = ...) -> None: ...

class LoadedAdapter(_message.Message):
    __slots__ = ("key", "name", "folder", "retired", "digest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    key: str
    name: str
    folder: str
    retired: bool
    digest: str
    def __init__(self, key: _Optional[str] = ..., name: _Optional[str] = ..., folder: _Optional[str] = ..., retired: _Optional[bool] = ..., digest: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("adapter", "router")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    adapter: LoadedAdapter
    router: str
    def __init__(self, adapter: _Optional[_Union[LoadedAdapter, _Mapping]] = ..., router: _Optional[str] = ...) -> None: ...

class LoadAdapterReply(_message.Message):
    __slots__ = ("folder", "digest")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    folder: str
    digest: str
    def __init__(self, folder: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WarmupRequest(_message.Message):
    __slots__ = ("max_step_tokens", "max_step_rows", "max_total_tokens", "max_sequences")
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    max_step_tokens: int
    max_step_rows: int
    max_total_tokens: int
    max_sequences: int
    def __init__(self, max_step_tokens: _Optional[int] = ..., max_step_rows: _Optional[int] = ..., max_total_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ...) -> None: ...

class WarmupReply(_message.Message):
    __slots__ = ("pages", "page_size", "bytes_per_page", "weight_bytes", "sample_tokens", "sample_seconds", "sequences", "images", "image_seconds")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_PAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    pages: int
    page_size: int
    bytes_per_page: int
    weight_bytes: int
    sample_tokens: int
    sample_seconds: float
    sequences: int
    images: bool
    image_seconds: float
    def __init__(self, pages: _Optional[int] = ..., page_size: _Optional[int] = ..., bytes_per_page: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., sample_tokens: _Optional[int] = ..., sample_seconds: _Optional[float] = ..., sequences: _Optional[int] = ..., images: _Optional[bool] = ..., image_seconds: _Optional[float] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "bias_ids", "bias_values", "final_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    FINAL_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    final_logprobs: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., final_logprobs: _Optional[bool] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("uid", "tokens", "choices", "max_new_tokens", "end_ids", "sampling", "top_n", "prompt_logprobs", "continuations", "cache_key", "prompt_top_n", "min_new_tokens", "grammar", "trace", "beams", "drafts", "adapter", "stops", "thinking", "images")
    UID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOP_N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_N_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    uid: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    choices: int
    max_new_tokens: int
    end_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    top_n: int
    prompt_logprobs: bool
    continuations: _containers.RepeatedCompositeFieldContainer[Continuation]
    cache_key: str
    prompt_top_n: int
    min_new_tokens: int
    grammar: str
    trace: str
    beams: Beams
    drafts: int
    adapter: str
    stops: _containers.RepeatedScalarFieldContainer[str]
    thinking: Thinking
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, uid: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., choices: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., end_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., top_n: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., continuations: _Optional[_Iterable[_Union[Continuation, _Mapping]]] = ..., cache_key: _Optional[str] = ..., prompt_top_n: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., grammar: _Optional[str] = ..., trace: _Optional[str] = ..., beams: _Optional[_Union[Beams, _Mapping]] = ..., drafts: _Optional[int] = ..., adapter: _Optional[str] = ..., stops: _Optional[_Iterable[str]] = ..., thinking: _Optional[_Union[Thinking, _Mapping]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class Thinking(_message.Message):
    __slots__ = ("most", "end", "begin")
    MOST_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    most: int
    end: int
    begin: int
    def __init__(self, most: _Optional[int] = ..., end: _Optional[int] = ..., begin: _Optional[int] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("start", "rows", "columns", "pixels", "shape", "size")
    START_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    start: int
    rows: int
    columns: int
    pixels: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    size: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[int] = ..., rows: _Optional[int] = ..., columns: _Optional[int] = ..., pixels: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ..., size: _Optional[_Iterable[int]] = ...) -> None: ...

class Beams(_message.Message):
    __slots__ = ("width", "length_penalty", "stop", "streamed", "watched")
    class Stop(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WORSE: _ClassVar[Beams.Stop]
        FULL: _ClassVar[Beams.Stop]
        NEVER: _ClassVar[Beams.Stop]
    WORSE: Beams.Stop
    FULL: Beams.Stop
    NEVER: Beams.Stop
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STREAMED_FIELD_NUMBER: _ClassVar[int]
    WATCHED_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    stop: Beams.Stop
    streamed: int
    watched: bool
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., stop: _Optional[_Union[Beams.Stop, str]] = ..., streamed: _Optional[int] = ..., watched: _Optional[bool] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("choice", "tokens", "score", "complete", "logprobs", "top_counts", "top_ids", "top_logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    score: float
    complete: bool
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, choice: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., score: _Optional[float] = ..., complete: _Optional[bool] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Grown(_message.Message):
    __slots__ = ("uid", "parents", "tokens", "scores", "complete_parents", "complete_tokens", "complete_scores", "length")
    UID_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_PARENTS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_SCORES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    uid: int
    parents: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    complete_parents: _containers.RepeatedScalarFieldContainer[int]
    complete_tokens: _containers.RepeatedScalarFieldContainer[int]
    complete_scores: _containers.RepeatedScalarFieldContainer[float]
    length: int
    def __init__(self, uid: _Optional[int] = ..., parents: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ..., complete_parents: _Optional[_Iterable[int]] = ..., complete_tokens: _Optional[_Iterable[int]] = ..., complete_scores: _Optional[_Iterable[float]] = ..., length: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("step", "batch", "groups", "chunk_uids", "chunk_lengths", "decode_batches", "prompt_tokens", "allowance")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_UIDS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DECODE_BATCHES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALLOWANCE_FIELD_NUMBER: _ClassVar[int]
    step: int
    batch: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    chunk_uids: _containers.RepeatedScalarFieldContainer[int]
    chunk_lengths: _containers.RepeatedScalarFieldContainer[int]
    decode_batches: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    allowance: Allowance
    def __init__(self, step: _Optional[int] = ..., batch: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., chunk_uids: _Optional[_Iterable[int]] = ..., chunk_lengths: _Optional[_Iterable[int]] = ..., decode_batches: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., allowance: _Optional[_Union[Allowance, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("step", "batches", "allowance")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    ALLOWANCE_FIELD_NUMBER: _ClassVar[int]
    step: int
    batches: _containers.RepeatedScalarFieldContainer[int]
    allowance: Allowance
    def __init__(self, step: _Optional[int] = ..., batches: _Optional[_Iterable[int]] = ..., allowance: _Optional[_Union[Allowance, _Mapping]] = ...) -> None: ...

class Allowance(_message.Message):
    __slots__ = ("step_seconds", "draft_seconds", "round_seconds", "most", "needed_uids", "needed", "first_seconds")
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    NEEDED_UIDS_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    FIRST_SECONDS_FIELD_NUMBER: _ClassVar[int]
    step_seconds: float
    draft_seconds: float
    round_seconds: float
    most: int
    needed_uids: _containers.RepeatedScalarFieldContainer[int]
    needed: _containers.RepeatedScalarFieldContainer[float]
    first_seconds: float
    def __init__(self, step_seconds: _Optional[float] = ..., draft_seconds: _Optional[float] = ..., round_seconds: _Optional[float] = ..., most: _Optional[int] = ..., needed_uids: _Optional[_Iterable[int]] = ..., needed: _Optional[_Iterable[float]] = ..., first_seconds: _Optional[float] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("step", "uids", "choices", "tokens", "logprobs", "finishes", "top_counts", "top_ids", "top_logprobs", "prompt_uids", "prompt_counts", "prompt_logprobs", "prompt_tops", "prompt_top_ids", "prompt_top_logprobs", "held_uids", "held", "grow", "lacking", "free", "cached", "failed_uids", "failed_messages", "seconds", "mask_seconds", "mask_wait_seconds", "prompt_tokens", "restored_tokens", "cached_tokens", "found_uids", "found_tokens", "decode_tokens", "prompt_keys", "decode_keys", "scored_uids", "scores", "scored_counts", "grown", "drafted_tokens", "accepted_tokens", "draft_uids", "draft_counts", "accepted_counts", "tried_by_depth", "kept_by_depth", "draft_seconds", "rounds", "later_seconds", "exhausted", "ahead", "saved_pages", "loaded_pages", "searched_uids", "searched_tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    UIDS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_UIDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HELD_UIDS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_UIDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MASK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MASK_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOUND_UIDS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_KEYS_FIELD_NUMBER: _ClassVar[int]
    DECODE_KEYS_FIELD_NUMBER: _ClassVar[int]
    SCORED_UIDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    SCORED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    GROWN_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_UIDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    TRIED_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    KEPT_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LATER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    SAVED_PAGES_FIELD_NUMBER: _ClassVar[int]
    LOADED_PAGES_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_UIDS_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    uids: _containers.RepeatedScalarFieldContainer[int]
    choices: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finishes: _containers.RepeatedScalarFieldContainer[int]
    top_counts: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    prompt_uids: _containers.RepeatedScalarFieldContainer[int]
    prompt_counts: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _containers.RepeatedScalarFieldContainer[float]
    prompt_tops: _containers.RepeatedScalarFieldContainer[int]
    prompt_top_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    held_uids: _containers.RepeatedScalarFieldContainer[int]
    held: _containers.RepeatedScalarFieldContainer[int]
    grow: _containers.RepeatedScalarFieldContainer[int]
    lacking: _containers.RepeatedScalarFieldContainer[int]
    free: int
    cached: int
    failed_uids: _containers.RepeatedScalarFieldContainer[int]
    failed_messages: _containers.RepeatedScalarFieldContainer[str]
    seconds: float
    mask_seconds: float
    mask_wait_seconds: float
    prompt_tokens: int
    restored_tokens: int
    cached_tokens: int
    found_uids: _containers.RepeatedScalarFieldContainer[int]
    found_tokens: _containers.RepeatedScalarFieldContainer[int]
    decode_tokens: int
    prompt_keys: int
    decode_keys: int
    scored_uids: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    scored_counts: _containers.RepeatedScalarFieldContainer[int]
    grown: _containers.RepeatedCompositeFieldContainer[Grown]
    drafted_tokens: int
    accepted_tokens: int
    draft_uids: _containers.RepeatedScalarFieldContainer[int]
    draft_counts: _containers.RepeatedScalarFieldContainer[int]
    accepted_counts: _containers.RepeatedScalarFieldContainer[int]
    tried_by_depth: _containers.RepeatedScalarFieldContainer[int]
    kept_by_depth: _containers.RepeatedScalarFieldContainer[int]
    draft_seconds: float
    rounds: int
    later_seconds: float
    exhausted: int
    ahead: bool
    saved_pages: int
    loaded_pages: int
    searched_uids: _containers.RepeatedScalarFieldContainer[int]
    searched_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., uids: _Optional[_Iterable[int]] = ..., choices: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., finishes: _Optional[_Iterable[int]] = ..., top_counts: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., prompt_uids: _Optional[_Iterable[int]] = ..., prompt_counts: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Iterable[float]] = ..., prompt_tops: _Optional[_Iterable[int]] = ..., prompt_top_ids: _Optional[_Iterable[int]] = ..., prompt_top_logprobs: _Optional[_Iterable[float]] = ..., held_uids: _Optional[_Iterable[int]] = ..., held: _Optional[_Iterable[int]] = ..., grow: _Optional[_Iterable[int]] = ..., lacking: _Optional[_Iterable[int]] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., failed_uids: _Optional[_Iterable[int]] = ..., failed_messages: _Optional[_Iterable[str]] = ..., seconds: _Optional[float] = ..., mask_seconds: _Optional[float] = ..., mask_wait_seconds: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., found_uids: _Optional[_Iterable[int]] = ..., found_tokens: _Optional[_Iterable[int]] = ..., decode_tokens: _Optional[int] = ..., prompt_keys: _Optional[int] = ..., decode_keys: _Optional[int] = ..., scored_uids: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ..., scored_counts: _Optional[_Iterable[int]] = ..., grown: _Optional[_Iterable[_Union[Grown, _Mapping]]] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., draft_uids: _Optional[_Iterable[int]] = ..., draft_counts: _Optional[_Iterable[int]] = ..., accepted_counts: _Optional[_Iterable[int]] = ..., tried_by_depth: _Optional[_Iterable[int]] = ..., kept_by_depth: _Optional[_Iterable[int]] = ..., draft_seconds: _Optional[float] = ..., rounds: _Optional[int] = ..., later_seconds: _Optional[float] = ..., exhausted: _Optional[int] = ..., ahead: _Optional[bool] = ..., saved_pages: _Optional[int] = ..., loaded_pages: _Optional[int] = ..., searched_uids: _Optional[_Iterable[int]] = ..., searched_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class FilterRequest(_message.Message):
    __slots__ = ("step", "drop", "pause", "end_uids", "end_choices")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    END_UIDS_FIELD_NUMBER: _ClassVar[int]
    END_CHOICES_FIELD_NUMBER: _ClassVar[int]
    step: int
    drop: _containers.RepeatedScalarFieldContainer[int]
    pause: _containers.RepeatedScalarFieldContainer[int]
    end_uids: _containers.RepeatedScalarFieldContainer[int]
    end_choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., drop: _Optional[_Iterable[int]] = ..., pause: _Optional[_Iterable[int]] = ..., end_uids: _Optional[_Iterable[int]] = ..., end_choices: _Optional[_Iterable[int]] = ...) -> None: ...

class Paused(_message.Message):
    __slots__ = ("uid", "continuations", "grow", "lacking")
    UID_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    uid: int
    continuations: _containers.RepeatedCompositeFieldContainer[Continuation]
    grow: int
    lacking: int
    def __init__(self, uid: _Optional[int] = ..., continuations: _Optional[_Iterable[_Union[Continuation, _Mapping]]] = ..., grow: _Optional[int] = ..., lacking: _Optional[int] = ...) -> None: ...

class FilterReply(_message.Message):
    __slots__ = ("step", "free", "paused", "cached")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    step: int
    free: int
    paused: _containers.RepeatedCompositeFieldContainer[Paused]
    cached: int
    def __init__(self, step: _Optional[int] = ..., free: _Optional[int] = ..., paused: _Optional[_Iterable[_Union[Paused, _Mapping]]] = ..., cached: _Optional[int] = ...) -> None: ...

class ConcatRequest(_message.Message):
    __slots__ = ("step", "into", "batches")
    STEP_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    step: int
    into: int
    batches: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., into: _Optional[int] = ..., batches: _Optional[_Iterable[int]] = ...) -> None: ...

class ConcatReply(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class AdaptRequest(_message.Message):
    __slots__ = ("step", "add", "retire", "drop")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    step: int
    add: str
    retire: str
    drop: str
    def __init__(self, step: _Optional[int] = ..., add: _Optional[str] = ..., retire: _Optional[str] = ..., drop: _Optional[str] = ...) -> None: ...

class AdaptReply(_message.Message):
    __slots__ = ("step", "problem")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    step: int
    problem: str
    def __init__(self, step: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class ClearCacheRequest(_message.Message):
    __slots__ = ("step", "router")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    step: int
    router: str
    def __init__(self, step: _Optional[int] = ..., router: _Optional[str] = ...) -> None: ...

class ClearCacheReply(_message.Message):
    __slots__ = ("step", "free")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    step: int
    free: int
    def __init__(self, step: _Optional[int] = ..., free: _Optional[int] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("prefill", "decode", "filter", "concat", "clear_cache", "adapt")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    CONCAT_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    ADAPT_FIELD_NUMBER: _ClassVar[int]
    prefill: PrefillRequest
    decode: DecodeRequest
    filter: FilterRequest
    concat: ConcatRequest
    clear_cache: ClearCacheRequest
    adapt: AdaptRequest
    def __init__(self, prefill: _Optional[_Union[PrefillRequest, _Mapping]] = ..., decode: _Optional[_Union[DecodeRequest, _Mapping]] = ..., filter: _Optional[_Union[FilterRequest, _Mapping]] = ..., concat: _Optional[_Union[ConcatRequest, _Mapping]] = ..., clear_cache: _Optional[_Union[ClearCacheRequest, _Mapping]] = ..., adapt: _Optional[_Union[AdaptRequest, _Mapping]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("step", "filter", "concat", "clear_cache", "adapt")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    CONCAT_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    ADAPT_FIELD_NUMBER: _ClassVar[int]
    step: StepReply
    filter: FilterReply
    concat: ConcatReply
    clear_cache: ClearCacheReply
    adapt: AdaptReply
    def __init__(self, step: _Optional[_Union[StepReply, _Mapping]] = ..., filter: _Optional[_Union[FilterReply, _Mapping]] = ..., concat: _Optional[_Union[ConcatReply, _Mapping]] = ..., clear_cache: _Optional[_Union[ClearCacheReply, _Mapping]] = ..., adapt: _Optional[_Union[AdaptReply, _Mapping]] = ...) -> None: ...
