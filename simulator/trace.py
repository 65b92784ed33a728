"""Request traces: which requests come when. Read from files, or generated from a seed. Knows no scheduler.

A trace is a file of JSON lines, one for each request:

    {"arrival": 0.25, "prompt": 812, "output": 96, "max_new_tokens": 256, "choices": 1, "priority": "normal", "tenant": "",
     "prefix": [["system", 300], ["chat 7", 908]]}

arrival in seconds; prompt, output in tokens, `output` a list where the choices' lengths differ. All but the first three may be
missing. `prefix` names content that requests share, each with the token where it ends, from the beginning of the prompt; with one
choice it may reach into the answer, with which the prompt of a chat's next turn begins.

Two public formats are read as well: Azure's LLM inference traces (CSV with TIMESTAMP, ContextTokens, GeneratedTokens) and
Mooncake's (JSON lines with timestamp, input_length, output_length, hash_ids of blocks of 512 tokens).
"""

import csv
import io
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PRIORITIES = ("interactive", "normal", "batch")
BLOCK = 512  # tokens per hash in Mooncake's traces


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    arrival: float  # seconds
    prompt: int  # tokens
    outputs: tuple[int, ...]  # tokens that each choice generates; each at most max_new_tokens
    max_new_tokens: int
    priority: str = "normal"
    tenant: str = ""
    prefix: tuple[tuple[str, int], ...] = ()

    @property
    def choices(self) -> int:
        """Answers that it asks for."""
        return len(self.outputs)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Parameters of a generated trace."""

    requests: int = 1000
    rate: float = 4.0  # requests a second, on average
    burstiness: float = 1.0  # coefficient of variation of the gaps between arrivals: 1 is Poisson, more comes in bursts
    wave: float = 0.0  # seconds of a period of which the first half has all the arrivals; 0: none
    prompt: int = 256  # tokens, median
    prompt_spread: float = 1.0  # sigma of the logarithm: 1 makes the 99th percentile ten times the median
    output: int = 128  # tokens, median
    output_spread: float = 0.8
    longest_prompt: int = 4096
    longest_output: int = 1024
    system_prompts: int = 0  # number of different ones; each request begins with one of them
    system_tokens: int = 512  # length of each
    chat: float = 0.0  # share of requests that are the next turn of an earlier one
    think: float = 10.0  # seconds from a request to its next turn, at least
    choices: int = 1  # most answers of a request; each has 1 with probability 1/2, else any number up to this
    interactive: float = 0.0  # share of requests with this priority
    batch: float = 0.0
    tenants: int = 1


def generate(workload: Workload, seed: int = 0) -> list[Request]:
    """The same list for the same seed."""
    return list(_requests(workload, random.Random(seed)))


def _requests(workload: Workload, dice: random.Random) -> Iterator[Request]:
    chats: list[tuple[float, Request]] = []  # earlier requests that may be continued, and since when
    names = 0
    for arrival in _arrivals(workload, dice):
        chat = None
        if dice.random() < workload.chat:
            chat = _earlier(chats, arrival, dice)
        said = _length(dice, workload.prompt, workload.prompt_spread, workload.longest_prompt)
        output = _length(dice, workload.output, workload.output_spread, workload.longest_output)
        choices = 1 if workload.choices == 1 or dice.random() < 0.5 else dice.randint(1, workload.choices)
        if chat is not None:
            before, choices = chat.prompt + chat.outputs[0], 1
            system, name = chat.prefix[:-1], chat.prefix[-1][0]
        else:
            names += 1
            system, name = (), f"chat {names}"
            if workload.system_prompts:
                system = ((f"system {dice.randrange(workload.system_prompts)}", workload.system_tokens),)
            before = system[-1][1] if system else 0
        prompt = before + said
        outputs = tuple(
            output if choice == 0 else _length(dice, workload.output, workload.output_spread, workload.longest_output)
            for choice in range(choices)
        )
        prefix = system
        if workload.chat and choices == 1:
            prefix = (*system, (name, prompt + output))
        most = min(workload.longest_output, 1 << (max(outputs) - 1).bit_length())
        draw = dice.random()
        priority = "interactive" if draw < workload.interactive else "batch" if draw > 1 - workload.batch else "normal"
        tenant = f"tenant {dice.randrange(workload.tenants)}" if workload.tenants > 1 else ""
        request = Request(round(arrival, 6), prompt, outputs, max(most, *outputs), priority, tenant, prefix)
        if workload.chat and choices == 1 and prompt < workload.longest_prompt:
            chats.append((arrival + workload.think, request))
        yield request


def _earlier(chats: list[tuple[float, Request]], now: float, dice: random.Random) -> Request | None:
    """A request whose client has thought long enough, and which is continued only once."""
    for _ in range(8):
        if not chats:
            return None
        place = dice.randrange(len(chats))
        if chats[place][0] <= now:
            chats[place], chats[-1] = chats[-1], chats[place]
            return chats.pop()[1]
    return None


def _arrivals(workload: Workload, dice: random.Random) -> Iterator[float]:
    """Gaps are gamma-distributed; with waves, time runs only in the first half of each, twice as densely."""
    shape = 1 / workload.burstiness**2
    density = workload.rate * (2 if workload.wave else 1)
    now = 0.0
    for _ in range(workload.requests):
        now += dice.gammavariate(shape, 1 / (shape * density))
        if workload.wave:
            half = workload.wave / 2
            yield now + math.floor(now / half) * half
        else:
            yield now


def _length(dice: random.Random, median: int, spread: float, longest: int) -> int:
    return max(1, min(longest, round(dice.lognormvariate(math.log(median), spread))))


def faster(requests: list[Request], factor: float) -> list[Request]:
    """The same requests in less time."""
    return requests if factor == 1.0 else [replace(each, arrival=each.arrival / factor) for each in requests]


def write(requests: Iterable[Request], path: Path) -> None:
    """Writes a trace as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for each in requests:
            line: dict[str, Any] = {
                "arrival": each.arrival,
                "prompt": each.prompt,
                "output": each.outputs[0] if each.choices == 1 else list(each.outputs),
                "max_new_tokens": each.max_new_tokens,
            }
            line |= {"choices": each.choices} if each.choices > 1 else {}
            line |= {"priority": each.priority} if each.priority != "normal" else {}
            line |= {"tenant": each.tenant} if each.tenant else {}
            line |= {"prefix": [list(segment) for segment in each.prefix]} if each.prefix else {}
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[Request]:
    """A trace of any of the formats above, by arrival, which begins at 0. Raises ValueError with the line that is wrong."""
    requests = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 (byte {error.start})") from None
    with io.StringIO(text, newline="") as file:
        table = csv.DictReader(file) if path.suffix == ".csv" else None
        number = 1 if table else 0
        try:
            for line in table or file:
                number += 1
                requests.append(_timely(_request(line if isinstance(line, dict) else json.loads(str(line)))))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError, csv.Error) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: {what}") from None
    requests.sort(key=lambda each: each.arrival)
    first = requests[0].arrival if requests else 0.0
    return [replace(each, arrival=each.arrival - first) for each in requests]


