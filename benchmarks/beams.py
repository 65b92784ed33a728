"""Beam search in the running batch: against greedy decoding of as many sequences, transformers, and clients that do it themselves.

    python benchmarks/beams.py                     the embedded demo model
    python benchmarks/beams.py --large             random weights, 200 million parameters
    python benchmarks/beams.py --device cuda       on a GPU, by the clock on the wall

8 prompts, width 4. Machines are shared, so on a CPU CPU time is measured, of the server's whole process tree or of this process,
with one compute thread; --wall measures what people wait for. Ways take turns and medians are printed. Greedy decoding is compared
by what tokens cost after the prompt, the difference between long answers and short ones; the others by whole answers, prompts
included. Also printed: pages that a group holds at most, against those of as many independent sequences.

A client's own beam search is what vLLM does: for every beam and every token a request for one token and its best alternatives.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import torch

from penstock.benchmarks import checkpoint
from penstock.benchmarks.cpu import serve, tree_cpu
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.hypotheses import Path as BeamPath
from penstock.shard.decoding.hypotheses import Search
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.sequence import Group, Sampling, sequences

DEMO = Path(__file__).parents[1] / "demo" / "model"
GROUPS, WIDTH, PROMPT = 8, 4, 256
GOALS = {"greedy": 0.90, "transformers": 2.0, "a client's own": 10.0}
Prompts = list[list[int]]


class Server:
    """Ours, and what its clients do. Every way returns the tokens that beams, or sequences, went on by."""

    def __init__(self, folder: Path, log: Path, device: str) -> None:
        self._log = open(log, "w")  # noqa: SIM115 - the server writes to it until `stop`
        flags = ["--threads", "1", "--max-total-tokens", "1024", "--max-top-n-tokens", "8", "--kv-pages", "2000"]
        flags += ["--device", device]
        self._process, self._port, _ = serve([str(folder), "--dtype", "float32", *flags], self._log)
        vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        self._ids = list(vocabulary.values())

    def cpu(self) -> float:
        return tree_cpu(self._process.pid)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        self._log.close()

    def beams(self, prompts: Prompts, new: int) -> int:
        body = {"max_tokens": new, "num_beams": WIDTH, "ignore_eos": True}
        return self._ask([{**body, "prompt": prompt} for prompt in prompts]) * WIDTH

    def greedy(self, prompts: Prompts, new: int) -> int:
        body = {"max_tokens": new, "temperature": 0, "ignore_eos": True}
        return self._ask([{**body, "prompt": prompt} for prompt in prompts for _ in range(WIDTH)])

    def client(self, prompts: Prompts, new: int) -> int:
        return asyncio.run(self._client(prompts, new))

    def _ask(self, bodies: list[dict[str, Any]]) -> int:
        async def main() -> int:
            async with self._session() as session:
                answers = await asyncio.gather(*(self._post(session, body) for body in bodies))
            return sum(answer["usage"]["completion_tokens"] for answer in answers)

        return asyncio.run(main())

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3600), connector=aiohttp.TCPConnector(limit=0))

    async def _post(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
        async with session.post(f"http://127.0.0.1:{self._port}/v1/completions", json={"model": "", **body}) as answer:
            if answer.status != 200:
                raise SystemExit(f"penstock answered {answer.status}: {await answer.text()}")
            return await answer.json()

    async def _client(self, prompts: Prompts, new: int) -> int:
        """The tokens that are chosen don't matter here, only what asking for them costs: alternatives are named by text, which
        need not lead back to a token, so any tokens are taken."""
        chance = random.Random(0)

        async def search(session: aiohttp.ClientSession, prompt: list[int]) -> int:
            beams = [prompt]
            for _ in range(new):
                body = {"max_tokens": 1, "temperature": 0, "logprobs": 2 * WIDTH, "ignore_eos": True}
                await asyncio.gather(*(self._post(session, {**body, "prompt": beam}) for beam in beams))
                parents = [chance.choice(beams) for _ in range(WIDTH)]
                beams = [[*parent, chance.choice(self._ids)] for parent in parents]
            return new * WIDTH

        async with self._session() as session:
            return sum(await asyncio.gather(*(search(session, prompt) for prompt in prompts)))


def by_transformers(folder: Path, device: str) -> Callable[[Prompts, int], int]:
    """In this process."""
    import transformers as untyped

    transformers: Any = untyped
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)

    @torch.inference_mode()
    def run(prompts: Prompts, new: int) -> int:
        given = torch.tensor(prompts, device=device)
        settings = transformers.GenerationConfig(
            num_beams=WIDTH, max_new_tokens=new, eos_token_id=[1 << 20], pad_token_id=0, do_sample=False
        )
        found = model.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)
        assert found.shape[1] == PROMPT + new
        if device != "cpu":
            torch.cuda.synchronize()
        return new * WIDTH * len(prompts)

    return run


def pages(folder: Path, new: int, page_size: int = 16) -> tuple[list[int], int]:
    """The most that each of the groups held, and what WIDTH independent sequences hold that share the prompt's pages."""
    engine = load(ShardConfig(folder=str(folder), model="", page_size=page_size, prefix_caching=False), lambda stage: None)
    engine.resize(2000, page_size)
    chance = random.Random(1)
    most = []
    for _ in range(GROUPS):  # prompts are what the model says itself: of noise it knows no best continuation
        start = [chance.randrange(3, engine.decoder.shape.vocabulary)]
        said, _ = _run(engine, _group(start, PROMPT - 1, Sampling(temperature=0.7, seed=chance.randrange(1000)), None))
        _, held = _run(engine, _group(start + said, new, Sampling(), Search(WIDTH, 1)))
        most.append(held)
    full = PROMPT // page_size
    return most, full + WIDTH * (-(-(PROMPT + new - 1) // page_size) - full)


def _group(prompt: list[int], new: int, sampling: Sampling, search: Search | None) -> Group:
    begun, waiting = sequences(prompt, 1)
    begun[0].path = BeamPath() if search else None
    return Group(uid=1, sequences=begun, waiting=waiting, sampling=sampling, max_new_tokens=new, end_ids=frozenset(), search=search)


def _run(engine: Engine, group: Group) -> tuple[list[int], int]:
    """What it says, and the most pages that it holds."""
    outcome = engine.prefill(1, [group], [(1, PROMPT)], PROMPT, [])
    said = [emitted.pick.token for _, emitted in outcome.emitted]
    most = engine.pool.pages - engine.pool.free
    while engine.books.groups:
        outcome = engine.decode([1])
        said += [emitted.pick.token for _, emitted in outcome.emitted]
        most = max(most, engine.pool.pages - engine.pool.free)
    return said, most


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="random weights, 200 million parameters, instead of the demo model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="for the server and transformers (default: cpu)")
    parser.add_argument("--wall", action="store_true", help="measure by the clock on the wall, not by CPU time; always so on a GPU")
    parser.add_argument("--new", type=int, default=48, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = DEMO
        if options.large:
            folder = Path(scratch) / "model"
            checkpoint.write(folder, torch.float32)
        wall = options.wall or options.device == "cuda"
        speeds = measure(folder, Path(scratch) / "penstock.log", options.new, options.rounds, options.device, wall)
        most, independent = pages(folder, options.new)
    report(speeds, most, independent, "second" if wall else "CPU-second, one thread")


def measure(folder: Path, log: Path, new: int, rounds: int, device: str, wall: bool) -> dict[str, list[float]]:
    """Tokens per second, or CPU-second, of each way."""
    chance = random.Random(0)
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    server, other = Server(folder, log, device), by_transformers(folder, device)
    clock, own = (time.perf_counter, time.perf_counter) if wall else (server.cpu, time.process_time)
    ways: dict[str, tuple[Callable[[Prompts, int], int], Callable[[], float]]] = {
        "beams": (server.beams, clock),
        "greedy": (server.greedy, clock),
        "transformers": (other, own),
        "a client's own": (server.client, clock),
    }
    speeds: dict[str, list[float]] = {name: [] for name in (*ways, "beams after the prompt")}
    for turn in range(-1, rounds):  # the first one warms up
        for name, (run, spent_by) in ways.items():
            spent = {}
            for length in (1, new):
                prompts = [[chance.randrange(3, vocabulary) for _ in range(PROMPT)] for _ in range(GROUPS)]
                before = spent_by()
                tokens = run(prompts, length)
                spent[tokens] = spent_by() - before
            if turn >= 0:
                (few, short), (many, long) = spent.items()
                after = (many - few) / max(long - short, 0.01)
                speeds[name].append(after if name == "greedy" else many / long)
                if name == "beams":
                    speeds["beams after the prompt"].append(after)
    server.stop()
    return speeds


def report(speeds: dict[str, list[float]], most: list[int], independent: int, per: str) -> None:
    """Prints it."""
    print(f"{GROUPS} groups of width {WIDTH}, prompts of {PROMPT} tokens: tokens of all beams per {per}")
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    for name, median in medians.items():
        told = ""
        if name in GOALS:
            ratio = medians["beams after the prompt" if name == "greedy" else "beams"] / median
            told = f"{ratio:8.2f}x  goal {GOALS[name]:.2f}x {'met' if ratio >= GOALS[name] else 'MISSED'}"
        print(f"  {name:24}{median:10.0f}{told}")
    held = f"{statistics.median(most):g} (median of {len(most)} groups, at most {max(most)})"
    print(f"pages that a group comes to hold: {held}; {WIDTH} independent sequences: {independent}")


if __name__ == "__main__":
    main()
