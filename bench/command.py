"""`penstock bench`: loads a server that speaks OpenAI's API or text-generation-inference's, and says what its clients get."""

import argparse
import asyncio
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console

from . import chaos, page, prompts, tables
from .client import CLOCK, Client, Unreachable
from .figures import Figures, Objective, figures
from .load import Extent, Load, Stage
from .local import Failed
from .prompts import Prompt, Recorded, Scale, Synthetic
from .protocols import Api, OpenAI, Tgi
from .record import Record
from .traffic import Arrivals, Lengths

DEFAULT_URL = "http://localhost:3000"
DEFAULT_SECONDS = 20.0
INTERRUPTED = 130  # exit code, as shells have it
DEFAULT_PROMPT, DEFAULT_OUTPUT = "128", "64"
OF_CHAOS, OF_BOTH = ("chaos", "chaos_clients", "chaos_every", "serve"), ("seed", "json", "quiet")  # flags
FEW, MANY = 8, 136  # words of the two prompts that measure how many tokens a word has
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
    """Mistakes are one line."""

    def error(self, message: str) -> NoReturn:
        """Exit code 2."""
        self.exit(2, f"penstock bench: error: {message}\n")


def main(arguments: Sequence[str], key: Callable[[str], str] = str) -> int:
    """Runs the command. key: what a server is shown, by what `--api-key` gives.

    Returns the exit code: 1 if a stage had no answer, 2 for what the caller can mend, 130 after Ctrl-C.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    if idle := _idle(parser, options):
        parser.error(idle)
    if options.chaos:
        return _chaos(parser, options)
    options.api_key = key(options.api_key)
    with ExitStack() as stack:
        try:
            source = _source(options)
            if options.requests and options.duration:
                raise ValueError("--requests and --duration exclude each other")
            if options.concurrency and options.rate:
                raise ValueError("--concurrency and --rate exclude each other: one is a closed loop, the other an open one")
            stack.enter_context(_places([path for path in (options.json, options.html) if path]))
        except OSError as mistake:
            parser.error(f"{mistake.filename}: {mistake.strerror}")
        except ValueError as mistake:
            parser.error(str(mistake))
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                result = runner.run(_measure(options, source, Console(stderr=True, quiet=options.quiet)))
        except Unreachable as mistake:
            parser.error(str(mistake))
        except KeyboardInterrupt:
            result = {"stages": []}
        return _told(options, result)


def _idle(parser: Parser, options: argparse.Namespace) -> str:
    """A complaint about the first flag that would have no effect, with or without --chaos; "" if there is none."""
    names = [name for name, value in vars(options).items() if value != parser.get_default(name)]
    if options.chaos:
        idle = [name for name in names if name not in (*OF_CHAOS, *OF_BOTH)]
        return f"--chaos has a server and a load of its own: leave {_flag(idle[0])} out" if idle else ""
    idle = [name for name in names if name in OF_CHAOS]
    return f"{_flag(idle[0])} is for --chaos SECONDS" if idle else ""


def _flag(name: str) -> str:
    return "URL" if name == "url" else "--" + name.replace("_", "-")


def _told(options: argparse.Namespace, result: dict[str, Any]) -> int:
    """The exit code."""
    found, asked = result["stages"], len(stages_of(options))
    if found:
        if options.json:
            options.json.write_text(json.dumps(result, indent=1))
        if options.html:
            options.html.write_text(page.render(result), encoding="utf-8")
        out = Console(width=None if sys.stdout.isatty() else 132, highlight=False)
        out.print(tables.overview(found))
        for line in tables.remarks(found):
            out.print(line, style="yellow", markup=False, soft_wrap=True)
    partial = sum(stage["partial"] for stage in found)
    if len(found) - partial < asked:
        rest = ", and the next in part" if partial else ""
        print(f"penstock bench: interrupted: {len(found) - partial} of {asked} stages were measured{rest}", file=sys.stderr)
        return INTERRUPTED
    return int(not all(stage["requests"]["answered"] for stage in found))


@contextmanager
def _places(paths: Sequence[Path]) -> Iterator[None]:
    """Tries before the work that they can be written: a folder may be missing. Files that this has made and nobody filled are
    gone in the end. Raises OSError."""
    made = [path for path in paths if not path.exists()]
    try:
        for path in paths:
            path.open("a").close()
        yield
    finally:
        for path in made:
            if path.exists() and not path.stat().st_size:
                path.unlink()


def _chaos(parser: Parser, options: argparse.Namespace) -> int:
    plan = chaos.Plan(options.chaos, options.chaos_clients, options.chaos_every, options.seed)
    try:
        return chaos.main(plan, shlex.split(options.serve), options.json, Console(stderr=True, quiet=options.quiet))
    except (Failed, OSError, ValueError) as mistake:
        parser.error(str(mistake))


async def _measure(options: argparse.Namespace, source: Synthetic | Recorded, console: Console) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    headers["Accept-Encoding"] = "identity"  # what is packed comes in bunches
    connector = aiohttp.TCPConnector(limit=0, ssl=not options.insecure)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        client = Client(session, options.url, api_of(options), fields_of(options), options.timeout)
        model = options.model or await client.model()
        client.named(model)
        scale = await _scale(client, options.seed)
        stages, extent = stages_of(options), extent_of(options)
        found: list[Figures] = []
        for index, stage in enumerate(stages):
            seed = options.seed + 1000 * index  # other prompts in each stage, or the second would find the first one's in a cache
            load = Load(client, source.prompts(seed, scale), extent, options.arrivals, seed)
            position = f"[{index + 1}/{len(stages)}]" if len(stages) > 1 else ""
            watching = asyncio.create_task(tables.watch(console, stage, client, extent, position))
            try:
                await load.run(stage, options.max_in_flight)
            except asyncio.CancelledError:  # Ctrl-C: what was measured before is told
                if stage.counted:
                    found.append(figures(stage, options.slo))
                break
            finally:
                watching.cancel()
                await asyncio.wait([watching])
            found.append(figures(stage, options.slo))
    told = {"url": options.url, "api": options.api, "model": model, "prompt_scale": [scale.fixed, scale.word]}
    return {"asked": {**told, **_asked(options)}, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "stages": found}


async def _scale(client: Client, seed: int) -> Scale:
    """Asks twice, which also shows that the server answers at all. Raises Unreachable."""
    measured = []
    dice = random.Random(seed)
    for count in (FEW, MANY):
        record = Record(CLOCK())
        await client.ask(Prompt(" ".join(prompts.words(dice, count)), 2), record)
        if record.error:
            raise Unreachable(f"the first request failed: {record.error}: {record.detail}")
        measured.append((count, record.prompt_tokens))
    if not measured[0][1] or measured[1][1] <= measured[0][1]:
        return Scale()  # it does not say how long prompts are
    return Scale.of((measured[0], measured[1]))


def api_of(options: argparse.Namespace) -> Api:
    """What --api says."""
    if options.api == "tgi":
        return Tgi()
    return OpenAI(options.api == "openai-chat", not options.stop_at_eos, options.continuous_usage)


def fields_of(options: argparse.Namespace) -> dict[str, Any]:
    """What is in every body beside the prompt and the number of tokens."""
    fields = dict(options.field)
    if options.temperature is not None:
        fields = {"temperature": options.temperature, **fields}
    elif options.api != "tgi":  # which is greedy unless it is told to sample
        fields = {"temperature": 0, **fields}
    return fields


def stages_of(options: argparse.Namespace) -> list[Stage]:
    """What --rate or --concurrency say, before they are run."""
    return [Stage("rate", rate) for rate in options.rate] or [Stage("concurrency", n) for n in options.concurrency or [8]]


def extent_of(options: argparse.Namespace) -> Extent:
    """What --duration, --requests and --warm-up say."""
    warm = options.warm_up
    return Extent(
        seconds=0.0 if options.requests else options.duration or DEFAULT_SECONDS,
        requests=options.requests or 0,
        warm_seconds=warm if isinstance(warm, float) else 0.0,
        warm_requests=warm if isinstance(warm, int) else 0,
        drain=options.timeout,
    )


def _source(options: argparse.Namespace) -> Synthetic | Recorded:
    if options.dataset is None:
        prompt, output = options.prompt or Lengths.parse(DEFAULT_PROMPT), options.output or Lengths.parse(DEFAULT_OUTPUT)
        if options.shared_prefix and prompt.kind == "fixed" and options.shared_prefix >= prompt.first:
            prompt = Lengths("fixed", options.shared_prefix + prompt.first) if options.prompt is None else prompt
        if options.shared_prefix and prompt.kind == "fixed" and options.shared_prefix >= prompt.first:
            raise ValueError(f"--shared-prefix {options.shared_prefix} leaves nothing of its own to --prompt {prompt}")
        return Synthetic(prompt, output, options.shared_prefix, options.prefixes)
    if options.prompt is not None or options.shared_prefix:
        raise ValueError("--dataset brings its own prompts: leave --prompt and --shared-prefix away")
    return prompts.read(options.dataset, options.output, int(DEFAULT_OUTPUT))


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    """What of the flags bears on the figures, as text or numbers; never the key."""
    names = ("arrivals", "duration", "requests", "warm_up", "prompt", "output", "shared_prefix", "prefixes", "dataset", "seed")
    given = {name: getattr(options, name) for name in (*names, "max_in_flight", "temperature", "stop_at_eos", "slo")}
    return {name: value if isinstance(value, int | float | bool) else str(value) for name, value in given.items() if value}


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def checked(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Its ValueError, in argparse's words."""

    def convert(text: str) -> Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def numbers(kind: Callable[[str], Value]) -> Callable[[str], list[Value]]:
    """Several with commas between them."""
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
    return 0.0 if text == "0" else positive(text)


