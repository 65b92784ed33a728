"""The flags of `penstock bench`, and what they mean together. Knows no network."""

import argparse
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from . import prompts
from .figures import Objective
from .load import Extent, Stage
from .prompts import Recorded, Synthetic
from .protocols import Api, OpenAI, Tgi
from .traffic import Arrivals, Lengths

DEFAULT_URL = "http://localhost:3000"
DEFAULT_SECONDS = 20.0
DEFAULT_PROMPT, DEFAULT_OUTPUT = "128", "64"
OF_CHAOS, OF_BOTH = ("chaos", "chaos_clients", "chaos_every", "serve"), ("seed", "json", "quiet")  # names of flags
EXAMPLES = """examples:
  penstock bench                                           8 clients, each asks again when it has its answer
  penstock bench --rate 1,2,4,8 --slo ttft=500ms,itl=50ms  open loop: Poisson arrivals, at rising rates
  penstock bench --concurrency 1,8,32 --requests 200 --html report.html
  penstock bench https://host/v1 --api openai-completions --prompt lognormal:800,0.7 --output uniform:16,256
  penstock bench --shared-prefix 1000 --prefixes 4         four system prompts of 1000 tokens
  penstock bench --dataset ShareGPT.json --rate 4
  penstock bench --chaos 120 --chaos-clients 200 --serve='--num-shard 2'

ttft: to the first token; itl: from each token to the next; tpot: mean of these in a request; e2e: to the last token. In an open
loop all count from the moment at which a request was to be sent. docs/benchmarking.md says more."""

Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the error, and exits with code 2."""
        self.exit(2, f"penstock bench: error: {message}\n")


def make_parser() -> Parser:
    """The parser of all flags."""
    width = min(118, shutil.get_terminal_size((120, 24)).columns - 2)
    parser = Parser(
        prog="penstock bench",
        usage="penstock bench [URL] [FLAG ...]",
        description="Loads a server that speaks OpenAI's API or text-generation-inference's, and says what its clients get.",
        epilog=EXAMPLES,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36, width=width),
        allow_abbrev=False,
    )
    _server_flags(parser)
    _load_flags(parser)
    _prompt_flags(parser)
    _chaos_flags(parser)
    _result_flags(parser)
    return parser


def _server_flags(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "url",
        type=checked(server),
        nargs="?",
        default=DEFAULT_URL,
        metavar="URL",
        help=f"of the server, with or without /v1 (default {DEFAULT_URL})",
    )
    add("--api", choices=("openai-chat", "openai-completions", "tgi"), default="openai-chat", help="(default openai-chat)")
    add("--model", default="", help="name of the model (default: the first that the server lists)")
    add("--api-key", default="", help="(default: API_KEY or OPENAI_API_KEY of the environment)")
    add("--insecure", action="store_true", help="take any certificate of https")


def _load_flags(parser: Parser) -> None:
    add = parser.add_argument_group("load").add_argument
    add("--rate", type=checked(numbers(positive)), default=[], metavar="X,...", help="open loop: requests a second, by stages")
    add("--arrivals", type=checked(Arrivals.parse), default=Arrivals("poisson"), help="poisson (default), constant or burst:SIZE")
    add("--max-in-flight", type=checked(count), default=0, metavar="N", help="open loop: more requests wait, and that counts")
    add(
        "--concurrency",
        type=checked(numbers(count)),
        default=[],
        metavar="N,...",
        help="closed loop: clients, by stages (default 8)",
    )
    add("--duration", type=checked(positive), metavar="SECONDS", help=f"of each stage (default {DEFAULT_SECONDS:g})")
    add("--requests", type=checked(count), metavar="N", help="of each stage, instead of a duration")
    add("--warm-up", type=checked(warm_up), default=0, metavar="N|Xs", help="requests or seconds before a stage counts")
    add("--timeout", type=checked(positive), default=600.0, metavar="SECONDS", help="of a request (default 600)")
    add("--seed", type=int, default=0, help="of arrivals, lengths and texts (default 0)")


def _prompt_flags(parser: Parser) -> None:
    add = parser.add_argument_group("what is asked").add_argument
    add(
        "--prompt",
        type=checked(Lengths.parse),
        metavar="LENGTHS",
        help=f"tokens: N, uniform:A,B, lognormal:MEDIAN,SIGMA ({DEFAULT_PROMPT})",
    )
    add("--output", type=checked(Lengths.parse), metavar="LENGTHS", help=f"tokens of the answer, likewise ({DEFAULT_OUTPUT})")
    add(
        "--shared-prefix", type=checked(count), default=0, metavar="N", help="tokens at the beginning of a prompt that others share"
    )
    add("--prefixes", type=checked(count), default=1, metavar="N", help="how many such beginnings there are (default 1)")
    add("--dataset", type=Path, metavar="FILE", help='JSON lines with "prompt" or "messages", or ShareGPT\'s conversations')
    add("--temperature", type=float, metavar="X", help="(default 0)")
    add("--stop-at-eos", action="store_true", help="answers may be shorter than asked: do not send ignore_eos")
    add(
        "--field",
        type=checked(field),
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="also in every body; may be repeated; what is no JSON is a text",
    )
    add("--continuous-usage", action="store_true", help="ask for the number of tokens with each event (vLLM, penstock)")


def _chaos_flags(parser: Parser) -> None:
    what = "which it starts: URL, load and what is asked are not for it"
    add = parser.add_argument_group("faults, to a server of its own", what).add_argument
    add("--chaos", type=checked(positive), metavar="SECONDS", help="kill and stop shards under load; are all answers the same?")
    add("--chaos-clients", type=checked(count), default=30, metavar="N", help="who ask again and again (default 30)")
    add(
        "--chaos-every",
        type=checked(from_zero),
        default=5.0,
        metavar="SECONDS",
        help="from ready to the next fault, on average (default 5); 0: none, a soak",
    )
    add(
        "--serve", default="", metavar="FLAGS", help="of that `penstock serve`, with the model among them (default: the demo model)"
    )


def _result_flags(parser: Parser) -> None:
    add = parser.add_argument_group("what is reported").add_argument
    add(
        "--slo",
        type=checked(Objective.parse),
        metavar="ttft=T,itl=T",
        help="goodput: requests that keep ttft, itl (p99), tpot, e2e",
    )
    add("--json", type=Path, metavar="FILE", help="every figure and every request")
    add("--html", type=Path, metavar="FILE", help="a page with charts, in one file")
    add("--quiet", action="store_true", help="no progress")


def checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """The function with its ValueError turned into an argparse error."""

    def convert(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def numbers(kind: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """A parser of several values separated by commas."""
    return lambda text: [kind(part.strip()) for part in text.split(",")]


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{text}: a number above 0 is needed")
    return value


def from_zero(text: str) -> float:
    """A number from 0."""
    with suppress(ValueError):
        if float(text) == 0:
            return 0.0
    return positive(text)


def count(text: str) -> int:
    """A whole number from 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ValueError(f"{text}: a whole number from 1 is needed")
    return int(text)


