"""Chat templates of model families: rendered like transformers, messages that a template drops, limits of the sandbox."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.router.api.openai_messages import messages_of
from penstock.router.request import Refused
from penstock.router.template import Chat, ChatTemplate, choose

# chatml, llama3, gemma, phi, zephyr: simple ones. deepseek: starts the reasoning. gemma3: content as text or in parts.
# llama31: tojson with an indent, strftime_now, variables with defaults. qwen25: adjacent messages, tool results in one turn.
# qwen3: namespaces, reversed messages, reasoning. mistral: checks the order of roles, nine-letter call ids, selectattr.
# mixed: break and continue, generation tags, macros, filters, white space around blocks.
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).with_name("templates").glob("*.jinja")}
CHATML, LLAMA3, GEMMA3, QWEN25 = (TEMPLATES[name] for name in ("chatml", "llama3", "gemma3", "qwen25"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

SYSTEM = {"role": "system", "content": " Be brief. "}
QUESTION = {"role": "user", "content": "What <|is> e?"}
ANSWER = {"role": "assistant", "content": " 2.718\n", "reasoning_content": "Euler"}
ANSWER_WITH_THINK_TAGS = {"role": "assistant", "content": "<think>\nHm\n</think>\n\nYes"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "sun", "arguments": {"city": "Zürich <"}}}],
}
TOOL_RESULT = {"role": "tool", "content": "21 °C", "tool_call_id": "abcdefghi", "name": "sun"}
CHATS: list[list[dict[str, Any]]] = [
    [QUESTION],
    [SYSTEM, QUESTION],
    [QUESTION, ANSWER, QUESTION],
    [SYSTEM, QUESTION, ANSWER_WITH_THINK_TAGS, QUESTION, ANSWER_WITH_THINK_TAGS],
    [QUESTION, CALL, TOOL_RESULT, ANSWER, QUESTION],
    [QUESTION, CALL, TOOL_RESULT, TOOL_RESULT],
    [QUESTION, QUESTION],
    [{"role": "nobody", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": " b"}]}],
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "sun",
            "description": "Is it <sunny>?",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
BEGUN_ANSWERS = ["Well,", "Well, ", " Well,\n", "<", "e", "|", "assistant", "\n\nSo:\n", "What <|is> e?"]


UNKNOWN_ROLE = {"role": "nobody", "content": "x"}


@pytest.mark.parametrize(
    ("name", "messages", "dropped"),
    [
        ("chatml", [UNKNOWN_ROLE, QUESTION], ""),  # it writes every role
        ("llama3", [QUESTION, UNKNOWN_ROLE, UNKNOWN_ROLE], ""),
        ("llama31", [QUESTION, CALL, TOOL_RESULT], ""),
        ("mistral", [QUESTION, CALL, TOOL_RESULT], ""),
        ("qwen25", [SYSTEM, QUESTION, CALL, TOOL_RESULT, TOOL_RESULT, ANSWER, SYSTEM], ""),
        ("qwen25", [QUESTION, UNKNOWN_ROLE], 'messages[1].role` "nobody"'),
        ("qwen25", [QUESTION, {"role": "nobody", "content": None}], 'messages[1].role` "nobody"'),
        ("qwen25", [QUESTION, {"role": "nobody", "content": []}], 'messages[1].role` "nobody"'),
        ("qwen25", [QUESTION, {"role": "nobody", "content": [{"type": "text", "text": "x"}]}], 'messages[1].role` "nobody"'),
        ("qwen25", [QUESTION, CALL, {**TOOL_RESULT, "role": "function"}, TOOL_RESULT], 'messages[2].role` "function"'),
        ("zephyr", [QUESTION, UNKNOWN_ROLE | {"role": "x" * 1000}], f'messages[1].role` "{"x" * 64}"'),
        ("zephyr", [QUESTION, CALL, TOOL_RESULT, QUESTION], 'messages[2].role` "tool"'),
    ],
)
def test_message_whose_role_the_template_drops_is_refused(name: str, messages: list[dict[str, Any]], dropped: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    chat = Chat(messages=messages)
    text = template.render(chat)
    if not dropped:
        template.check_roles(chat)
        assert "x" in text or UNKNOWN_ROLE not in messages
        return
    with pytest.raises(Refused, match=re.escape(dropped)) as refused:
        template.check_roles(chat)
    assert str(refused.value).endswith("use one of system, user, assistant, or one that the template knows")
    assert refused.value.parameter == "messages"


def test_role_that_the_template_writes_in_its_own_form_is_accepted() -> None:
    template = ChatTemplate("{% for m in messages %}{% if m.role == 'critic' %}{{ m.content | upper }}{% endif %}{% endfor %}", {})
    template.check_roles(Chat(messages=[QUESTION, {"role": "critic", "content": "hm"}]))
    with pytest.raises(Refused, match=re.escape('`messages[0].role` "Critic"')):
        template.check_roles(Chat(messages=[{"role": "Critic", "content": "hm"}, QUESTION]))


DROPS_LATER_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
LATER_SYSTEM = {"role": "system", "content": "so"}
REMINDER = "<system-reminder>\nso\n</system-reminder>"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([LATER_SYSTEM, QUESTION], "[system]so[user]What <|is> e?"),
        ([QUESTION, LATER_SYSTEM], f"[user]What <|is> e?\n\n{REMINDER}"),
        ([QUESTION, LATER_SYSTEM, LATER_SYSTEM], f"[user]What <|is> e?\n\n{REMINDER}\n\n{REMINDER}"),
        ([LATER_SYSTEM, LATER_SYSTEM, QUESTION], "[system]so\n\nso[user]What <|is> e?"),
        ([TOOL_RESULT, {"role": "system", "content": [{"type": "text", "text": "so"}]}], f"[tool]21 °C\n\n{REMINDER}"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}, LATER_SYSTEM], f"[user]a\n\n{REMINDER}"),
        ([{"role": "user", "content": []}, LATER_SYSTEM], f"[user]{REMINDER}"),
        ([QUESTION, {"role": "assistant", "content": "2"}, LATER_SYSTEM], f"[user]What <|is> e?[assistant]2[user]{REMINDER}"),
    ],
)
def test_later_system_message_is_folded_into_the_message_before(messages: list[dict[str, Any]], expected: str) -> None:
    assert ChatTemplate(DROPS_LATER_SYSTEM, {}).render(Chat(messages=messages, folds_system=True)) == expected


@pytest.mark.parametrize(
    ("source", "folds"),
    [
        (TEMPLATES["chatml"], False),
        (TEMPLATES["qwen3"], False),
        (DROPS_LATER_SYSTEM, True),
        (TEMPLATES["mistral"], True),  # the template refuses it
        (TEMPLATES["deepseek"], True),  # the template writes it first, in place of the first
        (DROPS_LATER_SYSTEM.replace("m.content", "m.content[0].text"), True),
    ],
)
def test_later_system_message_is_folded_only_if_the_template_cannot_write_it(source: str, folds: bool) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert (REMINDER in ChatTemplate(source, SPECIAL).render(Chat(messages=[*parts, LATER_SYSTEM], folds_system=True))) == folds


def rendered_by_transformers(source: str, chat: Chat) -> str:
    """The reference; raises whatever transformers raises."""
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    [text], _ = reference.render_jinja_template(
        [chat.messages],
        tools=chat.tools,
        documents=chat.documents,
        chat_template=source,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **SPECIAL,
        **chat.variables,
    )
    return str(text)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_of_all_families_render_like_transformers(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    equal = 0  # both refuse the rest
    for messages in CHATS:
        for tools in (None, TOOLS):
            for variables in ({}, {"enable_thinking": False}, {"date_string": "today", "custom_tools": None}):
                for add_prompt in (True, False):
                    chat = Chat(messages=messages, tools=tools, variables=variables, add_generation_prompt=add_prompt)
                    if isinstance(messages[0]["content"], list) and not template.takes_parts:
                        continue  # transformers would let the template fail, or write the list
                    try:
                        expected = rendered_by_transformers(TEMPLATES[name], chat)
                    except Exception:
                        with pytest.raises(Refused):
                            template.render(chat)
                        continue
                    assert template.render(chat) == expected
                    equal += 1
    assert equal >= 20


def continued(source: str, content: str | None) -> str:
    messages = [QUESTION, {"role": "assistant", "content": content}]
    return ChatTemplate(source, SPECIAL).render(Chat(messages=messages, continue_final_message=True))


@pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA3, QWEN25])
@pytest.mark.parametrize("content", BEGUN_ANSWERS)
def test_continued_message_ends_where_transformers_ends_it(source: str, content: str) -> None:
    messages = [QUESTION, {"role": "assistant", "content": content}]
    chat = Chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert continued(source, content) == rendered_by_transformers(source, chat)


LOOPS_OVER_PARTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
LOOPS_OVER_TOOL_PARTS = (  # loops over parts of tool results only
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'tool' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LOOPS_AND_ASKS_ABOUT_TOOLS = (
    LOOPS_OVER_PARTS + "{% if tools is iterable and tools is not string %}{% endif %}"
)  # asks for a type, but not the content's
NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('a system prompt is needed') }}{% endif %}" + LOOPS_OVER_PARTS
)


@pytest.mark.parametrize("source", [LOOPS_OVER_PARTS, LOOPS_AND_ASKS_ABOUT_TOOLS, NEEDS_SYSTEM])
def test_text_content_becomes_parts_if_the_template_reads_only_parts(source: str) -> None:
    assert ChatTemplate(source, SPECIAL).render(Chat(messages=[SYSTEM, QUESTION])) == "[system] Be brief. [user]What <|is> e?"


def test_text_content_stays_text_if_only_some_roles_contents_are_looped_over() -> None:
    chat = Chat(messages=[SYSTEM, QUESTION, {"role": "tool", "content": [{"type": "text", "text": "21"}]}])
    text = ChatTemplate(LOOPS_OVER_TOOL_PARTS, SPECIAL).render(chat)
    assert text == rendered_by_transformers(LOOPS_OVER_TOOL_PARTS, chat) == "[system] Be brief. [user]What <|is> e?[tool]21"


LOOPS_OVER_A_VARIABLE = (
    "{% for m in messages %}{% set found = m['content'] %}{% for p in found %}{{ p['text'] }}{% endfor %}{% endfor %}"
)
INDEXES_FIRST_PART = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"


@pytest.mark.parametrize("source", [LOOPS_OVER_A_VARIABLE, INDEXES_FIRST_PART])
def test_template_that_reads_parts_by_variable_or_index_gets_parts(source: str) -> None:
    for content in ("a b", [{"type": "text", "text": "a b"}]):
        assert ChatTemplate(source, SPECIAL).render(Chat(messages=[{"role": "user", "content": content}])) == "a b"


# Like DeepSeek's: calls are written if there is no content, or arguments are concatenated with other text.
CALLS_WITHOUT_CONTENT = (
    "{% for m in messages %}[{{ m.role }}]{% if m['content'] is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + ' ' + c['function']['arguments'] }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
CONCATENATED_ARGUMENTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}{% endfor %}"
)
PRINTED_ARGUMENTS = CONCATENATED_ARGUMENTS.replace(
    "c.function.name + ' ' + c.function.arguments", "c.function.name }} {{ c.function.arguments"
)
TOJSON_ARGUMENTS = CONCATENATED_ARGUMENTS.replace(
    "c.function.name + ' ' + c.function.arguments", "c.function.name }} {{ c.function.arguments | tojson"
)
# Like DeepSeek R1 0528's: it checks for messages without content, but fails for them.
FAILS_WITHOUT_CONTENT = "{% for m in messages %}{{ '' if '</think>' in m.content }}{% endfor %}" + CONCATENATED_ARGUMENTS.replace(
    "{{ m.content }}", "{% if m.content is not none %}{{ m.content }}{% endif %}"
)


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize(
    "source", [CALLS_WITHOUT_CONTENT, CONCATENATED_ARGUMENTS, PRINTED_ARGUMENTS, TOJSON_ARGUMENTS, FAILS_WITHOUT_CONTENT]
)
def test_tool_calls_are_given_as_text_or_object_as_each_template_needs(source: str, content: str | None) -> None:
    """OpenAI's clients send no content, or empty content, and arguments as JSON text."""
    given = {**CALL, "content": content, "tool_calls": [{"function": {"name": "sun", "arguments": '{"city": "Zürich"}'}}]}
    chat = Chat(messages=messages_of([QUESTION, given, TOOL_RESULT]))
    expected = '[user]What <|is> e?[assistant]sun {"city": "Zürich"}[tool]21 °C'
    assert ChatTemplate(source, SPECIAL).render(chat) == expected


