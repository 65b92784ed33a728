"""Which readers a model gets, by its chat template and the options."""

import pytest

from penstock.router import config
from penstock.router.parsing import chosen
from penstock.router.parsing.readers import REASONING_HINTS, REASONING_PARSERS, TOOL_HINTS, TOOL_PARSERS, detect


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", (None, None)),
        ("{% if tools %}<tool_call>{% endif %}</think>", ("hermes", "deepseek_r1")),
        ("<tool_call> <function=f> <parameter=x>", ("qwen3_coder", None)),
        ("<tool_call> <arg_key> <think>", ("glm45", "deepseek_r1")),
        ("'<|tool_call>call:' + name + '}<tool_call|>' <|channel>thought <channel|>", ("gemma4", "gemma4")),
        ("<minimax:tool_call> <invoke name= </think>", ("minimax_m2", "deepseek_r1")),
        ("<｜DSML｜function_calls> <think>", ("deepseek_v32", "deepseek_r1")),
        ("{% set token = '｜DSML｜' %} '<' + token + 'tool_calls>' <think>", ("deepseek_v4", "deepseek_r1")),
        ("{% set suffix = ':opensource' %} '<think{}>'.format(suffix) '<tool_sep{}>' <tool_call", ("hy_v3", "hy_v3")),
        ("{% set suffix = ':6124c78e' %} '<think{}>'.format(suffix) '<arg_key{}>' <tool_call", ("hy_v4", "hy_v4")),
        ("<think> <tool_calls> <tool_call> <tool_sep> <arg_key>", ("hy_v3_preview", "deepseek_r1")),
        ("'<｜DSML｜ calls>' tool_calls <think>", ("deepseek_v41", "deepseek_r1")),
        ("']<]minimax[>[' '<tool_call>' <mm:think> <response>", ("minimax_m3", "minimax_m3")),
        ("<minimax:tool_call> <think> </think> <response>", ("minimax_m2", "deepseek_r1")),
        ("tools <|function_call|> 'function descriptions'", ("gigachat3", None)),
        ("tools {'role': 'function call'} <|role_sep|>", ("gigachat3", None)),
        ("tools <|tools_prefix|>", ("apertus", None)),
        ("<seed:tool_call> <function=f> <parameter=x> <seed:think>", ("seed_oss", "seed_oss")),
        ("<|START_ACTION|> <|START_THINKING|>", ("cohere", "cohere")),
        ("<TOOLCALL> <think>", ("nemotron_json", "deepseek_r1")),
        ("<think> </think> <answer> </answer>", (None, "hunyuan_a13b")),
        ("</think> <response> <tool_call>", ("hermes", "ernie45")),
        ("<|tool_list_start|> tools", ("lfm2", None)),
        ("'List of tools: [' </think>", ("lfm2", "deepseek_r1")),
        ("'<|open|>' + tag '<|sep|>' open_tag('call' open_tag('think')", ("kimi_k3", "kimi_k3")),
        ("<|begin|>assistant<|think|> <|tool_call:begin|> <|tool_call:args|>", ("solar_open", "solar_open")),
        ("<|think:start|> <|tool_call:start|> <|tool_arg:value|>", ("solar_open2", "solar_open2")),
        ("'<function name=\"' '<param name=\"' <think>", ("minicpm5", "deepseek_r1")),
        ("<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name= <think>", ("step3", "deepseek_r1")),
        ("<start_function_call>call:", ("functiongemma", None)),
        ("<longcat_tool_call> <longcat_arg_key> <longcat_think>", ("longcat", "longcat")),
        ("<longcat_tool_call> tools", ("longcat_json", None)),
        ("'<｜GCML｜tool_calls>' 'function call' <|role_sep|> <think>", ("gigachat35", "deepseek_r1")),
        ("'Action:' `directly-answer` tool_name", ("command_r", None)),
        ("'<|im_start|>assistant/think\\n' 'assistant -> tool/function_call\\n['", ("hyperclovax", "hyperclovax")),
        ("<{start_tag}={function_name}> Environment: ipython <|python_tag|>", ("functionary_v31", None)),
        ("'>>>all\\n' + message['content'] tools", ("functionary_v32", None)),
        ("<function_calls> tools", ("olmo3", None)),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK]", ("mistral", "mistral")),
        ("<|start|>assistant<|channel|>final", ("harmony", "harmony")),
        ("Environment: ipython", ("llama3_json", None)),
        ("<｜tool▁call▁begin｜> ```json </think>", ("deepseek_v3", "deepseek_r1")),
        ("{{ tools | tojson }}", ("json", None)),
    ],
)
def test_parsers_are_detected_from_the_chat_template(template: str, expected: tuple[str | None, str | None]) -> None:
    assert detect(template) == expected


def test_parser_options_list_all_parsers_and_override_detection() -> None:
    assert set(config.TOOL_CALL_PARSERS) == {*TOOL_PARSERS, "auto", "none"}
    assert set(config.REASONING_PARSERS) == {*REASONING_PARSERS, "auto", "none"}
    assert chosen(("auto", "none"), ("hermes", "qwen3")) == ("hermes", None)
    assert chosen(("mistral", "auto"), (None, None)) == ("mistral", None)
    assert {name for name, _ in TOOL_HINTS} <= set(TOOL_PARSERS)
    assert {name for name, _ in REASONING_HINTS} <= set(REASONING_PARSERS)