def at_least(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least`, which is 1 or more."""

    def parse(text: str) -> int:
        if (value := count(text)) < least:
            raise ValueError(f"{text}: a whole number from {least} on is needed")
        return value

    return parse


def warm_up(text: str) -> float | int:
    """ "5s", or a number of requests."""
    return positive(text.removesuffix("s")) if text.endswith("s") else count(text)


def server(text: str) -> str:
    """A server's URL, in the forms that `penstock top` takes."""
    full = text if "://" in text else f"http://{text}"
    with suppress(ValueError):  # the port is no number, a bracket is missing, no host can have such a name
        parts = urlsplit(full)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.hostname.encode("idna"):
            return full
    raise ValueError(f"{text} is no URL of a server: http://HOST:PORT is needed")


def field(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value as JSON, or else a text."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise ValueError(f"{text}: NAME=VALUE is needed")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        if value.startswith(("{", "[", '"')):
            raise ValueError(f"{text}: this begins like JSON, and is none") from None
        return name, value


def api_of(options: argparse.Namespace) -> Api:
    """The API that --api names."""
    if options.api == "tgi":
        return Tgi()
    return OpenAI(options.api == "openai-chat", not options.stop_at_eos, options.continuous_usage)


def fields_of(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of every body besides the prompt and the number of tokens."""
    fields = dict(options.field)
    if options.temperature is not None:
        fields = {"temperature": options.temperature, **fields}
    elif options.api != "tgi":  # which is greedy unless it is asked to sample
        fields = {"temperature": 0, **fields}
    return fields


def stages_of(options: argparse.Namespace) -> list[Stage]:
    """The stages of --rate or --concurrency, before they are run."""
    return [Stage("rate", rate) for rate in options.rate] or [Stage("concurrency", n) for n in options.concurrency or [8]]


def extent_of(options: argparse.Namespace) -> Extent:
    """The extent that --duration, --requests and --warm-up set."""
    warm = options.warm_up
    return Extent(
        seconds=0.0 if options.requests else options.duration or DEFAULT_SECONDS,
        requests=options.requests or 0,
        warm_seconds=warm if isinstance(warm, float) else 0.0,
        warm_requests=warm if isinstance(warm, int) else 0,
        drain=options.timeout,
    )


def source_of(options: argparse.Namespace) -> Synthetic | Recorded:
    if options.dataset is None:
        prompt, output = options.prompt or Lengths.parse(DEFAULT_PROMPT), options.output or Lengths.parse(DEFAULT_OUTPUT)
        if options.shared_prefix and prompt.kind == "fixed" and options.shared_prefix >= prompt.first:
            if options.prompt is not None:
                raise ValueError(f"--shared-prefix {options.shared_prefix} leaves nothing of its own to --prompt {prompt}")
            prompt = Lengths("fixed", options.shared_prefix + prompt.first)
        return Synthetic(prompt, output, options.shared_prefix, options.prefixes)
    if options.prompt is not None or options.shared_prefix:
        raise ValueError("--dataset brings its own prompts: leave --prompt and --shared-prefix away")
    return prompts.read(options.dataset, options.output, int(DEFAULT_OUTPUT))


def asked_of(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that affect the figures, as text or numbers; never the key."""
    names = ("arrivals", "duration", "requests", "warm_up", "prompt", "output", "shared_prefix", "prefixes", "dataset", "seed")
    given = {name: getattr(options, name) for name in (*names, "max_in_flight", "temperature", "stop_at_eos", "slo")}
    return {name: value if isinstance(value, int | float | bool) else str(value) for name, value in given.items() if value}


def without_effect(parser: Parser, options: argparse.Namespace) -> str:
    """An error message about the first flag that would have no effect, with or without --chaos; "" if there is none."""
    names = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    if options.chaos:
        idle = [name for name in names if name not in (*OF_CHAOS, *OF_BOTH)]
        return f"--chaos has a server and a load of its own: leave {_flag(idle[0])} out" if idle else ""
    idle = [name for name in names if name in OF_CHAOS]
    return f"{_flag(idle[0])} is for --chaos SECONDS" if idle else ""


def _flag(name: str) -> str:
    return "URL" if name == "url" else "--" + name.replace("_", "-")
