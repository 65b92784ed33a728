"""The registry of output parsers: the forms in which families of models write reasoning and tool calls, their detection from chat
templates, and the parser of one answer.

To add a family: a line in REASONING_FORMS or FORMS, if it uses an existing form, and one in TOOL_HINTS or REASONING_HINTS.
"""

from collections.abc import Callable
from typing import Protocol

from ..config import AUTO, NONE
from . import harmony
from .calls import Calls, Schemas, mistral_id, openai_id
from .functionary import FunctionaryForm
from .gemma import GemmaForm
from .json_forms import JsonForm, MistralForm, NamingForm
from .kimi_k3 import KimiK3Form
from .lark import TOKEN
from .marked import MarkedForm
from .nested import NestedForm
from .parts import Part, Reader, Text
from .pythonic import PythonicForm
from .source import IncrementalReader, Markers, Source, Steps, before, space
from .tagged import TaggedForm
from .thoughts import ReasoningMarkers


class Form(Protocol):
    """A form of tool calls. A call that was emitted is never taken back; text that is no call is left unread."""

    @property
    def opens(self) -> tuple[str, ...]:
        """Markers behind which a call may stand."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings that must arrive as text, though they may be special tokens."""
        ...

    @property
    def bare(self) -> bool:
        """Whether an answer may also begin with a call, without a marker."""
        ...

    def read(self, source: Source, calls: Calls, marker: str) -> Steps[bool]:
        """Reads calls behind a marker; "": at the beginning of the answer. Returns whether there was one."""
        ...


