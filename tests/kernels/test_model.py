"""A whole shard by Triton's kernels, in the interpreter or on a GPU, gives the tokens that the plain operations give, also with
steps that are padded and replayed, as graphs are.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import choose, fused_sampling, operations
from penstock.proto.speculation import parse
from penstock.shard import rooms
from penstock.shard.drafter import Drafter
from penstock.shard.engine import Engine
from penstock.shard.forward import Bounds
from penstock.shard.guesses import Guesses
from penstock.shard.sequence import Group, Sampling
from penstock.tests.shard import tiny
from penstock.tests.shard.driver import Habits, World, drive

# What padding computes is said nowhere, and nobody sees it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")

PAGES = 64
FAMILIES = ["llama", "qwen3", "qwen2-window"]


@pytest.fixture(autouse=True)
def free() -> Iterator[None]:
    yield
    choose.force("")


def groups() -> list[Group]:
    """Greedy and sampled ones, with penalties, log-probabilities, several choices and a prompt in common."""
    common = [5, 9, 2, 44, 7, 7, 3, 11, 60, 31, 8, 2]
    sampled = Sampling(temperature=0.9, top_p=0.9, seed=3, repetition_penalty=1.2, frequency_penalty=0.3, bias=((4, 2.0),))
    return [
        tiny.group(1, common, 5, top_n=3),
        tiny.group(2, [*common, 17, 18], 4, sampled, choices=2),
        tiny.group(3, [3], 3, Sampling(temperature=1.1, seed=8, typical_p=0.8)),
        tiny.group(4, list(range(1, 30)), 3, Sampling(temperature=0.7, top_k=5, seed=9, final_logprobs=True), prompt_logprobs=True),
    ]


def run(engine: Engine, habits: Habits = Habits(chunk=9)) -> World:  # noqa: B008 (frozen)
    return drive(engine, groups(), habits, seed=4)


def replaying(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stands for a graph where there is no GPU."""
    run()
    return run


USUAL = Bounds(tokens=32, rows=8, total=64, pages=PAGES)


def with_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch, bounds: Bounds = USUAL) -> Engine:
    monkeypatch.setattr(rooms, "DECODES", (1, 2, 4))
    monkeypatch.setattr(rooms, "MIXED", (16, 32))
    record: Any = replaying
    if torch.cuda.is_available():
        from penstock.shard.graphs import Recorder

        record = Recorder()
    engine.record(record, bounds, lambda stage: None)
    return engine


@pytest.mark.parametrize("name", FAMILIES)
def test_a_shard_by_triton_gives_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(tiny.engine(name, 4, PAGES))
    calls = []
    sample = fused_sampling.sample
    monkeypatch.setattr(fused_sampling, "sample", lambda *given: calls.append(1) or sample(*given))
    choose.force("triton")
    found = run(tiny.engine(name, 4, PAGES))
    assert found.tokens == expected.tokens
    assert found.finishes == expected.finishes
    assert calls


@pytest.mark.parametrize("name", FAMILIES[:2])
def test_padded_steps_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(tiny.engine(name, 4, PAGES))
    choose.force("triton")
    engine = with_graphs(tiny.engine(name, 4, PAGES), monkeypatch)
    found = run(engine)
    assert found.tokens == expected.tokens
    assert engine.forward.replayed > 3 * engine.forward.eager
    assert not engine.cache.pages[:, 0].any()  # padding is written nowhere


@pytest.mark.parametrize("said", ["tokens=3", "tree=2x2"])
def test_steps_with_drafts_fit_graphs(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the model, which verify chains or trees, and those of its draft model."""
    expected = run(tiny.engine("llama", 4, PAGES))
    choose.force("triton")
    engine = tiny.engine("llama", 4, PAGES)
    engine.guesses = Guesses(
        engine.decoder.ranks, tiny.CPU, parse(f"draft=x,{said}"), Drafter(engine.decoder, tiny.VOCABULARY, tiny.CPU)
    )
    engine.resize(PAGES, 4)
    asked = groups()
    for group in asked:
        group.drafts = engine.guesses.most
    bounds = Bounds(tokens=32, rows=8, total=64, pages=PAGES, drafts=True, trees=engine.guesses.trees)
    found = drive(with_graphs(engine, monkeypatch, bounds), asked, Habits(chunk=9), seed=4)
    assert found.tokens == expected.tokens
    assert found.accepted > 0
    assert engine.forward.replayed > 3 * engine.forward.eager
    drafter = engine.guesses.drafter
    assert drafter is not None
    assert drafter.forward.replayed > 3 * drafter.forward.eager


def test_a_step_that_no_graph_has_room_for_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    choose.force("triton")
    engine = with_graphs(tiny.engine("llama", 4, PAGES), monkeypatch)
    engine.record(replaying, Bounds(tokens=32, rows=8, total=64, pages=PAGES, chosen=(1,)), lambda stage: None)
    found = run(engine, Habits(chunk=40))
    assert engine.forward.eager > 0
    choose.force("reference")
    assert found.tokens == run(tiny.engine("llama", 4, PAGES)).tokens


def test_a_cache_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as a full one whose keys and values were rounded when they were written."""
    small = torch.float8_e4m3fn
    scale = 0.25
    write = operations.write

    def rounding(slots: Tensor, rows: Tensor, cache: Tensor, scales: Tensor | None) -> None:
        write(slots, (rows / scale).to(small).to(rows.dtype) * scale, cache)

    def scores(dtype: torch.dtype | None) -> Tensor:
        engine = Engine(tiny.decoder("llama"), tiny.CPU, 4, cache_dtype=dtype)
        engine.resize(PAGES, 4)
        assert engine.token_bytes == tiny.decoder("llama").shape.kv_elements(1) * (1 if dtype else 4)
        for layer in engine.decoder.layers:
            monkeypatch.setattr(layer, "scales", torch.full((2, layer.shape.kv_heads), scale))
        outcome = engine.prefill(0, [tiny.group(1, list(range(1, 30)), 3, prompt_logprobs=True)], [(1, 7)], 7, [])
        while not outcome.prompts:
            outcome = engine.prefill(0, [], [(1, 7)], 7, [])
        return torch.tensor(outcome.prompts[0][1])

    found, full = scores(small), scores(None)
    monkeypatch.setattr(operations, "write", rounding)
    torch.testing.assert_close(found, scores(None), rtol=1e-5, atol=1e-5)
    assert (found - full).abs().max() > 1e-3
