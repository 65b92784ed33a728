"""text-generation-inference's (TGI's) own routes: its JSON becomes a `Request`, a stream of items becomes its JSON or SSE
events."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from ..config import RouterConfig
from ..grammar import json_schema, regex
from ..image_placeholders import marked
from ..record import arrival
from ..request import Alternative, Beam, Finish, Grammar, Grown, Item, Limits, Prompt, Refused, Request, Speculation, Token
from ..text import Tokenizer
from ..validation import Parameters, Validator, in_time
from .body import decode, json_response
from .errors import Problem, tgi_body
from .links import ImageLoader
from .ports import Batcher, limits_of
from .stream import Clock, Encoder, fold, headers_of, send, speculation_of, sse_frame, stream_headers_of
from .tenant import session_of, tenant_of
from .tgi_shapes import (
    GRAMMARS,
    UNSUPPORTED,
    BeamJson,
    BeamsEvent,
    BestOf,
    Details,
    DetokenizeBody,
    Event,
    GenerateAnswer,
    GenerateBody,
    GenerateParameters,
    GrammarBody,
    PrefillJson,
    SpanJson,
    SpeculationJson,
    StreamDetails,
    TokenizeBody,
    TokenJson,
)

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Asked:
    """The request that a body becomes, and how its answer is to look."""

    request: Request
    inputs: str
    full_text: bool  # the answer's text begins with the prompt
    details: bool

    @property
    def prefix(self) -> str:
        """What stands before the generated text: the prompt or nothing."""
        return self.inputs if self.full_text else ""

    @property
    def seed(self) -> int | None:
        return self.request.sampling.seed if self.request.sampling.temperature else None


class Tgi:
    """The handlers of TGI's routes, and of vLLM's /detokenize and /tokenizer_info."""

    def __init__(
        self, config: RouterConfig, tokenizer: Tokenizer, validator: Validator, image_loader: ImageLoader, batcher: Batcher
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._validator = validator
        self._image_loader = image_loader
        self._batcher = batcher

    async def root(self, http: web.Request) -> web.StreamResponse:
        """POST /: what Hugging Face's clients use. `stream` in the body says whether to stream; the default is a whole answer."""
        clock = Clock()
        body = decode(http, GenerateBody)
        asked = await self.asked(http, body, streaming=bool(body.stream), full_text=True)
        clock.valid()
        return await (self._streamed(http, asked, clock) if body.stream else self._whole(asked, clock, wrapped=True))

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """POST /generate."""
        clock = Clock()
        body = decode(http, GenerateBody)
        asked = await self.asked(http, body, streaming=False, full_text=False)
        clock.valid()
        return await self._whole(asked, clock, wrapped=False)

    async def generate_stream(self, http: web.Request) -> web.StreamResponse:
        """POST /generate_stream."""
        clock = Clock()
        body = decode(http, GenerateBody)
        asked = await self.asked(http, body, streaming=True, full_text=False)
        clock.valid()
        return await self._streamed(http, asked, clock)

    async def tokenize(self, http: web.Request) -> web.Response:
        """POST /tokenize. It needs no shard."""
        body = decode(http, TokenizeBody)
        special = body.add_special_tokens is not False
        if body.prompt is not None:
            return await self.count(body.prompt, special, bool(body.return_token_strs))
        if body.inputs is None:
            raise Refused("Object missing required field `inputs`", "inputs")
        if self._marked(body.inputs, self._batcher.limits)[1]:
            raise Refused("`inputs` with images is not supported on this route", "inputs")
        truncate = None if body.parameters is None else body.parameters.truncate
        if truncate is not None and truncate <= 0:
            raise Refused(f"`truncate` must be strictly positive. Given: {truncate}", "truncate")
        return json_response(await self.spans(body.inputs, special, truncate or 0))

    async def count(self, text: str, special: bool, strings: bool = False) -> web.Response:
        """A text's tokens in the shape of vLLM's /tokenize."""
        ids, texts = await self._validator.beside(text, lambda: self._tokens(text, special, strings))
        limits = self._batcher.limits
        return json_response(
            {"count": len(ids), "max_model_len": limits and limits.max_total_tokens, "tokens": ids, "token_strs": texts}
        )

    def _tokens(self, text: str, special: bool, strings: bool) -> tuple[list[int], list[str] | None]:
        ids = self._tokenizer.encode(text, special)
        return ids, [self._tokenizer.token_text(id) for id in ids] if strings else None

    async def detokenize(self, http: web.Request) -> web.Response:
        """POST /detokenize, which is vLLM's."""
        body = decode(http, DetokenizeBody)
        return json_response({"prompt": await asyncio.to_thread(self._text, body.tokens)})

    def _text(self, ids: Sequence[int]) -> str:
        """The text of these ids. Raises Refused for one without a token, which the tokenizer would leave out."""
        strange = next((id for id in ids if not self._tokenizer.knows(id)), None)
        if strange is not None:
            raise Refused(f"`tokens` has the id {strange}, and the tokenizer has no such token", "tokens")
        return self._tokenizer.decode(ids, False)

    async def tokenizer_info(self, http: web.Request) -> web.Response:
        """GET /tokenizer_info, which is vLLM's; lm-eval asks it where it has no tokenizer of its own."""
        return json_response(self._tokenizer.info)

    async def spans(self, text: str, special: bool, truncate: int = 0) -> msgspec.Raw:
        """A text's tokens with their byte offsets, as JSON; the last `truncate` of them, if that is not 0."""
        return await self._validator.beside(text, lambda: self._spans(text, special, truncate))

    def _spans(self, text: str, special: bool, truncate: int) -> msgspec.Raw:
        data = text.encode()
        found = self._tokenizer.offsets(text, special)[-truncate:]
        spans = (SpanJson(id, data[start:stop].decode(errors="replace"), start, stop) for id, start, stop in found)
        # one at a time: the encoder would keep the event loop waiting for all of them
        return msgspec.Raw(b"[%b]" % b",".join(map(msgspec.json.encode, spans)))

    async def info(self, http: web.Request) -> web.Response:
        """GET /info."""
        config, limits = self._config, self._batcher.limits
        return json_response(
            {
                "model_id": config.model,
                "model_sha": config.revision or None,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": config.max_concurrent_requests,
                "max_best_of": self._config.most_choices,
                "max_stop_sequences": config.max_stop_sequences,
                "max_input_tokens": limits.max_input_tokens if limits else config.max_input_tokens,
                "max_total_tokens": limits.max_total_tokens if limits else config.max_total_tokens,
                "validation_workers": 1,
                "max_client_batch_size": config.most_prompts,
                "router": "penstock",
                "version": version("penstock"),
                "sha": None,
                "docker_label": None,
            }
        )

    async def asked(self, http: web.Request, body: GenerateBody, *, streaming: bool = False, full_text: bool = False) -> Asked:
        """The request that the body asks for. Raises Refused. full_text: whether the answer begins with the prompt by default."""
        # TGI samples when `parameters` is missing, and is greedy when it is {}.
        given = body.parameters or GenerateParameters(do_sample=True)
        _refuse_unsupported(given, streaming)
        parameters = Parameters(
            choices=given.best_of,
            num_beams=given.num_beams,
            num_return_sequences=given.num_return_sequences,
            length_penalty=given.length_penalty,
            early_stopping=given.early_stopping,
            stream_beams=bool(given.stream_beams),
            speculate=given.speculate,
            temperature=given.temperature,
            repetition_penalty=given.repetition_penalty,
            frequency_penalty=given.frequency_penalty,
            presence_penalty=given.presence_penalty,
            top_k=given.top_k,
            top_p=given.top_p,
            min_p=given.min_p,
            typical_p=given.typical_p,
            logit_bias=given.logit_bias or {},
            do_sample=bool(given.do_sample),
            seed=given.seed,
            max_new_tokens=given.max_new_tokens,
            truncate=given.truncate,
            stop=given.stop or (),
            top_n_tokens=given.top_n_tokens,
            prompt_logprobs=bool(given.decoder_input_details),
            final_logprobs=True,
            grammar=_grammar(given.grammar),
            priority=given.priority,
            timeout=given.timeout,
            arrived=arrival(),
            tenant=tenant_of(http),
            adapter=given.adapter_id or "",
            session=session_of(http),
        )
        if 1 < (given.best_of or 1) <= self._config.most_choices and not parameters.sampled and (given.num_beams or 1) == 1:
            raise Refused("you must use sampling when `best_of` is > 1", "best_of")
        request = await self._request(body.inputs, parameters)
        full = full_text if given.return_full_text is None else given.return_full_text
        return Asked(request, body.inputs, full, bool(given.details or given.decoder_input_details))

    async def _request(self, inputs: str, parameters: Parameters) -> Request:
        """Where the model takes images, those in the prompt's Markdown are loaded and passed to it."""
        limits = limits_of(self._batcher)
        text, urls = self._marked(inputs, limits)
        if not urls:
            return await self._validator.request(inputs, parameters, limits)
        self._validator.check_images(len(urls), limits)
        if parameters.prompt_logprobs:
            raise Refused("`decoder_input_details` together with images is not supported", "decoder_input_details")
        async with in_time(parameters), self._image_loader.opened(urls) as images:
            return await self._validator.request(text, replace(parameters, images=images), limits)

    def _marked(self, inputs: str, limits: Limits | None) -> tuple[str, list[str]]:
        """The text with each Markdown image replaced by the model's image placeholder, and the images' URLs."""
        placer = self._validator.image_placer
        return marked(inputs, placer.text) if placer is not None and limits and limits.images else (inputs, [])

    async def _whole(self, asked: Asked, clock: Clock, *, wrapped: bool) -> web.Response:
        (answers,) = await fold([self._batcher.submit(asked.request)], asked.request.choices)
        best = answers[0] if asked.request.beams else max(answers, key=lambda answer: answer.mean_logprob)
        content = GenerateAnswer(asked.prefix + best.finish.text)
        if asked.details:
            prefill = self._prefill(asked.request, best.prompt)  # the same for all
            content.details = Details(**_details(asked, best.tokens, best.finish, prefill))
            content.details.speculation = _speculation(speculation_of(answer.finish for answer in answers))
            if len(answers) > 1:
                others = [answer for answer in answers if answer is not best]
                content.details.best_of_sequences = [_other(asked, one.tokens, one.finish, prefill) for one in others]
        headers = headers_of(clock, [asked.request], [best]) | _characters(asked)
        return json_response([content] if wrapped else content, headers)

    async def _streamed(self, http: web.Request, asked: Asked, clock: Clock) -> web.StreamResponse:
        headers = stream_headers_of(clock, [asked.request]) | _characters(asked)
        events = BeamEvents(asked) if asked.request.beams else Events(asked)
        return await send(http, self._batcher, [asked.request], events, headers)

    def _prefill(self, request: Request, prompt: Prompt) -> list[PrefillJson]:
        scored = zip(request.prompt, prompt.logprobs, strict=True) if request.prompt_logprobs else ()
        return [PrefillJson(id, self._tokenizer.token_text(id), logprob) for id, logprob in scored]


