"""Medusa's heads and the MLP speculator, which draft from the target model's last hidden state, against a reference that follows
the papers and recomputes everything from the beginning."""

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
from penstock.tests.shard.driver import UNLIMITED, Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import all_pages_free, prompt
from penstock.tests.shard.test_draft_head import engine, record_logit_errors, write_head
from penstock.tests.shard.test_drafter import max_drafts, with_free_drafts
from penstock.tests.shard.test_sharing import pages_of_largest_group
from penstock.tests.shard.test_speculation import sample_groups
from penstock.tests.shard.toy import g_test

COUNT = 11  # groups
LEVELS = 3
INNER = 48
# config.json of each kind; `sizes` has the shapes of the tensors.
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
    """The folders of the heads, by kind. Medusa's file of weights has a name of its own."""
    found = {}
    for kind, config in CONFIGS.items():
        found[kind] = write_head(tmp_path_factory.mktemp("heads") / kind.replace(" ", "-"), config, weights(kind))
        if "medusa" in kind:
            (found[kind] / "model.safetensors").rename(found[kind] / "medusa_lm_head.safetensors")
    return found


KNOWN_FEATURES: dict[tuple[str, tuple[int, ...]], Tensor] = {}


@torch.inference_mode()
def features(name: str, text: tuple[int, ...]) -> Tensor:
    """The output of the model's last norm at the text's last token: from a longer known text with this prefix, if there is one."""
    for (known, longer), found in KNOWN_FEATURES.items():
        if known == name and longer[: len(text)] == text:
            return found[len(text) - 1]
    states = tiny.reference(name)(torch.tensor([text]), output_hidden_states=True).hidden_states
    return KNOWN_FEATURES.setdefault((name, text), states[-1][0])[-1]


@functools.cache
def plain_results() -> Results:
    return drive(tiny.engine("llama"), sample_groups(0)[:COUNT], Traffic())