def count(text: str) -> int:
    """A whole number from 1."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ValueError(f"{text}: a whole number from 1 is needed")
    return int(text)


def warm_up(text: str) -> float | int:
    """ "5s", or a number of requests."""
    return positive(text.removesuffix("s")) if text.endswith("s") else count(text)


def server(text: str) -> str:
    """A URL, as `penstock top` takes it."""
    full = text if "://" in text else f"http://{text}"
    parts = urlsplit(full)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        good = False
    if not good:
        raise ValueError(f"{text} is no URL of a server: http://HOST:PORT is needed")
    return full


def field(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value as JSON, or else a text."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise ValueError(f"{text}: NAME=VALUE is needed")
    try:
        return name, json.loads(value)
    except ValueError:
        if value.startswith(("{", "[", '"')):
            raise ValueError(f"{text}: this begins like JSON, and is none") from None
        return name, value


def make_parser() -> Parser:
    """All flags."""
    parser = Parser(
        prog="penstock bench",
        usage="penstock bench [URL] [FLAG ...]",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=36, width=118),
        allow_abbrev=False,
    )
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
    load = parser.add_argument_group("load")
    add = load.add_argument
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
    asked = parser.add_argument_group("what is asked")
    add = asked.add_argument
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
    faults = parser.add_argument_group(
        "faults, to a server of its own", "which it starts: URL, load and what is asked are not for it"
    )
    add = faults.add_argument
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
    told = parser.add_argument_group("what is told")
    add = told.add_argument
    add(
        "--slo",
        type=checked(Objective.parse),
        metavar="ttft=T,itl=T",
        help="goodput: requests that keep ttft, itl (p99), tpot, e2e",
    )
    add("--json", type=Path, metavar="FILE", help="every figure and every request")
    add("--html", type=Path, metavar="FILE", help="a page with charts, in one file")
    add("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