def test_null_content_is_not_rendered_as_none() -> None:
    chat = Chat(
        messages=messages_of([{"role": "system", "content": None}, {"role": "user"}, {"role": "assistant", "content": None}])
    )
    for source in TEMPLATES.values():
        with suppress(Refused):
            assert "None" not in ChatTemplate(source, SPECIAL).render(chat)


def test_message_with_tool_calls_cannot_be_continued() -> None:
    for content in ("", None):
        chat = Chat(messages=[QUESTION, {**CALL, "content": content}], continue_final_message=True)
        with pytest.raises(Refused, match="the last message has"):
            ChatTemplate(CHATML, SPECIAL).render(chat)


def test_message_in_parts_is_continued_after_its_last_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b c "}]
    chat = Chat(messages=[QUESTION, {"role": "assistant", "content": parts}], continue_final_message=True)
    assert ChatTemplate(GEMMA3, SPECIAL).render(chat).endswith("assistant\nab c")
    assert ChatTemplate(CHATML, SPECIAL).render(chat).endswith("assistant\nab c ")
    assert parts[1]["text"] == "b c "


@pytest.mark.parametrize("source", [CHATML, LLAMA3])
def test_continuing_an_empty_message_is_a_generation_prompt(source: str) -> None:
    expected = ChatTemplate(source, SPECIAL).render(Chat(messages=[QUESTION]))
    assert continued(source, "") == expected
    assert continued(source, " ") in (expected, expected + " ")  # the template may only keep or strip the space


