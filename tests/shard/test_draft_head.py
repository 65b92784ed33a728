"""EAGLE-3: heads that guess by what their target makes of tokens, against a computation of their own from the beginning."""

import dataclasses
import functools
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from penstock.demo import eagle
from penstock.launcher import checkpoint, hub, plan
from penstock.launcher.machine import Machine
from penstock.launcher.options import Options
from penstock.proto.speculation import parse
from penstock.shard import graph_sizes
from penstock.shard.config import ShardConfig
from penstock.shard.decoding.growth import Frontier
from penstock.shard.decoding.proposers import DraftRequest, Proposal
from penstock.shard.engine import Engine
from penstock.shard.loading import _drafter, load
from penstock.shard.models.decoder import Decoder
from penstock.shard.models.draft_families import draft_shape
from penstock.shard.models.draft_head import Eagle3, MtpHead
from penstock.shard.models.families import shape
from penstock.shard.models.shape import Shape, Unsupported
from penstock.shard.models.traits import DraftFeatures
from penstock.shard.parallel import Ranks
from penstock.shard.speculator import Speculator
from penstock.shard.weights import Weights
from penstock.tests.shard import configurations, tiny
from penstock.tests.shard.driver import UNLIMITED, Habits, World, drive
from penstock.tests.shard.test_drafter import all_of, free
from penstock.tests.shard.test_oracle import at_rest
from penstock.tests.shard.test_sharing import room
from penstock.tests.shard.test_speculation import asked, expected

KNOWN = 100  # tokens that the head can guess
LAYERS = [0, 1]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": configurations.VOCABULARY,
    "draft_vocab_size": KNOWN,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 48,  # fewer than are used
    "eagle_aux_hidden_state_layer_ids": LAYERS,
}
SHAPES = {
    "fc.weight": (64, 128),
    "midlayer.input_layernorm.weight": (64,),
    "midlayer.hidden_norm.weight": (64,),
    "midlayer.post_attention_layernorm.weight": (64,),
    "midlayer.self_attn.q_proj.weight": (64, 128),
    "midlayer.self_attn.k_proj.weight": (32, 128),
    "midlayer.self_attn.v_proj.weight": (32, 128),
    "midlayer.self_attn.o_proj.weight": (64, 64),
    "midlayer.mlp.gate_proj.weight": (80, 64),
    "midlayer.mlp.up_proj.weight": (80, 64),
    "midlayer.mlp.down_proj.weight": (64, 80),
    "norm.weight": (64,),
    "lm_head.weight": (KNOWN, 64),
}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = {name: torch.randn(size, generator=generator) * 0.3 + ("norm" in name) for name, size in SHAPES.items()}
    targets = torch.randperm(configurations.VOCABULARY, generator=generator)[:KNOWN].sort().values
    return found | {"d2t": targets - torch.arange(KNOWN), "t2d": torch.isin(torch.arange(configurations.VOCABULARY), targets)}


