"""text-generation-inference's JSON: bodies of requests, answers, events. Knows no request of ours."""

from typing import Annotated, Any

import msgspec

GRAMMARS = ["json", "json_object", "json_schema", "regex"]


class GrammarBody(msgspec.Struct):
    """`grammar`. What `value` is depends on the type: a schema (or its JSON in a string), a pattern, {"name", "schema"}."""

    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": GRAMMARS})]
    value: Any


# What would change the answer, and can't be honoured; values that ask for nothing.
UNSUPPORTED: dict[str, object] = {"watermark": False, "num_beam_groups": 1, "diversity_penalty": 0.0, "force_words_ids": []}


class GenerateParameters(msgspec.Struct):
    """`parameters`. An explicit null is the same as nothing."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None  # ours
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None  # ours
    typical_p: float | None = None
    logit_bias: dict[int, float] | None = None  # ours
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: GrammarBody | None = None
    adapter_id: str | None = None
    num_beams: int | None = None  # these are ours, with transformers' names
    num_return_sequences: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None  # or "never"
    stream_beams: bool | None = None
    num_beam_groups: int | None = None  # transformers', too; refused unless they ask for nothing
    diversity_penalty: float | None = None
    force_words_ids: list[Any] | None = None
    speculate: int | None = None  # ours
    priority: Any = None  # ours
    timeout: float | None = None  # ours: seconds


class GenerateBody(msgspec.Struct):
    """Of /generate, /generate_stream and /; only the last looks at `stream`."""

    inputs: str
    parameters: GenerateParameters | None = None
    stream: bool | None = None


class TokenizeBody(msgspec.Struct):
    """TGI says `inputs`, vLLM says `prompt`: each gets its own answer."""

    inputs: str | None = None
    prompt: str | None = None
    parameters: GenerateParameters | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None  # vLLM's


class DetokenizeBody(msgspec.Struct):
    """vLLM's."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


class SpanJson(msgspec.Struct):
    """A token of a text that was given, and its place in the text's bytes."""

    id: int
    text: str
    start: int
    stop: int


class TokenJson(msgspec.Struct):
    """A generated token."""

    id: int
    text: str
    logprob: float | None  # null, for -inf, of an alternative that filters or a grammar exclude
    special: bool


class PrefillJson(msgspec.Struct):
    """A token of the prompt."""

    id: int
    text: str
    logprob: float | None


class SpeculationJson(msgspec.Struct):
    """What guesses were worth to a request, all its answers together. There where it might have had some."""

    drafted_tokens: int
    accepted_tokens: int  # those of them that were right
    steps: int  # that gave it tokens


class BestOf(msgspec.Struct):
    """Another answer than the best. `score` is there where beams were searched."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillJson]
    tokens: list[TokenJson]
    top_tokens: list[list[TokenJson]] | msgspec.UnsetType = msgspec.UNSET
    score: float | msgspec.UnsetType = msgspec.UNSET


class Details(msgspec.Struct):
    """Of a whole answer."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillJson]
    tokens: list[TokenJson]
    best_of_sequences: list[BestOf] | msgspec.UnsetType = msgspec.UNSET
    top_tokens: list[list[TokenJson]] | msgspec.UnsetType = msgspec.UNSET
    score: float | msgspec.UnsetType = msgspec.UNSET
    speculation: SpeculationJson | msgspec.UnsetType = msgspec.UNSET  # ours


class StreamDetails(msgspec.Struct):
    """Of a stream, in its last event. What beams found beside the answer that was streamed is `best_of_sequences`."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int
    best_of_sequences: list[BestOf] | msgspec.UnsetType = msgspec.UNSET
    score: float | msgspec.UnsetType = msgspec.UNSET
    speculation: SpeculationJson | msgspec.UnsetType = msgspec.UNSET  # ours


class GenerateAnswer(msgspec.Struct):
    generated_text: str
    details: Details | msgspec.UnsetType = msgspec.UNSET


class Event(msgspec.Struct):
    """One of a stream, with one token."""

    index: int  # from 1
    token: TokenJson
    top_tokens: list[TokenJson] | msgspec.UnsetType = msgspec.UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class BeamJson(msgspec.Struct):
    """A beam, by its last token."""

    parent: int  # its place among the live beams of the step before
    id: int
    text: str
    score: float


class BeamsEvent(msgspec.Struct):
    """What a step made of the beams: an event named `beams`, for who asks for `stream_beams`."""

    step: int  # from 1
    live: list[BeamJson]  # best first
    complete: list[BeamJson]  # by this step
