"""Request validation: raw parameters in, a `Request` out. Every rule about what a client may ask, in text-generation-inference's
words.

Knows the limits and the tokenizer. Knows no HTTP and no JSON; both APIs use it. An invalid value is refused, never adjusted.
"""

import asyncio
import hashlib
import logging
import math
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import TypeVar

import msgspec

from .adapters import Adapters
from .config import Misconfigured, RouterConfig
from .grammar import Grammars
from .image_placeholders import NO_IMAGES, ImagePlacer
from .request import (
    Beams,
    Expired,
    Grammar,
    Image,
    Limits,
    Overloaded,
    Priority,
    Refused,
    Request,
    Sampling,
    Stopping,
    Thinking,
    TooLong,
)
from .scheduler import most_pages
from .text import LONG_TEXT, Tokenizer

MAX_STOP_CHARACTERS = 1024
LARGEST_FLOAT = 3.4e38  # the shards compute in 32 bit
SMALLEST_FLOAT = 1.2e-38
COLDEST = 1e-5  # temperature below which decoding is greedy, as in vLLM: logits divided by less may overflow 32 bits
CANDIDATES = 4096  # most candidates that a step weighs for one request's beams: each costs 20 us of all requests' time
UNLIKELY = 1000.0  # negative log-probability of a token, penalties and bias included, that is hardly ever exceeded
THREADS = 2
MOST_LONG = 64  # long texts that are tokenized, or queued for it
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Unchecked parameters of a client. None: not given. Names are TGI's, where TGI has one."""

    images: Sequence[bytes] = ()  # encoded files, in the order of the prompt
    choices: int | None = None  # sampled answers: TGI's best_of, OpenAI's n
    num_beams: int | None = None
    num_return_sequences: int | None = None  # answers of beam search: the best beams
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    stream_beams: bool = False  # every step's beams are sent
    speculate: int | None = None  # drafts in a step, at most as many as the operator allows
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    do_sample: bool = False
    seed: int | None = None
    max_new_tokens: int | None = None
    fitting: bool = False  # max_new_tokens is an upper bound: fewer if only fewer fit
    truncate: int | None = None
    stop: Sequence[str] = ()
    include_stop: bool = True
    end_ids: Sequence[int] = ()  # stop tokens, beside the model's own
    ignore_eos: bool = False
    top_n_tokens: int | None = None
    prompt_logprobs: bool = False
    prompt_top_n: int = 0  # alternatives for each token of the prompt
    most_top_n: int = 0  # most alternatives that may be asked for, if more than the operator's setting
    min_new_tokens: int = 0
    thinking: Thinking | None = None
    final_logprobs: bool = False
    skip_special_tokens: bool = True
    shown: tuple[int, ...] = ()
    grammar: Grammar | None = None
    priority: object = None
    timeout: float | None = None
    arrived: float = 0.0  # when its first byte arrived, by the monotonic clock; 0: now
    tenant: str = ""
    adapter: str = ""  # requested LoRA adapter
    model: str = ""  # requested model: any name; an adapter's selects that adapter
    salt: str = ""  # cache salt: only requests with the same share cached prefixes
    session: str = ""

    @property
    def sampled(self) -> bool:
        """Whether tokens are sampled, as TGI infers it."""
        return self.do_sample or any(
            value is not None for value in (self.temperature, self.top_k, self.top_p, self.typical_p, self.min_p)
        )