class Events(Encoder):
    """The SSE events of one stream, numbered: one for each token. The last token's event also carries the finish."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._index = 0

    def of(self, stream: int, items: Sequence[Item]) -> bytes:
        """See `Encoder`."""
        frames = []
        for item, after in zip(items, [*items[1:], None], strict=True):
            if isinstance(item, Token):
                frames.append(self._frame(item, after if isinstance(after, Finish) else None))
        return b"".join(frames)

    def failed(self, problem: Problem) -> bytes:
        """The error event that ends a stream that failed."""
        return sse_frame(tgi_body(problem))

    def _frame(self, token: Token, finish: Finish | None, others: Sequence[BestOf] = ()) -> bytes:
        self._index += 1
        event = Event(self._index, _token(token))
        if self._asked.request.top_n:
            event.top_tokens = _top(token)
        if finish is not None:
            event.generated_text = self._asked.prefix + finish.text
            event.details = _stream_details(self._asked, finish, others)
        return sse_frame(encode(event))


class BeamEvents(Events):
    """The events of a beam search: the best answer's tokens, and, if asked for, the live beams of each step.

    The last token's event waits until the search has ended: it also carries the other answers.
    """

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._step = 0
        self._tokens: list[list[Token]] = [[] for _ in range(asked.request.choices)]  # of each answer but the best
        self._finishes: dict[int, Finish] = {}
        self._last: Token | None = None  # of the best answer, not sent yet

    def of(self, stream: int, items: Sequence[Item]) -> bytes:
        """See `Encoder`."""
        frames = []
        for item in items:
            match item:
                case Token(choice=0):
                    frames += self._untold()
                    self._last = item
                case Token():
                    self._tokens[item.choice].append(item)
                case Grown():
                    frames.append(self._grown(item))
                case Finish():
                    self._finishes[item.choice] = item
        if 0 not in self._finishes:
            frames += self._untold()
        return b"".join(frames)

    def end(self) -> bytes:
        """The last token's event."""
        assert self._last is not None
        finish = self._finishes.pop(0)
        others = [_other(self._asked, self._tokens[choice], own) for choice, own in sorted(self._finishes.items())]
        return self._frame(self._last, finish, others)

    def _untold(self) -> list[bytes]:
        token, self._last = self._last, None
        return [] if token is None else [self._frame(token, None)]

    def _grown(self, grown: Grown) -> bytes:
        self._step += 1
        event = BeamsEvent(self._step, [_beam(beam) for beam in grown.live], [_beam(beam) for beam in grown.complete])
        return b"event: beams\n" + sse_frame(encode(event))


