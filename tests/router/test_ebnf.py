"""Translation of EBNF (GBNF) to Lark: it allows what the rules say, compared with `re`, and errors name the line."""

import random
import re
from functools import lru_cache

import llguidance
import pytest

from penstock.proto.grammar import limits
from penstock.router import ebnf
from penstock.router.grammar import BYTES, _byte_tokenizer, problem
from penstock.router.grammar import lark as of_lark

SQL = """
root ::= select_statement

select_statement ::= "SELECT " column " from " table " where " condition

column ::= "col_1 " | "col_2 "

table ::= "table_1 " | "table_2 "

condition ::= column "= " number

number ::= "1 " | "2 "
"""
CAPITAL_CITIES = """root ::= city | description
city ::= "London" | "Paris"
description ::= city " is " status
status ::= "the capital of " country
country ::= "England" | "France"
"""
JSON = r"""root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws  # in any order

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F]
    | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [0-9]{0,15})? ws

ws ::= | " " | "\n" [ \t]{0,20}
"""
RECURSIVE = r"""root ::= basic_array | basic_object
basic_any ::= basic_number | basic_string | basic_array | basic_object
basic_number ::= ("0" | "-"? [1-9] [0-9]*) ("." [0-9]+)?
basic_string ::= (([\"] basic_string_1 [\"]))
basic_string_1 ::= "" | [^"\\\r\n] basic_string_1 | "\\" escape basic_string_1
escape ::= ["\\/bfnrt] | "u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]
basic_array ::= "[" ("" | ws basic_any (ws "," ws basic_any)*) ws "]"
basic_object ::= "{" ("" | ws basic_string ws ":" ws basic_any ( ws "," ws basic_string ws ":" ws basic_any)*) ws "}"
ws ::= [ \n\t]*
"""
ARITHMETIC = """root  ::= (expr "=" ws term "\\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
"""


@lru_cache(maxsize=64)
def compiled(grammar: str) -> str:
    source = of_lark(ebnf.lark(grammar))
    assert problem(source) == ""
    return llguidance.LLMatcher.grammar_from_lark(source.source)


def allows(grammar: str, text: str) -> bool:
    """Whether the grammar allows the whole text, byte by byte."""
    matcher = llguidance.LLMatcher(_byte_tokenizer(()), compiled(grammar), log_level=0, limits=limits())
    data = text.encode()
    return matcher.validate_tokens([*data, BYTES]) == len(data) + 1


@pytest.mark.parametrize(
    ("grammar", "valid", "invalid"),
    [
        (
            SQL,
            ["SELECT col_1  from table_2  where col_2 = 1 "],
            ["", "SELECT col_1  from table_3 ", "SELECT col_1  from table_2  where col_2 = 3 "],
        ),
        (CAPITAL_CITIES, ["London", "Paris is the capital of England"], ["London is", "Rome", "LondonParis"]),
        (
            JSON,
            ["{}", '{ "a": [1, -2.5e+3, true, null, {"b": "\\u00e9\\n é"}]}', '{"a":\n  {"b":[ ]} }'],
            ["", "[]", '{"a"}', '{"a":1,}', '{"a":"\n"}', '{"a":tru}', '{"a":  1}'],
        ),
        (RECURSIVE, ["[]", '[ "a\\"b" , {"x" :0}, -1.5 ]', '{"": ["é"]}'], ["", '"a"', "[01]", '["\\x"]', "[,]"]),
        (ARITHMETIC, ["a=1\n", "( a +b2) *3 = c \n(1)=x\n"], ["a=", "a=1", "a+=1\n", "a+ b=1\n", "A=1\n"]),
        ('root ::= "a" | "b" root\n', ["a", "bba"], ["", "ab"]),
        ('root ::= "a"\n  | "b"\n\n  "c"', ["a", "bc"], ["b"]),  # a rule ends where the next begins
        ('# first\nroot ::= fooBar foo-bar foo_bar # "\nfooBar ::= "1"\nfoo-bar::="2"\nfoo_bar ::= "3"', ["123"], ["321"]),
        ('root ::= start | START\nstart ::= "y" start?\nSTART ::= "z"', ["y", "yyy", "z"], ["yz"]),
        ('root ::= größe\ngröße ::= "ü"', ["ü"], ["u"]),
        (r'root ::= "\u0041\U0001F600\x42\u{43}\n\t\\\"\[\0"', ['A😀BC\n\t\\"[\0'], ["A"]),
        (
            r"root ::= [\]\[^-] [^\n\r] [a-c-] [\x41-\u0043\-z] [-]",
            ["]\t-A-", "^é-B-", "-xb--", "[xcz-"],
            ["a\tbA-", "]\nbA-", "]xbD-"],
        ),
        ("root ::= [^] . [&&a~~b]", ["\n\n&", "é😀~"], ["\n\nc"]),
        ('root ::= ("ab" ){2} "c" {1,} "d"{ 0 , 2 } "e"{0}', ["ababc", "ababcccdd"], ["abc", "abab", "ababcddd", "ababce"]),
        ('root ::= "" | ( | "x")+ "y"?', ["", "x", "xxy", "y"], ["yx"]),
        ('root ::= "a" |', ["a", ""], ["b"]),
        ('root ::= "%json {}" | "/" "//" "#"', ["%json {}", "///#"], ["{}"]),
        ('root ::= x "."\nx ::= [a-z.]+', ["a.", "a.b.c..", ".."], [".", "a"]),  # no terminal takes what the following ones need
        ('root ::= "true" | [a-z]+', ["true", "tr", "trx", "truex"], ["", "t1"]),
        # `ws` can't be a terminal where another one follows, nor can a rule that contains it
        ('root ::= "(" ws ws root ")" | end\nend ::= "." ws ";"\nws ::= " "*', [".;", "(  .  ;)", "((. ;))"], ["(.)", ". "]),
        ('unused ::= unused "x"\nroot ::= "a"', ["a"], ["x"]),
    ],
)
def test_grammar_allows_valid_texts_and_no_others(grammar: str, valid: list[str], invalid: list[str]) -> None:
    assert ebnf.is_ebnf(grammar)
    for text in valid:
        assert allows(grammar, text), text
    for text in invalid:
        assert not allows(grammar, text), text


