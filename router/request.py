"""The router's internal request and stream types, independent of any HTTP API and of protobuf."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Priority(StrEnum):
    """Scheduling priority of a request."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters: how the next token is chosen. Defaults are neutral: greedy decoding."""

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    typical_p: float = 1.0  # 1: off
    repetition_penalty: float = 1.0  # 1: off; over prompt and output
    frequency_penalty: float = 0.0  # over the output
    presence_penalty: float = 0.0  # over the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int = 0  # unsigned 64 bit
    final_logprobs: bool = False  # logprobs of the distribution sampled from (TGI), not of the model's own (OpenAI)


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that every answer's text must match: source text of one of these kinds."""

    kind: str  # "json_schema", "regex", "lark", "ebnf" until it was converted, "choice" (a JSON list of strings)
    source: str


class Stopping(StrEnum):
    """When a beam search ends, once as many answers as it is wide are complete: transformers' early_stopping."""

    WORSE = "false"  # when the best beam, as long as it is now, is no better than any of them
    FULL = "true"  # at once
    NEVER = "never"  # when no beam can become better than any of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """Beam search with the meaning of transformers' generate(num_beams=...). With a temperature beams are drawn, by the seed."""

    width: int  # num_beams, at least 2 and at least the request's `choices`
    length_penalty: float = 1.0  # scores are divided by length to this power
    stopping: Stopping = Stopping.WORSE
    watched: bool = False  # the stream has a Grown for every step


