"""Settings of speculative decoding, the value of `--speculate`: parsed by the launcher, and again by the shards. Standard library
only.

    3                                       n-gram lookup, 3 drafts: as TGI's integer
    ngram=8                                 the same, 8 drafts
    draft=PATH,tokens=4                     a draft model, or draft heads; a chain of 4
    draft=mtp,tokens=2                      the model's own layer for multi-token prediction (MTP)
    draft=PATH,tree=4x2x2x1                 a tree: 4 children of the last token, 2 of each of these, ...
    draft=PATH,nodes=16,ngram=8             the 16 most probable nodes, merged into one tree with n-gram drafts
    draft=PATH,tokens=4,verify=rejection    by another rule than `gumbel`

A path has no commas.
"""

from dataclasses import dataclass
from itertools import accumulate

MOST_DRAFTS = 127  # of a sequence in a step: with its last token they are the 128 nodes that attention has mask bits for
OWN = "mtp"  # in place of a draft model: the model's own layer for multi-token prediction
RULES = ("gumbel", "rejection", "typical")
LOSSY = ("typical",)  # rules that change the output distribution
SHAPES = ("tokens", "tree", "nodes")
DRAFT_TOKENS = 4  # default length of a draft model's chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How many tokens are drafted for each sequence in a step, at most, by what, and the rule that verifies them."""

    draft: str = ""  # draft model: the launcher gets a name or a path, the shards a folder, or both `OWN`; "": none
    widths: tuple[int, ...] = ()  # widths of the draft model's tree, layer by layer; a chain of k is k times 1
    nodes: int = 0  # size of its tree, if that grows the most probable nodes first
    ngram: int = 0  # drafts by n-gram lookup
    verify: str = RULES[0]

    @property
    def grown(self) -> int:
        """Drafts of the draft model."""
        return self.nodes or sum(accumulate(self.widths, lambda count, width: count * width))

    @property
    def chain(self) -> bool:
        """Whether drafts always form a chain, and never a tree."""
        return self.nodes <= 1 and max(self.widths, default=1) == 1 and not (self.draft and self.ngram)

    @property
    def most(self) -> int:
        """Drafts of a sequence in a step."""
        return min(self.grown + self.ngram, MOST_DRAFTS)


NOTHING = Speculation()


def parse(text: str) -> Speculation:
    """The inverse of `written`. Raises ValueError, in one line with the remedy."""
    if text.isascii() and text.isdigit():
        text = f"ngram={text}"
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not value or key not in ("draft", *SHAPES, "ngram", "verify"):
            raise ValueError(
                f"{part.strip()!r} is no whole number, and none of draft=PATH, tokens=K, tree=4x2x2x1, nodes=N, ngram=K, "
                f"verify={'|'.join(RULES)}"
            )
        if key in values:
            raise ValueError(f"{key}= comes twice: say it once")
        values[key] = value
    return _checked(values)


def says_shape(text: str) -> bool:
    """Whether the text gives the shape of the draft model's drafts. text: as of `parse`."""
    return any(part.strip().partition("=")[0] in SHAPES for part in text.split(","))


def _checked(values: dict[str, str]) -> Speculation:
    shapes = [key for key in SHAPES if key in values]
    if shapes and "draft" not in values:
        raise ValueError(f"{shapes[0]}= is the shape of a draft model's drafts: add draft=PATH, or take ngram=K, which needs none")
    if len(shapes) > 1:
        raise ValueError(f"{shapes[0]}= and {shapes[1]}= exclude each other: tokens=K is a chain, tree= and nodes= are trees")
    verify = values.get("verify", RULES[0])
    if verify not in RULES:
        raise ValueError(f"verify={verify} is not known: take {', '.join(RULES)}")
    widths: tuple[int, ...] = ()
    if "tree" in values:
        widths = tuple(_number("tree", part, 1) for part in values["tree"].split("x"))
    elif "draft" in values and "nodes" not in values:
        widths = (1,) * _number("tokens", values.get("tokens", str(DRAFT_TOKENS)), 1)
    nodes = _number("nodes", values["nodes"], 1) if "nodes" in values else 0
    ngram = _number("ngram", values.get("ngram", "0"), 0)
    found = Speculation(draft=values.get("draft", ""), widths=widths, nodes=nodes, ngram=ngram, verify=verify)
    if found.grown > MOST_DRAFTS:
        raise ValueError(f"a tree of {found.grown} drafts is too large: {MOST_DRAFTS} is the most")
    if verify == "rejection" and nodes:
        raise ValueError("verify=rejection needs a shape that doesn't depend on what is drawn: take tokens=K or tree=, not nodes=N")
    if verify == "rejection" and widths and ngram:
        raise ValueError("verify=rejection takes one proposer: drop ngram=, or take verify=gumbel")
    return found


def _number(key: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= MOST_DRAFTS:
        raise ValueError(f"{key}={text!r} must have whole numbers from {least} to {MOST_DRAFTS}")
    return int(text)


def written(speculation: Speculation) -> str:
    """As a value of `--speculate`; "" if nothing is drafted."""
    parts = []
    if speculation.draft:
        parts.append(f"draft={speculation.draft}")
        parts.append(f"nodes={speculation.nodes}" if speculation.nodes else f"tree={'x'.join(map(str, speculation.widths))}")
    if speculation.ngram:
        parts.append(f"ngram={speculation.ngram}")
    return ",".join([*parts, f"verify={speculation.verify}"]) if parts else ""
