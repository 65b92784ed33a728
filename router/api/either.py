"""Routes that take bodies of TGI's or of OpenAI's form: SageMaker's, Vertex AI's, and the tokenizing ones.

They only tell which form a body has. What it asks for and how it is answered is done by `tgi` and `openai`.
"""

import msgspec
from aiohttp import web

from ..config import RouterConfig
from ..request import Refused, Request
from .body import decode, json_response
from .openai import OpenAI
from .openai_bodies import UNSUPPORTED_IN_CHATS, ChatBody, beam_width_of, naming, parameters, refuse_unsupported
from .openai_chats import Chats
from .ports import Batcher, limits_of
from .stream import Clock, fold, headers_of
from .tgi import Tgi
from .tgi_shapes import GenerateBody

NULL = msgspec.Raw(b"null")


class Kind(msgspec.Struct):
    """The fields by which a body's form is recognized. An explicit null is the same as a missing field."""

    inputs: msgspec.Raw = NULL
    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL


class VertexBody(msgspec.Struct):
    """A Vertex AI body: each instance is a body of /generate or of a chat."""

    instances: list[msgspec.Raw]


class TokenizeChatBody(ChatBody, kw_only=True):
    """Body of POST /tokenize with a chat, as vLLM has it."""

    return_token_strs: bool | None = None


class Either:
    """The handlers of these routes."""

    def __init__(self, config: RouterConfig, batcher: Batcher, chats: Chats, tgi: Tgi, openai: OpenAI) -> None:
        self._config = config
        self._batcher = batcher
        self._chats = chats
        self._tgi = tgi
        self._openai = openai

    async def invocations(self, http: web.Request) -> web.StreamResponse:
        """POST /invocations: as /, a chat or a completion, depending on the body."""
        kind = decode(http, Kind)  # the body stays readable for the handler
        if kind.inputs != NULL:
            return await self._tgi.root(http)
        if kind.messages != NULL:
            return await self._openai.chat_completions(http)
        if kind.prompt != NULL:
            return await self._openai.completions(http)
        raise Refused("Object missing required field `inputs`, `messages` or `prompt`", "inputs")

    async def vertex(self, http: web.Request) -> web.Response:
        """POST /vertex: several prompts and chats; returns the text of each answer."""
        clock = Clock()
        body = decode(http, VertexBody)
        most = self._config.max_concurrent_requests
        if not 0 < len(body.instances) <= most:
            raise Refused(f"`instances` must have from 1 to {most} entries. Given: {len(body.instances)}", "instances")
        asked = []
        for index, data in enumerate(body.instances):
            try:
                asked.append(await self._instance(http, data))
            except msgspec.ValidationError as error:
                raise Refused(f"instances[{index}]: {error}", "instances") from error
            except Refused as refused:  # keeps its own kind, and so its status
                refused.args, refused.parameter = (f"instances[{index}]: {refused}",), "instances"
                raise
        clock.valid()
        folded = await fold([self._batcher.submit(request) for request, _ in asked])
        answers = [answer for [answer] in folded]
        texts = [prefix + answer.finish.text for (_, prefix), answer in zip(asked, answers, strict=True)]
        return json_response({"predictions": texts}, headers_of(clock, [request for request, _ in asked], answers))

    async def chat_tokenize(self, http: web.Request) -> web.Response:
        """POST /chat_tokenize: the prompt that a chat becomes, and its tokens."""
        body = decode(http, ChatBody)
        text = await self._chats.text(body)
        spans = await self._tgi.spans(text, bool(body.add_special_tokens))
        return json_response({"tokenize_response": spans, "templated_text": text})

    async def tokenize(self, http: web.Request) -> web.Response:
        """POST /tokenize: TGI's, or vLLM's, which may be of a chat."""
        kind = decode(http, Kind)
        if kind.messages == NULL:
            return await self._tgi.tokenize(http)
        body = decode(http, TokenizeChatBody)
        text = await self._chats.text(body)
        return await self._tgi.count(text, bool(body.add_special_tokens), bool(body.return_token_strs))

    async def _instance(self, http: web.Request, data: msgspec.Raw) -> tuple[Request, str]:
        """The request of one instance, and what stands before the answer's text."""
        if msgspec.json.decode(data, type=Kind).messages != NULL:
            return await self._chat_instance(http, msgspec.json.decode(data, type=ChatBody)), ""
        body = msgspec.json.decode(data, type=GenerateBody)
        given = body.parameters
        if body.stream or (given and (given.best_of not in (None, 1) or given.num_return_sequences not in (None, 1))):
            raise Refused("neither `stream` nor `best_of` nor `num_return_sequences` is allowed for this endpoint", "instances")
        asked = await self._tgi.asked(http, body)
        return asked.request, asked.prefix

    async def _chat_instance(self, http: web.Request, body: ChatBody) -> Request:
        refuse_unsupported(body, UNSUPPORTED_IN_CHATS)
        _refuse_more_than_text(body)
        width, limits = beam_width_of(body), limits_of(self._batcher)
        asked = parameters(http, body, limits, width=width, max_new_tokens=body.most)
        with naming(**body.names, **width.names):
            request, _ = await self._chats.request(body, asked, limits)
        return request


def _refuse_more_than_text(body: ChatBody) -> None:
    one, none = (None, 1), (None, False)
    neutral: dict[str, tuple[object, ...]] = {
        "n": one,
        "best_of": one,
        "stream": none,
        "logprobs": none,
        "prompt_logprobs": (None,),
    }
    for name, values in neutral.items():
        if getattr(body, name) not in values:
            raise Refused(f"`{name}` is not allowed for this endpoint, which answers with one text", name)
