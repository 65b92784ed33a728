"""`penstock bench`: measures the latency and throughput of a server with OpenAI's API or text-generation-inference's."""

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
from typing import Any

import aiohttp
from rich.console import Console

from . import chaos, page, prompts, tables
from .chaos_report import Plan
from .client import CLOCK, Client, Unreachable
from .figures import Figures, figures
from .flags import Parser, api_of, asked_of, extent_of, fields_of, make_parser, source_of, stages_of, without_effect
from .load import Load
from .local_server import Failed
from .prompts import Prompt, Recorded, Synthetic, TokenScale
from .record import Record

INTERRUPTED = 130  # exit code, as in shells
FEW, MANY = 8, 136  # words of the two prompts that measure how many tokens a word has


def main(arguments: Sequence[str], key: Callable[[str], str] = str) -> int:
    """Runs the command. key: the API key to send, given the value of `--api-key`.

    Returns the exit code: 1 if a stage had no answer, 2 for errors that the caller can correct, 130 after Ctrl-C.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    if idle := without_effect(parser, options):
        parser.error(idle)
    if options.chaos:
        return _chaos(parser, options, key(""))
    options.api_key = key(options.api_key)
    with ExitStack() as stack:
        try:
            source = source_of(options)
            if options.requests and options.duration:
                raise ValueError("--requests and --duration exclude each other")
            if options.concurrency and options.rate:
                raise ValueError("--concurrency and --rate exclude each other: one is a closed loop, the other an open one")
            if options.json and options.json == options.html:
                raise ValueError(f"--json and --html both name {options.json}: choose another name for one of them")
            stack.enter_context(_places([path for path in (options.json, options.html) if path]))
        except OSError as error:
            parser.error(f"{error.filename}: {error.strerror}")
        except ValueError as error:
            parser.error(str(error))
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                result = runner.run(_measure(options, source, Console(stderr=True, quiet=options.quiet)))
        except Unreachable as error:
            parser.error(str(error))
        except KeyboardInterrupt:
            result = {"stages": []}
        return _told(options, result)


def _told(options: argparse.Namespace, result: dict[str, Any]) -> int:
    """Prints and writes the results. Returns the exit code."""
    found, asked = result["stages"], len(stages_of(options))
    if found:
        out = Console(width=None if sys.stdout.isatty() else 132, highlight=False)
        out.print(tables.overview(found))
        for line in tables.remarks(found):
            out.print(line, style="yellow", markup=False, soft_wrap=True)
        if options.json:
            _write(options.json, json.dumps(result, indent=1))
        if options.html:
            _write(options.html, page.render(result))
    partial = sum(stage["partial"] for stage in found)
    if len(found) - partial < asked:
        rest = ", and the next in part" if partial else ""
        print(f"penstock bench: interrupted: {len(found) - partial} of {asked} stages were measured{rest}", file=sys.stderr)
        return INTERRUPTED
    return int(not all(stage["requests"]["answered"] for stage in found))


def _write(path: Path, text: str) -> None:
    """Raises OSError with the file's name, which Python leaves out where a disk is full."""
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # names of files may be no UTF-8
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def _places(paths: Sequence[Path]) -> Iterator[None]:
    """Checks before the measurement that the files can be written. Files that this has created and that stay empty are removed in
    the end. Raises OSError."""
    made = [path for path in paths if not path.exists()]
    try:
        for path in paths:
            path.open("a").close()
        yield
    finally:
        for path in made:
            if path.exists() and not path.stat().st_size:
                path.unlink()


def _chaos(parser: Parser, options: argparse.Namespace, key: str) -> int:
    plan = Plan(options.chaos, options.chaos_clients, options.chaos_every, options.seed)
    try:
        with _places([options.json] if options.json else []):
            return chaos.main(plan, shlex.split(options.serve), options.json, Console(stderr=True, quiet=options.quiet), key)
    except (Failed, OSError, ValueError, aiohttp.ClientError) as error:
        parser.error(str(error))


async def _measure(options: argparse.Namespace, source: Synthetic | Recorded, console: Console) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    headers["Accept-Encoding"] = "identity"  # compressed data comes in bursts
    connector = aiohttp.TCPConnector(limit=0, ssl=not options.insecure)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        client = Client(session, options.url, api_of(options), fields_of(options), options.timeout)
        model = options.model or await client.model()
        client.named(model)
        scale = await _scale(client, options.seed)
        stages, extent = stages_of(options), extent_of(options)
        found: list[Figures] = []
        for index, stage in enumerate(stages):
            # other prompts in each stage, or the second would find the first one's in the prefix cache
            seed = options.seed + 1000 * index
            load = Load(client, source.prompts(seed, scale), extent, options.arrivals, seed)
            position = f"[{index + 1}/{len(stages)}]" if len(stages) > 1 else ""
            watching = asyncio.create_task(tables.watch(console, stage, client, extent, position))
            try:
                await load.run(stage, options.max_in_flight)
            except asyncio.CancelledError:  # Ctrl-C: what was measured before is reported
                if stage.counted:
                    found.append(figures(stage, options.slo))
                break
            finally:
                watching.cancel()
                await asyncio.wait([watching])
            found.append(figures(stage, options.slo))
    target = {"url": options.url, "api": options.api, "model": model, "prompt_scale": [scale.fixed, scale.word]}
    return {"asked": {**target, **asked_of(options)}, "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "stages": found}


async def _scale(client: Client, seed: int) -> TokenScale:
    """Measures the TokenScale by two requests, which also show that the server answers. Raises Unreachable."""
    measured = []
    dice = random.Random(seed)
    for count in (FEW, MANY):
        record = Record(CLOCK())
        await client.ask(Prompt(" ".join(prompts.words(dice, count)), 2), record)
        if record.error:
            raise Unreachable(f"the first request failed: {record.error}: {record.detail}")
        measured.append((count, record.prompt_tokens))
    if not measured[0][1] or measured[1][1] <= measured[0][1]:
        return TokenScale()  # the server does not count prompt tokens
    return TokenScale.of((measured[0], measured[1]))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