def test_message_without_text_or_changed_by_the_template_cannot_be_continued() -> None:
    with pytest.raises(Refused, match="no text that could be continued"):
        continued(CHATML, None)
    for source in ("{{ messages[0].content }}", "{{ messages[-1].content | replace('ell', 'ill') }}"):
        with pytest.raises(Refused, match="the chat template changes the last message"):
            continued(source, "Well,")


UPPERCASE_PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text | upper }};{% endfor %}{% endfor %}"


def test_content_is_converted_to_parts_or_text_as_the_template_reads_it() -> None:
    text = [{"role": "user", "content": "ab"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert [ChatTemplate(UPPERCASE_PARTS, {}).render(Chat(messages=messages)) for messages in (text, parts)] == ["AB;", "A;B;"]
    text_template = ChatTemplate("{{ messages[0].content | upper }}", {})
    assert [text_template.render(Chat(messages=messages)) for messages in (text, parts)] == ["AB", "AB"]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(Refused, match=r"'image_url'.*only text"):
        text_template.render(Chat(messages=image))


def test_chat_template_kwargs_do_not_replace_messages() -> None:
    template = ChatTemplate("{{ messages[0].content }} {{ bos_token }} {{ enable_thinking }} {{ documents[0].text }}", SPECIAL)
    chat = Chat(
        messages=[QUESTION],
        documents=[{"title": "t", "text": "doc"}],
        variables={"enable_thinking": False, "bos_token": "<b>", "messages": []},
    )
    assert template.render(chat) == "What <|is> e? <b> False doc"


def test_named_template_is_chosen_by_tools_then_documents() -> None:
    named = {"default": "d", "tool_use": "t", "rag": "r"}
    documents = [{"text": ""}]
    assert choose(named, Chat(messages=[QUESTION])) == "d"
    assert choose(named, Chat(messages=[QUESTION], tools=[])) == "d"
    assert choose(named, Chat(messages=[QUESTION], tools=TOOLS)) == "t"
    assert choose(named, Chat(messages=[QUESTION], documents=documents)) == "r"
    assert choose(named, Chat(messages=[QUESTION], tools=TOOLS, documents=documents)) == "t"
    assert choose({"default": "d"}, Chat(messages=[QUESTION], tools=TOOLS, documents=documents)) == "d"
    assert choose({"other": "o"}, Chat(messages=[QUESTION])) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "the chat template is no template"),
        ("{{ messages | nothing }}", "the chat template is no template"),
        ("{{" + "(" * 5000, "the chat template is no template"),
        ("{% break %}", "the chat template is no template: 'break' outside loop"),
        ("{% for m in messages %}" * 25 + "{% endfor %}" * 25, "the chat template is no template: too many"),
        ("{{ " + "1" * 5000 + " }}", "the chat template is no template: exceeds the limit"),
        ("{{ cycler() }}", "refuses the messages: at least one item"),
        ("{{ messages[0].content|truncate(1) }}", "refuses the messages: expected length"),  # an AssertionError of Jinja's
        ("{{ messages[0].content.rjust(2**62) }}", "refuses the messages: MemoryError"),
        (r"{{ '\ud83d' }}", "refuses the messages: .* surrogates not allowed"),
        ("x" * 600_000, "has 600000 characters"),
        ("{{ raise_exception('no, <b>') }}", "refuses the messages: no, <b>"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "must not set"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "must not set"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        (
            "{% for m in messages %}{% for i in range(90000) %}{{ m.content * 200 }}{% endfor %}{% endfor %}",
            "writes more than 16000000",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_template_that_exceeds_limits_or_the_sandbox_is_refused(source: str, message: str) -> None:
    with pytest.raises(Refused, match=re.compile(message, re.IGNORECASE)):
        ChatTemplate(source, {}).render(Chat(messages=[QUESTION]))


def test_constant_expressions_are_not_evaluated_at_compile_time() -> None:
    ChatTemplate("{{ 'a' * 10 ** 12 }}{{ 10 ** 10 ** 10 }}", {})