class Validator:
    """The rules for one model under one operator's settings."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        observe: Callable[[int, int], None] = lambda prompt, max_new_tokens: None,
        adapters: Adapters | None = None,
    ) -> None:
        """observe: called with the tokens of each valid request, and the most that it may generate; adapters: the registry, if
        adapters may be loaded at run time. Raises Misconfigured if the operator requires images, which the model does not
        support."""
        self._config = config
        self._adapters = adapters or Adapters(config.model, config.adapters)
        self._tokenizer = tokenizer
        self._observe = observe
        self.grammars = Grammars(tokenizer.added_id, tokenizer.is_added)
        self.image_placer = _image_placer(config, tokenizer) if config.max_images else None
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer")
        self._long = 0  # texts being tokenized by threads, or queued

    async def request(
        self, prompt: str | Sequence[int], parameters: Parameters, limits: Limits, *, add_special_tokens: bool = True
    ) -> Request:
        """The validated request. Raises Refused, Overloaded, or Expired if its timeout is over before."""
        async with in_time(parameters):
            request = await self._request(prompt, parameters, limits, add_special_tokens)
        self._observe(len(request.prompt), request.max_new_tokens)
        return request

    async def _request(
        self, prompt: str | Sequence[int], parameters: Parameters, limits: Limits, add_special_tokens: bool
    ) -> Request:
        self._check_numbers(parameters)
        self._check_counts(parameters)
        beams = self._beams(parameters)
        adapter = self._adapter(parameters)
        _check_ids(parameters.logit_bias, "logit_bias", limits)
        _check_ids(parameters.end_ids, "stop_token_ids", limits)
        placer = self._image_placer(parameters, limits)
        if placer is not None and isinstance(prompt, str):
            prompt = placer.worded(prompt)
        ids = await self._prompt(prompt, parameters.truncate, limits, add_special_tokens)
        images: tuple[Image, ...] = ()
        if placer is not None:
            _check_prompt(len(ids), limits)  # before its images are decoded, each of which has at least one token
            ids, images = await placer.put(ids, parameters.images, limits.vocabulary)
        try:
            stop, end_ids, choices, longest = self._ways(parameters, beams, len(ids), limits)
        except Refused:
            if beams is None or parameters.num_beams is not None or _about_beams(parameters):
                raise
            beams = None  # the operator's default for all requests that allow beams, which this one doesn't
            stop, end_ids, choices, longest = self._ways(parameters, None, len(ids), limits)
        request = Request(
            prompt=tuple(ids),
            images=images,
            max_new_tokens=longest,
            sampling=_sampling(parameters, limits),
            stop=stop,
            include_stop=parameters.include_stop,
            end_ids=end_ids,
            top_n=parameters.top_n_tokens or 0,
            prompt_logprobs=parameters.prompt_logprobs,
            prompt_top_n=parameters.prompt_top_n,
            min_new_tokens=parameters.min_new_tokens,
            thinking=parameters.thinking,
            skip_special_tokens=parameters.skip_special_tokens,
            shown=parameters.shown,
            choices=choices,
            beams=beams,
            drafts=self._drafts(parameters, beams),
            priority=_priority(parameters.priority),
            grammar=parameters.grammar,
            timeout=parameters.timeout or 0.0,
            arrived=parameters.arrived,
            tenant=parameters.tenant,
            session=parameters.session,
            adapter=adapter,
            cache_key=_together(parameters.tenant if self._config.isolate_tenants else "", parameters.salt, adapter),
        )
        if parameters.grammar is not None:
            return msgspec.structs.replace(request, grammar=await self.grammars.check(parameters.grammar))
        return request

    def check_images(self, count: int, limits: Limits) -> None:
        """Raises Refused if a request has more images than allowed."""
        most = self._config.max_images if self.image_placer is not None and limits.images else 0
        if count > most:
            if not most:
                raise Refused(f"`inputs` has an image, and {NO_IMAGES}", "inputs")
            raise Refused(f"`inputs` must have at most {most} images (--max-images). Given: {count}", "inputs")

    def _image_placer(self, given: Parameters, limits: Limits) -> ImagePlacer | None:
        """What puts the request's images into its prompt; None if it has none."""
        self.check_images(len(given.images), limits)
        if not given.images:
            return None
        for name, asked in (("truncate", given.truncate), ("prompt_logprobs", given.prompt_logprobs)):
            if asked:
                raise Refused(f"`{name}` together with images is not supported", name)
        return self.image_placer

    async def _prompt(
        self, prompt: str | Sequence[int], truncate: int | None, limits: Limits, add_special_tokens: bool
    ) -> Sequence[int]:
        """The prompt's tokens; the last ones if it is to be truncated."""
        if not prompt:
            raise Refused("`inputs` cannot be empty", "inputs")
        most = limits.max_input_tokens
        if truncate is not None and not 0 < truncate <= most:
            raise Refused(f"`truncate` must be strictly positive and less than {most}. Given: {truncate}", "truncate")
        if isinstance(prompt, str):
            if not truncate:
                self._check_length(prompt, most)
            ids: Sequence[int] = await self.encode(prompt, add_special_tokens)
        else:
            ids = prompt
        _check_ids(ids, "inputs", limits)  # a tokenizer, too, may have more tokens than the model
        return ids[-truncate:] if truncate else ids

    def _check_length(self, text: str, most: int) -> None:
        """Checks the length of a long text before it is tokenized, which is expensive."""
        room = most * self._tokenizer.longest
        if len(text) > max(room, LONG_TEXT) and room:
            raise TooLong(
                f"`inputs` must have at most {most} tokens, which are at most {room} characters. Given: {len(text)} characters",
                f"at least {math.ceil(len(text) / self._tokenizer.longest)}",
                most,
            )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's tokens, without blocking the event loop."""
        return await self.beside(text, lambda: self._tokenizer.encode(text, add_special_tokens))

    async def beside(self, text: str, work: Callable[[], Result]) -> Result:
        """Tokenizes a text by `work`: if it is long, on one of few threads, beside the event loop; each holds hundreds of times its
        text in memory. Raises Overloaded."""
        if len(text) <= LONG_TEXT:
            return work()
        if self._long >= MOST_LONG:
            raise Overloaded(f"{self._long} long texts are being tokenized")
        self._long += 1
        job = asyncio.get_running_loop().run_in_executor(self._threads, work)
        job.add_done_callback(self._done)
        return await job

    def _done(self, job: object) -> None:
        self._long -= 1

    def _ways(
        self, given: Parameters, beams: Beams | None, length: int, limits: Limits
    ) -> tuple[tuple[str, ...], tuple[int, ...], int, int]:
        """What ends an answer to a prompt of this length (strings, tokens), how many answers there are, and how long each may
        be."""
        stop, end_ids = self._ends(given, beams, limits)
        choices = (given.choices if beams is None else given.num_return_sequences) or 1
        longest = _max_new_tokens(length, None if given.fitting else given.max_new_tokens, choices, beams, limits)
        if given.fitting and given.max_new_tokens is not None:
            longest = min(longest, given.max_new_tokens)
        if given.min_new_tokens > longest:
            raise Refused(
                f"`min_tokens` must be at most {longest}, the tokens that the answer may have. Given: {given.min_new_tokens}",
                "min_tokens",
            )
        if beams is not None:
            _check_beams(beams, longest, len(end_ids), limits)
        return stop, end_ids, choices, longest

    def _ends(self, given: Parameters, beams: Beams | None, limits: Limits) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Strings and token ids that end the answer. `ignore_eos` applies to the model's own end tokens, not to requested ones.

        A stop string that is a special token has no text where special tokens are skipped: it can only be matched as a token. Beams
        are ended by the shards, which never see it as text.
        """
        skipped = given.skip_special_tokens
        found = {string: self._tokenizer.special_id(string) for string in given.stop} if skipped or beams else {}
        strings = dict.fromkeys(string for string in given.stop if not skipped or found[string] is None)
        own = () if given.ignore_eos else self._tokenizer.eos_ids
        ids = dict.fromkeys((*own, *given.end_ids, *(id for id in found.values() if id is not None)))
        return tuple(strings), tuple(id for id in ids if id < limits.vocabulary)  # a tokenizer may have more tokens than the model

    def _adapter(self, given: Parameters) -> str:
        """The key of the request's LoRA adapter; "": none."""
        if not given.adapter:
            return self._adapters.key_of_model(given.model)
        if not (known := self._adapters.names):
            raise Refused("`adapter_id` is not supported: the server has no adapters", "adapter_id")
        found = self._adapters.key(given.adapter)
        if found is None:
            raise Refused(f"`adapter_id` must be one of {', '.join(known)} (--lora-adapters). Given: {given.adapter}", "adapter_id")
        return found

    def _drafts(self, given: Parameters, beams: Beams | None) -> int:
        """Most drafts in a step. None for beams, and for prompts with images, which draft models don't support."""
        most = self._config.speculate
        if given.speculate is not None and not 0 <= given.speculate <= most:
            raise Refused(f"`speculate` must be >= 0 and <= {most} (--speculate). Given: {given.speculate}", "speculate")
        if beams is not None or given.images:
            return 0
        return most if given.speculate is None else given.speculate

    def _beams(self, given: Parameters) -> Beams | None:
        """Beam search settings, if any. The operator's default width applies to requests that neither sample nor say otherwise."""
        drawn = (given.choices or 1) > 1
        default = 1 if given.sampled or drawn or given.thinking else self._config.num_beams
        width = default if given.num_beams is None else given.num_beams
        most = self._config.most_beams
        if not 0 < width <= most:
            flag = "--max-num-beams" if most == self._config.max_num_beams else "--max-batch-size"
            raise Refused(f"`num_beams` must be > 0 and <= {most} ({flag}). Given: {width}", "num_beams")
        stopping = _stopping(given.early_stopping)
        if width == 1:
            if name := _about_beams(given):
                raise Refused(f"`{name}` needs beams: ask for them with `num_beams` > 1, or leave it out", name)
            return None
        if given.thinking:
            raise Refused("`thinking_token_budget` together with `num_beams` > 1 is not supported", "thinking_token_budget")
        if drawn:
            raise Refused(
                "`best_of` together with `num_beams` > 1 is not supported: `num_return_sequences` says how many of the best beams "
                "are answers",
                "best_of",
            )
        most = min(width, self._config.most_choices)
        if given.num_return_sequences is not None and not 0 < given.num_return_sequences <= most:
            bound = "`num_beams`" if most == width else "--max-best-of"
            raise Refused(
                f"`num_return_sequences` must be > 0 and <= {most} ({bound}). Given: {given.num_return_sequences}",
                "num_return_sequences",
            )
        penalty = 1.0 if given.length_penalty is None else given.length_penalty
        return Beams(width=width, length_penalty=penalty, stopping=stopping, watched=given.stream_beams)

    def _check_numbers(self, given: Parameters) -> None:
        """Checks ranges, in TGI's order."""
        most = self._config.most_choices
        if given.choices is not None and not 0 < given.choices <= most:
            if most == 1:
                raise Refused("`best_of` != 1 is not allowed for this endpoint", "best_of")
            raise Refused(f"`best_of` must be > 0 and <= {most}. Given: {given.choices}", "best_of")
        _positive("temperature", given.temperature)
        _positive("repetition_penalty", given.repetition_penalty)
        _between("frequency_penalty", given.frequency_penalty, -2.0, 2.0)
        _between("presence_penalty", given.presence_penalty, -2.0, 2.0)
        _fraction("top_p", given.top_p)
        _fraction("typical_p", given.typical_p)
        _between("min_p", given.min_p, 0.0, 1.0)
        for id, bias in given.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise Refused(f"`logit_bias` must be >= -100.0 and <= 100.0. Given: {bias} for the token id {id}", "logit_bias")
        _positive("top_k", given.top_k)
        _positive("max_new_tokens", given.max_new_tokens)
        _positive("timeout", given.timeout)
        if given.length_penalty is not None:
            _finite("length_penalty", given.length_penalty)
        if given.seed is not None and not 0 <= given.seed < 2**64:
            raise Refused(f"`seed` must be an unsigned integer of 64 bits. Given: {given.seed}", "seed")

    def _check_counts(self, given: Parameters) -> None:
        most = self._config.max_stop_sequences
        if len(given.stop) > most:
            raise Refused(f"`stop` supports up to {most} stop sequences. Given: {len(given.stop)}", "stop")
        if not all(0 < len(string) <= MAX_STOP_CHARACTERS for string in given.stop):
            raise Refused(f"`stop` sequences must have from 1 to {MAX_STOP_CHARACTERS} characters", "stop")
        most = max(self._config.max_top_n_tokens, given.most_top_n)
        if given.top_n_tokens is not None and not 0 <= given.top_n_tokens <= most:
            raise Refused(f"`top_n_tokens` must be >= 0 and <= {most}. Given: {given.top_n_tokens}", "top_n_tokens")
        if given.grammar is not None and self._config.disable_grammar_support:
            raise Refused("grammar is not supported", "grammar")