class Image(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """An image in a prompt: see `proto.images`, and Image in shard.proto."""

    start: int
    rows: int
    columns: int
    pixels: bytes
    shape: tuple[int, ...]
    size: tuple[int, ...] = ()


class Thinking(msgspec.Struct, frozen=True):
    """Budget for reasoning at the beginning of an answer."""

    most: int  # most tokens of reasoning
    end: int  # token that ends it
    begin: int | None = None  # token that begins it; None: the prompt has begun it


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request. Its prompt fits, its numbers are in range."""

    prompt: tuple[int, ...]
    images: tuple[Image, ...] = ()  # of the prompt, in its order
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()  # strings that end the text; the stop string itself is part of the stream's tokens
    include_stop: bool = True  # the finished text keeps the stop string (TGI) or loses it (OpenAI)
    end_ids: tuple[int, ...] = ()  # EOS, unless it is ignored, and other tokens that end the sequence
    top_n: int = 0  # alternatives per token
    prompt_logprobs: bool = False
    prompt_top_n: int = 0  # alternatives per token of the prompt, if its log-probabilities are asked for
    min_new_tokens: int = 0  # tokens of end_ids can't be sampled earlier
    thinking: Thinking | None = None  # budget for reasoning; None: unlimited
    skip_special_tokens: bool = True  # in the text
    shown: tuple[int, ...] = ()  # special tokens that are kept in the text, for parsers
    choices: int = 1  # answers: sampled independently, with the prompt computed once; or the best of beam search, in order
    beams: Beams | None = None
    drafts: int = 0  # most draft tokens per choice in a step (speculative decoding): they change no token
    priority: Priority = Priority.NORMAL
    grammar: Grammar | None = None  # compiled and found to be satisfiable
    timeout: float = 0.0  # seconds after arrival by which the whole answer must be there; 0: none
    arrived: float = 0.0  # by the monotonic clock: when its first byte arrived; 0: when it is submitted
    tenant: str = ""  # account; tenants share the server fairly. Never shown or logged
    session: str = ""  # e.g. a conversation: with several replicas, requests of a session go to the same one
    adapter: str = ""  # LoRA adapter on the shards; "": the base model
    cache_key: str = ""  # prefix caching: only requests with equal keys share cached pages

    @property
    def sequences(self) -> int:
        """Number of sequences computed side by side."""
        return self.beams.width if self.beams else self.choices


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the size of a request. Known after warm-up."""

    max_input_tokens: int  # prompt
    max_total_tokens: int  # prompt and max_new_tokens
    vocabulary: int  # valid ids are below it
    pages: int = 1 << 30  # in the KV pool: the most that one request, with all its choices, may take
    page_size: int = 1  # tokens per page
    sequences: int = 1 << 30  # that run at once
    images: bool = False  # the shards support images


# The following exist once per token: a frozen dataclass takes ten times as long to make (1.5 us, x86, one core).
class Alternative(msgspec.Struct, frozen=True, gc=False):
    """One of the most probable tokens at a position."""

    id: int
    text: str
    logprob: float
    special: bool


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one token adds to a stream of text."""

    text: str  # the token's own text; "" while a character is incomplete, then the whole character
    delta: str  # what it adds for a reader
    stop: str  # the stop string that has ended the text; "": none


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """First item of a stream: the prompt with its log-probabilities, as soon as its first token is there."""

    logprobs: tuple[float | None, ...]  # None for the first token; () unless they were asked for
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), best first: prompt_top_n for each token but the first
    cached_tokens: int = 0  # of the prompt, found in the prefix cache


class Token(msgspec.Struct, frozen=True, gc=False):
    """A generated token of one of the choices."""

    id: int
    text: str  # the token's own text, special tokens written out (TGI's `token.text`)
    delta: str  # what it adds to the text for a reader: no special tokens, held back while a stop string may begin
    logprob: float
    special: bool
    top: tuple[Alternative, ...] = ()
    choice: int = 0  # from 0


class Speculation(msgspec.Struct, frozen=True, gc=False):
    """Statistics of speculative decoding for a request, all its choices together, so far."""

    drafted: int  # draft tokens
    accepted: int  # of these, accepted
    steps: int  # steps that gave it tokens


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Last item of a choice. A stream ends with the last choice's."""

    reason: str  # "length", "eos_token", "stop_sequence"
    text: str  # the whole generated text
    delta: str  # the end of the text that no Token's delta held
    generated_tokens: int
    queue_seconds: float  # from arrival to the first step that computed something of it
    inference_seconds: float  # from that step to the end
    choice: int = 0
    score: float | None = None  # of an answer that beam search found
    speculation: Speculation | None = None  # of a request that may have drafts
    stop: str = ""  # the stop string that ended it


class Beam(msgspec.Struct, frozen=True, gc=False):
    """A beam after a step."""

    parent: int  # index of the live beam before the step that it continues; 0 in the first step: the prompt
    id: int  # its new token
    text: str  # the token's own
    score: float  # sum of log-probabilities; of a complete one divided by length to the power of length_penalty


class Grown(msgspec.Struct, frozen=True, gc=False):
    """What a step made of the beams of a request that watches its search (`Beams.watched`)."""

    live: tuple[Beam, ...]  # best first
    complete: tuple[Beam, ...]  # completed by this step and, so far, among the best


Item = Prompt | Token | Finish | Grown
# Takes items as soon as a step gives them; False: it can't now, and they wait for the stream's reader.
Sink = Callable[[list[Item]], bool]


class Failure(Exception):
    """Why a request can't be answered, as sent to the client. Turned into an HTTP status in `api/app.py` only.

    Failure
      Refused      the client's fault: the request is invalid
      Overloaded   no room now: try again later
      Expired      it was not complete by its own deadline
      NotReady     the model is still loading, or the server is draining
      Broken       the shards failed while they computed it
    """

    kind = "generation"  # in metrics and logs
    counted = False  # whether the metrics have it already; else the request never got that far


class Refused(Failure):
    """The request is invalid; the message says which value and what would do. `parameter` names the field, if one is to blame."""

    kind = "validation"

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class NoModel(Refused):
    """No served model has this name."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "model")


class TooLong(Refused):
    """The prompt has too many tokens. `found`: how many it has."""

    def __init__(self, message: str, found: str, most: int) -> None:
        super().__init__(message, "inputs")
        self.found = found
        self.most = most


class Overloaded(Failure):
    """There is no room for the request, or no thread free to validate it. `retry_after`: estimated seconds until there is."""

    kind = "overloaded"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Expired(Failure):
    """The request's own `timeout` is over, and its answer is not complete."""

    kind = "timeout"

    @classmethod
    def after(cls, timeout: float, generated: int = 0) -> "Expired":
        """For a timeout of so many seconds, when so many tokens of the answer were there."""
        return cls(f"the answer was not complete {timeout:g} s after the request came: {generated} tokens were there")


class NotReady(Failure):
    """The model is still loading, or the server is shutting down."""

    kind = "unavailable"


class Broken(Failure):
    """The shards failed while they computed this request."""


class Superseded(Broken):
    """Another router has taken the shards, which serve one: nothing is wrong with them, nor with this request."""