def _other(asked: Asked, tokens: list[Token], finish: Finish, prefill: Sequence[PrefillJson] = ()) -> BestOf:
    return BestOf(generated_text=asked.prefix + finish.text, **_details(asked, tokens, finish, prefill))


def _details(asked: Asked, tokens: list[Token], finish: Finish, prefill: Sequence[PrefillJson]) -> dict[str, Any]:
    """The details that the best answer and the others have in common."""
    return {
        "finish_reason": finish.reason,
        "generated_tokens": finish.generated_tokens,
        "seed": asked.seed,
        "prefill": prefill,
        "tokens": [_token(token) for token in tokens],
        "top_tokens": [_top(token) for token in tokens] if asked.request.top_n else msgspec.UNSET,
        "score": _score(finish),
    }


def _stream_details(asked: Asked, finish: Finish, others: Sequence[BestOf]) -> StreamDetails | None:
    if not asked.details:
        return None
    return StreamDetails(
        finish.reason,
        finish.generated_tokens,
        asked.seed,
        len(asked.request.prompt),
        best_of_sequences=list(others) or msgspec.UNSET,
        score=_score(finish),
        speculation=_speculation(finish.speculation),
    )


def _characters(asked: Asked) -> dict[str, str]:
    return {"x-compute-characters": str(len(asked.inputs))}