def written(folder: Path, config: dict[str, Any] = CONFIG, tensors: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors or weights(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("eagle") / "head")


def engine(
    folder: Path, said: str, page_size: int = 16, pages: int = 2000, prefix_caching: bool = True, name: str = "llama"
) -> Engine:
    asked = f"draft={folder},{said}"
    where = {"folder": str(tiny.folder(name)), "model": name, "page_size": page_size}
    config = ShardConfig(**where, speculate=asked, prefix_caching=prefix_caching)
    found = load(config, lambda stage: None)
    found.resize(pages)
    return found


class Oracle:
    """Logits after a text and drafts, of a head as its authors have it: pair i is of token i + 1 and the features of token i."""

    def __init__(self, name: str, normalized: bool = False) -> None:
        self.name = name
        self.normalized = normalized
        self.own = weights()
        self.known: dict[tuple[int, ...], Tensor] = {}  # features of texts
        self.after = functools.cache(self._after)

    def __call__(self, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
        return self._logits(self.after(tuple(text), tuple(drafts))[1])

    def _after(self, text: tuple[int, ...], drafts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The features of all tokens but the last, and what comes of them."""
        if drafts:
            before, last = self.after(text, drafts[:-1])
            features = torch.cat((before, last.unsqueeze(0)))
        else:
            features = self.features(text)[: len(text) - 1]
        return features, self._hidden([*text, *drafts][1 : len(features) + 1], features)[-1]

    def features(self, text: tuple[int, ...]) -> Tensor:
        """A text has those that it has as the beginning of another."""
        for longer, found in self.known.items():
            if longer[: len(text)] == text:
                return found
        return self.known.setdefault(text, self._features(text))

    def _logits(self, hidden: Tensor) -> Tensor:
        whole = torch.full((configurations.VOCABULARY,), -torch.inf)
        whole[self.own["d2t"] + torch.arange(KNOWN)] = self.own["lm_head.weight"] @ self._norm(hidden, "norm")
        return whole

    @torch.inference_mode()
    def _features(self, text: tuple[int, ...]) -> Tensor:
        states = tiny.reference(self.name)(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in LAYERS], 1) @ self.own["fc.weight"].t()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (64,), self.own[f"{name}.weight"], 1e-5)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.own[f"midlayer.{name}_proj.weight"].t()

    def _hidden(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        embedded = tiny.reference(self.name).get_input_embeddings().weight.detach()[list(tokens)]
        seen = self._norm(features, "midlayer.hidden_norm")
        both = torch.cat((self._norm(embedded, "midlayer.input_layernorm"), seen), 1)
        query, key, value = (self._linear(both, f"self_attn.{name}").view(len(both), -1, 16).transpose(0, 1) for name in "qkv")
        found = functional.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True, enable_gqa=True)
        hidden = (seen if self.normalized else features) + self._linear(found.transpose(0, 1).flatten(1), "self_attn.o")
        x = self._norm(hidden, "midlayer.post_attention_layernorm")
        return hidden + self._linear(functional.silu(self._linear(x, "mlp.gate")) * self._linear(x, "mlp.up"), "mlp.down")


def turned(x: Tensor) -> Tensor:
    """[heads, positions, 16]."""
    angles = torch.arange(x.shape[1]).unsqueeze(1) * 500.0 ** (-torch.arange(8) / 8)
    cosines, sines = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cosines + torch.cat((-x[..., 8:], x[..., :8]), 2) * sines


def watched(own: Engine, oracle: Callable[[Sequence[int], Sequence[int]], Tensor]) -> Callable[[], list[float]]:
    """Tells how far its draft model's logits were from those of the oracle, of all nodes that were asked for from now on."""
    drafter, told = own.speculator.drafter, list[tuple[list[int], list[int], Tensor]]()
    assert drafter is not None
    logits = drafter.logits

    def seen(wanted: Sequence[Frontier]) -> Tensor:
        found = logits(wanted)
        nodes = [(one, node) for one in wanted for node in one.nodes]
        for row, (one, node) in zip(found, nodes, strict=True):
            path = list[int]()
            while node >= 0:
                path.insert(0, one.tokens[node])
                node = one.parents[node]
            told.append((list(one.sequence.tokens), path, row.clone()))
        return found

    def off() -> list[float]:
        """The longest texts first: what transformers makes of their beginnings is told with them."""
        found = []
        for text, path, row in sorted(told, key=lambda one: -len(one[0])):
            truth = oracle(text, path)
            assert row.isinf().equal(truth.isinf())
            found.append((row - truth)[~truth.isinf()].abs().max().item())
        return found

    drafter.logits = seen  # type: ignore[method-assign]
    return off


@pytest.mark.parametrize(
    ("said", "page_size", "chunk"),
    [("tokens=4", 16, 7), ("tokens=3", 1, UNLIMITED), ("tree=3x2x1", 4, 7), ("nodes=12", 16, 9), ("nodes=12", 1, 5)],
)
def test_what_it_computes_is_what_its_authors_mean(head: Path, said: str, page_size: int, chunk: int) -> None:
    """In chunks, after pauses, beside others. No token changes."""
    groups = [group for group in asked(all_of(said)) if len(group.waiting) == 1]
    own = free(engine(head, said, page_size, room(groups, page_size) + 300 // page_size, prefix_caching=False))
    off = watched(own, Oracle("llama"))
    world = drive(own, groups, Habits(chunk, pause=0.05), seed=page_size)
    assert max(told := off()) < 1e-3
    assert len(told) > 100
    assert world.tokens == {one: expected().tokens[one] for one in world.tokens}
    assert world.pauses
    assert world.drafted > 50
    assert at_rest(own)


@pytest.mark.parametrize(("name", "said"), [("llama", "tree=2x2x1"), ("glm4-moe", "tokens=3"), ("qwen3.5", "tokens=3")])
def test_two_ranks_keep_what_one_of_them_guesses_by(
    name: str, said: str, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both compute the same rows of the last layer, though only rank 0 has a draft model."""
    if name != "llama":
        predicting(name, tmp_path, tables=False)
    folder, draft = (tiny.folder(name), str(head)) if name == "llama" else (tmp_path, "mtp")
    own = threading.local()
    monkeypatch.setattr(
        "penstock.shard.loading.Ranks", lambda rank, size, *rest: own.ranks if size > 1 else Ranks(rank, size, *rest)
    )

    def work(ranks: Ranks) -> tuple[World, list[float]]:
        own.ranks = ranks
        config = ShardConfig(folder=str(folder), model=name, speculate=f"draft={draft},{said}", prefix_caching=False, page_size=4)
        half = load(dataclasses.replace(config, rank=ranks.rank, ranks=2, meeting="here"), lambda stage: None)
        half.resize(300)
        free(half)
        off = watched(half, Oracle("llama")) if name == "llama" and not ranks.rank else list
        world = drive(half, [group for group in asked(all_of(said)) if len(group.waiting) == 1][:8], Habits(16), seed=5)
        return world, off()

    (world, off), (twin, _) = tiny.Threads().run(work)
    plain = drive(tiny.engine(name, prefix_caching=False), [group for group in asked(0) if group.uid in world.answers], Habits())
    assert world.tokens == twin.tokens == plain.tokens
    assert world.drafted == twin.drafted > 50
    assert max(off, default=0.0) < 1e-3


def in_speculators(name: str) -> str:
    """What that library calls a tensor."""
    return name.replace("midlayer.", "layers.0.")


@pytest.mark.parametrize("said", [{"norm_before_residual": True, "model_type": None}, {"speculators_model_type": "eagle3"}])
def test_heads_as_speculators_has_them(said: dict[str, Any], tmp_path: Path) -> None:
    """With the layer's fields in an object of their own, another name of the layer, features that begin behind their norm, which
    need not be said, and the target's table once more."""
    outer = ("architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    config: dict[str, Any] = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": KNOWN, "target_hidden_size": None} | said
    config |= {"eagle_aux_hidden_state_layer_ids": LAYERS[::-1]}
    config |= {"transformer_layer_config": {name: value for name, value in CONFIG.items() if name not in outer}}
    tensors = {in_speculators(name): tensor for name, tensor in weights().items()}
    tensors["embed_tokens.weight"] = tiny.reference("llama").get_input_embeddings().weight.detach().clone()
    own = free(engine(written(tmp_path, config, tensors), "tree=2x2x1", 4, prefix_caching=False))
    drafter = own.speculator.drafter
    assert drafter is not None
    assert drafter.decoder.embedding is own.decoder.embedding
    off = watched(own, Oracle("llama", normalized=True))
    world = drive(own, [group for group in asked(10) if len(group.waiting) == 1], Habits(7), seed=4)
    assert max(told := off()) < 1e-3
    assert len(told) > 100
    assert world.tokens == {one: expected().tokens[one] for one in world.tokens}
    assert world.drafted > 20


def test_what_a_token_takes_is_what_is_set_aside_for_it(head: Path) -> None:
    own = engine(head, "tokens=3", page_size=4, pages=9)
    drafter = own.speculator.drafter
    assert drafter is not None
    held = sum(part.nbytes for cache in (own.cache, drafter.cache) for part in cache.pages)
    assert held == 10 * 4 * own.token_bytes
    model, draft = (checkpoint.read(folder, "dummy") for folder in (tiny.folder("llama"), head))
    planned = plan.divide(Options(dtype="float32"), model, Machine(cores=2, memory=1 << 32, fast_bfloat16=False), draft)
    assert planned.draft_token_bytes == drafter.token_bytes


@torch.inference_mode()
def test_padding_has_no_features(head: Path) -> None:
    """Pages are cleared by what is in the first one, where all that has no slot is written."""
    own = engine(head, "tokens=3", page_size=4, pages=9)
    assert own.decoder.kept is not None
    assert own.cache.features is not None
    places: Any = SimpleNamespace(slots=torch.tensor([-1, 13, -1, 6]))
    own.decoder.kept.keep(torch.randn(4, 128).index_fill(0, torch.tensor([2]), torch.nan), places, own.cache)
    assert own.cache.features.any(1).nonzero().flatten().tolist() == [6, 13]


@pytest.mark.parametrize(("page_size", "exact"), [(16, 0.95), (4, 0.9), (1, 0.5)])
def test_a_page_that_is_shared_knows_one_token_of_its_first(head: Path, page_size: int, exact: float) -> None:
    """That behind its last one. All else is exact, and tokens do not change."""
    own = free(engine(head, "tree=2x2x1", page_size))
    off = watched(own, Oracle("llama"))
    world = drive(own, asked(10), Habits(7, pause=0.05), seed=3)
    assert world.tokens == expected().tokens
    assert world.finishes == expected().finishes
    assert world.cached > 50
    told = off()
    assert sum(value < 1e-3 for value in told) > exact * len(told)


class NextOracle(Oracle):
    """The same of a model's own layer for predicting several tokens, by transformers' layer of that kind."""

    def __init__(self, name: str, own: dict[str, Tensor], larger: Any) -> None:
        super().__init__(name)
        self.own = own
        self.larger = larger

    @torch.inference_mode()
    def _features(self, text: tuple[int, ...]) -> Tensor:
        return tiny.reference(self.name)(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _hidden(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        embedded = self.own.get("embed_tokens.weight", tiny.reference(self.name).get_input_embeddings().weight)[list(tokens)]
        both = torch.cat((self._norm(embedded, "enorm"), self._norm(features, "hnorm")), 1).unsqueeze(0)
        x, positions = both @ self.own["eh_proj.weight"].t(), torch.arange(len(tokens)).unsqueeze(0)
        turning = self.larger.model.rotary_emb(x, positions)
        mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf).triu(1) if self.name == "glm-5" else None  # it needs one
        found = self.larger.model.layers[-1](x, attention_mask=mask, position_embeddings=turning)
        found = found[0][0] if isinstance(found, tuple) else found[0]
        return self._norm(found, "shared_head.norm") if self.name in configurations.HYBRIDS else found

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Tensor:
        output = self.own.get("shared_head.head.weight", tiny.reference(self.name).get_output_embeddings().weight)
        return (hidden if self.name in configurations.HYBRIDS else self._norm(hidden, "shared_head.norm")) @ output.t()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        gains = self.own[f"{name}.weight"] + (self.name in configurations.HYBRIDS)  # Qwen's are stored less 1
        return functional.rms_norm(x, (64,), gains, tiny.reference(self.name).config.rms_norm_eps)


def predicting(name: str, folder: Path, tables: bool) -> NextOracle:
    """Writes a model with such a layer, with tables of its own or without."""
    config = tiny.reference(name).config
    count = config.num_hidden_layers
    prefix = f"model.layers.{count}."
    kinds = [one for one in ("layer_types", "mlp_layer_types", "indexer_types") if getattr(config, one, None)]
    fields = config.to_dict() | {"num_hidden_layers": count + 1}
    for one in kinds:
        fields[one] = [*getattr(config, one), "full_attention" if name in configurations.HYBRIDS else getattr(config, one)[-1]]
    larger = type(tiny.reference(name))(type(config)(**fields)).eval()
    generator = torch.Generator().manual_seed(3)
    for key, value in larger.state_dict().items():
        value.normal_("norm" in key, 0.3, generator=generator)
    sizes = {"enorm": (64,), "hnorm": (64,), "eh_proj": (64, 128), "shared_head.norm": (64,)}
    sizes |= (
        {"shared_head.head": (configurations.VOCABULARY, 64), "embed_tokens": (configurations.VOCABULARY, 64)} if tables else {}
    )
    own = {f"{key}.weight": torch.randn(size, generator=generator) * 0.3 + ("norm" in key) for key, size in sizes.items()}
    stored = safetensors.torch.load_file(tiny.folder(name) / "model.safetensors")
    larger.save_pretrained(folder / "larger")  # experts as checkpoints have them
    saved = safetensors.torch.load_file(folder / "larger" / "model.safetensors")
    layer = {key: value for key, value in saved.items() if key.startswith(prefix)}
    added = layer | {prefix + key: value for key, value in own.items()}
    whole = stored | (
        {in_qwen(key.removeprefix(prefix)): value for key, value in added.items()} if name in configurations.HYBRIDS else added
    )
    fields = json.loads((tiny.folder(name) / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    written(folder, fields, {key: value.contiguous() for key, value in whole.items()})
    return NextOracle(name, own, larger)


def in_qwen(name: str) -> str:
    """What Qwen calls a tensor of such a layer."""
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
    own = names.get(name.removesuffix(".weight"))
    return f"mtp.{own}.weight" if own else f"mtp.layers.0.{name}"


@pytest.mark.parametrize(
    ("name", "tables", "said"),
    [
        ("deepseek-v3", True, "tokens=3"),
        ("glm4-moe", False, "tree=2x2x1"),
        ("glm4-moe-lite", False, "nodes=6"),
        ("glm-5", True, "tokens=2"),
        ("qwen3-next", False, "tokens=3"),
        ("qwen3.5", False, "tokens=3"),
        ("qwen3.5-moe", False, "tokens=2"),
    ],
)
def test_a_layer_for_predicting_several_tokens(name: str, tables: bool, said: str, tmp_path: Path) -> None:
    oracle = predicting(name, tmp_path, tables)
    groups = [group for group in asked(all_of(said)) if len(group.waiting) == 1][:8]
    config = ShardConfig(folder=str(tmp_path), model=name, speculate=f"draft=mtp,{said}", prefix_caching=False, page_size=4)
    own = free(load(config, lambda stage: None))
    own.resize(500)
    off, most = watched(own, oracle), 5e-3 if name in configurations.HYBRIDS else 1e-3
    world = drive(own, groups, Habits(7, pause=0.05), seed=3)
    plain = drive(
        tiny.engine(name, 16, 2000, prefix_caching=False),
        [group for group in asked(0) if group.uid in {group.uid for group in groups}],
        Habits(),
    )
    assert max(told := off()) < most
    assert len(told) > 50
    assert world.tokens == plain.tokens
    assert at_rest(own)


def test_a_table_of_its_own_is_kept(head: Path, tmp_path: Path) -> None:
    table = torch.randn(configurations.VOCABULARY, 64)
    own = engine(written(tmp_path, CONFIG, weights() | {"embed_tokens.weight": table}), "tokens=2")
    assert own.speculator.drafter is not None
    assert own.speculator.drafter.decoder.embedding.equal(table)


def test_two_ranks_guess_what_one_does(head: Path) -> None:
    said = "tree=2x2x1"

    def work(ranks: Ranks) -> World:
        half = tiny.engine_of("llama", ranks, 4, 300)
        config = ShardConfig(folder=str(tiny.folder("llama")), model="llama", rank=ranks.rank, ranks=2)
        whole = Weights(tiny.folder("llama"), torch.float32, tiny.CPU, lambda read: None)
        speculation = parse(f"draft={head},{said}")
        form = draft_shape(CONFIG, half.decoder.shape)
        drafter = _drafter(config, speculation, form, half.decoder, whole, lambda stage: None)
        assert (drafter is None) == (ranks.rank == 1)
        half.speculator = Speculator(ranks, tiny.CPU, speculation, drafter)
        half.resize(300)
        return drive(free(half), asked(8), Habits(16, pause=0.03), seed=5)

    world, twin = tiny.Threads().run(work)
    alone = drive(free(engine(head, said, 4, 300)), asked(8), Habits(16, pause=0.03), seed=5)
    assert world.tokens == twin.tokens == alone.tokens == expected().tokens
    assert world.drafted == twin.drafted
    assert world.accepted == twin.accepted > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128}, "hidden_size 128, and for this model it must be 64"),
        ({"target_hidden_size": 128}, "target_hidden_size 128, and"),
        ({"vocab_size": 130}, "vocab_size 130, and for this model it must be 131"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2, and for this model it must be 1"),
        ({"draft_vocab_size": 132}, "draft_vocab_size 132, an integer from 1 to vocab_size"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size 'many'"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"\[2, 1, -1\] \(nothing means what enters layer 2, the middle one"),
        ({"transformer_layer_config": 3}, "transformer_layer_config 3, an object is needed"),
        ({"rms_norm_eps": "little"}, "rms_norm_eps 'little'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ],
)
def test_heads_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        draft_shape(CONFIG | changes, shape(tiny.reference("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))


def test_a_field_that_is_missing() -> None:
    target = tiny.decoder("llama").shape
    with pytest.raises(Unsupported, match=r"config.json of an EAGLE-3 head lacks 'intermediate_size': is it complete"):
        draft_shape({key: value for key, value in CONFIG.items() if key != "intermediate_size"}, target)
    with pytest.raises(Unsupported, match="architecture LlamaForCausalLMEagle3 is not supported"):
        shape(CONFIG)  # as a model of its own
    with pytest.raises(Unsupported, match="num_nextn_predict_layers 0: the model has no layer for predicting"):
        draft_shape({}, target, own=True)


def test_tokens_that_lead_nowhere(tmp_path: Path) -> None:
    for wrong in (torch.arange(KNOWN), torch.zeros(KNOWN - 1, dtype=torch.int64), -torch.arange(KNOWN)):
        with pytest.raises(Unsupported, match="d2t does not lead 100 tokens to as many of 131"):
            engine(written(tmp_path, CONFIG, weights() | {"d2t": wrong}), "tokens=2")


def test_numbers_of_weights_are_as_planned(head: Path) -> None:
    """Of a head's own, without the table that it shares."""
    own = engine(head, "tokens=2")
    assert own.speculator.drafter is not None
    decoder = own.speculator.drafter.decoder
    assert decoder.shape.parameters() == sum(value.numel() for name, value in weights().items() if "2" not in name)
    assert own.speculator.drafter.token_bytes == 4 * (2 * 2 * 16 + 64)
    assert own.cache.features is not None
    assert own.cache.features.shape == (2001 * 16, 64)


def test_trees_are_not_for_linear_attention(head: Path) -> None:
    for said in ("tree=2x1", "nodes=4", "tokens=3,ngram=2"):
        with pytest.raises(Unsupported, match="with linear attention drafts must be a chain"):
            engine(head, said, name="qwen3.5")


def test_eagle_beside_linear_attention(tmp_path: Path) -> None:
    config = CONFIG | {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    own = free(engine(written(tmp_path, config), "tokens=3", 4, name="qwen3.5"))
    world = drive(own, asked(3), Habits(7, pause=0.05), seed=2)
    assert world.tokens == drive(tiny.engine("qwen3.5", 16, 2000, prefix_caching=False), asked(0), Habits()).tokens
    assert world.drafted > 50


def test_the_demos_head_guesses_what_its_trainer_does() -> None:
    """Another program, which computes everything from the beginning: the same drafts, but for near ties, and most are right."""
    target, trained = eagle.load_target(tiny.DEMO), eagle.load(hub.DRAFTS["demo-eagle"])
    config = ShardConfig(folder=str(tiny.DEMO), model="demo", speculate=f"draft={hub.DRAFTS['demo-eagle']},tokens=4")
    own = free(load(config, lambda stage: None))
    own.resize(500)
    tokenizer = Tokenizer.from_file(str(tiny.DEMO / "tokenizer.json"))
    chats = [
        f"<|begin|><|user|>{text}<|end|><|assistant|>" for text in ("Tell me a story.", "What is 3 + 4?", "Count from 3 to 9.")
    ]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in chats]
    asked = list[tuple[list[int], list[int]]]()
    propose = own.speculator.proposer.propose

    def noted(wanted: Sequence[DraftRequest]) -> Proposal:
        found = propose(wanted)
        asked.extend((list(one.sequence.tokens), list(draft.tree.tokens)) for one, draft in zip(wanted, found.drafts, strict=True))
        return found

    own.speculator.proposer.propose = noted  # type: ignore[method-assign]
    world = drive(own, [tiny.group(uid, prompt, 90, end_ids=[2], drafts=4) for uid, prompt in enumerate(prompts)], Habits(7))
    same = sum(drafts == eagle.drafts(target, trained, text, len(drafts)) for text, drafts in asked)
    assert same >= len(asked) - 1 > 20
    assert world.accepted > 0.6 * world.drafted


def test_a_model_that_is_its_own_draft_model_guesses_as_a_whole() -> None:
    """Its folder is named, and not its own layer, which it may lack."""
    own = free(engine(tiny.folder("llama"), "tokens=4"))
    assert own.speculator.drafter is not None
    assert own.speculator.drafter.decoder.shape.features is None
    world = drive(own, asked(4)[:6], Habits())
    assert world.accepted > 20


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3.5-moe"])
def test_tables_that_a_model_has_too_are_held_once(name: str, tmp_path: Path) -> None:
    """Checkpoints may have them once more, for the layer."""
    predicting(name, tmp_path, tables=name == "glm4-moe")
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    layer = f"model.layers.{tiny.reference(name).config.num_hidden_layers}."
    if name == "glm4-moe":
        stored |= {f"{layer}shared_head.head.weight": stored["lm_head.weight"].clone()}
        stored |= {f"{layer}embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}
        safetensors.torch.save_file(stored, tmp_path / "model.safetensors")
    own = load(ShardConfig(folder=str(tmp_path), model=name, speculate="draft=mtp,tokens=3"), lambda stage: None)
    assert own.speculator.drafter is not None
    assert own.speculator.drafter.decoder.head is own.decoder.head
    assert own.speculator.drafter.decoder.embedding is own.decoder.embedding


@pytest.mark.parametrize("name", ["llama", "glm4-moe", "qwen3.5"])
def test_what_a_head_takes_beside_two_ranks_is_planned(name: str, head: Path, tmp_path: Path) -> None:
    """Which have parts of the tables that it needs whole."""
    folder, own = (tiny.folder(name), head) if name == "llama" else (tmp_path, tmp_path)
    if name != "llama":
        predicting(name, tmp_path, tables=False)
    target, config = (json.loads((place / "config.json").read_text()) for place in (folder, own))

    def work(ranks: Ranks) -> int:
        source = Weights(folder, torch.bfloat16, tiny.CPU, lambda read: None)
        decoder = Decoder(shape(target), source, ranks, tiny.CPU)
        if ranks.rank:
            return 0
        form = draft_shape(config, decoder.shape, own=name != "llama")
        if name != "llama":
            return MtpHead(form, decoder, source).weight_bytes
        return Eagle3(form, Weights(own, torch.bfloat16, tiny.CPU, lambda read: None), decoder, source).weight_bytes

    bytes, _ = tiny.Threads().run(work)
    model = checkpoint.read(folder, "dummy")
    draft = model if name != "llama" else checkpoint.read(own, "dummy")
    planned = plan.divide(
        Options(num_shard=2, dtype="bfloat16"), model, Machine(cores=2, memory=1 << 32, fast_bfloat16=False), draft
    )
    assert planned.draft_bytes == pytest.approx(bytes, rel=0.02)


def test_graphs_of_a_head_are_planned_though_its_model_has_fewer() -> None:
    """Steps of linear attention that carry prompts have none."""
    model = checkpoint.read(tiny.folder("qwen3.5"), "dummy")
    asked = Options(device="cuda", speculate="draft=mtp,tokens=3", max_batch_prefill_tokens=512)
    planned = plan.divide(asked, model, Machine(cores=2, memory=1 << 32, fast_bfloat16=False, gpu_memory=(1 << 36,)), model)
    assert planned.graphs == 2 * len(graph_sizes.decodes(None, planned.sequences)) + len(graph_sizes.mixed(None, 512, drafts=True))


def deep(name: str, **more: Any) -> Shape:
    """Of a tiny model's family, with 48 layers."""
    config = json.loads((tiny.folder(name) / "config.json").read_text())
    return shape(config | {"num_hidden_layers": 48, "layer_types": None} | more)


def features(found: Shape) -> DraftFeatures:
    assert found.features is not None
    return found.features


@pytest.mark.parametrize(
    ("said", "enters"),
    [
        ({}, (2, 24, 45)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 24, 47]}, (0, 24, 47)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}, (2, 24, 45)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [46, 0]}, "eagle_aux_hidden_state_layer_ids": [5]}, (1, 47)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 24, 45)),
    ],
)
def test_layers_are_told_by_what_they_make_or_by_what_enters_them(said: dict[str, Any], enters: tuple[int, ...]) -> None:
    """SpecForge's and SGLang's part of config.json means what comes out of layers, vLLM's field what enters them."""
    config = {name: value for name, value in CONFIG.items() if "eagle" not in name}
    assert features(draft_shape(config | said, deep("llama"))).layers == enters


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 47]}}, r"\[1, 23, 47\].* from 0 to 46 are needed"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 48]}, "from 0 to 47 are needed"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1]}, "numbers of different layers"),
        ({"eagle_config": [1]}, r"eagle_config \[1\], an object is needed"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc true"),
        ({"fc_norm": True}, "fc_norm true"),
        ({"norm_output": True}, "norm_output true"),
    ],
)
def test_what_a_head_means_that_the_decoder_does_not_have_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        draft_shape(CONFIG | said, deep("llama"))


