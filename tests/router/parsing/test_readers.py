"""Readers of generated text: which tool calls and text they find, however the text is split into deltas."""

import json
import random
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from penstock.router.parsing import Arguments, Call, Part, Reasoning, Text, reader
from penstock.router.parsing.readers import FORMS, REASONING_PARSERS, TOOL_PARSERS, markers
from penstock.tests.router.parsing.deltas import PARIS, SCHEMAS, calls, parts_of, random_deltas

LFM2_PARTS = [*calls(("weather", PARIS), ("now", "{}")), Text("Soon.")]
# parser, text, parts
CASES: list[tuple[str, str, list[Part]]] = [
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', calls(("weather", PARIS))),
    (
        "hermes",
        f'Let me look.\n\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>\n',
        [Text("Let me look."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1, {"b": "}\\" </tool_call>"}]}, "name": "now"}</tool_call> Done.',
        [*calls(("now", '{"a": [1, {"b": "}\\" </tool_call>"}]}')), Text("Done.")],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>', calls(("now", '{"a": "é"}'))),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', calls(("now", "{}"))),
    ("hermes", '<tool_call>{"name": "new", "arguments": null}</tool_call>', calls(("new", "{}"))),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}', calls(("now", '{"a": "x\\ny"}'))),
    (
        "granite",
        f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        calls(("weather", PARIS), ("now", "{}")),
    ),
    ("jamba", f'<tool_calls>[\n {{"name": "weather", "arguments": {PARIS}}}\n]</tool_calls>', calls(("weather", PARIS))),
    (
        "internlm",
        f'Ok.<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {PARIS}}}<|action_end|>\n',
        [Text("Ok."), *calls(("weather", PARIS))],
    ),
    ("phi4_mini_json", f'functools[{{"name": "weather", "arguments": {PARIS}}}]', calls(("weather", PARIS))),
    ("llama3_json", f'{{"name": "weather", "parameters": {PARIS}}}', calls(("weather", PARIS))),
    (
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {PARIS}}}; {{"name": "now", "parameters": {{}}}}',
        calls(("weather", PARIS), ("now", "{}")),
    ),
    (
        "json",
        f'[{{"name": "weather", "arguments": {PARIS}}},\n{{"name": "now", "arguments": {{}}}}]',
        calls(("weather", PARIS), ("now", "{}")),
    ),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        calls(("weather", PARIS), ("now", "{}")),
    ),
    ("mistral", f"Well [TOOL_CALLS]weather{PARIS}[TOOL_CALLS]now{{}}", [Text("Well"), *calls(("weather", PARIS), ("now", "{}"))]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]aB3456789[ARGS]{PARIS}", calls(("weather", PARIS))),
    (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls(("weather", PARIS), ("now", "{}")),
    ),
    (
        "deepseek_v3",
        f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Text("Hm."), *calls(("weather", PARIS))],
    ),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{PARIS}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        calls(("weather", PARIS), ("now", "{}")),
    ),
    (
        "qwen3_coder",
        'I see.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\n"York"\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        "<parameter=any>\n[1, 2]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [Text("I see."), *calls(("weather", '{"city": "New\\n\\"York\\"", "days": 3, "any": [1, 2]}'), ("now", "{}"))],
    ),
    ("qwen3_coder", "<function=weather><parameter=city>12</parameter></function>", calls(("weather", '{"city": "12"}'))),
    ("qwen3_coder", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', calls(("now", "{}"))),
    (
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris </arg_value>\n<arg_key>days</arg_key>\n<arg_value>3"
        "</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        calls(("weather", '{"city": "Paris ", "days": 3}'), ("now", "{}")),
    ),
    (
        "pythonic",
        "[weather(city='it\\'s \"Paris\", (now)', days=-3, tags=[1, ('a', None)], any={'k': True}), now()]",
        calls(
            ("weather", '{"city": "it\'s \\"Paris\\", (now)", "days": -3, "tags": [1, ["a", null]], "any": {"k": true}}'),
            ("now", "{}"),
        ),
    ),
    (
        "pythonic",
        '<|python_start|>[weather(city="é\\n", any=true)]<|python_end|>',
        calls(("weather", '{"city": "é\\n", "any": true}')),
    ),
    ("pythonic", '[weather(city="a\r\nb")]', calls(("weather", '{"city": "a\\r\\nb"}'))),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm, weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>",
        [Reasoning("Hm, weather."), Text("I look."), *calls(("weather", PARIS))],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm <|start|>assistant<|channel|>final<|message|>Yes \n<|return|>",
        [Reasoning("Hm "), Text("Yes \n")],
    ),
    ("harmony", "just text", [Text("just text")]),
    (
        "cohere",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {PARIS}}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        calls(("weather", PARIS), ("now", "{}")),
    ),
    (
        "nemotron_json",
        f'So.\n\n<TOOLCALL>[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>',
        [Text("So."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    ("lfm2", "<|tool_call_start|>[weather(city='Paris', days=3), now()]<|tool_call_end|>Soon.", LFM2_PARTS),
    ("lfm2", "[weather(city='Paris', days=3), now()] Soon.", LFM2_PARTS),
    (
        "lfm2",
        "<|tool_call_start|>[weather(city='New\nYork', tags=['a',\n'b'])]",
        calls(("weather", '{"city": "New\\nYork", "tags": ["a", "b"]}')),
    ),
    (
        "olmo3",
        'So:\n<function_calls>weather(city="Paris", days=3)\nnow()\n\nweather(any=true, tags=["a"])</function_calls>',
        [Text("So:"), *calls(("weather", PARIS), ("now", "{}"), ("weather", '{"any": true, "tags": ["a"]}'))],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>New\nYork </parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
        calls(("weather", '{"city": "New\\nYork ", "days": 3}')),
    ),
    (
        "minimax_m2",
        'So.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="tags">["a"]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>\n',
        [Text("So."), *calls(("weather", '{"city": "Paris", "tags": ["a"]}'), ("now", "{}"))],
    ),
    (
        "deepseek_v32",
        'So.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">New\nYork "</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">["a"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="any" string="true">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [
            Text("So."),
            *calls(("weather", '{"city": "New\\nYork \\"", "days": 3, "tags": ["a"], "any": "3"}'), ("now", "{}")),
        ],
    ),
    # The tag's `string` attribute overrides the schema; a value that is no valid JSON is read as a string.
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="false">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">three</｜DSML｜parameter>\n</｜DSML｜invoke>',
        calls(("weather", '{"city": 7, "days": "three"}')),
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n{"name": "now", "arguments": {}}\n{"name": "weather", "arguments": {"days": 3}}\n'
        "</｜DSML｜function_calls>",
        calls(("now", "{}"), ("weather", '{"days": 3}')),
    ),
    (
        "deepseek_v4",
        'So.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        [Text("So."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    (
        "hy_v3",
        "So.<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>None</arg_value:opensource>\n"
        "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n"
        "<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        [Text("So."), *calls(("weather", '{"city": "None", "days": 3}'), ("now", "{}"))],
    ),
    (
        "hy_v3",
        f'<tool_call:opensource>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call:opensource> Done.',
        [*calls(("weather", PARIS)), Text("Done.")],
    ),
    (
        "hy_v3_preview",
        "So.<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
        [Text("So."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    (
        "hy_v4",
        "So.<tool_calls:6124c78e>\n<tool_call:6124c78e>weather\n<arg_key:6124c78e>city</arg_key:6124c78e>\n"
        "<arg_value:6124c78e>Paris</arg_value:6124c78e>\n<arg_key:6124c78e>days</arg_key:6124c78e>\n"
        "<arg_value:6124c78e>3</arg_value:6124c78e>\n</tool_call:6124c78e>\n"
        "<tool_call:6124c78e>now</tool_call:6124c78e></tool_calls:6124c78e>",
        [Text("So."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    (
        "deepseek_v41",
        'So.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Paris</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
        '<｜DSML｜ invoke name="now">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        [Text("So."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    (
        "minimax_m3",
        (
            'So.<tool_call>\n<invoke name="weather"><city>New\n"York" [b></city><days>3</days><tags><item>1</item><item>a b</item>'
            "</tags><any><k>true</k><l><item></item></l></any></invoke>\n"
            '<invoke name="now"></invoke>\n</tool_call>'
        ).replace("<", "]<]minimax[>[<"),
        [
            Text("So."),
            *calls(
                ("weather", '{"city": "New\\n\\"York\\" [b>", "days": 3, "tags": [1, "a b"], "any": {"k": true, "l": [""]}}'),
                ("now", "{}"),
            ),
        ],
    ),
    (
        "minimax_m3",
        f']<]minimax[>[<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n{{"name": "now", "arguments": {{}}}}\n'
        "]<]minimax[>[</tool_call>Done.",
        [*calls(("weather", PARIS), ("now", "{}")), Text("Done.")],
    ),
    (
        "minimax_m3",
        ']<]minimax[>[<invoke name="weather">]<]minimax[>[<tags>]<]minimax[>[</tags>]<]minimax[>[</invoke>',
        calls(("weather", '{"tags": []}')),
    ),
    ("gigachat3", f'So.<|function_call|>{{"name": "weather", "arguments": {PARIS}}}', [Text("So."), *calls(("weather", PARIS))]),
    (
        "gigachat3",
        f'So.<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "weather", "arguments": {PARIS}}}',
        [Text("So."), *calls(("weather", PARIS))],
    ),
    (
        "apertus",
        f'So.<|tools_prefix|>[{{"weather": {PARIS}}}, {{"now": {{}}}}]<|tools_suffix|>\n',
        [Text("So."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    ("apertus", '<|tools_prefix|>[{"now": {}}, {"now": 3}] ok', [*calls(("now", "{}")), Text(', {"now": 3}] ok')]),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>', calls(("weather", PARIS))),
    (
        "gemma4",
        'Let me look.\n<|tool_call>call:weather{city:<|"|>a "b" {c}, \\d\n<|"|>,days:-1.5e3}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        [Text("Let me look."), *calls(("weather", '{"city": "a \\"b\\" {c}, \\\\d\\n", "days": -1.5e3}'), ("now", "{}"))],
    ),
    (
        "gemma4",
        '<|tool_call>call:weather{tags:[<|"|>a<|"|>,[],{x y:None, <|"|>p:q<|"|> : [1,true ]}],any:{ }, "k":"v"}<tool_call|> Done.',
        [*calls(("weather", '{"tags": ["a", [], {"x y": null, "p:q": [1, true]}], "any": {}, "k": "v"}')), Text("Done.")],
    ),
    (
        "qwen3_coder",
        '<function=now>\n</function>\n{"name": "now", "arguments": {}} is an example',
        [*calls(("now", "{}")), Text('{"name": "now", "arguments": {}} is an example')],
    ),
    # An unquoted value is a string; a call without its end marker is a call.
    ("gemma4", "<|tool_call>\ncall: now {a:New York,b:[x, 01]}", calls(("now", '{"a": "New York", "b": ["x", "01"]}'))),
    ("gemma4", "<|tool_call>call:srv:get-it{größe:1}<tool_call|>", calls(("srv:get-it", '{"größe": 1}'))),
    ("gemma4", "<|tool_call>call:now{a:[True,],b:{},}<tool_call|>", calls(("now", '{"a": [true], "b": {}}'))),
    (
        "functiongemma",
        "Let me look.<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
        [Text("Let me look."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    (
        "kimi_k3",
        'So.<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>New\n"York" '
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        '<|open|>argument key="a&amp;&quot;b" type="array"<|sep|>["x"]<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        [
            Text("So."),
            *calls(("weather", '{"city": "New\\n\\"York\\" ", "days": 3, "a&\\"b": ["x"]}'), ("now", "{}")),
        ],
    ),
    (
        "kimi_k3",
        f'<|open|>call tool="weather" index="1"<|sep|><|open|>json type="object"<|sep|>{PARIS}<|close|>json<|sep|>'
        "<|close|>call<|sep|>ok",
        [*calls(("weather", PARIS)), Text("ok")],
    ),
    (
        "solar_open",
        f"<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather<|tool_call:args|>{PARIS}<|tool_call:end|>"
        "<|tool_call:begin|><|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        calls(("weather", PARIS), ("now", "{}")),
    ),
    (
        "solar_open2",
        "So.<|tool_call:start|>weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>\n"
        "<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>\n<|tool_call:start|>now\n<|tool_call:end|>",
        [Text("So."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    (
        "minicpm5",
        'So.\n<function name="weather"><param name="city"><![CDATA[a </param> b]] & c\n]]></param><param name="days">3</param>'
        '<param name="tags">[\'a\', None]</param></function>\n<function name="now"></function>',
        [Text("So."), *calls(("weather", '{"city": "a </param> b]] & c\\n", "days": 3, "tags": ["a", null]}'), ("now", "{}"))],
    ),
    (
        "minicpm5",
        f'<function name="weather">{PARIS}</function><function name="now"><param name="a"><![CDATA[7]]></param></function>',
        calls(("weather", PARIS), ("now", '{"a": 7}')),
    ),
    (
        "step3",
        'So.\n<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
        '<steptml:parameter name="city">Paris</steptml:parameter>\n<steptml:parameter name="days">3</steptml:parameter>\n'
        "</steptml:invoke><｜tool_call_end｜>\n"
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now"></steptml:invoke>'
        "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
        [Text("So."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    (
        "longcat",
        "<longcat_tool_call>weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Paris</longcat_arg_value>\n"
        "<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>\n"
        f'<longcat_tool_call>{{"name": "weather", "arguments": {PARIS}}}</longcat_tool_call>',
        calls(("weather", PARIS), ("weather", PARIS)),
    ),
    (
        "longcat_json",
        f'So.\n<longcat_tool_call>{{"name": "weather", "arguments": {PARIS}}}</longcat_tool_call>',
        [Text("So."), *calls(("weather", PARIS))],
    ),
    (
        "gigachat35",
        'So.\n\n<｜GCML｜tool_calls>\n<｜GCML｜invoke name="weather">\n'
        '<｜GCML｜parameter name="city" string="true">Paris</｜GCML｜parameter>\n'
        '<｜GCML｜parameter name="days" string="false">3</｜GCML｜parameter>\n</｜GCML｜invoke>\n'
        '<｜GCML｜invoke name="now">\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>',
        [Text("So."), *calls(("weather", PARIS), ("now", "{}"))],
    ),
    (
        "command_r",
        'So.\nAction:\n```json\n[\n    {\n        "tool_name": "weather",\n'
        '        "parameters": {\n            "city": "Paris"\n        }\n    },'
        '\n    {\n        "tool_name": "now",\n        "parameters": {}\n    }\n]```',
        [Text("So."), *calls(("weather", '{\n            "city": "Paris"\n        }'), ("now", "{}"))],
    ),
    ("command_r", f'Action: ```json\n[{{"tool_name": "weather", "parameters": {PARIS}}}]\n```', calls(("weather", PARIS))),
    (
        "hyperclovax",
        f' -> tool/function_call\n[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        calls(("weather", PARIS), ("now", "{}")),
    ),
    ("functionary_v31", f"So.<function=weather>{PARIS}</function>", [Text("So."), *calls(("weather", PARIS))]),
    ("functionary_v31", "<function=now>{}</function>\n<function=now>{}</function>", calls(("now", "{}"), ("now", "{}"))),
    ("functionary_v32", f"weather\n{PARIS}\n>>>now\n{{}}", calls(("weather", PARIS), ("now", "{}"))),
    ("functionary_v32", f"all\nSo.>>>weather\n{PARIS}", [Text("So."), *calls(("weather", PARIS))]),
    ("functionary_v32", "all\nSo >>> it.", [Text("So >>> it.")]),
]
# Text that only looks like a call, or contains a malformed one: all of it is text.
TEXTS_WITHOUT_CALLS: list[tuple[str, str]] = [
    ("minimax_m2", '{"name": "now", "arguments": {}} is an example'),
    ("hermes", "The <tool_call> tag is  written\n so: <tool_call>{}</tool_call> "),
    ("hermes", '<tool_call>{"name": "weather", "argum'),
    ("hermes", '<tool_call>{"name": "weather" "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": 7}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "no json"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "we\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", "a <tool_c"),
    ("hermes", "trailing \n\n"),
    ("hermes", '{"name": "weather", "arguments": {}}'),
    ("llama3_json", '{"name": "Ann", "parameters": {}}'),  # no such tool
    ("llama3_json", '{"city": "Paris"}'),
    ("llama3_json", " {} and <|python_tag|>print(1)"),
    ("llama3_json", '  So: {"name": "weather", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]no call at all"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜> what"),
    ("kimi_k2", "<|tool_call_begin|>x<|tool_call_argument_begin|>7"),
    ("qwen3_coder", "<tool_call> <function weather>"),
    ("qwen3_coder", "<function=we\nather>"),
    ("glm45", "<tool_call>weather and more"),
    ("pythonic", "[1, 2] and [a](b) and [f(x)]"),
    ("pythonic", "[link](http://x)"),
    ("pythonic", "[weather(city)]"),
    ("pythonic", "[weather(city=open('x'))]"),
    ("pythonic", "[print(a=1)]"),  # no such tool
    ("harmony", "<|channel|>analysis"),
    ("harmony", "a <|start|>b <|mess"),
    ("gemma4", "<|tool_call>weather{days:3}<tool_call|>"),
    ("gemma4", "<|tool_call>call:weather<tool_call|>"),
    ("gemma4", "<|tool_call>call:{}<tool_call|>"),
    ("gemma4", "call:weather{days:3}"),
    ("olmo3", "weather(city='Paris')"),
    ("olmo3", "<function_calls>\n</function_calls>"),
    ("lfm2", "<|tool_call_start|>now()<|tool_call_end|>"),
    ("minimax_m2", "<minimax:tool_call>\n</minimax:tool_call>"),
    ("seed_oss", "<tool_call>\n<functions>"),
    ("deepseek_v32", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>"),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜parameter name="city" string="true">'),
    ("deepseek_v4", "<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>"),
    ("hy_v3", "<tool_calls:opensource>\n</tool_calls:opensource>"),
    ("hy_v3_preview", "<tool_calls>\n<tool_call>weather and more"),
    ("hy_v4", "<tool_calls:6124c78e>\n<tool_call:6124c78e>weather and more"),
    ("deepseek_v41", "<｜DSML｜ calls>\n</｜DSML｜ calls>"),
    ("hy_v3", "<tool_calls:opensource>\n<tool_call:opensource>weather and more"),
    ("minimax_m3", "]<]minimax[>[<tool_call>\n]<]minimax[>[</tool_call>"),
    ("minimax_m3", ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="we\nather">'),
    ("minimax_m3", "<tool_call> and ]<]minimax[>["),
    ("gigachat3", "<|function_call|>weather"),
    ("gigachat3", "<|message_sep|>\n\nfunction result<|role_sep|>\n{}"),
    ("apertus", '<|tools_prefix|>[{"weather": 3}]<|tools_suffix|>'),
    ("apertus", '<|tools_prefix|>[{"we\\nather": {}}]<|tools_suffix|>'),
    ("apertus", "<|tools_prefix|>[]<|tools_suffix|>"),
    ("functiongemma", "<start_function_call>weather{}<end_function_call>"),
    ("kimi_k3", "<|open|>tools<|sep|><|close|>tools<|sep|>"),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="weather"<|sep|><|close|>call<|sep|>'),
    ("kimi_k3", '<|open|>call tool="we\nather" index="1"<|sep|><|close|>call<|sep|>'),
    ("solar_open", "<|tool_calls|>weather"),
    ("solar_open", "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather<|tool_call:args|>3"),
    ("solar_open2", "<|tool_call:start|>weather and more"),
    ("minicpm5", "<function name=weather></function>"),
    ("minicpm5", '<function name="we\nather"></function>'),
    ("step3", "<｜tool_calls_begin｜>\n<｜tool_calls_end｜>"),
    ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜>code<｜tool_sep｜><steptml:invoke nam="weather">'),
    ("longcat", "<longcat_tool_call>weather and more"),
    ("longcat_json", "<longcat_tool_call>weather</longcat_tool_call>"),
    ("gigachat35", "<｜GCML｜tool_calls>\n</｜GCML｜tool_calls>"),
    ("command_r", "Action:\n```json\n[1, 2]\n```"),
    ("hyperclovax", "So -> tool/function_call\n[1]"),
    ("functionary_v31", "<function=weather>city</function>"),
    ("functionary_v32", f"nobody\n{PARIS}"),
    ("functionary_v32", "weather\nis fine >>> today"),
    ("functionary_v32", "So:\n>>> x\n{'a': 1}\nDone."),
]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_tool_calls_and_text_are_parsed(parser: str, text: str, expected: list[Part]) -> None:
    found = parts_of([text], None, parser, schemas=SCHEMAS)
    assert found == expected
    for part in found:
        if isinstance(part, Arguments):
            json.loads(part.text)


STRING_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
STRING_OR_INTEGERS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12345", '"12345"'),
        (STRING_OR_NULL, "12345", '"12345"'),
        (STRING_OR_NULL, "true", '"true"'),
        (STRING_OR_NULL, '"a"', '"\\"a\\""'),
        (STRING_OR_NULL, "[1]", '"[1]"'),
        (STRING_OR_NULL, "null", "null"),
        (STRING_OR_NULL, "Nonesuch", '"Nonesuch"'),
        (STRING_OR_NULL, "nullify", '"nullify"'),
        ({"type": ["string", "null"]}, "1e5", '"1e5"'),
        ({"type": ["string", "integer"]}, "7", '"7"'),
        ({"$ref": "#/$defs/id"}, "0123", '"0123"'),
        ({"$ref": "#/$defs/id"}, "123", '"123"'),
        ({"allOf": [{"$ref": "#/$defs/id"}], "title": "Id"}, "123", '"123"'),
        ({"oneOf": [{"$ref": "#/$defs/id"}, {"type": "null"}]}, "123", '"123"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"const": "true"}, "true", '"true"'),
        (STRING_OR_INTEGERS, "12", '"12"'),
        (STRING_OR_INTEGERS, "[1, 2]", "[1, 2]"),
        (STRING_OR_INTEGERS, "[1, 2", '"[1, 2"'),
        ({"type": "integer"}, "12345678901234567890", "12345678901234567890"),
        ({"type": "number"}, "1E400", "1E400"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": ["integer", "null"]}, "None", "null"),
        ({"$ref": "#/$defs/itself"}, "7", "7"),
        ({"$ref": "#/$defs/nowhere"}, "7", "7"),
        ({}, "12", "12"),
        (True, "True", "true"),
        ({"type": "boolean"}, " False ", "false"),
        ({"type": "boolean"}, " true ", "true"),
        ({}, "Paris", '"Paris"'),
        ({"type": 3, "enum": "x", "$ref": 5, "anyOf": {}}, "7", "7"),
    ],
)
def test_unquoted_argument_gets_a_type_that_its_schema_allows(schema: Any, text: str, value: str) -> None:
    definitions = {"id": {"type": "string"}, "itself": {"anyOf": [{"$ref": "#/$defs/itself"}]}}
    direct = {"type": "object", "properties": {"a": schema}, "$defs": definitions}
    by_reference = {"$ref": "#/$defs/f", "$defs": definitions | {"f": {"properties": {"a": schema}}}}
    in_all_of = {"allOf": [{"additionalProperties": schema}, {"properties": {"b": {}}}], "$defs": definitions}
    in_any_of = {"anyOf": [{"properties": {"a": schema}}, {"properties": {"b": {"type": "null"}}}], "$defs": definitions}
    for parameters in (direct, by_reference, in_all_of, in_any_of):
        for parser, form in (
            ("qwen3_coder", "<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>"),
            ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        ):
            found = parts_of([form.format(text)], None, parser, schemas={"f": parameters})
            assert found == calls(("f", f'{{"a": {value}}}'))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING_OR_NULL, "None", "null"),
        (STRING_OR_NULL, "['a']", "\"['a']\""),
        ({"type": "string"}, "None", '"None"'),
        ({"type": "array"}, "['a', \"b's\", None]", '["a", "b\'s", null]'),
        ({"type": "array"}, '["a"]', '["a"]'),
        ({"type": "object"}, "{'a': {'b': True}}", '{"a": {"b": true}}'),
        ({"type": "array"}, "[open('x')]", "\"[open('x')]\""),
        (STRING_OR_INTEGERS, "[1, (2)]", "[1, 2]"),
        ({}, "{'a': 1}", '{"a": 1}'),
        ({"type": "integer"}, "3", "3"),
    ],
)
def test_null_lists_and_objects_in_python_syntax_are_parsed(schema: Any, text: str, value: str) -> None:
    """The chat templates of Qwen3-Coder, Nemotron 3 and Seed-OSS write them so."""
    for parser, form in (
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("seed_oss", "<seed:tool_call>\n<function=f>\n<parameter=a>{}</parameter>\n</function>\n</seed:tool_call>"),
    ):
        found = parts_of(list(form.format(text)), None, parser, schemas={"f": {"properties": {"a": schema}}})
        assert found == calls(("f", f'{{"a": {value}}}'))
    glm = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    [_, arguments] = parts_of([glm], None, "glm45", schemas={"f": {"properties": {"a": STRING_OR_NULL}}})
    assert arguments != Arguments(0, '{"a": null}'), "GLM's template writes JSON"


@pytest.mark.parametrize(
    ("parser", "before", "end", "after"),
    [
        ("qwen3_coder", "<function=f>\n<parameter=a>\n", "\n</parameter>", "\n</function>"),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>", "\n</tool_call>"),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">',
            "</｜DSML｜parameter>",
            "\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        ("minicpm5", '<function name="f"><param name="a">', "</param>", "</function>"),
        (
            "kimi_k3",
            '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="array"<|sep|>',
            "<|close|>argument<|sep|>",
            "<|close|>call<|sep|>",
        ),
    ],
)
@pytest.mark.parametrize("schema", [{}, {"type": ["array", "object"]}], ids=str)
def test_json_in_tags_may_contain_their_end_and_raw_line_ends(parser: str, before: str, end: str, after: str, schema: Any) -> None:
    """Its own end is the one behind the JSON; where it is no JSON, the first."""
    schemas = {"f": {"properties": {"a": schema}}}
    for text, value in (
        (f'["x{end}y", {{"\n": 1}}]', [f"x{end}y", {"\n": 1}]),
        (f'{{"x": ["{end}"]}}', {"x": [end]}),
        ('["x", y', '["x", y'),
        ('["x"] y', '["x"] y'),
    ):
        answer = f"{before}{text}{end}{after}So."
        for deltas in ([answer], list(answer)):
            [call, arguments, rest] = parts_of(deltas, None, parser, schemas=schemas)
            assert (call, rest) == (Call(0, "", "f"), Text("So."))
            assert isinstance(arguments, Arguments)
            assert json.loads(arguments.text) == {"a": value}


NESTED_SCHEMA = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"$ref": "#/$defs/one"}},
        "map": {"type": "object", "additionalProperties": {"type": "string"}},
        "item": {"type": "object", "properties": {"item": {"type": "integer"}}},
        "maybe": STRING_OR_NULL,
        "empty": {"type": "object"},
    },
    "$defs": {"one": {"properties": {"id": {"type": "string"}, "n": {"type": "number"}}}},
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<list><item><id>12</id><n>1.5</n></item></list>", {"list": [{"id": "12", "n": 1.5}]}),
        ("<map><12>true</12></map>", {"map": {"12": "true"}}),
        ("<item><item>3</item></item>", {"item": {"item": 3}}),
        ("<maybe>12</maybe><empty></empty><list></list>", {"maybe": "12", "empty": {}, "list": []}),
        ("<other><item>1</item><item>x</item></other>", {"other": [1, "x"]}),
    ],
)
def test_values_in_nested_tags_get_types_that_their_schemas_allow(text: str, value: Any) -> None:
    inner = text.replace("<", "]<]minimax[>[<")
    answer = f']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">{inner}]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>'
    for deltas in ([answer], list(answer)):
        [call, arguments] = parts_of(deltas, None, "minimax_m3", schemas={"f": NESTED_SCHEMA})
        assert (call, json.loads(arguments.text)) == (Call(0, "", "f"), value)  # type: ignore[union-attr]


@pytest.mark.parametrize("malformed", ["<list>x<item>1</item></list>", "<list><item>1</list>", "<list>" * 40, "<list", "</maybe>"])
def test_malformed_nested_tags_continue_as_text(malformed: str) -> None:
    inner = malformed.replace("<", "]<]minimax[>[<")
    answer = f']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">{inner} So.'
    for deltas in ([answer], list(answer)):
        assert parts_of(deltas, None, "minimax_m3", schemas={"f": NESTED_SCHEMA}) == [*calls(("f", "{")), Text(f"{inner} So.")]


def test_deep_and_fanned_out_references_in_schemas_are_resolved_quickly() -> None:
    """References deeper than Python's recursion limit leave the argument's type unknown."""
    deep = {f"d{index}": {"anyOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(5000)}
    wide = {f"w{index}": {"allOf": [{"$ref": f"#/$defs/w{index + 1}"}] * 9} for index in range(50)}
    text = "<function=f><parameter=a>7</parameter><parameter=b>7</parameter></function>"
    properties = {"a": {"$ref": "#/$defs/d0"}, "b": {"$ref": "#/$defs/w0"}}
    schema = {"properties": properties, "$defs": deep | wide | {"w50": {"type": "string"}}}
    start = time.thread_time()
    assert parts_of([text], None, "qwen3_coder", schemas={"f": schema}) == calls(("f", '{"a": 7, "b": "7"}'))
    assert time.thread_time() - start < 2


def test_schema_is_read_once_for_all_arguments_of_a_call() -> None:
    schema = {"allOf": [{"properties": {f"p{index}": {}}} for index in range(10_000)]}
    text = f"<function=f>{'<parameter=p7>7</parameter>' * 400}</function>"
    start = time.thread_time()
    assert len(parts_of([text], None, "qwen3_coder", schemas={"f": schema})) == 2
    assert time.thread_time() - start < 1


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[get-weather(a=9)]", {"a": 9}),
        ("[get-weather(x-y=3, $top='5')]", {"x-y": 3, "$top": "5"}),
        ("[get-weather(class=True)]", {"class": True}),
        ("[get-weather(**{\"a b\": 1, 'c': None})]", {"a b": 1, "c": None}),
        ('[get-weather(a=1, **{}, **{"b": [2]}, c=3)]', {"a": 1, "b": [2], "c": 3}),
        ("[get-weather(**{})]", {}),
        ("[get-weather(z-z=3)]", None),  # no such parameter
        ("[get-weather(**[1])]", None),
        ("[get-time(a=9)]", None),
    ],
)
def test_pythonic_names_that_are_no_identifiers_are_parsed_if_the_request_has_them(text: str, arguments: Any) -> None:
    schemas = {"get-weather": {"properties": {"a": {}, "x-y": {}, "$top": {}, "": {}}}}
    for deltas in ([text], list(text)):
        found = parts_of(deltas, None, "pythonic", schemas=schemas)
        if arguments is None:
            assert found == [Text(text)]
        else:
            assert found[0] == Call(0, "", "get-weather")
            assert isinstance(found[1], Arguments)
            assert json.loads(found[1].text) == arguments
    names = ["ns:tool", "3d_render", "srv/tool", "$f", "größe"]
    call_list = f"[{', '.join(f'{name}()' for name in names)}]"
    assert parts_of([call_list], None, "pythonic", schemas={name: {} for name in names}) == calls(*((name, "{}") for name in names))
    assert parts_of([call_list], None, "pythonic") == [Text(call_list)]


@pytest.mark.parametrize(("parser", "text"), TEXTS_WITHOUT_CALLS)
def test_malformed_call_stays_text(parser: str, text: str) -> None:
    assert parts_of([text], None, parser, schemas=SCHEMAS) == [Text(text)]
    assert parts_of(list(text), None, parser, schemas=SCHEMAS) == [Text(text)]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_parts_do_not_depend_on_how_text_is_split_into_deltas(parser: str, text: str, expected: list[Part]) -> None:
    rng = random.Random(text)
    assert parts_of(list(text), None, parser, schemas=SCHEMAS) == expected
    for _ in range(60):
        assert parts_of(random_deltas(text, rng), None, parser, schemas=SCHEMAS) == expected
    for length in range(0, len(text), 3):  # a truncated answer
        short = text[:length]
        assert parts_of(list(short), None, parser, schemas=SCHEMAS) == parts_of([short], None, parser, schemas=SCHEMAS)


WORDS = [
    *("<", "</", ">", "{", "}", "[", "]", "(", ")", ",", ";", ":", '"', "'", "\\", "\\u12", "\n", " ", "\t", "=", "1", "-", "tr"),
    *(
        '{"name": "',
        '"weather"',
        '"arguments": ',
        '"parameters"',
        "weather",
        "now",
        "functions.now:0",
        "name",
        "city",
        "true",
        "é🦊",
    ),
    *(
        PARIS,
        '{"name": "now", "arguments": {"a": "',
        '{"name": "weather"',
        '"function"',
        "```json",
        "function",
        " to=functions.now",
    ),
    *("weather(city=", "now()", "a=1", "\x00", "\u2028", "call", "analysis", "final", "assistant"),
]


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_random_texts_give_equal_parts_for_any_split_and_lose_no_text(parser: str) -> None:
    """Malformed text included. No character outside a call is lost but for white space next to one."""
    rng = random.Random(parser)
    parser_markers = [*markers(None, parser), *(marker[: len(marker) // 2] for marker in markers(None, parser))]
    kind = {"deepseek_v31": "deepseek_v3", "mistral_args": "mistral"}.get(parser, parser)
    examples = [case[1] for case in CASES if case[0] == kind]
    texts_with_calls = 0
    for _ in range(500):
        text = rng.choice(examples)[: rng.randrange(400)] if rng.random() < 0.4 else ""
        text += "".join(rng.choice(parser_markers if rng.random() < 0.3 else WORDS) for _ in range(rng.randrange(1, 25)))
        schemas = SCHEMAS if rng.random() < 0.7 else None
        whole = parts_of([text], None, parser, schemas=schemas)
        assert parts_of(random_deltas(text, rng), None, parser, schemas=schemas) == whole, text
        assert parts_of(list(text), None, parser, schemas=schemas) == whole, text
        texts_with_calls += any(isinstance(part, Call) for part in whole)
        headed = parser in ("harmony", "functionary_v32")  # with a recipient before a text, which is no part of it
        if not any(isinstance(part, Call | Reasoning) for part in whole) and not headed:
            assert whole == ([Text(text)] if text else [])
        rest = text
        for part in whole:  # texts keep their order
            if isinstance(part, Text) and parser != "harmony":  # which joins the texts of several messages
                assert part.text in rest
                rest = rest[rest.index(part.text) + len(part.text) :]
            if isinstance(part, Arguments):
                part.text.encode()
    assert texts_with_calls > 10


def random_answer(parser: str, rng: random.Random) -> tuple[str, list[Part]]:
    """Random text around calls as models of this parser's family write them, and the expected parts."""
    text, count = "", 0
    parts: list[Part] = []
    examples = [(case[1], case[2]) for case in CASES if case[0] == parser and not isinstance(case[2][0], Text)]
    for _ in range(rng.randrange(1, 4)):
        prose = " ".join(rng.choice(["So", "the", "answer", "is <b>", "{x}", "naïve 🦊"]) for _ in range(rng.randrange(1, 6)))
        example, found = rng.choice([example for example in examples if not isinstance(example[1][-1], Text)])
        text += rng.choice(["", "\n", "  "] if count else [""]) + prose + rng.choice(["", "\n\n", " "]) + example
        parts.append(Text(prose))
        for part in found:
            assert isinstance(part, Call | Arguments)
            parts.append(replace(part, index=count + part.index))
        count += len(found) // 2
    return text, parts


@pytest.mark.parametrize("parser", ["hermes", "mistral", "deepseek_v3", "kimi_k2", "gemma4", "glm45", "qwen3_coder", "seed_oss"])
def test_text_around_calls_is_kept_for_any_split(parser: str) -> None:
    rng = random.Random(parser)
    for _ in range(200):
        text, expected = random_answer(parser, rng)
        assert parts_of(random_deltas(text, rng), None, parser, schemas=SCHEMAS) == expected, text


def test_arguments_are_streamed_as_they_are_generated() -> None:
    read = reader(None, "hermes")
    assert read.push('<tool_call>{"name": "now", "arguments": ') == []
    [call, first] = read.push('{"a": "on')
    assert isinstance(call, Call)
    assert first == Arguments(0, '{"a": "on')
    assert read.push("e tw") == [Arguments(0, "e tw")]
    assert read.push('o"') == [Arguments(0, 'o"')]
    assert read.push("}}</tool") == [Arguments(0, "}")]
    assert read.push("_call>") == []
    read = reader(None, "gemma4")
    assert read.push("<|tool_call>call:now") == []
    [call, first] = read.push('{a:<|"|>on')
    assert isinstance(call, Call)
    assert first == Arguments(0, '{"a": "on')
    assert read.push('e "tw<|') == [Arguments(0, 'e \\"tw')]
    assert read.push('"|>') == [Arguments(0, '"')]
    assert read.push("}<tool") == [Arguments(0, "}")]
    read = reader(None, "qwen3_coder", schemas=SCHEMAS)
    read.push("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert read.push("New Yo") == [Arguments(0, "New Yo")]
    assert read.push("rk\n</para") == [Arguments(0, "rk")]


def test_text_is_held_back_only_while_it_may_become_a_marker() -> None:
    read = reader("qwen3", "hermes")
    assert read.push("Hello") == [Text("Hello")]
    assert read.push(" wor") == [Text(" wor")]
    assert read.push("ld ") == [Text("ld")]
    assert read.push("<b>") == [Text(" <b>")]
    assert read.push("<tool") == []
    assert read.push("s>") == [Text("<tools>")]


def test_call_that_becomes_malformed_while_streamed_continues_as_text() -> None:
    found = parts_of(list('<tool_call>{"name": "now", "arguments": {"a": nope}}</tool_call>'), None, "hermes")
    assert found == [*calls(("now", '{"a": ')), Text("nope}}</tool_call>")]


def test_call_without_its_separator_stays_text_before_another() -> None:
    broken = '<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather{"city": "Paris"}<|tool_call:end|>'
    text = f"{broken}<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>now<|tool_call:args|>{{}}<|tool_call:end|>"
    for deltas in ([text], list(text)):
        assert parts_of(deltas, None, "solar_open") == [Text(broken), *calls(("now", "{}"))]


@pytest.mark.parametrize("rest", ['"id}</tool_call> So.', '"id": "x}</tool_call> So.', '"id": }</tool_call> So.', '"id" "x"} So.'])
def test_call_that_becomes_malformed_behind_its_arguments_loses_no_text(rest: str) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {{}}, {rest}'
    for deltas in ([text], list(text)):
        assert parts_of(deltas, None, "hermes") == [*calls(("now", "{}")), Text(rest)]


def test_call_ids_are_unique_or_those_that_the_model_wrote() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>' * 3
    ids = [part.id for _ in range(3) for part in reader(None, "hermes").push(text + "x") if isinstance(part, Call)]
    assert len(set(ids)) == 9
    assert all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids)
    [call, _] = reader(None, "mistral").push("[TOOL_CALLS]now{}")
    assert isinstance(call, Call)
    assert re.fullmatch("[A-Za-z0-9]{9}", call.id)
    [call, _] = reader(None, "mistral").push("[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}")
    assert isinstance(call, Call)
    assert call.id == "abcdefghi"
    [call, _] = reader(None, "kimi_k2").push("<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}")
    assert isinstance(call, Call)
    assert call.id == "functions.now:0"
    [call, _] = reader(None, "solar_open").push("<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>now<|tool_call:args|>{}")
    assert isinstance(call, Call)
    assert call.id == "a1b2c3d4e5"


@pytest.mark.parametrize("parser", [*FORMS, "harmony"])
def test_parse_time_of_long_and_deeply_nested_texts_is_linear(parser: str) -> None:
    """A text of twice the length takes no more than a few times as long, and deep nesting breaks nothing."""
    opened = (*(FORMS[parser].opens if parser in FORMS else ()), *markers(None, parser), "")
    start = time.thread_time()
    for text in ("[" * 20_000, '{"name": "now", "arguments": ' + '{"a":' * 5000, " \n" * 10_000, "<" * 20_000, '{"a":"\\' * 3000):
        for marker in opened:
            parts_of([(marker + text)[at : at + 50] for at in range(0, len(text), 50)], None, parser)
    parts_of([opened[0] * 3000], None, parser)
    assert time.thread_time() - start < 20


def test_plain_text_is_read_within_40_microseconds_per_token() -> None:
    """2 us are usual; the bound leaves room for a busy machine."""
    read = reader("qwen3", "hermes")
    read.push("Once")
    start = time.thread_time()
    for _ in range(10_000):
        read.push(" upon")
    assert (time.thread_time() - start) / 10_000 < 40e-6


def test_every_combination_of_parsers_passes_plain_text_through() -> None:
    for tools in (None, *TOOL_PARSERS):
        for reasoning in (None, *REASONING_PARSERS):
            text = "Hello <b>, [1] {2}"
            assert parts_of(list(text), reasoning, tools) == [Text(text)]


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_endless_white_space_is_read_in_linear_time(parser: str) -> None:
    """Small models can repeat it endlessly. It is held back where it may belong to a marker, and must be searched only once."""
    parsing, start = reader(None, parser), time.thread_time()
    for _ in range(60_000):
        parsing.push("\n")
    parsing.push("x")
    assert time.thread_time() - start < 3  # 0.1 is usual; 10 if it were searched again with each character


def test_endless_number_is_read_in_linear_time() -> None:
    parsing, start = reader(None, "hermes"), time.thread_time()
    parsing.push('<tool_call>{"name": "f", "arguments": {"a": 1')
    for _ in range(40_000):
        parsing.push("12345")
    parsing.end()
    assert time.thread_time() - start < 3  # 0.1 is usual; 30 if it were searched again with each delta