THINK = ReasoningMarkers(("<think>",), ("</think>",))
REASONING_FORMS = {
    "deepseek_r1": THINK,
    "qwen3": THINK,
    "glm45": THINK,
    "kimi_k2": THINK,
    "mistral": ReasoningMarkers(("[THINK]",), ("[/THINK]",)),
    "granite": ReasoningMarkers(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "seed_oss": ReasoningMarkers(("<seed:think>",), ("</seed:think>",)),
    "cohere": ReasoningMarkers(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
    "gemma4": ReasoningMarkers(("<|channel>",), ("<channel|>",), name="thought"),
    "hunyuan_a13b": ReasoningMarkers(("<think>",), ("</think>",), answer=("<answer>", "</answer>")),
    "ernie45": ReasoningMarkers(("<think>",), ("</think>",), answer=("<response>", "</response>")),
    "hy_v3": ReasoningMarkers(("<think:opensource>",), ("</think:opensource>",)),
    "hy_v4": ReasoningMarkers(("<think:6124c78e>",), ("</think:6124c78e>",)),
    "minimax_m3": ReasoningMarkers(("<mm:think>",), ("</mm:think>",)),
    "longcat": ReasoningMarkers(("<longcat_think>",), ("</longcat_think>",)),
    "solar_open": ReasoningMarkers(
        ("<|think|>",), ("<|end|>",), frames=("<|begin|>assistant", "<|content|>", "<|end|>", "<|calls|>")
    ),
    "solar_open2": ReasoningMarkers(("<|think:start|>",), ("<|think:end|>",)),
    "hyperclovax": ReasoningMarkers(("/think",), ("<|im_end|>",), frames=("<|im_end|>", "<|im_start|>assistant")),
    "kimi_k3": ReasoningMarkers(
        *(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",)),
        frames=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
}
DEEPSEEK = MarkedForm(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)


def _dsml(token: str, calls: str) -> TaggedForm:
    """DeepSeek's markup, or one like it: a token in all tags, and the tag of all calls."""
    return TaggedForm(
        *(f'<{token}invoke name="', '">', f'<{token}parameter name="', '"', "", f"</{token}parameter>", f"</{token}invoke>"),
        lines=False,
        call=f"<{token}{calls}>",
        call_end=f"</{token}{calls}>",
        kinds=('string="true">', 'string="false">'),
        within=(token.strip(),),
    )


def _hunyuan(mark: str, function_end: str) -> TaggedForm:
    """Hunyuan's markup, in which all tags end in a mark."""
    return TaggedForm(
        *("", function_end, f"<arg_key{mark}>", f"</arg_key{mark}>", f"<arg_value{mark}>", f"</arg_value{mark}>"),
        end=f"</tool_call{mark}>",
        lines=False,
        call=f"<tool_call{mark}>",
        call_end=f"</tool_call{mark}>",
        section=f"<tool_calls{mark}>",
        section_end=f"</tool_calls{mark}>",
    )


MISTRAL_ARGS = "mistral_args"  # reads the same as "mistral"; when forced, newer models write names outside of the JSON
FORMS: dict[str, Form] = {
    "hermes": JsonForm(("<tool_call>",), "</tool_call>"),
    "llama3_json": JsonForm(("<|python_tag|>",), bare=True),
    "json": JsonForm(("<tool_call>",), "</tool_call>", bare=True),
    "granite": JsonForm(("<|tool_call|>", "<tool_call>"), "</tool_call>"),
    "jamba": JsonForm(("<tool_calls>",), "</tool_calls>"),
    "internlm": JsonForm(("<|action_start|><|plugin|>",), "<|action_end|>"),
    "phi4_mini_json": JsonForm(("functools",)),
    "mistral": MistralForm(),
    MISTRAL_ARGS: MistralForm(),
    "cohere": JsonForm(("<|START_ACTION|>",), "<|END_ACTION|>"),
    "nemotron_json": JsonForm(("<TOOLCALL>",), "</TOOLCALL>"),
    "pythonic": PythonicForm("<|python_start|>", "<|python_end|>"),
    "lfm2": PythonicForm("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": PythonicForm("<function_calls>", "</function_calls>", listed=False),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "kimi_k2": MarkedForm(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "qwen3_coder": TaggedForm("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", lines=True, python=True),
    "seed_oss": TaggedForm(
        *("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>"),
        lines=False,
        call="<seed:tool_call>",
        call_end="</seed:tool_call>",
        python=True,
    ),
    "minimax_m2": TaggedForm(
        *('<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>"),
        lines=False,
        call="<minimax:tool_call>",
        call_end="</minimax:tool_call>",
    ),
    "minimax_m3": NestedForm(),
    "deepseek_v32": _dsml("｜DSML｜", "function_calls"),
    "deepseek_v4": _dsml("｜DSML｜", "tool_calls"),
    "deepseek_v41": _dsml("｜DSML｜ ", "calls"),
    "gigachat35": _dsml("｜GCML｜", "tool_calls"),
    "hy_v3": _hunyuan(":opensource", "<tool_sep:opensource>"),
    "hy_v3_preview": _hunyuan("", "<tool_sep>"),
    "hy_v4": _hunyuan(":6124c78e", ""),
    "gigachat3": JsonForm(("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>")),
    "apertus": NamingForm("<|tools_prefix|>", "<|tools_suffix|>"),
    "gemma4": GemmaForm(),
    "functiongemma": GemmaForm("<start_function_call>", "<end_function_call>", "<escape>"),
    "glm45": TaggedForm("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", lines=False),
    "longcat": TaggedForm(
        *("", "", "<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>", "</longcat_tool_call>"),
        lines=False,
        call="<longcat_tool_call>",
        call_end="</longcat_tool_call>",
    ),
    "longcat_json": JsonForm(("<longcat_tool_call>",), "</longcat_tool_call>"),
    "minicpm5": TaggedForm(
        *('<function name="', '">', '<param name="', '">', "", "</param>", "</function>"),
        lines=False,
        call="",
        call_end="",
        within=("<function", "<param", "</param>"),
        python=True,
        cdata=True,
    ),
    "step3": TaggedForm(
        *('<steptml:invoke name="', '">', '<steptml:parameter name="', '">', "", "</steptml:parameter>", "</steptml:invoke>"),
        lines=False,
        call="<｜tool_call_begin｜>function<｜tool_sep｜>",
        call_end="<｜tool_call_end｜>",
        section="<｜tool_calls_begin｜>",
        section_end="<｜tool_calls_end｜>",
    ),
    "solar_open": MarkedForm(
        *("<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>"),
        name="<|tool_call:name|>",
    ),
    "solar_open2": TaggedForm(
        *("", "", "<|tool_arg:start|>", "<|tool_arg:value|>", "", "<|tool_arg:end|>", "<|tool_call:end|>"),
        lines=False,
        call="<|tool_call:start|>",
        call_end="<|tool_call:end|>",
    ),
    "kimi_k3": KimiK3Form(),
    "command_r": JsonForm(("Action:\n```json", "Action: ```json", "Action:```json"), "```"),
    "hyperclovax": JsonForm(("-> tool/function_call",)),
    "functionary_v31": MarkedForm("", "<function=", ">", "</function>", ""),
    "functionary_v32": FunctionaryForm(),
}
HARMONY = "harmony"  # parses both, since channels are not divided into reasoning and calls
REASONING_PARSERS = (*REASONING_FORMS, HARMONY)
TOOL_PARSERS = (*FORMS, HARMONY)

# Strings that a chat template must contain, all of them; the first line that matches counts.
TOOL_HINTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|start|>")),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("deepseek_v41", ("｜DSML｜", " calls>")),
    ("deepseek_v32", ("｜DSML｜", "function_calls")),
    ("deepseek_v4", ("｜DSML｜", "tool_calls")),
    ("hy_v3", (":opensource", "<tool_sep")),
    ("hy_v3_preview", ("<tool_sep>", "<arg_key>")),
    ("hy_v4", (":6124c78e", "<arg_key")),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("kimi_k3", ("call", "<|open|>", "<|sep|>")),
    ("solar_open", ("<|tool_call:args|>",)),
    ("solar_open2", ("<|tool_arg:value|>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("step3", ("<steptml:invoke",)),
    ("functiongemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_arg_key>",)),
    ("longcat_json", ("<longcat_tool_call>",)),
    ("command_r", ("Action:", "directly-answer")),
    ("hyperclovax", ("-> tool/function_call",)),
    ("functionary_v31", ("{start_tag}={function_name}",)),
    ("functionary_v32", (">>>all",)),
    ("gigachat35", ("｜GCML｜",)),
    ("gigachat3", ("<|function_call|>", "function descriptions")),
    ("gigachat3", ("'function call'", "<|role_sep|>")),
    ("apertus", ("<|tools_prefix|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("List of tools: [",)),
    ("olmo3", ("<function_calls>",)),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("phi4_mini_json", ("functools[",)),
    ("internlm", ("<|plugin|>",)),
    ("jamba", ("<tool_calls>",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("func_name1(params_name1=",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("Environment: ipython",)),
    ("json", ("tools",)),
)
REASONING_HINTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|start|>")),
    ("gemma4", ("<|channel>", "<channel|>")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("cohere", ("<|START_THINKING|>",)),
    ("granite", ("Here is my thought process:",)),
    ("hy_v3", (":opensource", "<think")),
    ("hy_v4", (":6124c78e", "<think")),
    ("minimax_m3", ("<mm:think>",)),
    ("kimi_k3", ("think", "<|open|>", "<|sep|>")),
    ("solar_open", ("<|think|>", "<|begin|>")),
    ("solar_open2", ("<|think:start|>",)),
    ("longcat", ("<longcat_think>",)),
    ("hyperclovax", ("assistant/think",)),
    ("deepseek_r1", ("<minimax:tool_call>", "</think>")),  # its <response> is a tool's
    ("hunyuan_a13b", ("<think>", "<answer>")),
    ("ernie45", ("</think>", "<response>")),
    ("deepseek_r1", ("<think>",)),
    ("deepseek_r1", ("</think>",)),
)


class Plain:
    """A reader for which all text is content."""

    def push(self, delta: str) -> list[Part]:
        return [Text(delta)] if delta else []

    def end(self) -> list[Part]:
        return []


def reader(
    reasoning: str | None, tools: str | None, *, prompt: str = "", continued: str = "", schemas: Schemas | None = None
) -> Reader:
    """A parser for one answer of a model with these reasoning and tool parsers; None: there is none, or it is not wanted.

    `prompt`: the prompt's text, or its end: a template may have opened the reasoning, or a message. `continued`: the text of the
    last message, if the answer continues it. `schemas`: of the request's tools, so that text that only looks like a call is not
    taken for one, and untyped arguments get their types.
    """
    calls = Calls(schemas, mistral_id if tools in ("mistral", MISTRAL_ARGS) else openai_id)
    if HARMONY in (reasoning, tools):
        return IncrementalReader(lambda source: harmony.read(source, calls, harmony.begun(prompt)))
    if reasoning is None and tools is None:
        return Plain()
    thoughts = None if reasoning is None else REASONING_FORMS[reasoning]
    form = None if tools is None else FORMS[tools]
    return IncrementalReader(_answer(thoughts, form, calls, prompt, continued))


def detect(template: str) -> tuple[str | None, str | None]:
    """The parsers (tools, reasoning) for models that come with this chat template."""
    return _detect(template, TOOL_HINTS), _detect(template, REASONING_HINTS)


def chosen(asked: tuple[str, str], detected: tuple[str | None, str | None]) -> tuple[str | None, str | None]:
    """The parsers (tools, reasoning) that the operator's flags select."""
    tools, reasoning = (
        found if name == AUTO else None if name == NONE else name for name, found in zip(asked, detected, strict=True)
    )
    return tools, reasoning


def markers(reasoning: str | None, tools: str | None) -> tuple[str, ...]:
    """Strings that the parser must see. Special tokens among them must not be left out of the text."""
    if HARMONY in (reasoning, tools):
        return harmony.MARKERS
    found = [*(REASONING_FORMS[reasoning].markers if reasoning else ()), *(FORMS[tools].markers if tools else ())]
    return tuple(dict.fromkeys(token for marker in found for token in TOKEN.findall(marker) or [marker]))


def reasoning_markers(reasoning: str, prompt: str, continued: str) -> tuple[str, str] | None:
    """The texts that open and close an answer's reasoning; the first is "" if the `prompt`, or the `continued` message, has opened
    it. None: the format has channels instead."""
    thoughts = REASONING_FORMS.get(reasoning)
    if thoughts is None:
        return None
    return "" if thoughts.begun(prompt, continued) else thoughts.opens[0], thoughts.closes[0]


def _answer(
    thoughts: ReasoningMarkers | None, form: Form | None, calls: Calls, prompt: str, continued: str
) -> Callable[[Source], Steps[None]]:
    def read(source: Source) -> Steps[None]:
        end = ""
        if thoughts is not None:
            yield from thoughts.read(source, prompt, continued)
            end = yield from thoughts.unwrap(source, continued)
        yield from _text_and_calls(source, form, calls, end, () if thoughts is None else thoughts.frames)
        while not source.ended or source.at < len(source.text):
            if source.at < len(source.text):
                yield Text(source.text[source.at :])
                source.at = len(source.text)
                source.forget()
            if not source.ended:
                yield None

    return read


def _text_and_calls(source: Source, form: Form | None, calls: Calls, end: str, frames: tuple[str, ...]) -> Steps[None]:
    """Reads content and calls. Whitespace next to a call belongs to it. end: a marker that is left out once, with the whitespace
    next to it; frames: markers that always are."""
    start = source.at
    if form is not None and form.bare and (yield from form.read(source, calls, "")):
        yield from space(source)
    else:
        source.at = start
    opens = form.opens if form is not None else ()
    while markers := (*opens, *frames, *filter(None, [end])):
        marker = yield from before(source, Markers(*markers), Text)
        if not marker:
            return
        start = source.at
        yield from space(source)
        source.at += len(marker)
        stop = source.at
        if marker == end:
            yield from space(source)
            end = ""
        elif marker in frames or (form is not None and (yield from form.read(source, calls, marker))):
            yield from space(source)
        else:
            source.at = stop
            yield Text(source.text[start:stop])


def _detect(template: str, hints: tuple[tuple[str, tuple[str, ...]], ...]) -> str | None:
    return next((name for name, strings in hints if all(string in template for string in strings)), None)
