"""Compares scheduling policies on generated traces, by simulation: the router's scheduler, shards that count, a clock of its own.

    python benchmarks/policies.py                 tables
    python benchmarks/policies.py --plot          and pictures in docs/pictures (needs matplotlib)
    python benchmarks/policies.py --only chat     one of the workloads

The machine is an 8 B model on an H200 as `penstock.simulator` assumes it: not measured, so ratios count and not seconds.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.flags import checked, count
from penstock.router.cost import Cost
from penstock.router.policies import ChunkedPrefill, Policy, WholePrefill
from penstock.router.scheduler import Bounds
from penstock.simulator import report, trace
from penstock.simulator.machines import MACHINES
from penstock.simulator.measures import ALL, Measures
from penstock.simulator.replay import Replay, Setting
from penstock.simulator.trace import Workload

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
MACHINE = MACHINES["8b-h200"]
PAGE = 16  # tokens
AMPLE, SCARCE = MACHINE.tokens // PAGE, 1200  # pages


@dataclass(frozen=True)
class Scene:
    """A workload, with a description."""

    what: str
    workload: Workload
    pages: int = AMPLE


def scenes(requests: int) -> dict[str, Scene]:
    """All workloads."""
    return {
        "steady": Scene("Poisson, 30 a second, medium lengths", Workload(requests=requests, rate=30)),
        "bursts": Scene(
            "the same in bursts, three priorities",
            Workload(requests=requests, rate=25, burstiness=4, interactive=0.3, batch=0.3),
        ),
        "long-prompts": Scene(
            "prompts of 3000 tokens in the median",
            Workload(requests=requests, rate=7, prompt=3000, prompt_spread=0.7, longest_prompt=16000),
        ),
        "chat": Scene(
            "chats with system prompts of 1000 tokens",
            Workload(requests=requests, rate=25, chat=0.7, think=5, system_prompts=4, system_tokens=1000),
        ),
        "scarce": Scene(
            "memory for some 30 requests",
            Workload(requests=requests, rate=22, output=200, output_spread=0.6),
            SCARCE,
        ),
    }


@dataclass(frozen=True)
class Choice:
    """A policy with its settings."""

    make: Callable[[int], Policy]  # from a step's tokens
    caching: bool = True
    headroom: int = 32


def mixed(milliseconds: float) -> Callable[[int], Policy]:
    """The mixed policy with this target."""
    return lambda tokens: ChunkedPrefill(tokens, Cost(tokens, MACHINE.speed.sample(tokens)), milliseconds / 1e3)


CHOICES = {
    "mixed": Choice(mixed(0)),
    "mixed, 15 ms": Choice(mixed(15)),
    "mixed, 25 ms": Choice(mixed(25)),
    "mixed, 100 ms": Choice(mixed(100)),
    "pause": Choice(WholePrefill),
    "mixed, no cache": Choice(mixed(0), caching=False),
}
SCARCE_CHOICES = {
    "mixed": Choice(mixed(0)),
    "headroom 0": Choice(mixed(0), headroom=0),
    "headroom 8": Choice(mixed(0), headroom=8),
    "headroom 128": Choice(mixed(0), headroom=128),
    "headroom 512": Choice(mixed(0), headroom=512),
    "pause": Choice(WholePrefill),
}


def run(scene: Scene, choice: Choice) -> Measures:
    """One policy on one workload."""
    bounds = Bounds(
        pages=scene.pages, page_size=PAGE, step_tokens=MACHINE.step_tokens, sequences=256, headroom=choice.headroom
    )  # fmt: skip
    setting = Setting(
        speed=MACHINE.speed,
        bounds=bounds,
        policy=choice.make(bounds.step_tokens),
        prefix_caching=choice.caching,
        ttft_goal=1.0,
        itl_goal=0.025,
    )
    return Replay(setting, trace.generate(scene.workload, 1)).run()


def row(name: str, measures: Measures) -> str:
    """A row of the table."""
    service = measures.services[ALL]
    ttft, between = service.ttft.percentiles((0.5, 0.99)), service.itl.percentiles((0.5, 0.99, 1.0))
    return (
        f"{name:18}{ttft[0] * 1e3:9.0f}{ttft[1] * 1e3:9.0f}"
        + "".join(f"{value * 1e3:9.1f}" for value in between)
        + f"{measures.output_tokens / measures.seconds:10.0f}{service.good / max(service.finished, 1):8.0%}"
        + f"{measures.pauses:8}{measures.restored_tokens:10}{measures.cached_tokens:10}"
        + f"{measures.finished / measures.real_seconds:10.0f}"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(scenes(1)), help="one workload")
    parser.add_argument("--requests", type=checked(count), default=2000)
    parser.add_argument("--plot", action="store_true", help=f"pictures in {PICTURES}")
    options = parser.parse_args()
    for name, scene in scenes(options.requests).items():
        if options.only not in (None, name):
            continue
        print(f"\n{name}: {scene.what}; {options.requests} requests, {scene.pages} pages")
        print(f"{'milliseconds':18}{'first':>9}{'p99':>9}{'between':>9}{'p99':>9}{'most':>9}"
              f"{'tokens/s':>10}{'good':>8}{'pauses':>8}{'restored':>10}{'cached':>10}{'sim req/s':>10}")  # fmt: skip
        runs = {}
        for label, choice in (SCARCE_CHOICES if name == "scarce" else CHOICES).items():
            runs[label] = run(scene, choice)
            print(row(label, runs[label]), flush=True)
        if options.plot:
            report.plot(runs, PICTURES / f"policies-{name}.svg", scene.what)


if __name__ == "__main__":
    main()
