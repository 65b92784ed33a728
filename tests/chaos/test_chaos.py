"""Shards that die and hang under load, and a soak, in miniature. PENSTOCK_CHAOS_SECONDS: how long each shall last.

`make bench`'s sizes, and more than one rank: `penstock bench --chaos`, docs/benchmarking.md.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench import chaos, command
from penstock.bench.chaos import Plan, play
from penstock.bench.local import Local
from penstock.tests.serving import scratch

FAULTS, SOAK = 6.0, 6.0  # seconds
SECONDS = os.environ.get("PENSTOCK_CHAOS_SECONDS")
FLAGS = "--device cpu --threads 1 --page-size 4 --kv-pages 4096 --max-batch-prefill-tokens 32"
STEEPEST = 2.0  # MiB a minute, of a longer soak
STEP = 8 * 2**20  # bytes within a short one, where one allocation makes any slope: only a coarse leak is seen
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    with scratch() as folder, Local(FLAGS.split(), folder / "log") as server:
        yield server
        assert server.stop() == 0


def test_nobody_notices_that_shards_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scratch() as folder:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        monkeypatch.setenv("TMPDIR", str(folder))
        asked = ["--chaos", SECONDS or str(FAULTS), "--chaos-every", "1", f"--serve={FLAGS} --step-timeout 1", "--quiet"]
        code = command.main([*asked, "--json", str(tmp_path / "found.json")])
        out = capsys.readouterr().out
        assert code == 0, out
        assert list(folder.iterdir()) == []
    found = json.loads((tmp_path / "found.json").read_text())
    assert sum(found["faults"].values()) >= 1
    assert found["answers"] >= 30
    assert found["cut"] > 0
    assert "wrong: 0; errors: 0" in out
    assert "longest pause of a stream: " in out
    assert "left behind: no page, process, socket or file" in out


def test_memory_stays_as_it_is(server: Local, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(float(SECONDS or SOAK), 16, every=0, seed=1)
    found = asyncio.run(play(server, plan, QUIET))
    with capsys.disabled():
        print("\n" + "\n".join(line for line in chaos.told(plan, found) if line.startswith("memory")))
    assert found.good, chaos.told(plan, found)
    assert sorted(found.names.values()) == ["launcher", "router", "shard 0"]
    for pid, samples in found.memory.items():
        late = chaos.settled(samples)
        if SECONDS is None:
            assert late[-1][1] - late[0][1] < STEP, found.names[pid]
        else:
            assert chaos.slope(late) < STEEPEST, found.names[pid]


def test_answers_that_differ_are_found(server: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {"prompt": "Once", "temperature": 1.0, "max_tokens": 20, "ignore_eos": True, "stream": True}  # no seed
    refused = {"prompt": "Once", "max_tokens": 20, "stream": True}
    monkeypatch.setattr(chaos, "requests", lambda: [("/v1/completions", drawn), ("/v1/completions", refused)])
    ask = chaos.Chaos._ask

    async def spoil(self: chaos.Chaos, path: str, body: chaos.Json) -> dict[str, str]:
        answer = await ask(self, path, body)
        body["temperature"] = 1.0 if "seed" in body or "temperature" in body else -1.0  # the second is wrong from now on
        return answer

    monkeypatch.setattr(chaos.Chaos, "_ask", spoil)
    plan = Plan(1.0, 4, every=0, seed=1)
    found = asyncio.run(play(server, plan, QUIET))
    assert found.wrong
    assert found.wrong[0]["body"]["prompt"] == "Once"
    assert "status 400" in found.errors[0]
    assert not found.good
    told = chaos.told(plan, found)
    assert f"wrong: {len(found.wrong)}; errors: {len(found.errors)}" in told[1]