def _token(token: Token | Alternative) -> TokenJson:
    return TokenJson(token.id, token.text, token.logprob, token.special)


def _score(finish: Finish) -> float | msgspec.UnsetType:
    return msgspec.UNSET if finish.score is None else finish.score


def _speculation(speculation: Speculation | None) -> SpeculationJson | msgspec.UnsetType:
    return msgspec.UNSET if speculation is None else SpeculationJson(speculation.drafted, speculation.accepted, speculation.steps)


def _beam(beam: Beam) -> BeamJson:
    return BeamJson(beam.parent, beam.id, beam.text, beam.score)


def _top(token: Token) -> list[TokenJson]:
    return [_token(alternative) for alternative in token.top]


def _refuse_unsupported(given: GenerateParameters, streaming: bool) -> None:
    if streaming and given.best_of not in (None, 1):
        raise Refused("`best_of` != 1 is not supported when streaming tokens", "best_of")
    if given.stream_beams and not streaming:
        raise Refused("`stream_beams` needs a stream: send the request to /generate_stream, or leave it out", "stream_beams")
    if streaming and given.decoder_input_details:
        raise Refused("`decoder_input_details` == true is not supported when streaming tokens", "decoder_input_details")
    for name, neutral in UNSUPPORTED.items():
        if getattr(given, name) not in (None, neutral):
            raise Refused(f"`{name}` is not supported", name)


def _grammar(given: GrammarBody | None) -> Grammar | None:
    """TGI's grammar types come down to two kinds: a schema, which may also be a JSON string or stand beside its name, and a
    regex."""
    if given is None:
        return None
    value = given.value
    if given.type not in GRAMMARS:
        raise Refused(f"`grammar.type` must be one of {', '.join(GRAMMARS)}. Given: {given.type}", "parameters.grammar.type")
    if given.type == "regex":
        if not isinstance(value, str):
            raise Refused("grammar is not valid: the `value` of type regex must be a string", "grammar")
        return regex(value)
    if given.type == "json_schema":
        if not isinstance(value, dict) or "schema" not in value:
            raise Refused('grammar is not valid: the `value` of type json_schema must be {"name": ..., "schema": ...}', "grammar")
        value = value["schema"]
    elif isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(f"grammar is not valid: the `value` of type {given.type} is no JSON: {error}", "grammar") from error
    if not isinstance(value, dict):
        raise Refused(f"grammar is not valid: the schema of type {given.type} must be an object", "grammar")
    return json_schema(value)