@asynccontextmanager
async def in_time(given: Parameters) -> AsyncIterator[None]:
    """Raises Expired when the request's own timeout is over before the block ends."""
    if given.timeout is None or not SMALLEST_FLOAT <= given.timeout <= LARGEST_FLOAT:  # none, or one that will be refused
        yield
        return
    now = monotonic()
    try:
        async with asyncio.timeout((given.arrived or now) + given.timeout - now):
            yield
    except TimeoutError:
        raise Expired.after(given.timeout) from None


def _image_placer(config: RouterConfig, tokenizer: Tokenizer) -> ImagePlacer | None:
    """What puts images into prompts, if supported. Raises Misconfigured if it isn't, and the operator requires it."""
    try:
        return ImagePlacer(config, tokenizer.token_text, tokenizer.added_id, partial(tokenizer.encode, add_special_tokens=False))
    except Misconfigured as error:
        if config.images_asked:
            raise
        logger.warning("text alone is served: %s", error)
        return None


def _finite(name: str, value: float) -> None:
    if not abs(value) <= LARGEST_FLOAT:  # so that NaN fails too, and integers of any size can be compared
        raise Refused(f"`{name}` must be a finite number of 32 bits", name)


def _positive(name: str, value: float | None) -> None:
    if value is None:
        return
    _finite(name, value)
    if value < SMALLEST_FLOAT:
        raise Refused(f"`{name}` must be strictly positive", name)