def test_the_own_layer_of_a_model_with_images() -> None:
    """Whose text has another name than by itself."""
    text = json.loads((tiny.folder("qwen3.5") / "config.json").read_text())
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    assert features(draft_shape(config, shape(config), own=True)).behind
    text["mtp_num_hidden_layers"] = 0
    with pytest.raises(Unsupported, match="mtp_num_hidden_layers 0: the model has no layer"):
        draft_shape(config, shape(config), own=True)


@pytest.mark.parametrize("name", ["ernie-moe", "exaone-moe", "llama", "granite-4-h"])
def test_own_layers_of_another_kind_are_refused_before_weights_are_read(name: str) -> None:
    """Of models whose config.json has the field, and whose layers have neither DeepSeek's names nor their tables."""
    config = json.loads((tiny.folder(name) / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    with pytest.raises(Unsupported, match="no layer for predicting several tokens that is known here"):
        draft_shape(config, shape(config), own=True)


@pytest.mark.parametrize(
    ("name", "lacking"), [("glm4-moe", r"model.layers.\d.enorm.weight"), ("qwen3.5", "mtp.pre_fc_norm_embedding.weight")]
)
def test_a_checkpoint_without_its_layer(name: str, lacking: str, tmp_path: Path) -> None:
    """As quantized copies often are; random weights have whatever is asked for."""
    folder = Path(shutil.copytree(tiny.folder(name), tmp_path / "model"))
    fields = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    config = ShardConfig(folder=str(folder), model=name, speculate="draft=mtp,tokens=2")
    with pytest.raises(Unsupported, match=f"the checkpoint has no {lacking}: its layer for predicting several tokens was left out"):
        load(config, lambda stage: None)
    assert load(replace(config, load_format="dummy"), lambda stage: None).speculator.drafter is not None
