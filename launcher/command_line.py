"""Command-line parsing: flags and environment variables become `Options`; also the help. Raises UsageError, in one line."""

import argparse
import dataclasses
import difflib
import importlib.metadata
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from . import option_types
from .errors import UsageError
from .options import BATCHING, CHATS, COMPUTE, FIELDS, HTTP, MODEL, NODES, REQUESTS, Options, check, flag
from .tgi_flags import IGNORED, REFUSED

LONGEST = 60  # characters of choices that stand where a value does: longer ones fit on no line


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as a one-line UsageError."""

    def error(self, message: str) -> NoReturn:
        if switch := re.fullmatch(r"argument (\S+): ignored explicit argument '(.*)'", message):
            raise UsageError(f"{switch[1]}={switch[2]}: a switch takes no value: write {switch[1]}, or leave it out")
        raise UsageError(f"{message} ({self.prog} --help lists what there is)")


class Joined(argparse.Action):
    """The action of a flag that may be given several times: its values joined by `const`."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        """See argparse."""
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before}{self.const}{values}")


class Formatter(argparse.HelpFormatter):
    """A help formatter that takes up to 118 columns, in which most flags fit on a line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(118, shutil.get_terminal_size((120, 24)).columns - 2))

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Flags and values are not broken at their hyphens."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def add_version(parser: argparse.ArgumentParser) -> None:
    """Adds the --version flag that every command has."""
    parser.add_argument("--version", action="version", version=f"penstock {importlib.metadata.version('penstock')}")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds every flag, in groups, and the positional MODEL."""
    add_version(parser)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="folder or hub id (default: the embedded demo model)")
    groups = {title: parser.add_argument_group(title) for title in (MODEL, REQUESTS, CHATS, BATCHING, COMPUTE, NODES, HTTP)}
    for name, field in FIELDS.items():
        details = field.metadata
        group = groups[details["group"]]
        names = [details["short"], flag(name)] if details["short"] else [flag(name)]
        default = "" if field.default in (0, "", None) else f" (default: {field.default})"
        metavar = (
            "{" + ",".join(details["choices"]) + "}" if details["choices"] else option_types.METAVARS.get(details["kind"], "TEXT")
        )
        listed = ""
        if len(metavar) > LONGEST:
            metavar, listed = "NAME", f". One of {', '.join(details['choices'])}"
        help = (details["help"] + listed + default).replace("%", "%%")
        if details["switch"]:
            group.add_argument(*names, dest=name, action="store_const", const="true", help=help)
            continue
        several: dict[str, Any] = {"action": Joined, "const": ";"} if details["kind"] is option_types.rank_groups else {}
        group.add_argument(*names, dest=name, metavar=metavar, help=help, **several)
        if details["also"]:
            group.add_argument(flag(details["also"]), dest=details["also"], help=argparse.SUPPRESS)


def stripped(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without whitespace around values: files that become variables, such as mounted secrets, end with a newline. A
    value of whitespace alone stays: it is a mistake, and must not pass as unset."""
    return {name: text.strip() or text for name, text in environment.items()}


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """The options from the command line, and from the environment where the command line is silent. Raises UsageError."""
    values, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise UsageError(_unknown(parser.prog, unknown))
    if "" in (values.model, values.model_id):  # a variable that is not set, in a script
        raise UsageError("MODEL is empty: name a folder or a hub id, or leave it out for the embedded demo model")
    given: dict[str, Any] = {}
    environment = stripped(environment)
    for name, field in FIELDS.items():
        sources = [(flag(spelling), getattr(values, spelling, None)) for spelling in _spellings(field)]
        if field.metadata["environment"] and not any(text is not None for _, text in sources):
            sources = [(spelling.upper(), environment.get(spelling.upper()) or None) for spelling in _spellings(field)]
            if name == "hostname":
                sources = [(source, text) for source, text in sources if text and _is_address(text)]
        found = [(source, text) for source, text in sources if text is not None]
        if len(found) > 1:
            raise UsageError(f"{found[0][0]} and {found[1][0]} mean the same: set one of them")
        if found:
            given[name] = _value(field, *found[0])
    if values.model:
        if values.model_id not in (None, values.model):
            raise UsageError(f"MODEL says {values.model} and --model-id says {values.model_id}: give one of them")
        given["model_id"] = values.model
    return check(Options(**given))


def _spellings(field: "dataclasses.Field[Any]") -> list[str]:
    return [field.name, field.metadata["also"]] if field.metadata["also"] else [field.name]


def _is_address(text: str) -> bool:
    try:
        option_types.address(text)
    except ValueError:
        return False
    return True


def _value(field: "dataclasses.Field[Any]", source: str, text: str) -> Any:
    """`text` as the field's type. `source`: the flag or variable, for the error message. Raises UsageError."""
    choices = field.metadata["choices"]
    if not text and field.metadata["kind"] is str:  # other kinds have their own words for it
        raise UsageError(f"{source} is empty: give it a value, or leave it out")
    if choices and text not in choices:
        raise UsageError(f"{source}={text}: one of {', '.join(choices)} is needed")
    try:
        return (option_types.boolean if field.metadata["switch"] else field.metadata["kind"])(text)
    except ValueError as error:
        # What was mistyped may be most of a key.
        secret = field.metadata["kind"] is option_types.keys and option_types.keys_of(text)
        raise UsageError(f"{source}={'...' if secret else ' '.join(text.split())}: {error}") from None


def _unknown(program: str, arguments: Sequence[str]) -> str:
    """An error message about the first of `arguments`, with the flag that was probably meant."""
    name = arguments[0].partition("=")[0]
    if not name.startswith("-"):
        return f"{arguments[0]} is one argument too many: {program} takes one MODEL"
    if name in map(flag, (*IGNORED, *REFUSED)):  # someone migrating from TGI is not pointed to a flag that only looks alike
        return f"{name} is text-generation-inference's, penstock has no such flag ({program} --help lists what there is)"
    spellings = [flag(spelling) for field in FIELDS.values() for spelling in _spellings(field)]
    return f"no flag {name}{did_you_mean(name, [*spellings, '--version'], program)}"


def did_you_mean(name: str, known: Iterable[str], program: str) -> str:
    """The end of an error message about an unknown name: a similar known one, or how to list them."""
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return f": did you mean {close[0]}?" if close else f" ({program} --help lists what there is)"
