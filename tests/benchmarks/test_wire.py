"""The benchmark of the gRPC protocol runs with the current interfaces of the shard's service and the router's shards."""

import asyncio

from penstock.benchmarks import wire

STEPS = 120


def test_short_run_measures_all_three_ways() -> None:
    found = asyncio.run(wire.measure(1, STEPS))
    assert {name: len(ways["trips"]) for name, ways in found.items()} == {"ahead": STEPS, "alone": STEPS, "calls": STEPS}
    [gaps] = found["ahead"]["gaps"]
    assert len(gaps) == STEPS - 1
    assert min(gaps) > 0
