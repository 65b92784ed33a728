"""`penstock simulate`: what a policy does to a trace, without a model and in a fraction of its time."""

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ..router.cost import Cost
from ..router.policies import ChunkedPrefill, Policy, WholePrefill
from ..router.scheduler import Bounds
from . import report, trace
from .machines import MACHINES, Speed
from .replay import Replay, Setting
from .trace import Request, Workload

EXAMPLES = """examples:
  penstock simulate                                 a thousand requests, 20 a second
  penstock simulate --poisson 60 --plot out.svg     more than it can take: see them wait
  penstock simulate --poisson 60 --policy pause     as TGI does it: decoding pauses while prompts are computed
  penstock simulate --trace azure.csv --hurry 3     a recorded trace, three times as fast
  penstock simulate --write trace.jsonl             the generated trace itself, to edit and to replay with --trace

The scheduler is the router's own; only the shards and the clock are simulated. Without another --seed the numbers are the same
every time. What a trace file looks like: the beginning of simulator/trace.py."""


class Parser(argparse.ArgumentParser):
    """An argument parser that reports mistakes in one line."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2."""
        self.exit(2, f"penstock simulate: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code; 2 for what the caller can mend."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        if options.itl_target and options.policy == "pause":
            raise ValueError("--itl-target is for --policy mixed: under pause, streams wait for whole prompts")
        if options.interactive + options.batch > 1:
            raise ValueError(
                f"--interactive {options.interactive:g} and --batch {options.batch:g} are shares of one: above 1 together"
            )
        requests = asked(options)
        if options.write:
            trace.write(requests, options.write)
            print(f"{len(requests)} requests over {requests[-1].arrival:.1f} s are in {options.write}")
            return 0
        if options.plot:
            report.plotter()  # before the work: it may be missing
    except OSError as error:
        parser.error(f"{error.filename or options.write or options.trace}: {error.strerror}")  # a full disk has no name
    except (ValueError, report.Missing) as error:
        parser.error(str(error))
    measures = Replay(setting(options), requests).run()
    print(json.dumps(measures.summary(), indent=2) if options.json else report.table(measures))
    if options.plot:
        try:
            report.plot({options.policy: measures}, options.plot)
        except ValueError as error:
            parser.error(f"--plot {options.plot}: {error}")
    return 0


def run() -> int:
    """Runs the command, without a traceback where it can't write. Returns the exit code."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # else Python would do so when it ends, with an error of its own
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed
        if isinstance(error, BrokenPipeError):  # `penstock simulate | head`
            return 0
        print(f"penstock simulate: error: {error.filename or 'stdout'} can't be written to ({error.strerror})", file=sys.stderr)
        return 1


def asked(options: argparse.Namespace) -> list[Request]:
    """The requests that are read or generated. Raises ValueError if there is none, or if one never comes."""
    if options.trace:
        requests = trace.read(options.trace)[: options.requests]
        if not requests:
            raise ValueError(f"{options.trace}: no request in it")
    else:
        try:
            requests = trace.generate(workload(options), options.seed)
        except ArithmeticError:
            raise ValueError("--poisson, --bursts or --waves is too near to 0 to reckon with, or a length too large") from None
    requests = trace.faster(requests, options.hurry)
    if not math.isfinite(requests[-1].arrival):
        raise ValueError("--poisson, --bursts or --hurry is so near to 0 that requests never come")
    return requests


def workload(options: argparse.Namespace) -> Workload:
    """The workload to generate."""
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Workload)}
    return Workload(**given | {"requests": options.requests or 1000})


def setting(options: argparse.Namespace) -> Setting:
    """The simulated server."""
    machine = MACHINES[options.machine]
    speed = options.cost or machine.speed
    bounds = Bounds(
        pages=options.kv_pages or max(1, machine.tokens // options.page_size),
        page_size=options.page_size,
        step_tokens=options.max_batch_prefill_tokens or machine.step_tokens,
        sequences=options.max_batch_size,
    )
    return Setting(
        speed=speed,
        bounds=bounds,
        policy=policy(options, speed, bounds),
        prefix_caching=options.prefix_caching == "on",
        concurrent=options.max_concurrent_requests,
        lookahead=options.lookahead == "on",
        ttft_goal=options.ttft_goal / 1e3,
        itl_goal=options.itl_goal / 1e3,
    )


def policy(options: argparse.Namespace, speed: Speed, bounds: Bounds) -> Policy:
    """The policy given by --policy. Its cost model starts from one measured step, as the router's does."""
    if options.policy == "pause":
        return WholePrefill(bounds.step_tokens, options.waiting_served_ratio, options.max_waiting_tokens)
    cost = Cost(bounds.step_tokens, speed.sample(bounds.step_tokens))
    return ChunkedPrefill(bounds.step_tokens, cost, options.itl_target / 1e3)


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 1 is needed")
    return int(text)


def limit(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: a whole number from 0 is needed")
    return int(text)


def between(least: float, most: float, above: bool = False) -> Callable[[str], float]:
    """A parser for numbers from `least`, or above it, up to `most`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most or (above and value == least):
            kind = f"a number above {least:g}" if above else f"a number from {least:g}"
            raise argparse.ArgumentTypeError(f"{text}: {kind}" + (f" to {most:g}" if most < 1e9 else "") + " is needed")
        return value

    return number


def speed(text: str) -> Speed:
    """Parses the five numbers of --cost."""
    try:
        step, token, prompt_key, decode_key, row = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: five numbers with commas between them are needed") from None
    if not all(0 <= each < math.inf for each in (step, token, prompt_key, decode_key, row)) or step + token <= 0:
        raise argparse.ArgumentTypeError(f"{text}: no number may be negative or without end, and a step takes time")
    return Speed(step, token, prompt_key, decode_key, row)


def make_parser() -> Parser:
    """All flags."""
    parser = Parser(
        prog="penstock simulate",
        description="Replays requests against the scheduler, in a fraction of their time, and shows how long clients would wait.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="penstock simulate [--trace FILE | --poisson RATE] [--policy mixed|pause] [--itl-target MS] [--plot FILE] [...]",
    )
    _trace_flags(parser)
    _length_flags(parser)
    _server_flags(parser)
    _result_flags(parser)
    return parser


def _trace_flags(parser: Parser) -> None:
    positive, share = between(0, 1e9, above=True), between(0, 1)
    group = parser.add_argument_group("which requests come when")
    either = group.add_mutually_exclusive_group()
    either.add_argument("--trace", type=Path, metavar="FILE", help="a recorded trace: our JSON lines, Azure's CSV, Mooncake's JSON")
    either.add_argument(
        "--poisson", dest="rate", type=positive, default=20.0, metavar="RATE", help="requests a second at random (default 20)"
    )
    group.add_argument("--requests", type=count, metavar="N", help="how many (default 1000, or all of the trace)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="another one, other requests (default 0)")
    group.add_argument(
        "--bursts",
        dest="burstiness",
        type=positive,
        default=1.0,
        metavar="CV",
        help="above 1: they come in bursts, below: more evenly (default 1)",
    )
    group.add_argument(
        "--waves", dest="wave", type=between(0, 1e9), default=0.0, metavar="S", help="all come in the first half of every S seconds"
    )
    group.add_argument("--hurry", type=positive, default=1.0, metavar="X", help="arrivals X times as fast (default 1)")
    group.add_argument("--system-prompts", type=limit, default=0, metavar="N", help="every prompt begins with one of N common ones")
    group.add_argument("--system-tokens", type=count, default=512, metavar="N", help="of each of them (default 512)")
    group.add_argument("--chat", type=share, default=0.0, metavar="SHARE", help="of requests that continue an earlier one")
    group.add_argument(
        "--think", type=between(0, 1e9), default=10.0, metavar="S", help="seconds until they do, at least (default 10)"
    )
    group.add_argument("--choices", type=count, default=1, metavar="N", help="half of them ask for up to N answers (default 1)")
    group.add_argument("--interactive", type=share, default=0.0, metavar="SHARE", help="of requests with this priority")
    group.add_argument("--batch", type=share, default=0.0, metavar="SHARE", help="of requests with this priority")
    group.add_argument("--tenants", type=count, default=1, metavar="N", help="who share the server fairly (default 1)")


def _length_flags(parser: Parser) -> None:
    group = parser.add_argument_group("how long they are (tokens, log-normal)")
    spread = between(0, 10)
    group.add_argument("--prompt", type=count, default=256, metavar="N", help="median (default 256)")
    group.add_argument("--prompt-spread", type=spread, default=1.0, metavar="X", help="sigma of the logarithm (default 1)")
    group.add_argument("--longest-prompt", type=count, default=4096, metavar="N", help="(default 4096)")
    group.add_argument("--output", type=count, default=128, metavar="N", help="median (default 128)")
    group.add_argument("--output-spread", type=spread, default=0.8, metavar="X", help="sigma of the logarithm (default 0.8)")
    group.add_argument("--longest-output", type=count, default=1024, metavar="N", help="(default 1024)")


def _server_flags(parser: Parser) -> None:
    group = parser.add_argument_group("the server (as in `penstock serve`)")
    group.add_argument("--policy", "--prefill-policy", choices=["mixed", "pause"], default="mixed", help="(default mixed)")
    group.add_argument("--itl-target", type=between(0, 1e9), default=0.0, metavar="MS", help="of mixed: milliseconds of a step")
    group.add_argument("--waiting-served-ratio", type=between(0, 1e9), default=0.3, metavar="X", help="of pause (default 0.3)")
    group.add_argument("--max-waiting-tokens", type=limit, default=20, metavar="N", help="of pause (default 20)")
    group.add_argument("--prefix-caching", choices=["on", "off"], default="on", help="(default on)")
    group.add_argument("--kv-pages", type=count, metavar="N", help="pages in the pool (default: by the machine)")
    group.add_argument("--page-size", type=count, default=16, metavar="N", help="tokens (default 16)")
    group.add_argument("--max-batch-prefill-tokens", type=count, metavar="N", help="tokens in a step (default: by the machine)")
    group.add_argument("--max-batch-size", type=count, default=256, metavar="N", help="sequences that run at once (default 256)")
    group.add_argument(
        "--max-concurrent-requests", type=limit, default=0, metavar="N", help="others are refused (default: none is)"
    )
    group.add_argument("--lookahead", choices=["on", "off"], default="on", help="ask for a step before the last one is answered")
    described = "; ".join(f"{name}: {machine.what}" for name, machine in MACHINES.items())
    group.add_argument("--machine", choices=list(MACHINES), default="8b-h200", help=f"how fast it is. {described}")
    group.add_argument(
        "--cost",
        type=speed,
        metavar="A,B,C,D,E",
        help="how fast it is, in seconds: a step takes A + B for each query token + C for each key that a prompt's token sees + "
        "D for each that a decode's token sees + E for each sampled token",
    )


def _result_flags(parser: Parser) -> None:
    group = parser.add_argument_group("what is shown")
    goal = between(0, 1e9, above=True)
    group.add_argument("--ttft-goal", type=goal, default=2000.0, metavar="MS", help="a good answer begins by then (default 2000)")
    group.add_argument("--itl-goal", type=goal, default=100.0, metavar="MS", help="and has a token that often (default 100)")
    group.add_argument("--json", action="store_true", help="numbers for programs, in seconds")
    group.add_argument("--plot", type=Path, metavar="FILE", help="a picture as well (.svg, .png); needs matplotlib")
    group.add_argument("--write", type=Path, metavar="FILE", help="write the requests there instead of simulating them")
