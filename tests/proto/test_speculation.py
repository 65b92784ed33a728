"""Values of `--speculate`: parsing, writing, and errors."""

import pytest

from penstock.proto.speculation import MOST_DRAFTS, Speculation, parse, written


def test_integer_is_the_number_of_ngram_drafts() -> None:
    assert parse("3") == parse("ngram=3") == Speculation(ngram=3)
    assert parse("0") == Speculation()
    assert (parse("3").most, parse("0").most) == (3, 0)


@pytest.mark.parametrize(
    ("text", "expected", "most"),
    [
        ("draft=a/b", Speculation(draft="a/b", widths=(1, 1, 1, 1)), 4),
        ("draft=a/b,tokens=2", Speculation(draft="a/b", widths=(1, 1)), 2),
        ("draft=a,tree=4x2x1", Speculation(draft="a", widths=(4, 2, 1)), 20),
        ("draft=/x y/z, nodes=16, ngram=8", Speculation(draft="/x y/z", nodes=16, ngram=8), 24),
        ("draft=a,nodes=127,ngram=127", Speculation(draft="a", nodes=127, ngram=127), MOST_DRAFTS),
        ("draft=a,tokens=4,verify=rejection", Speculation(draft="a", widths=(1,) * 4, verify="rejection"), 4),
        ("ngram=5,verify=typical", Speculation(ngram=5, verify="typical"), 5),
    ],
)
def test_settings_are_parsed_and_written_back(text: str, expected: Speculation, most: int) -> None:
    assert parse(text) == expected
    assert parse(text).most == most
    assert parse(written(expected)) == expected  # shards parse what the launcher writes


def test_no_drafts_are_written_as_an_empty_value() -> None:
    assert written(Speculation()) == written(parse("ngram=0,verify=typical")) == ""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "none of draft=PATH"),
        ("-1", "none of draft=PATH"),
        ("many", "none of draft=PATH"),
        ("speed=3", "none of draft=PATH"),
        ("ngram=", "none of draft=PATH"),
        ("ngram=3,ngram=4", "ngram= comes twice"),
        ("ngram=128", "ngram='128' must have whole numbers from 0 to 127"),
        ("128", "from 0 to 127"),
        ("tokens=3", "add draft=PATH"),
        ("draft=a,tokens=3,nodes=4", "exclude each other"),
        ("draft=a,tree=8x16", "136 drafts is too large"),
        ("draft=a,tree=4x0", "tree='0'"),
        ("draft=a,tree=4x", "tree=''"),
        ("ngram=3,verify=magic", "take gumbel, rejection, typical"),
        ("draft=a,nodes=8,verify=rejection", "not nodes=N"),
        ("draft=a,tokens=4,ngram=4,verify=rejection", "takes one proposer"),
    ],
)
def test_invalid_values_are_refused_in_one_line(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