def _timely(request: Request) -> Request:
    if not math.isfinite(request.arrival):  # JSON as Python reads it has NaN and Infinity, which can't be ordered or waited for
        raise ValueError(f"it arrives at {request.arrival}")
    return request


def _request(row: dict[str, Any]) -> Request:
    if "TIMESTAMP" in row:
        output = max(1, int(row["GeneratedTokens"]))
        moment = datetime.fromisoformat(row["TIMESTAMP"])
        if moment.tzinfo is None:  # else it would be taken as local time
            moment = moment.replace(tzinfo=UTC)
        return Request(moment.timestamp(), max(1, int(row["ContextTokens"])), (output,), output)
    if "input_length" in row:
        prompt, output = max(1, int(row["input_length"])), max(1, int(row["output_length"]))
        hashes = row.get("hash_ids", ())
        prefix = tuple((str(name), min(BLOCK * (place + 1), prompt)) for place, name in enumerate(hashes))
        return Request(float(row["timestamp"]) / 1000, prompt, (output,), output, prefix=prefix)
    return _own(row)


def _own(row: dict[str, Any]) -> Request:
    output = row["output"]
    outputs = tuple(int(each) for each in output) if isinstance(output, list) else (int(output),) * int(row.get("choices", 1))
    most = int(row.get("max_new_tokens", max(outputs, default=0)))
    prefix = tuple((str(name), int(end)) for name, end in row.get("prefix", ()))
    priority = row.get("priority", "normal")
    if priority not in PRIORITIES:
        raise ValueError(f"priority {priority}: expected {', '.join(PRIORITIES)}")
    if row.get("choices", len(outputs)) != len(outputs):
        raise ValueError(f"{len(outputs)} outputs for {row['choices']} choices")
    if not outputs or min(outputs) < 1 or max(outputs) > most or int(row["prompt"]) < 1:
        raise ValueError("prompt, output and choices are at least 1, and output at most max_new_tokens")
    return Request(float(row["arrival"]), int(row["prompt"]), outputs, most, priority, str(row.get("tenant", "")), prefix)
