"""Request bodies of OpenAI's routes: the fields, which of them are refused, and how they become `Parameters`.

vLLM's extra fields are accepted where they cost nothing. A field that would change the answer and cannot be honoured is refused by
name; an unknown one is ignored and named in a response header, or refused, as the operator likes.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from aiohttp import web

from ..config import RouterConfig
from ..record import arrival
from ..request import Limits, Priority, Refused
from ..validation import SMALLEST_FLOAT, Parameters
from .body import decode_named
from .errors import shown
from .openai_formats import Format, grammar_of
from .tenant import session_of, tenant_of

COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens`, for completions only
MOST_TOP_LOGPROBS = 20  # OpenAI's
# Characters of `model`, which may be a path. Each chunk of a stream repeats it, and hundreds may wait for a client.
MOST_NAME = 4096
MOST_TOLD = 32  # names of ignored fields in the header
PLACE = re.compile(r"`messages\[(\d+)\]")  # the place of a chat's message, where a refusal begins with it
# Sampling parameters that vLLM's beam search does not use, with their neutral values. At a temperature of 0 any value is neutral.
NOT_DRAWN: dict[str, tuple[float, ...]] = {"temperature": (), "top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}

TIERS = {  # OpenAI's service tiers
    "auto": Priority.NORMAL,
    "default": Priority.NORMAL,
    "flex": Priority.BATCH,
    "priority": Priority.INTERACTIVE,
}

# Values of unsupported fields that ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "use_beam_search": (False,),
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "stream_beams": (False,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "force_words_ids": ([],),
    "logits_processors": ([],),
    "bad_words": ([],),
    "modalities": (["text"],),
    "return_tokens_as_token_ids": (False,),
    "background": (False,),
    "store": (False,),
    "truncation": ("disabled",),
}
REASONS = {
    "suffix": "Suffix is not supported and can be achieved by preprocessing the prompt.",
    "functions": "`functions` is not supported: use `tools`, which chats have",
    "function_call": "`function_call` is not supported: use `tool_choice`, which chats have",
    "bad_words": "`bad_words` is not supported: forbid tokens with a `logit_bias` of -100",
    "previous_response_id": "`previous_response_id` is not supported: the server keeps no answers; send the whole conversation",
    "conversation": "`conversation` is not supported: the server keeps no conversations; send all of it as `input`",
    "store": "`store`: true is not supported: the server keeps no answers",
    "use_beam_search": "`use_beam_search` is not supported on this route: use `num_beams`",
    "beam_width": "`beam_width` is not supported on this route: use `num_beams`",
    "num_return_sequences": "`num_return_sequences` is not supported on this route: use `n`, which chats and completions have",
    "stream_beams": "`stream_beams` is not supported on this route: use /generate_stream",
    "stop": "`stop` is not supported on this route: use `stop_sequences`",
    "background": "`background` is not supported: the server keeps no answers",
}

# OpenAI's fields that change nothing in an answer, and Anthropic's `cache_control`: prefixes are cached in any case.
HARMLESS = frozenset(
    ("metadata", "store", "safety_identifier", "prompt_cache_retention", "prediction", "request_id", "cache_control")
)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage on each chunk
    include_obfuscation: bool | None = None  # OpenAI's padding against traffic analysis: there is none


class Common(Format, kw_only=True):
    """Fields of the body that all of OpenAI's routes take. An explicit null is the same as a missing field."""

    model: Annotated[str, msgspec.Meta(max_length=MOST_NAME)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: Any = None  # penstock's own
    timeout: float | None = None  # penstock's own: seconds
    service_tier: str | None = None
    user: Any = None  # this and the next one say which requests belong together
    prompt_cache_key: Any = None
    cache_salt: str | None = None
    speculate: int | None = None  # penstock's own
    num_beams: int | None = None  # this and the next two are penstock's own, with transformers' names
    length_penalty: float | None = None
    early_stopping: bool | str | None = None  # a bool, or "never"

    @property
    def unknown(self) -> list[str]:
        """Fields inside of others, as paths, that are unknown and ask for something."""
        return []


class Body(Common, kw_only=True):
    """Fields of the body that chat completions and completions take."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None  # SGLang's for num_beams
    return_token_ids: bool | None = None  # vLLM's

    # Fields that would change the answer and cannot be honoured.
    suffix: Any = None
    functions: Any = None
    function_call: Any = None
    num_return_sequences: Any = None
    stream_beams: Any = None
    num_beam_groups: Any = None  # this and the next three are transformers'
    diversity_penalty: Any = None
    force_words_ids: Any = None
    logits_processors: Any = None
    bad_words: Any = None
    stop_regex: Any = None  # SGLang's
    allowed_token_ids: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    return_tokens_as_token_ids: Any = None


Decoded = TypeVar("Decoded", bound=Common)

UNSUPPORTED = Body.__struct_fields__[Body.__struct_fields__.index("suffix") :]
UNSUPPORTED_IN_CHATS = (*UNSUPPORTED, "echo")


class CompletionBody(Body, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class ChatBody(Body, kw_only=True):
    """Body of POST /v1/chat/completions."""

    folds_system: ClassVar[bool] = False  # see `Chat`
    # where the model's reasoning cannot be bounded, `thinking_token_budget` is dropped without an error
    bound_if_able: ClassVar[bool] = False

    messages: list[dict[str, Any]]
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # one of the template's variables
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None  # vLLM's
    echo: Any = None  # refused
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def most(self) -> int | None:
        """The limit of new tokens, by either of the two names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def names(self) -> dict[str, str]:
        """What refusals call fields that penstock names differently."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"inputs": "messages", "max_new_tokens": limit, "top_n_tokens": "top_logprobs", "truncate": "truncate_prompt_tokens"}


def unsupported(name: str) -> str:
    """The refusal of a field that cannot be honoured."""
    return REASONS.get(name, f"`{name}` is not supported")


def refuse_unsupported(body: msgspec.Struct, names: Iterable[str]) -> None:
    """Raises Refused for the first of these fields that asks for something."""
    for name in names:
        value = getattr(body, name)
        neutral = [each for each in NEUTRAL.get(name, ()) if isinstance(each, bool) == isinstance(value, bool)]  # true is no 1
        if value is not None and value not in neutral:
            raise Refused(unsupported(name), name)


def body_of(
    http: web.Request, kind: type[Decoded], config: RouterConfig, unsupported: Iterable[str]
) -> tuple[Decoded, dict[str, str]]:
    """The body, and the response header that names its unknown fields. Raises HttpError or Refused, also for the first of the
    fields `unsupported` that asks for something, and for unknown ones if the operator wants that."""
    body, names = decode_named(http, kind)
    unknown = sorted({*set(names) - set(body.__struct_fields__) - HARMLESS, *body.unknown})
    if unknown and config.unknown_fields == "refuse":
        raise Refused(f"`{unknown[0]}` is not a field of this route (--unknown-fields refuse)", unknown[0])
    refuse_unsupported(body, unsupported)
    told = ", ".join(re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII) for name in unknown[:MOST_TOLD])
    return body, {"x-ignored-fields": told} if unknown else {}


@dataclass(frozen=True, slots=True)
class BeamWidth:
    """How many beams a body asks for, and by which of its fields."""

    beams: int | None = None  # None: the body does not say
    field: str = "num_beams"
    greedy: bool = False  # beams are extended greedily, without sampling

    @property
    def names(self) -> dict[str, str]:
        """What refusals call the fields that only chats and completions name differently."""
        return {"num_beams": self.field, "num_return_sequences": "n"}

    @property
    def searched(self) -> bool:
        """Whether answers come from a beam search instead of sampling."""
        return self.beams is not None and self.beams > 1


def beam_width_of(body: Body) -> BeamWidth:
    """The beams that a body asks for, by transformers' name or SGLang's; with vLLM's `use_beam_search`, by the number of answers.
    Raises Refused for contradictions."""
    names = ("num_beams", "beam_width", *(("best_of", "n") if body.use_beam_search else ()))
    greedy = bool(body.use_beam_search)
    said = [BeamWidth(getattr(body, name), name, greedy) for name in names if getattr(body, name) is not None]
    if len(said) > 1 and said[1].field == "beam_width" and said[0].beams != said[1].beams:
        raise Refused("`num_beams` and `beam_width` say the same: send one of them", "beam_width")
    if not greedy:
        if said and said[0].searched and body.use_beam_search is False:
            raise Refused(f"`use_beam_search`: false contradicts `{said[0].field}`: leave one of them out", "use_beam_search")
        return said[0] if said else BeamWidth()
    if not said:
        raise Refused("`use_beam_search` needs to know how many beams: send `n`, or `num_beams`", "use_beam_search")
    for name, neutral in NOT_DRAWN.items():
        if body.temperature != 0.0 and getattr(body, name) not in (None, *neutral):
            raise Refused(
                f"`{name}` together with `use_beam_search` is not supported: leave it out, or send `num_beams` instead, which lets "
                "beams be drawn",
                name,
            )
    return said[0]


def parameters(
    http: web.Request, body: Common, limits: Limits, *, choices: int | None = None, width: BeamWidth | None = None, **more: Any
) -> Parameters:
    """A body's fields as `Parameters`. OpenAI's and vLLM's neutral values become None, as TGI has it. choices: answers to each
    prompt; width: the beams."""
    _check_bounds(body)
    width = width or BeamWidth(body.num_beams)
    greedy = width.greedy or body.temperature == 0.0
    return Parameters(
        choices=None if width.searched else choices,
        num_beams=width.beams,
        num_return_sequences=choices if width.searched else None,
        length_penalty=body.length_penalty,
        early_stopping=body.early_stopping,
        speculate=body.speculate,
        truncate=limits.max_input_tokens if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens,  # -1 is vLLM's
        priority=_priority(body),
        timeout=body.timeout,
        arrived=arrival(),
        tenant=tenant_of(http),
        model=body.model or "",
        salt=body.cache_salt or "",
        session=session_of(http, body.prompt_cache_key, body.user),
        temperature=None if greedy else body.temperature,
        do_sample=not greedy and not (width.searched and body.temperature is None),
        top_k=None if greedy or body.top_k in (0, -1) else body.top_k,
        top_p=None if greedy or body.top_p in (None, 1.0) else max(body.top_p, SMALLEST_FLOAT),  # of 0 one token is left
        min_p=None if greedy or body.min_p == 0.0 else body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        seed=_seed(body.seed),
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        include_stop=bool(body.include_stop_str_in_output),
        end_ids=body.stop_token_ids or (),
        min_new_tokens=_min_tokens(body),
        ignore_eos=bool(body.ignore_eos),
        most_top_n=MOST_TOP_LOGPROBS,
        skip_special_tokens=body.skip_special_tokens is not False,
        **more,
    )


def _check_bounds(body: Common) -> None:
    """Of numbers that may be more here than on TGI's routes, whose bounds a refusal would name otherwise. Raises Refused."""
    if body.temperature is not None and body.temperature < 0.0:
        raise Refused(f"`temperature` must be at least 0. Given: {body.temperature}", "temperature")
    if body.top_p is not None and not 0.0 <= body.top_p <= 1.0:
        raise Refused(f"`top_p` must be from 0 to 1. Given: {body.top_p}", "top_p")
    if body.top_k is not None and body.top_k < -1:
        raise Refused(f"`top_k` must be at least 1, or 0 or -1 for all tokens. Given: {body.top_k}", "top_k")


@contextmanager
def naming(**names: str) -> Iterator[None]:
    """Refusals inside the context are raised with these field names: penstock's, or paths of them, to the client's."""
    try:
        yield
    except Refused as refused:
        message, parameter = str(refused), refused.parameter or ""
        for name, theirs in names.items():
            message = re.sub(f"`{name}([`.])", rf"`{theirs}\1", message)
            parameter = re.sub(rf"^{re.escape(name)}(?=\.|$)", theirs, parameter)
        refused.args, refused.parameter = (message,), parameter or None
        raise


@contextmanager
def placing(places: Sequence[str]) -> Iterator[None]:
    """Refusals of a chat's message inside the context are raised with its place in a body of another shape. places: by the
    message's index."""
    try:
        yield
    except Refused as refused:
        if found := PLACE.match(str(refused)):
            refused.args = (f"`{places[int(found[1])]}{str(refused)[found.end() :]}",)
        raise


def effort_of(given: object, name: str) -> str | None:
    """The body's `reasoning_effort`, which the route calls `name`. Raises Refused."""
    if given is None or isinstance(given, str):
        return given
    raise Refused(f"`{name}` must be a string. Given: {shown(given)}", name)


def prompt_alternatives(body: Body) -> int | None:
    """How many alternatives `prompt_logprobs` asks for; None: no prompt log-probabilities."""
    count = body.prompt_logprobs
    if count is None:
        return None
    if not 0 <= count <= MOST_TOP_LOGPROBS:
        raise Refused(f"`prompt_logprobs` must be from 0 to {MOST_TOP_LOGPROBS}. Given: {count}", "prompt_logprobs")
    if body.stream:
        raise Refused("`prompt_logprobs` is not supported when streaming tokens", "prompt_logprobs")
    return count


def _min_tokens(body: Common) -> int:
    count = body.min_tokens or 0
    if count < 0:
        raise Refused(f"`min_tokens` must be at least 0. Given: {count}", "min_tokens")
    if count and body.stop:
        raise Refused("`min_tokens` together with `stop` is not supported: strings would end the answer before", "min_tokens")
    if count and grammar_of(body) is not None:
        raise Refused(
            "`min_tokens` together with a format of the answer is not supported: the format says when it ends", "min_tokens"
        )
    return count


def _priority(body: Common) -> object:
    """The priority by penstock's names, or by OpenAI's service tiers, which mean the same."""
    if body.priority is None and body.service_tier is not None:
        if body.service_tier not in TIERS:
            raise Refused(f'`service_tier` must be one of {", ".join(TIERS)}. Given: "{body.service_tier}"', "service_tier")
        return TIERS[body.service_tier]
    return body.priority


def _seed(seed: int | None) -> int | None:
    """OpenAI's seeds are signed, penstock's unsigned."""
    return seed + 2**64 if seed is not None and -(2**63) <= seed < 0 else seed