class Oracle:
    """Logits after a text and drafts, computed from the beginning, as the papers define them."""

    def __init__(self, kind: str, name: str = "llama", own: dict[str, Tensor] | None = None) -> None:
        self.kind = kind
        self.name = name
        self.own = own or weights(kind)

    def __call__(self, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
        hidden = features(self.name, tuple(text[:-1]))
        return self._medusa(hidden, len(drafts)) if "medusa" in self.kind else self._speculator(hidden, [text[-1], *drafts])

    def _medusa(self, x: Tensor, level: int) -> Tensor:
        for block in range(CONFIGS[self.kind]["medusa_num_layers"]):
            y = self.own[f"{level}.{block}.linear.weight"] @ x + self.own[f"{level}.{block}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        output, model = self.own.get(f"{level}.{CONFIGS[self.kind]['medusa_num_layers']}.weight"), tiny.reference(self.name)
        if output is None:
            return model.get_output_embeddings()(x).detach() * getattr(model.config, "logit_scale", 1)  # type: ignore[no-any-return]
        return output @ x

    def _speculator(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        x, config = hidden, CONFIGS[self.kind]
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


def check_drafts(own: Engine, oracle: Oracle, groups: Sequence[Group], traffic: Traffic) -> Results:
    """Checks the logits of every node, and that the tokens are those of plain decoding."""
    errors = record_logit_errors(own, oracle)
    results = drive(own, groups, traffic, seed=own.page_size)
    assert max(deviations := errors()) < 1e-3
    assert len(deviations) > 50
    assert results.tokens == {one: plain_results().tokens[one] for one in results.tokens}
    assert results.finishes == {one: plain_results().finishes[one] for one in results.tokens}
    assert results.drafted > 50
    assert all_pages_free(own)
    return results


@pytest.mark.parametrize(
    ("kind", "options", "page_size", "chunk"),
    [
        ("medusa", "tree=3x2x1", 4, 7),
        ("medusa", "nodes=20", 16, 9),
        ("medusa without outputs", "tokens=3", 1, UNLIMITED),
        ("speculator", "tree=3x2x1", 1, 7),
        ("speculator", "nodes=20,ngram=6", 4, 5),
        ("tied speculator", "tokens=3", 16, 7),
    ],
)
def test_head_logits_match_the_papers_reference(
    kind: str, options: str, page_size: int, chunk: int, folders: dict[str, Path]
) -> None:
    """In chunks, after preemption, in small pools with shared prefixes."""
    groups = sample_groups(max_drafts(options))[:COUNT]
    own = with_free_drafts(engine(folders[kind], options, page_size, pages_of_largest_group(groups, page_size) + 50))
    results = check_drafts(own, Oracle(kind), groups, Traffic(chunk, pause=0.05))
    assert results.pauses
    assert results.restored or results.cached


def test_heads_without_output_matrices_use_a_float32_output_matrix(folders: dict[str, Path]) -> None:
    """Hy 4's output matrix is float32 whatever the dtype is: heads without output matrices use it."""
    draft = f"draft={folders['medusa without outputs']},tokens=3"
    own = load(ShardConfig(folder=str(tiny.folder("hy-4")), model="m", dtype="bfloat16", speculate=draft), lambda stage: None)
    own.resize(64)
    results = drive(with_free_drafts(own), [tiny.group(1, prompt(1, 20), 10, drafts=3)], Traffic(), seed=1)
    assert results.failed == {}
    assert results.drafted > 3


def test_mlp_speculator_with_linear_attention_changes_no_token(folders: dict[str, Path]) -> None:
    """With linear attention accepted drafts are computed again with the next step."""
    groups = [group for group in sample_groups(3) if len(group.waiting) == 1][:3]
    own = with_free_drafts(engine(folders["speculator"], "tokens=3", 4, name="qwen3.5"))
    errors = record_logit_errors(own, Oracle("speculator", "qwen3.5"))
    results = drive(own, groups, Traffic(7, pause=0.05), seed=2)
    plain = drive(tiny.engine("qwen3.5", 16, 2000, prefix_caching=False), [replace(group, drafts=0) for group in groups], Traffic())
    assert max(errors()) < 5e-3
    assert results.tokens == plain.tokens
    assert results.drafted > 30


@pytest.mark.parametrize(
    ("kind", "name"),
    [("speculator", "llama"), *(("medusa without outputs", name) for name in ("phi", "cohere", "gpt2"))],
)
def test_heads_on_two_ranks_match_the_reference(
    kind: str, name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads without output matrices use the model's, of which rank 0 has a part: with biases, tied, scaled, under other names."""
    own, options = threading.local(), "tree=2x2x1"
    monkeypatch.setattr(
        "penstock.shard.loading.Ranks", lambda rank, size, *rest: own.ranks if size > 1 else Ranks(rank, size, *rest)
    )
    groups = [group for group in sample_groups(max_drafts(options)) if len(group.waiting) == 1][:4]

    def work(ranks: Ranks) -> tuple[Results, list[float]]:
        own.ranks = ranks
        rank_engine = engine_of_rank(name, folders[kind], options, ranks)
        errors = record_logit_errors(rank_engine, Oracle(kind, name)) if not ranks.rank else list
        return drive(rank_engine, copies_of(groups), Traffic(16, pause=0.05), seed=5), errors()

    (results, errors), (other_rank, _) = tiny.ThreadedRanks().run(work)
    assert max(errors) < 1e-3
    assert len(errors) > 20
    assert results.tokens == other_rank.tokens == drive(tiny.engine(name), copies_of(groups, 0), Traffic()).tokens
    assert results.drafted == other_rank.drafted > 20


def engine_of_rank(name: str, folder: Path, options: str, ranks: Ranks) -> Engine:
    config = ShardConfig(folder=str(tiny.folder(name)), model=name, speculate=f"draft={folder},{options}", page_size=4)
    found = load(replace(config, rank=ranks.rank, ranks=2, meeting="here"), lambda stage: None)
    found.resize(300)
    return with_free_drafts(found)


def copies_of(groups: Sequence[Group], drafts: int | None = None) -> list[Group]:
    """New copies of the groups for another engine, with another number of drafts if it is given."""
    fresh = {group.uid: group for group in sample_groups(0)}
    return [replace(fresh[group.uid], drafts=group.drafts if drafts is None else drafts) for group in groups]


def solved_heads(kind: str, texts: Sequence[Sequence[int]], start: int) -> dict[str, Tensor]:
    """Heads whose output matrices are solved for so that they draft all tokens of these texts behind the first `begins`: there are
    fewer tokens than features."""
    own = dict(weights(kind))
    for level in range(LEVELS):
        name = f"{level}.2.weight" if kind == "medusa" else f"speculator.head.{level}.weight"
        states, next_tokens = list[Tensor](), list[int]()
        own[name] = torch.eye(64 if kind == "medusa" else INNER)  # so that the oracle returns hidden states
        for text in texts:
            for end in range(start, len(text) - level):
                states.append(Oracle(kind, own=own)(text[:end], text[end : end + level]))
                next_tokens.append(text[end + level])
        wanted = functional.one_hot(torch.tensor(next_tokens), configurations.VOCABULARY).double()
        own[name] = torch.linalg.lstsq(torch.stack(states).double(), wanted, driver="gelsd").solution.t().float().contiguous()
    return own


@pytest.mark.parametrize("kind", ["medusa", "speculator"])
def test_all_drafts_of_correct_heads_are_accepted(kind: str, tmp_path: Path) -> None:
    """All but the last drafts, which are behind the ends of answers."""
    prompts = [prompt(uid, 9) for uid in (3, 4)]
    plain_tokens = drive(tiny.engine("llama"), [tiny.group(uid, one, 22) for uid, one in enumerate(prompts)], Traffic()).tokens
    texts = [[*one, *plain_tokens[uid, 0]] for uid, one in enumerate(prompts)]
    own = with_free_drafts(engine(write_head(tmp_path, CONFIGS[kind], solved_heads(kind, texts, 10)), "tokens=3", 4))
    results = drive(own, [tiny.group(uid, one, 22, drafts=3) for uid, one in enumerate(prompts)], Traffic(5))
    assert results.tokens == plain_tokens
    assert results.accepted >= results.drafted - 2 * LEVELS
    assert results.accepted > 25


def test_grammars_are_respected_with_drafts_of_heads(folders: dict[str, Path]) -> None:
    options = "nodes=9"
    own = with_free_drafts(engine(folders["medusa without outputs"], options, 4, name="words"))
    masks, plain = Masks(grammars.GRAMMAR_TOKENS, grammars.VOCABULARY), grammars.with_masks(tiny.engine("words"))
    own.speculator = Speculator(own.decoder.ranks, tiny.CPU, parse(f"draft=x,{options}"), own.speculator.drafter, masks, LEVELS)
    own._masks = masks
    results = drive(own, grammars.grammar_groups(max_drafts(options), range(8)), Traffic(7, pauses=1), seed=2)
    grammars.check_results(results, drive(plain, grammars.grammar_groups(0, range(8)), Traffic()))
    assert results.accepted > 10


@pytest.mark.parametrize(("options", "count"), [("tree=3x2,verify=rejection", 250), ("tree=2x2", 100)])
def test_answers_have_the_distribution_of_plain_sampling(
    options: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model with four tokens: see `test_distribution`."""
    hidden, generator = tiny.decoder("four").shape.hidden, torch.Generator().manual_seed(1)
    shapes = {f"{level}.0.linear.{part}": (hidden, hidden)[: 2 - (part == "bias")] for level in range(2) for part in PARTS}
    tensors = {name: 0.3 * torch.randn(size, generator=generator) for name, size in shapes.items()}
    write_head(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors)
    monkeypatch.setattr(test_distribution, "engine", lambda options: engine(tmp_path, options, pages=6000, name="four"))
    found, drafted, accepted = test_distribution.answers(options, count)
    exact = test_distribution.exact(test_distribution.PLAIN)
    assert drafted > accepted > count
    assert g_test(found, exact) > test_distribution.FAIR


def test_model_folder_with_medusa_heads_drafts_for_itself(tmp_path: Path) -> None:
    """As of models trained together with their heads: the folder is given both as the model and as its draft model."""
    fields = json.loads((tiny.folder("llama") / "config.json").read_text()) | MEDUSA
    stored = safetensors.torch.load_file(tiny.folder("llama") / "model.safetensors")
    write_head(tmp_path, fields, stored | {f"medusa_head.{name}": tensor for name, tensor in weights("medusa").items()})
    config = ShardConfig(folder=str(tmp_path), model="llama", speculate=f"draft={tmp_path},tokens=2", page_size=4)
    own = load(config, lambda stage: None)
    own.resize(500)
    check_drafts(with_free_drafts(own), Oracle("medusa"), sample_groups(2)[:4], Traffic(7))


@pytest.mark.parametrize("kind", CONFIGS)
def test_planned_bytes_of_heads_match_their_weights(kind: str, folders: dict[str, Path]) -> None:
    own = engine(folders[kind], "tokens=3", page_size=4, pages=9)
    drafter = own.speculator.drafter
    assert isinstance(drafter, Readout)
    assert drafter.token_bytes == 4 * 64
    assert sum(part.nbytes for part in own.cache.pages) == 10 * 4 * own.token_bytes
    model, draft = checkpoint.read(tiny.folder("llama"), "auto", text=False), checkpoint.read(folders[kind], "auto", text=False)
    draft = replace(draft, config=with_sizes(draft.config, checkpoint.elements(folders[kind])))
    machine, weight_bytes = (
        Machine(cores=2, memory=1 << 32, fast_bfloat16=False),
        sum(tensor.nbytes for tensor in weights(kind).values()),
    )
    one, two = (plan.divide(Options(dtype="float32", num_shard=ranks), model, machine, draft) for ranks in (1, 2))
    assert one.draft_token_bytes == drafter.token_bytes
    assert one.draft_bytes == weight_bytes
    assert two.draft_bytes - weight_bytes == (4 * configurations.VOCABULARY * 64 if "without" in kind else 0)
    assert "3 heads" in plan.table(one, "llama")
    assert "\n  features " in plan.table(one, "llama")


@pytest.mark.parametrize("kind", ["medusa", "speculator"])
def test_heads_with_dummy_weights_can_draft(kind: str, folders: dict[str, Path]) -> None:
    speculate = f"draft={folders[kind]},tokens=2"
    own = load(
        ShardConfig(folder=str(tiny.folder("llama")), model="llama", speculate=speculate, load_format="dummy"), lambda stage: None
    )
    own.resize(100)
    results = drive(with_free_drafts(own), [tiny.group(1, [1, 2, 3], 6, drafts=2)], Traffic())
    assert results.drafted > 2


@pytest.mark.parametrize(
    ("config", "message"),
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
def test_head_config_that_does_not_fit_the_model_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        draft_shape(config, tiny.decoder("llama").shape)


def test_number_of_drafts_is_limited_by_the_number_of_heads() -> None:
    found = readout_shape(MEDUSA, 64, 131)
    assert shaped(found, parse("draft=x"), said=False).widths == (1, 1, 1)
    assert shaped(found, parse("draft=x,nodes=30")).nodes == 30
    for options in ("tokens=4", "tree=2x1x1x1"):
        with pytest.raises(Unsupported, match="4 tokens in a chain are asked for, and its 3 heads draft one each: say tokens=3"):
            shaped(found, parse(f"draft=x,{options}"))
    with pytest.raises(Unsupported, match=r"no tensor is named 0.0.linear.weight"):
        with_sizes(MEDUSA, {"blocks.0.layers.0.weight": 4096})


def test_missing_head_tensor_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in weights("medusa").items() if not name.startswith("2.")}
    with pytest.raises(Unsupported, match=r"has no tensor 2.0.linear.weight: is the download complete"):
        engine(write_head(tmp_path, MEDUSA, tensors), "tokens=2")
