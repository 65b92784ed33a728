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
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.bench.flags import checked, count
from penstock.benchmarks import checkpoint
from penstock.benchmarks.server import serving, tree_cpu
from penstock.benchmarks.streams import Client, client
from penstock.launcher.hub import DEMO_FOLDER
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.hypotheses import Path as BeamPath
from penstock.shard.decoding.hypotheses import Search
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.sequence import Group, Sampling, sequences

GROUPS, WIDTH, PROMPT = 8, 4, 256
ROUTE = "/v1/completions"
GOALS = {"greedy": 0.90, "transformers": 2.0, "a client's own": 10.0}
Prompts = list[list[int]]


class Server:
    """Our server with its clients. Every method returns the number of tokens that beams, or sequences, grew by."""

    def __init__(self, port: int, folder: Path) -> None:
        self._port = port
        vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        self._ids = list(vocabulary.values())

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
            async with client(self._port) as asked:
                answers = await asyncio.gather(*(asked.post(ROUTE, body) for body in bodies))
            return sum(answer["usage"]["completion_tokens"] for answer in answers)

        return asyncio.run(main())

    async def _client(self, prompts: Prompts, new: int) -> int:
        """A beam search by the client. The chosen tokens don't matter here, only the cost of the requests: alternatives are named
        by text, which need not lead back to a token, so any tokens are taken."""
        chance = random.Random(0)

        async def search(asked: Client, prompt: list[int]) -> int:
            beams = [prompt]
            for _ in range(new):
                body = {"max_tokens": 1, "temperature": 0, "logprobs": 2 * WIDTH, "ignore_eos": True}
                await asyncio.gather(*(asked.post(ROUTE, {**body, "prompt": beam}) for beam in beams))
                parents = [chance.choice(beams) for _ in range(WIDTH)]
                beams = [[*parent, chance.choice(self._ids)] for parent in parents]
            return new * WIDTH

        async with client(self._port) as asked:
            return sum(await asyncio.gather(*(search(asked, prompt) for prompt in prompts)))


def by_transformers(folder: Path, device: str) -> Callable[[Prompts, int], int]:
    """Beam search by transformers, in this process."""
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
    """The most pages that each group held, and the pages of WIDTH independent sequences that share the prompt's pages."""
    engine = load(ShardConfig(folder=str(folder), model="", page_size=page_size, prefix_caching=False), lambda stage: None)
    engine.resize(2000)
    chance = random.Random(1)
    most = []
    for _ in range(GROUPS):  # prompts are generated by the model itself: noise has no clear best continuation
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
    """Its generated tokens, and the most pages that it holds."""
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
    parser.add_argument("--new", type=checked(count), default=48, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=checked(count), default=5, help="how often everything is measured (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = DEMO_FOLDER
        if options.large:
            folder = Path(scratch) / "model"
            checkpoint.write(folder, torch.float32)
        wall = options.wall or options.device == "cuda"
        flags = ["--threads", "1", "--max-total-tokens", "1024", "--max-top-n-tokens", "8", "--kv-pages", "2000"]
        with serving(str(folder), "--dtype", "float32", "--device", options.device, *flags) as server:
            clock = time.perf_counter if wall else partial(tree_cpu, server.pid)
            speeds = measure(folder, Server(server.port, folder), clock, options.new, options.rounds, options.device, wall)
        most, independent = pages(folder, options.new)
    report(speeds, most, independent, "second" if wall else "CPU-second, one thread")


def measure(
    folder: Path, server: Server, clock: Callable[[], float], new: int, rounds: int, device: str, wall: bool
) -> dict[str, list[float]]:
    """Tokens per second, or CPU-second, of each way. clock: of the server's seconds."""
    chance = random.Random(0)
    vocabulary = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    other, own = by_transformers(folder, device), time.perf_counter if wall else time.process_time
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
    return speeds


def report(speeds: dict[str, list[float]], most: list[int], independent: int, per: str) -> None:
    """Prints the results."""
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
