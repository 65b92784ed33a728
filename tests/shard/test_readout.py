"""Medusa's heads and the MLP speculator, which guess by what their target makes of a token, against a computation of their own."""

import functools
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from penstock.launcher import checkpoint, plan
from penstock.launcher.machine import Machine
from penstock.launcher.options import Options
from penstock.proto.speculation import parse
from penstock.shard.config import ShardConfig
from penstock.shard.engine import Engine
from penstock.shard.loading import load
from penstock.shard.masks import Masks
from penstock.shard.models.draft_families import draft_shape, shaped
from penstock.shard.models.readout_families import readout_shape, with_sizes
from penstock.shard.models.shape import Unsupported
from penstock.shard.parallel import Ranks
from penstock.shard.readout import Readout
from penstock.shard.sequence import Group
from penstock.shard.speculator import Speculator
from penstock.tests.shard import configurations, test_distribution, tiny
from penstock.tests.shard import test_speculation_grammar as grammars
from penstock.tests.shard.driver import UNLIMITED, Habits, World, drive
from penstock.tests.shard.test_draft_head import engine, watched, written
from penstock.tests.shard.test_drafter import all_of, free
from penstock.tests.shard.test_oracle import at_rest, prompt
from penstock.tests.shard.test_sharing import room
from penstock.tests.shard.test_speculation import asked
from penstock.tests.shard.toy import g_test

COUNT = 11  # groups
LEVELS = 3
INNER = 48
# Of each kind: config.json, and what tensors are shaped like for a model of that vocabulary.
MEDUSA = {"medusa_num_heads": LEVELS, "medusa_num_layers": 2, "base_model_name_or_path": "somewhere/else"}
SPECULATOR = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": 64,
    "inner_dim": INNER,
    "vocab_size": configurations.VOCABULARY,
    "n_predict": LEVELS,
    "n_candidates": 5,
    "top_k_tokens_per_head": [4, 3, 2],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "medusa": MEDUSA,
    "medusa without outputs": MEDUSA | {"medusa_num_layers": 1},
    "speculator": SPECULATOR | {"scale_input": True},
    "tied speculator": SPECULATOR | {"tie_weights": True, "inner_dim": 0},
}


def sizes(kind: str) -> dict[str, tuple[int, ...]]:
    config = CONFIGS[kind]
    if "medusa" in kind:
        blocks = range(config["medusa_num_layers"])
        found = {
            f"{i}.{j}.linear.{part}": (64, 64)[: 2 - (part == "bias")] for i in range(LEVELS) for j in blocks for part in PARTS
        }
        outputs = {} if "without" in kind else {f"{i}.{len(blocks)}.weight": (configurations.VOCABULARY, 64) for i in range(LEVELS)}
        return found | outputs
    inner = config["inner_dim"] or 64
    sets = 1 if "tied" in kind else LEVELS
    found = {f"speculator.{part}.{i}.weight": (configurations.VOCABULARY, inner) for i in range(sets) for part in ("emb", "head")}
    found |= {f"speculator.ln.{i}.{part}": (inner,) for i in range(sets) for part in PARTS}
    return found | {f"speculator.proj.{i}.weight": (inner, inner if i else 64) for i in range(2 if "tied" in kind else LEVELS)}


PARTS = ("weight", "bias")