class RandomGrammar:
    """A random grammar without recursion, with the regular expression of the same meaning."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._patterns: list[str] = []
        self._lines: list[str] = []
        for _ in range(2):
            body, pattern = self._choice(1)
            self._lines.append(f"x{len(self._patterns)} ::= {body}")
            self._patterns.append(pattern)
        body, self.pattern = self._choice(1)
        self._draw.shuffle(self._lines)
        self.text = "\n".join([*self._lines, f"root ::= {body}"])

    def _choice(self, depth: int) -> tuple[str, str]:
        parts = [self._sequence(depth) for _ in range(self._draw.randint(1, 2))]
        between = self._draw.choice((" | ", "\n  | "))
        return between.join(body for body, _ in parts), f"(?:{'|'.join(pattern for _, pattern in parts)})"

    def _sequence(self, depth: int) -> tuple[str, str]:
        parts = [self._part(depth) for _ in range(self._draw.randint(0, 3))]
        return " ".join(body for body, _ in parts), "".join(pattern for _, pattern in parts)

    def _part(self, depth: int) -> tuple[str, str]:
        kind = self._draw.randrange(4 if depth else 2)
        if kind == 0:
            letters = "".join(self._draw.choices("ab", k=self._draw.randint(0, 2)))
            body, pattern = f'"{letters}"', letters
        elif kind == 1:
            body = pattern = self._draw.choice(("[ab]", "[^a]", "[a-b]", "[^ab]", "[b]"))
        elif kind == 2 and self._patterns:
            which = self._draw.randrange(len(self._patterns))
            body, pattern = f"x{which}", self._patterns[which]
        else:
            body, pattern = self._choice(depth - 1)
            body = f"( {body} )"
        times = self._draw.choice(("", "", "", "?", "*", "+", "{2}", "{1,2}", "{0,}"))
        return body + times, f"(?:{pattern}){times}"


@pytest.mark.parametrize("seed", range(40))
def test_random_grammar_without_recursion_matches_its_regular_expression(seed: int) -> None:
    random_grammar = RandomGrammar(seed)
    rng = random.Random(seed)
    source = of_lark(ebnf.lark(random_grammar.text))
    if problem(source):
        assert not re.fullmatch(random_grammar.pattern, ""), random_grammar.text
        return
    for _ in range(60):
        text = "".join(rng.choices("abc", k=rng.randint(0, 5)))
        assert allows(random_grammar.text, text) == bool(re.fullmatch(random_grammar.pattern, text)), (random_grammar.text, text)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "there is no rule root, by which an answer begins"),
        ('Root ::= "a"', "there is no rule root"),
        ('"a"', 'line 1: "a", where a rule has to begin: name ::= ...'),
        ('# x\n\nroot "a"\n', "line 3: root, where a rule has to begin"),
        ('root ::= "a"\n ::= "b"', "line 2: ::= without the name"),
        ('root ::= "a"\n"b" ::= "b"', "line 2: ::= without the name"),
        ('root ::= "a"\nb ::= "b"\nroot ::= "c"', "line 3: root is a rule already, of line 1"),
        ('root ::= "a"\n  | b-c', "line 2: there is no rule b-c"),
        ('root ::= "a\n', 'line 1: a text without its end: "a'),
        ("root ::= [a\n]", "line 1: a set of characters without its end: [a"),
        ("root ::= \n 'a'", "line 2: nothing that is known here: 'a'"),
        ("root ::= <think>", "line 1: nothing that is known here: <think>"),
        ('root ::= ("a"\n | ("b"', "line 2: ( without its )"),
        ('root ::= "a")', "line 1: ) without its ("),
        ("root ::= * ", "line 1: *, and nothing before it"),
        ('root ::= "a"\n+*', "line 2: *, and nothing before it"),
        ('root ::= "a" | {2}', "line 1: {2}, and nothing before it"),
        ('root ::= "a"{3,2}', "line 1: {3,2} ends before it begins"),
        ('root ::= "a"{12345678}', "line 1: nothing that is known here: {12345678}"),
        ("root ::= []", "line 1: [] is a set of no characters"),
        ("root ::= [b-a]", "line 1: from 'b' to 'a' there is nothing"),
        (r'root ::= "\q"', r"line 1: \q is no escape"),
        (r'root ::= "\x4"', r"line 1: \x is no escape"),
        (r"root ::= [\d]", r"line 1: \d is no escape"),
        (r'root ::= "\ud83d\ude00"', r"line 1: \ud83d is no character"),
        (r'root ::= "\U00110000"', r"line 1: \U00110000 is no character"),
    ],
)
def test_syntax_error_names_its_line(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ebnf.lark(grammar)


@pytest.mark.parametrize(
    "text", ['start: "::="', 'start: "a"\n// root ::= x', '%llguidance {}\nstart: x\nx: "b ::= c"', "start: /[a-z] ::= /", ""]
)
def test_lark_grammar_is_not_taken_for_ebnf(text: str) -> None:
    assert not ebnf.is_ebnf(text)
