"""The benchmark of the wire follows what the shard's service and the router's shards ask of each other."""

import asyncio

from penstock.benchmarks import wire

STEPS = 120


def test_a_short_run_of_all_ways() -> None:
    found = asyncio.run(wire.measure(1, STEPS))
    assert {name: len(ways["trips"]) for name, ways in found.items()} == {"ahead": STEPS, "alone": STEPS, "calls": STEPS}
    [gaps] = found["ahead"]["gaps"]
    assert len(gaps) == STEPS - 1
    assert min(gaps) > 0