@functools.cache
def weights(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = {name: torch.randn(size, generator=generator) * 0.3 for name, size in sizes(kind).items()}
    return {name: tensor + (".ln." in name and "weight" in name) for name, tensor in found.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the heads, by kind. Medusa's file has a name of its own."""
    found = {}
    for kind, config in CONFIGS.items():
        found[kind] = written(tmp_path_factory.mktemp("heads") / kind.replace(" ", "-"), config, weights(kind))
        if "medusa" in kind:
            (found[kind] / "model.safetensors").rename(found[kind] / "medusa_lm_head.safetensors")
    return found


KNOWN: dict[tuple[str, tuple[int, ...]], Tensor] = {}


@torch.inference_mode()
def features(name: str, text: tuple[int, ...]) -> Tensor:
    """What the model's last norm gives for the last token: as it is where the text goes on, if that is known."""
    for (known, longer), found in KNOWN.items():
        if known == name and longer[: len(text)] == text:
            return found[len(text) - 1]
    states = tiny.reference(name)(torch.tensor([text]), output_hidden_states=True).hidden_states
    return KNOWN.setdefault((name, text), states[-1][0])[-1]


@functools.cache
def expected() -> World:
    return drive(tiny.engine("llama"), asked(0)[:COUNT], Habits())


class Oracle:
    """Logits after a text and drafts, from the beginning, as the papers have it."""

    def __init__(self, kind: str, name: str = "llama", own: dict[str, Tensor] | None = None) -> None:
        self.kind = kind
        self.name = name
        self.own = own or weights(kind)

    def __call__(self, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
        seen = features(self.name, tuple(text[:-1]))
        return self._medusa(seen, len(drafts)) if "medusa" in self.kind else self._speculator(seen, [text[-1], *drafts])

    def _medusa(self, x: Tensor, level: int) -> Tensor:
        for block in range(CONFIGS[self.kind]["medusa_num_layers"]):
            y = self.own[f"{level}.{block}.linear.weight"] @ x + self.own[f"{level}.{block}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        output, model = self.own.get(f"{level}.{CONFIGS[self.kind]['medusa_num_layers']}.weight"), tiny.reference(self.name)
        if output is None:
            return model.get_output_embeddings()(x).detach() * getattr(model.config, "logit_scale", 1)  # type: ignore[no-any-return]
        return output @ x

    def _speculator(self, seen: Tensor, tokens: Sequence[int]) -> Tensor:
        x, config = seen, CONFIGS[self.kind]
        if config.get("scale_input"):
            x = x / x.square().mean().add(1e-6).sqrt() / math.sqrt(2)
        share, tied = 2 ** (-0.5 / LEVELS), config.get("tie_weights", False)
        for level, token in enumerate(tokens):
            own = 0 if tied else level
            table, projection = (self.own[f"speculator.{name}.weight"] for name in (f"emb.{own}", f"proj.{min(level, 1 + own)}"))
            x = share * (projection @ x) + math.sqrt(1 - share**2) * math.sqrt(table.shape[1] / 2) * table[token]
            x = x / x.square().mean().add(1e-6).sqrt() * self.own[f"speculator.ln.{own}.weight"]
            x = x + self.own[f"speculator.ln.{own}.bias"]
            x = x * (1 + torch.erf(x / math.sqrt(2))) / 2
        return self.own[f"speculator.head.{own}.weight"] @ x


def check(own: Engine, oracle: Oracle, groups: Sequence[Group], habits: Habits) -> World:
    """Logits of every node, and the tokens of plain decoding."""
    off = watched(own, oracle)
    world = drive(own, groups, habits, seed=own.page_size)
    assert max(told := off()) < 1e-3
    assert len(told) > 50
    assert world.tokens == {one: expected().tokens[one] for one in world.tokens}
    assert world.finishes == {one: expected().finishes[one] for one in world.tokens}
    assert world.drafted > 50
    assert at_rest(own)
    return world


@pytest.mark.parametrize(
    ("kind", "said", "page_size", "chunk"),
    [
        ("medusa", "tree=3x2x1", 4, 7),
        ("medusa", "nodes=20", 16, 9),
        ("medusa without outputs", "tokens=3", 1, UNLIMITED),
        ("speculator", "tree=3x2x1", 1, 7),
        ("speculator", "nodes=20,ngram=6", 4, 5),
        ("tied speculator", "tokens=3", 16, 7),
    ],
)
def test_what_they_compute_is_what_the_papers_say(
    kind: str, said: str, page_size: int, chunk: int, folders: dict[str, Path]
) -> None:
    """In chunks, after pauses, on few pages that others know, too."""
    groups = asked(all_of(said))[:COUNT]
    own = free(engine(folders[kind], said, page_size, room(groups, page_size) + 50))
    world = check(own, Oracle(kind), groups, Habits(chunk, pause=0.05))
    assert world.pauses
    assert world.restored or world.cached


def test_beside_an_output_matrix_in_float32(folders: dict[str, Path]) -> None:
    """Hy 4's, whatever it is computed in: heads that lack such matrices take it."""
    draft = f"draft={folders['medusa without outputs']},tokens=3"
    own = load(ShardConfig(folder=str(tiny.folder("hy-4")), model="m", dtype="bfloat16", speculate=draft), lambda stage: None)
    own.resize(64)
    world = drive(free(own), [tiny.group(1, prompt(1, 20), 10, drafts=3)], Habits(), seed=1)
    assert world.failed == {}
    assert world.drafted > 3


def test_beside_linear_attention(folders: dict[str, Path]) -> None:
    """Where right drafts are computed once more with the next step."""
    groups = [group for group in asked(3) if len(group.waiting) == 1][:3]
    own = free(engine(folders["speculator"], "tokens=3", 4, name="qwen3.5"))
    off = watched(own, Oracle("speculator", "qwen3.5"))
    world = drive(own, groups, Habits(7, pause=0.05), seed=2)
    plain = drive(tiny.engine("qwen3.5", 16, 2000, prefix_caching=False), [replace(group, drafts=0) for group in groups], Habits())
    assert max(off()) < 5e-3
    assert world.tokens == plain.tokens
    assert world.drafted > 30


@pytest.mark.parametrize(
    ("kind", "name"),
    [("speculator", "llama"), *(("medusa without outputs", name) for name in ("phi", "cohere", "gpt2"))],
)
def test_two_ranks_keep_what_one_of_them_guesses_by(
    kind: str, name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads without output matrices take the model's, of which rank 0 has a part: with biases, tied, scaled, otherwise named."""
    own, said = threading.local(), "tree=2x2x1"
    monkeypatch.setattr(
        "penstock.shard.loading.Ranks", lambda rank, size, *rest: own.ranks if size > 1 else Ranks(rank, size, *rest)
    )
    groups = [group for group in asked(all_of(said)) if len(group.waiting) == 1][:4]

    def work(ranks: Ranks) -> tuple[World, list[float]]:
        own.ranks = ranks
        half = halved(name, folders[kind], said, ranks)
        off = watched(half, Oracle(kind, name)) if not ranks.rank else list
        return drive(half, copied(groups), Habits(16, pause=0.05), seed=5), off()

    (world, off), (twin, _) = tiny.Threads().run(work)
    assert max(off) < 1e-3
    assert len(off) > 20
    assert world.tokens == twin.tokens == drive(tiny.engine(name), copied(groups, 0), Habits()).tokens
    assert world.drafted == twin.drafted > 20


def halved(name: str, folder: Path, said: str, ranks: Ranks) -> Engine:
    config = ShardConfig(folder=str(tiny.folder(name)), model=name, speculate=f"draft={folder},{said}", page_size=4)
    found = load(replace(config, rank=ranks.rank, ranks=2, meeting="here"), lambda stage: None)
    found.resize(300)
    return free(found)


def copied(groups: Sequence[Group], drafts: int | None = None) -> list[Group]:
    """Not begun yet, for another engine; with other numbers of drafts, if these are given."""
    made = {group.uid: group for group in asked(0)}
    return [replace(made[group.uid], drafts=group.drafts if drafts is None else drafts) for group in groups]


def planted(kind: str, texts: Sequence[Sequence[int]], begins: int) -> dict[str, Tensor]:
    """Heads whose output matrices are such that they guess what these texts say, all of it: of fewer tokens than features, behind
    the first `begins`."""
    own = dict(weights(kind))
    for level in range(LEVELS):
        name = f"{level}.2.weight" if kind == "medusa" else f"speculator.head.{level}.weight"
        states, said = list[Tensor](), list[int]()
        own[name] = torch.eye(64 if kind == "medusa" else INNER)  # so that states come out
        for text in texts:
            for end in range(begins, len(text) - level):
                states.append(Oracle(kind, own=own)(text[:end], text[end : end + level]))
                said.append(text[end + level])
        wanted = functional.one_hot(torch.tensor(said), configurations.VOCABULARY).double()
        own[name] = torch.linalg.lstsq(torch.stack(states).double(), wanted, driver="gelsd").solution.t().float().contiguous()
    return own


@pytest.mark.parametrize("kind", ["medusa", "speculator"])
def test_heads_that_are_right_are_believed(kind: str, tmp_path: Path) -> None:
    """All but the last guesses, behind the ends of answers."""
    prompts = [prompt(uid, 9) for uid in (3, 4)]
    said = drive(tiny.engine("llama"), [tiny.group(uid, one, 22) for uid, one in enumerate(prompts)], Habits()).tokens
    texts = [[*one, *said[uid, 0]] for uid, one in enumerate(prompts)]
    own = free(engine(written(tmp_path, CONFIGS[kind], planted(kind, texts, 10)), "tokens=3", 4))
    world = drive(own, [tiny.group(uid, one, 22, drafts=3) for uid, one in enumerate(prompts)], Habits(5))
    assert world.tokens == said
    assert world.accepted >= world.drafted - 2 * LEVELS
    assert world.accepted > 25


def test_grammars_are_kept(folders: dict[str, Path]) -> None:
    said = "nodes=9"
    own = free(engine(folders["medusa without outputs"], said, 4, name="words"))
    masks, plain = Masks(grammars.GRAMMAR_TOKENS, grammars.VOCABULARY), grammars.with_masks(tiny.engine("words"))
    own.speculator = Speculator(own.decoder.ranks, tiny.CPU, parse(f"draft=x,{said}"), own.speculator.drafter, masks, LEVELS)
    own._masks = masks
    world = drive(own, grammars.asked(all_of(said), range(8)), Habits(7, pauses=1), seed=2)
    grammars.check(world, drive(plain, grammars.asked(0, range(8)), Habits()))
    assert world.accepted > 10


@pytest.mark.parametrize(("said", "count"), [("tree=3x2,verify=rejection", 250), ("tree=2x2", 100)])
def test_answers_have_the_distribution_of_plain_sampling(
    said: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with four tokens: see `test_distribution`."""
    hidden, generator = tiny.decoder("four").shape.hidden, torch.Generator().manual_seed(1)
    shapes = {f"{level}.0.linear.{part}": (hidden, hidden)[: 2 - (part == "bias")] for level in range(2) for part in PARTS}
    tensors = {name: 0.3 * torch.randn(size, generator=generator) for name, size in shapes.items()}
    written(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors)
    monkeypatch.setattr(test_distribution, "engine", lambda said: engine(tmp_path, said, pages=6000, name="four"))
    found, drafted, accepted = test_distribution.answers(said, count)
    exact = test_distribution.exact(test_distribution.PLAIN)
    assert drafted > accepted > count
    assert g_test(found, exact) > test_distribution.FAIR


def test_whole_models_that_hold_their_heads(tmp_path: Path) -> None:
    """As those that were trained together: named twice, as the model and as what drafts for it."""
    fields = json.loads((tiny.folder("llama") / "config.json").read_text()) | MEDUSA
    stored = safetensors.torch.load_file(tiny.folder("llama") / "model.safetensors")
    written(tmp_path, fields, stored | {f"medusa_head.{name}": tensor for name, tensor in weights("medusa").items()})
    config = ShardConfig(folder=str(tmp_path), model="llama", speculate=f"draft={tmp_path},tokens=2", page_size=4)
    own = load(config, lambda stage: None)
    own.resize(500)
    check(free(own), Oracle("medusa"), asked(2)[:4], Habits(7))


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_they_take_is_planned(kind: str, folders: dict[str, Path]) -> None:
    own = engine(folders[kind], "tokens=3", page_size=4, pages=9)
    drafter = own.speculator.drafter
    assert isinstance(drafter, Readout)
    assert drafter.token_bytes == 4 * 64
    assert sum(part.nbytes for part in own.cache.pages) == 10 * 4 * own.token_bytes
    model, draft = checkpoint.read(tiny.folder("llama"), "auto", text=False), checkpoint.read(folders[kind], "auto", text=False)
    draft = replace(draft, config=with_sizes(draft.config, checkpoint.elements(folders[kind])))
    machine, bytes = Machine(cores=2, memory=1 << 32, fast_bfloat16=False), sum(tensor.nbytes for tensor in weights(kind).values())
    one, two = (plan.divide(Options(dtype="float32", num_shard=ranks), model, machine, draft) for ranks in (1, 2))
    assert one.draft_token_bytes == drafter.token_bytes
    assert one.draft_bytes == bytes
    assert two.draft_bytes - bytes == (4 * configurations.VOCABULARY * 64 if "without" in kind else 0)
    assert "3 heads" in plan.table(one, "llama")
    assert "\n  features " in plan.table(one, "llama")


@pytest.mark.parametrize("kind", ["medusa", "speculator"])
def test_weights_that_are_made_up(kind: str, folders: dict[str, Path]) -> None:
    asked = f"draft={folders[kind]},tokens=2"
    own = load(
        ShardConfig(folder=str(tiny.folder("llama")), model="llama", speculate=asked, load_format="dummy"), lambda stage: None
    )
    own.resize(100)
    world = drive(free(own), [tiny.group(1, [1, 2, 3], 6, drafts=2)], Habits())
    assert world.drafted > 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MEDUSA | {"medusa_num_heads": 0}, "medusa_num_heads 0, an integer from 1 to 127 is needed"),
        (MEDUSA | {"medusa_num_layers": None}, "medusa_num_layers null, an integer"),
        (
            MEDUSA | {"hidden_size": 128},
            "hidden_size of Medusa's heads is 128, and for this model it must be 64: take a draft model",
        ),
        (MEDUSA | {"medusa_outputs": "yes"}, "medusa_outputs 'yes', true or false is needed"),
        (MEDUSA | {"vocab_size": 132}, "vocab_size of Medusa's heads is 132, and for this model it must be 131"),
        (SPECULATOR | {"emb_dim": 128}, "emb_dim of the MLP speculator is 128, and for this model it must be 64"),
        (SPECULATOR | {"vocab_size": 130}, "vocab_size of the MLP speculator is 130, and for this model it must be 131"),
        (SPECULATOR | {"n_predict": "all"}, "n_predict 'all', an integer from 1 to 127"),
        (SPECULATOR | {"inner_dim": -1}, "inner_dim -1, an integer from 0"),
        (SPECULATOR | {"tie_weights": 1}, "tie_weights 1, true or false is needed"),
    ],
)
def test_heads_that_do_not_fit(config: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        draft_shape(config, tiny.decoder("llama").shape)


def test_as_many_tokens_as_heads() -> None:
    found = readout_shape(MEDUSA, 64, 131)
    assert shaped(found, parse("draft=x"), said=False).widths == (1, 1, 1)
    assert shaped(found, parse("draft=x,nodes=30")).nodes == 30
    for said in ("tokens=4", "tree=2x1x1x1"):
        with pytest.raises(Unsupported, match="4 tokens in a chain are asked for, and its 3 heads draft one each: say tokens=3"):
            shaped(found, parse(f"draft=x,{said}"))
    with pytest.raises(Unsupported, match=r"no tensor is named 0.0.linear.weight"):
        with_sizes(MEDUSA, {"blocks.0.layers.0.weight": 4096})


def test_a_tensor_that_is_missing(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in weights("medusa").items() if not name.startswith("2.")}
    with pytest.raises(Unsupported, match=r"has no tensor 2.0.linear.weight: is the download complete"):
        engine(written(tmp_path, MEDUSA, tensors), "tokens=2")
