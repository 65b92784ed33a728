"""text-generation-inference's (TGI's) JSON types: request bodies, answers and stream events. Knows nothing of penstock's
requests."""

from typing import Annotated, Any

import msgspec

GRAMMARS = ["json", "json_object", "json_schema", "regex"]


class GrammarBody(msgspec.Struct):
    """`parameters.grammar`. `value` depends on `type`: a JSON schema (or its JSON in a string), a regex, {"name", "schema"}."""

    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": GRAMMARS})]
    value: Any


# Fields that would change the answer and cannot be honoured, with the values that ask for nothing.
UNSUPPORTED: dict[str, object] = {"watermark": False, "num_beam_groups": 1, "diversity_penalty": 0.0, "force_words_ids": []}


class GenerateParameters(msgspec.Struct):
    """`parameters` of a generation request. An explicit null is the same as a missing field."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None  # penstock's own
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None  # penstock's own
    typical_p: float | None = None
    logit_bias: dict[int, float] | None = None  # penstock's own
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
    num_beams: int | None = None  # this and the next four are penstock's own, with transformers' names
    num_return_sequences: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None  # a bool, or "never"
    stream_beams: bool | None = None
    num_beam_groups: int | None = None  # these three are transformers', too; refused unless they ask for nothing
    diversity_penalty: float | None = None
    force_words_ids: list[Any] | None = None
    speculate: int | None = None  # penstock's own
    priority: Any = None  # penstock's own
    timeout: float | None = None  # penstock's own: seconds


class GenerateBody(msgspec.Struct):
    """Body of POST /generate, /generate_stream and /; only the last looks at `stream`."""

    inputs: str
    parameters: GenerateParameters | None = None
    stream: bool | None = None


class TokenizeBody(msgspec.Struct):
    """Body of POST /tokenize. TGI's clients send `inputs`, vLLM's `prompt`: each gets the answer that it knows."""

    inputs: str | None = None
    prompt: str | None = None
    parameters: GenerateParameters | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None  # vLLM's


class DetokenizeBody(msgspec.Struct):
    """Body of POST /detokenize, as vLLM has it."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]


class SpanJson(msgspec.Struct):
    """A token of the text that was tokenized, and where it stands in the text's bytes."""

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
    """A token of the prompt, with its log-probability."""

    id: int
    text: str
    logprob: float | None


class SpeculationJson(msgspec.Struct):
    """Draft tokens of a request that may speculate, all its answers together: proposed and accepted."""

    drafted_tokens: int
    accepted_tokens: int  # draft tokens that were accepted
    steps: int  # steps that gave it tokens


class BestOf(msgspec.Struct):
    """One of the other answers of `best_of` or of a beam search, which alone has a `score`."""

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillJson]
    tokens: list[TokenJson]
    top_tokens: list[list[TokenJson]] | msgspec.UnsetType = msgspec.UNSET
    score: float | msgspec.UnsetType = msgspec.UNSET


class Details(msgspec.Struct):
    """`details` of an answer that is not streamed."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillJson]
    tokens: list[TokenJson]
    best_of_sequences: list[BestOf] | msgspec.UnsetType = msgspec.UNSET
    top_tokens: list[list[TokenJson]] | msgspec.UnsetType = msgspec.UNSET
    score: float | msgspec.UnsetType = msgspec.UNSET
    speculation: SpeculationJson | msgspec.UnsetType = msgspec.UNSET  # penstock's own


class StreamDetails(msgspec.Struct):
    """`details` in a stream's last event. `best_of_sequences` holds a beam search's answers beside the streamed one."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int
    best_of_sequences: list[BestOf] | msgspec.UnsetType = msgspec.UNSET
    score: float | msgspec.UnsetType = msgspec.UNSET
    speculation: SpeculationJson | msgspec.UnsetType = msgspec.UNSET  # penstock's own


class GenerateAnswer(msgspec.Struct):
    generated_text: str
    details: Details | msgspec.UnsetType = msgspec.UNSET


class Event(msgspec.Struct):
    """An event of a stream, with one token."""

    index: int  # from 1
    token: TokenJson
    top_tokens: list[TokenJson] | msgspec.UnsetType = msgspec.UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class BeamJson(msgspec.Struct):
    """A live beam of a beam search, with its last token."""

    parent: int  # index among the live beams of the step before
    id: int
    text: str
    score: float


class BeamsEvent(msgspec.Struct):
    """The live beams after a step of a beam search: an event named `beams`, sent if `stream_beams` is true."""

    step: int  # from 1
    live: list[BeamJson]  # best first
    complete: list[BeamJson]  # completed in this step