def _fraction(name: str, value: float | None) -> None:
    if value is not None and not SMALLEST_FLOAT <= value < 1.0:
        raise Refused(f"`{name}` must be > 0.0 and < 1.0", name)


def _between(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise Refused(f"`{name}` must be >= {low} and <= {high}", name)


def _check_ids(ids: Sequence[int] | Mapping[int, float], name: str, limits: Limits) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < limits.vocabulary:  # there may be millions
        unknown = next(id for id in ids if not 0 <= id < limits.vocabulary)
        raise Refused(f"`{name}` has the token id {unknown}; the model knows 0 to {limits.vocabulary - 1}", name)


def _priority(given: object) -> Priority:
    if given is None:
        return Priority.NORMAL
    if isinstance(given, str) and given in tuple(Priority):
        return Priority(given)
    names = ", ".join(f'"{name}"' for name in Priority)
    given, hint = (f'"{given}"', "") if isinstance(given, str) else (given, "; numbers are not supported")
    raise Refused(f"`priority` must be one of {names}{hint}. Given: {given}", "priority")


def _stopping(given: bool | str | None) -> Stopping:
    if given is None or isinstance(given, bool):
        return Stopping.FULL if given else Stopping.WORSE
    if given != Stopping.NEVER:
        raise Refused(f'`early_stopping` must be true, false or "never". Given: "{given}"', "early_stopping")
    return Stopping.NEVER


def _about_beams(given: Parameters) -> str:
    """The first beam parameter given besides the width; "" if there is none."""
    for name, value, neutral in (
        ("num_return_sequences", given.num_return_sequences, 1),
        ("length_penalty", given.length_penalty, 1.0),
        ("early_stopping", _stopping(given.early_stopping), Stopping.WORSE),
        ("stream_beams", given.stream_beams, False),
    ):
        if value not in (None, neutral):
            return name
    return ""


def _check_beams(beams: Beams, longest: int, end_ids: int, limits: Limits) -> None:
    """Checks that depend on the length, the end tokens and the model."""
    candidates = max(2, 1 + end_ids)  # of which at most all but one end, for each beam
    if beams.width * candidates > limits.vocabulary:
        raise Refused(
            f"`num_beams` must be <= {limits.vocabulary // candidates}: each step weighs {candidates} tokens for each beam, of "
            f"which the model has {limits.vocabulary}. Given: {beams.width}",
            "num_beams",
        )
    if end_ids > 1 and beams.width * candidates > CANDIDATES:
        raise Refused(
            f"{beams.width} beams that {end_ids} tokens end would weigh {beams.width * candidates} tokens in each step, which is "
            f"more than {CANDIDATES}: ask for fewer `num_beams` or `stop_token_ids`",
            "num_beams",
        )
    if math.log(longest * UNLIKELY) + abs(beams.length_penalty) * math.log(longest) > math.log(LARGEST_FLOAT):
        raise Refused(
            f"`length_penalty` {beams.length_penalty} is too far from 0 for {longest} tokens: scores must be finite numbers of 32 "
            "bits; lower `max_new_tokens` or bring it nearer",
            "length_penalty",
        )


def _max_new_tokens(length: int, given: int | None, choices: int, beams: Beams | None, limits: Limits) -> int:
    """How many tokens may follow a prompt of this length, for each choice: exactly what was asked, or all that fit."""
    rows, noun, onto = (choices, "answers", "to") if beams is None else (beams.width, "beams", "over")
    total = limits.max_total_tokens
    if rows > limits.sequences:
        name = "num_beams" if beams else "best_of"
        raise Refused(f"`{name}` must be <= {limits.sequences}, the sequences that run at once. Given: {rows} {noun}", name)
    if given is not None and length + given > total:
        raise Refused(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. Given: {length} `inputs` tokens and {given} `max_new_tokens`",
            "max_new_tokens",
        )
    _check_prompt(length, limits)
    most = total - length if given is None else given
    pages = most_pages(length, most, rows, limits.page_size)
    if pages <= limits.pages:
        return most
    shared = length // limits.page_size
    fitting = (shared + (limits.pages - shared) // rows) * limits.page_size - length + 1
    if given is None and fitting > 0:
        return fitting
    pages = most_pages(length, given or 1, rows, limits.page_size)
    raise Refused(
        f"{rows} {noun} {onto} {length} `inputs` tokens with `max_new_tokens` {given or 1} need {pages} pages of "
        f"{limits.page_size} tokens, and there are {limits.pages}: at most {max(0, fitting)} new tokens fit, or fewer {noun}",
        "max_new_tokens",
    )


def _check_prompt(length: int, limits: Limits) -> None:
    most = min(limits.max_input_tokens, limits.max_total_tokens - 1)
    if not 0 < length <= most:
        message = f"`inputs` must have less than {limits.max_input_tokens} tokens. Given: {length}"
        raise TooLong(message, str(length), most) if length else Refused(message, "inputs")


def _sampling(given: Parameters, limits: Limits) -> Sampling:
    """Checked parameters, with defaults for absent ones."""

    def or_neutral(value: float | None, neutral: float) -> float:
        return neutral if value is None else value

    temperature = or_neutral(given.temperature, 1.0) if given.sampled else 0.0
    return Sampling(
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_k=min(given.top_k or 0, limits.vocabulary),  # more than all is all; the protocol's integers are small
        top_p=or_neutral(given.top_p, 1.0),
        min_p=or_neutral(given.min_p, 0.0),
        typical_p=or_neutral(given.typical_p, 1.0),
        repetition_penalty=or_neutral(given.repetition_penalty, 1.0),
        frequency_penalty=or_neutral(given.frequency_penalty, 0.0),
        presence_penalty=or_neutral(given.presence_penalty, 0.0),
        logit_bias=tuple(given.logit_bias.items()),
        seed=_seed(given),
        final_logprobs=given.final_logprobs,
    )


def _seed(given: Parameters) -> int:
    if not given.sampled:
        return 0
    return secrets.randbits(64) if given.seed is None else given.seed


def _together(tenant: str, salt: str, adapter: str) -> str:
    """The cache key: what requests must have in common to share cached prefixes. Unambiguous. Of a salt only a digest, since shards
    keep the key as long as a page is cached under it."""
    salt = hashlib.blake2b(salt.encode(), digest_size=16).hexdigest() if salt else ""
    return f"{len(tenant)} {tenant} {len(adapter)} {adapter} {salt}" if salt or adapter else tenant
