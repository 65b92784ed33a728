"""Draft heads that read the target model's hidden states (EAGLE-3, and a model's own MTP layer): their logits are compared with
references that recompute every draft from the beginning, for MTP with transformers' layers."""

import dataclasses
import functools
import json
import math
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
from penstock.launcher.gpus import Gpus
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
from penstock.tests.shard.driver import UNLIMITED, Results, Traffic, drive
from penstock.tests.shard.test_against_transformers import all_pages_free
from penstock.tests.shard.test_drafter import max_drafts, with_free_drafts
from penstock.tests.shard.test_sharing import pages_of_largest_group
from penstock.tests.shard.test_speculation import plain_results, sample_groups

DRAFT_VOCABULARY = 100  # the head's draft vocabulary
FEATURE_LAYERS = [0, 1]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": configurations.VOCABULARY,
    "draft_vocab_size": DRAFT_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 48,  # fewer positions than the tests use
    "eagle_aux_hidden_state_layer_ids": FEATURE_LAYERS,
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
    "lm_head.weight": (DRAFT_VOCABULARY, 64),
}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = {name: torch.randn(size, generator=generator) * 0.3 + ("norm" in name) for name, size in SHAPES.items()}
    targets = torch.randperm(configurations.VOCABULARY, generator=generator)[:DRAFT_VOCABULARY].sort().values
    return found | {
        "d2t": targets - torch.arange(DRAFT_VOCABULARY),
        "t2d": torch.isin(torch.arange(configurations.VOCABULARY), targets),
    }


def write_head(folder: Path, config: dict[str, Any] = CONFIG, tensors: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors or weights(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("eagle") / "head")


def engine(
    folder: Path, options: str, page_size: int = 16, pages: int = 2000, prefix_caching: bool = True, name: str = "llama"
) -> Engine:
    speculate = f"draft={folder},{options}"
    where = {"folder": str(tiny.folder(name)), "model": name, "page_size": page_size}
    config = ShardConfig(**where, speculate=speculate, prefix_caching=prefix_caching)
    loaded = load(config, lambda stage: None)
    loaded.resize(pages)
    return loaded


class Eagle3Oracle:
    """Logits after a text and drafts, of an EAGLE-3 head as its authors define it: input i is token i + 1, features of token i."""

    def __init__(self, name: str, normalized: bool = False) -> None:
        self.name = name
        self.normalized = normalized
        self.own = weights()
        self.known: dict[tuple[int, ...], Tensor] = {}  # the target's features, by text
        self.after = functools.cache(self._after)

    def __call__(self, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
        return self._logits(self.after(tuple(text), tuple(drafts))[1])

    def _after(self, text: tuple[int, ...], drafts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The features of all tokens but the last, and the head's hidden state at the last."""
        if drafts:
            before, last = self.after(text, drafts[:-1])
            features = torch.cat((before, last.unsqueeze(0)))
        else:
            features = self.features(text)[: len(text) - 1]
        return features, self._hidden([*text, *drafts][1 : len(features) + 1], features)[-1]

    def features(self, text: tuple[int, ...]) -> Tensor:
        """The target's features of a text. A prefix of a known text has the known text's features."""
        for longer, found in self.known.items():
            if longer[: len(text)] == text:
                return found
        return self.known.setdefault(text, self._features(text))

    def _logits(self, hidden: Tensor) -> Tensor:
        whole = torch.full((configurations.VOCABULARY,), -torch.inf)
        whole[self.own["d2t"] + torch.arange(DRAFT_VOCABULARY)] = self.own["lm_head.weight"] @ self._norm(hidden, "norm")
        return whole

    @torch.inference_mode()
    def _features(self, text: tuple[int, ...]) -> Tensor:
        states = tiny.reference(self.name)(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in FEATURE_LAYERS], 1) @ self.own["fc.weight"].t()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (64,), self.own[f"{name}.weight"], 1e-5)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.own[f"midlayer.{name}_proj.weight"].t()

    def _hidden(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        embedded = tiny.reference(self.name).get_input_embeddings().weight.detach()[list(tokens)]
        normalized = self._norm(features, "midlayer.hidden_norm")
        both = torch.cat((self._norm(embedded, "midlayer.input_layernorm"), normalized), 1)
        query, key, value = (self._linear(both, f"self_attn.{name}").view(len(both), -1, 16).transpose(0, 1) for name in "qkv")
        found = functional.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True, enable_gqa=True)
        hidden = (normalized if self.normalized else features) + self._linear(found.transpose(0, 1).flatten(1), "self_attn.o")
        x = self._norm(hidden, "midlayer.post_attention_layernorm")
        return hidden + self._linear(functional.silu(self._linear(x, "mlp.gate")) * self._linear(x, "mlp.up"), "mlp.down")


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of [heads, positions, 16]."""
    angles = torch.arange(x.shape[1]).unsqueeze(1) * 500.0 ** (-torch.arange(8) / 8)
    cosines, sines = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    return x * cosines + torch.cat((-x[..., 8:], x[..., :8]), 2) * sines


def record_logit_errors(own: Engine, oracle: Callable[[Sequence[int], Sequence[int]], Tensor]) -> Callable[[], list[float]]:
    """Records the draft head's logits of all nodes from now on. The returned function gives their largest error against the oracle,
    for each node."""
    drafter, recorded = own.speculator.drafter, list[tuple[list[int], list[int], Tensor]]()
    assert drafter is not None
    logits = drafter.logits

    def record(wanted: Sequence[Frontier]) -> Tensor:
        found = logits(wanted)
        nodes = [(one, node) for one in wanted for node in one.nodes]
        for row, (one, node) in zip(found, nodes, strict=True):
            path = list[int]()
            while node >= 0:
                path.insert(0, one.tokens[node])
                node = one.parents[node]
            recorded.append((list(one.sequence.tokens), path, row.clone()))
        return found

    def errors() -> list[float]:
        """The longest texts first: their features contain those of their prefixes."""
        found = []
        for text, path, row in sorted(recorded, key=lambda one: -len(one[0])):
            truth = oracle(text, path)
            assert row.isinf().equal(truth.isinf())
            found.append((row - truth)[~truth.isinf()].abs().max().item())
        return found

    drafter.logits = record  # type: ignore[method-assign]
    return errors


@pytest.mark.parametrize(
    ("options", "page_size", "chunk"),
    [("tokens=4", 16, 7), ("tokens=3", 1, UNLIMITED), ("tree=3x2x1", 4, 7), ("nodes=12", 16, 9), ("nodes=12", 1, 5)],
)
def test_draft_head_logits_match_the_eagle3_reference(head: Path, options: str, page_size: int, chunk: int) -> None:
    """In chunks, after preemption, in a batch. No token changes."""
    groups = [group for group in sample_groups(max_drafts(options)) if len(group.waiting) == 1]
    own = with_free_drafts(
        engine(head, options, page_size, pages_of_largest_group(groups, page_size) + 300 // page_size, prefix_caching=False)
    )
    errors = record_logit_errors(own, Eagle3Oracle("llama"))
    results = drive(own, groups, Traffic(chunk, pause=0.05), seed=page_size)
    assert max(deviations := errors()) < 1e-3
    assert len(deviations) > 100
    assert results.tokens == {one: plain_results().tokens[one] for one in results.tokens}
    assert results.pauses
    assert results.drafted > 50
    assert all_pages_free(own)


@pytest.mark.parametrize(("name", "options"), [("llama", "tree=2x2x1"), ("glm4-moe", "tokens=3"), ("qwen3.5", "tokens=3")])
def test_features_on_two_ranks_are_kept_alike_for_the_head_on_rank_0(
    name: str, options: str, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks compute the same rows of the last layer, though only rank 0 has a draft model."""
    if name != "llama":
        write_mtp_model(name, tmp_path, tables=False)
    folder, draft = (tiny.folder(name), str(head)) if name == "llama" else (tmp_path, "mtp")
    own = threading.local()
    monkeypatch.setattr(
        "penstock.shard.loading.Ranks", lambda rank, size, *rest: own.ranks if size > 1 else Ranks(rank, size, *rest)
    )

    def work(ranks: Ranks) -> tuple[Results, list[float]]:
        own.ranks = ranks
        config = ShardConfig(
            folder=str(folder), model=name, speculate=f"draft={draft},{options}", prefix_caching=False, page_size=4
        )
        rank_engine = load(dataclasses.replace(config, rank=ranks.rank, ranks=2, meeting="here"), lambda stage: None)
        rank_engine.resize(300)
        with_free_drafts(rank_engine)
        errors = record_logit_errors(rank_engine, Eagle3Oracle("llama")) if name == "llama" and not ranks.rank else list
        results = drive(
            rank_engine, [group for group in sample_groups(max_drafts(options)) if len(group.waiting) == 1][:8], Traffic(16), seed=5
        )
        return results, errors()

    (results, errors), (other_rank, _) = tiny.ThreadedRanks().run(work)
    plain = drive(
        tiny.engine(name, prefix_caching=False), [group for group in sample_groups(0) if group.uid in results.answers], Traffic()
    )
    assert results.tokens == other_rank.tokens == plain.tokens
    assert results.drafted == other_rank.drafted > 50
    assert max(errors, default=0.0) < 1e-3


def speculators_name(name: str) -> str:
    """A tensor's name in checkpoints of the library speculators."""
    return name.replace("midlayer.", "layers.0.")


@pytest.mark.parametrize("changes", [{"norm_before_residual": True, "model_type": None}, {"speculators_model_type": "eagle3"}])
def test_head_in_the_format_of_speculators_matches_the_reference(changes: dict[str, Any], tmp_path: Path) -> None:
    """The layer's fields are in an object of their own, the layer has another name, features are taken after their norm, which need
    not be stated, and the target's embedding is stored once more."""
    outer = ("architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCABULARY,
        "target_hidden_size": None,
    } | changes
    config |= {"eagle_aux_hidden_state_layer_ids": FEATURE_LAYERS[::-1]}
    config |= {"transformer_layer_config": {name: value for name, value in CONFIG.items() if name not in outer}}
    tensors = {speculators_name(name): tensor for name, tensor in weights().items()}
    tensors["embed_tokens.weight"] = tiny.reference("llama").get_input_embeddings().weight.detach().clone()
    own = with_free_drafts(engine(write_head(tmp_path, config, tensors), "tree=2x2x1", 4, prefix_caching=False))
    drafter = own.speculator.drafter
    assert drafter is not None
    assert drafter.decoder.embedding is own.decoder.embedding
    errors = record_logit_errors(own, Eagle3Oracle("llama", normalized=True))
    results = drive(own, [group for group in sample_groups(10) if len(group.waiting) == 1], Traffic(7), seed=4)
    assert max(deviations := errors()) < 1e-3
    assert len(deviations) > 100
    assert results.tokens == {one: plain_results().tokens[one] for one in results.tokens}
    assert results.drafted > 20


def test_token_bytes_and_plan_count_the_heads_cache_and_features(head: Path) -> None:
    own = engine(head, "tokens=3", page_size=4, pages=9)
    drafter = own.speculator.drafter
    assert drafter is not None
    held = sum(part.nbytes for cache in (own.cache, drafter.cache) for part in cache.pages)
    assert held == 10 * 4 * own.token_bytes
    model, draft = (checkpoint.read(folder, "dummy") for folder in (tiny.folder("llama"), head))
    planned = plan.divide(Options(dtype="float32"), model, Machine(cores=2, memory=1 << 32, fast_bfloat16=False), draft)
    assert planned.draft_token_bytes == drafter.token_bytes


@torch.inference_mode()
def test_padding_rows_write_no_features(head: Path) -> None:
    """Rows without a slot are written to the first page, by which pages are cleared: it must stay zero."""
    own = engine(head, "tokens=3", page_size=4, pages=9)
    assert own.decoder.kept is not None
    assert own.cache.features is not None
    places: Any = SimpleNamespace(slots=torch.tensor([-1, 13, -1, 6]))
    own.decoder.kept.keep(torch.randn(4, 128).index_fill(0, torch.tensor([2]), torch.nan), places, own.cache)
    assert own.cache.features.any(1).nonzero().flatten().tolist() == [6, 13]


@pytest.mark.parametrize(("page_size", "exact"), [(16, 0.95), (4, 0.9), (1, 0.5)])
def test_shared_prefix_pages_miss_only_one_tokens_features(head: Path, page_size: int, exact: float) -> None:
    """The features of one token are missing: the one behind the page's last token. All other features are exact, and no token
    changes."""
    own = with_free_drafts(engine(head, "tree=2x2x1", page_size))
    errors = record_logit_errors(own, Eagle3Oracle("llama"))
    results = drive(own, sample_groups(10), Traffic(7, pause=0.05), seed=3)
    assert results.tokens == plain_results().tokens
    assert results.finishes == plain_results().finishes
    assert results.cached > 50
    deviations = errors()
    assert sum(value < 1e-3 for value in deviations) > exact * len(deviations)


class MtpOracle(Eagle3Oracle):
    """The same for a model's own MTP layer, computed by transformers' layer of that kind."""

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


def write_mtp_model(name: str, folder: Path, tables: bool) -> MtpOracle:
    """Writes a model with an MTP layer, with or without embedding and output matrices of its own."""
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
        {qwen_name(key.removeprefix(prefix)): value for key, value in added.items()} if name in configurations.HYBRIDS else added
    )
    fields = json.loads((tiny.folder(name) / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    write_head(folder, fields, {key: value.contiguous() for key, value in whole.items()})
    return MtpOracle(name, own, larger)


def qwen_name(name: str) -> str:
    """A tensor's name in the MTP layer of Qwen's checkpoints."""
    names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
    own = names.get(name.removesuffix(".weight"))
    return f"mtp.{own}.weight" if own else f"mtp.layers.0.{name}"


@pytest.mark.parametrize(
    ("name", "tables", "options"),
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
def test_mtp_layer_logits_match_transformers_layer(name: str, tables: bool, options: str, tmp_path: Path) -> None:
    oracle = write_mtp_model(name, tmp_path, tables)
    groups = [group for group in sample_groups(max_drafts(options)) if len(group.waiting) == 1][:8]
    config = ShardConfig(folder=str(tmp_path), model=name, speculate=f"draft=mtp,{options}", prefix_caching=False, page_size=4)
    own = with_free_drafts(load(config, lambda stage: None))
    own.resize(500)
    errors, tolerance = record_logit_errors(own, oracle), 5e-3 if name in configurations.HYBRIDS else 1e-3
    results = drive(own, groups, Traffic(7, pause=0.05), seed=3)
    plain = drive(
        tiny.engine(name, 16, 2000, prefix_caching=False),
        [group for group in sample_groups(0) if group.uid in {group.uid for group in groups}],
        Traffic(),
    )
    assert max(deviations := errors()) < tolerance
    assert len(deviations) > 50
    assert results.tokens == plain.tokens
    assert all_pages_free(own)


def test_heads_own_embedding_is_used(head: Path, tmp_path: Path) -> None:
    table = torch.randn(configurations.VOCABULARY, 64)
    own = engine(write_head(tmp_path, CONFIG, weights() | {"embed_tokens.weight": table}), "tokens=2")
    assert own.speculator.drafter is not None
    assert own.speculator.drafter.decoder.embedding.equal(table)


def test_two_ranks_draft_and_accept_like_one(head: Path) -> None:
    options = "tree=2x2x1"

    def work(ranks: Ranks) -> Results:
        rank_engine = tiny.rank_engine("llama", ranks, 4, 300)
        config = ShardConfig(folder=str(tiny.folder("llama")), model="llama", rank=ranks.rank, ranks=2)
        whole = Weights(tiny.folder("llama"), torch.float32, tiny.CPU, lambda read: None)
        speculation = parse(f"draft={head},{options}")
        form = draft_shape(CONFIG, rank_engine.decoder.shape)
        drafter = _drafter(config, speculation, form, rank_engine.decoder, whole, lambda stage: None)
        assert (drafter is None) == (ranks.rank == 1)
        rank_engine.speculator = Speculator(ranks, tiny.CPU, speculation, drafter)
        rank_engine.resize(300)
        return drive(with_free_drafts(rank_engine), sample_groups(8), Traffic(16, pause=0.03), seed=5)

    results, other_rank = tiny.ThreadedRanks().run(work)
    alone = drive(with_free_drafts(engine(head, options, 4, 300)), sample_groups(8), Traffic(16, pause=0.03), seed=5)
    assert results.tokens == other_rank.tokens == alone.tokens == plain_results().tokens
    assert results.drafted == other_rank.drafted
    assert results.accepted == other_rank.accepted > 0


@pytest.mark.parametrize(
    ("changes", "message"),
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
def test_head_config_that_does_not_fit_the_model_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        draft_shape(CONFIG | changes, shape(tiny.reference("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))


def test_missing_field_architecture_or_mtp_layer_is_reported() -> None:
    target = tiny.decoder("llama").shape
    with pytest.raises(Unsupported, match=r"config.json of an EAGLE-3 head lacks 'intermediate_size': is it complete"):
        draft_shape({key: value for key, value in CONFIG.items() if key != "intermediate_size"}, target)
    with pytest.raises(Unsupported, match="architecture LlamaForCausalLMEagle3 is not supported"):
        shape(CONFIG)  # as a model of its own
    with pytest.raises(Unsupported, match="num_nextn_predict_layers 0: the model has no layer for predicting"):
        draft_shape({}, target, own=True)


def test_invalid_d2t_is_refused(tmp_path: Path) -> None:
    for wrong in (
        torch.arange(DRAFT_VOCABULARY),
        torch.zeros(DRAFT_VOCABULARY - 1, dtype=torch.int64),
        -torch.arange(DRAFT_VOCABULARY),
    ):
        with pytest.raises(Unsupported, match="d2t does not lead 100 tokens to as many of 131"):
            engine(write_head(tmp_path, CONFIG, weights() | {"d2t": wrong}), "tokens=2")


def test_head_parameters_and_cache_sizes_are_as_planned(head: Path) -> None:
    """The head's own parameters, without the shared embedding."""
    own = engine(head, "tokens=2")
    assert own.speculator.drafter is not None
    decoder = own.speculator.drafter.decoder
    assert decoder.shape.parameters() == sum(value.numel() for name, value in weights().items() if "2" not in name)
    assert own.speculator.drafter.token_bytes == 4 * (2 * 2 * 16 + 64)
    assert own.cache.features is not None
    assert own.cache.features.shape == (2001 * 16, 64)


def test_draft_trees_are_refused_with_linear_attention(head: Path) -> None:
    for options in ("tree=2x1", "nodes=4", "tokens=3,ngram=2"):
        with pytest.raises(Unsupported, match="with linear attention drafts must be a chain"):
            engine(head, options, name="qwen3.5")


def test_eagle3_chain_with_linear_attention_changes_no_token(tmp_path: Path) -> None:
    config = CONFIG | {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    own = with_free_drafts(engine(write_head(tmp_path, config), "tokens=3", 4, name="qwen3.5"))
    results = drive(own, sample_groups(3), Traffic(7, pause=0.05), seed=2)
    assert results.tokens == drive(tiny.engine("qwen3.5", 16, 2000, prefix_caching=False), sample_groups(0), Traffic()).tokens
    assert results.drafted > 50


def test_demo_heads_drafts_match_its_trainers() -> None:
    """The trainer recomputes everything from the beginning: the drafts are the same but for near ties, and most are accepted."""
    target, trained = eagle.load_target(tiny.DEMO), eagle.load(hub.DRAFTS["demo-eagle"])
    config = ShardConfig(folder=str(tiny.DEMO), model="demo", speculate=f"draft={hub.DRAFTS['demo-eagle']},tokens=4")
    own = with_free_drafts(load(config, lambda stage: None))
    own.resize(500)
    tokenizer = Tokenizer.from_file(str(tiny.DEMO / "tokenizer.json"))
    chats = [
        f"<|begin|><|user|>{text}<|end|><|assistant|>" for text in ("Tell me a story.", "What is 3 + 4?", "Count from 3 to 9.")
    ]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in chats]
    proposals = list[tuple[list[int], list[int]]]()
    propose = own.speculator.proposer.propose

    def recording_propose(wanted: Sequence[DraftRequest]) -> Proposal:
        found = propose(wanted)
        proposals.extend(
            (list(one.sequence.tokens), list(draft.tree.tokens)) for one, draft in zip(wanted, found.drafts, strict=True)
        )
        return found

    own.speculator.proposer.propose = recording_propose  # type: ignore[method-assign]
    results = drive(own, [tiny.group(uid, prompt, 90, end_ids=[2], drafts=4) for uid, prompt in enumerate(prompts)], Traffic(7))
    same = sum(drafts == eagle.drafts(target, trained, text, len(drafts)) for text, drafts in proposals)
    assert same >= len(proposals) - 1 > 20
    assert results.accepted > 0.6 * results.drafted


def test_model_as_its_own_draft_model_uses_no_features() -> None:
    """`draft=` names its folder rather than its MTP layer, which it may lack."""
    own = with_free_drafts(engine(tiny.folder("llama"), "tokens=4"))
    assert own.speculator.drafter is not None
    assert own.speculator.drafter.decoder.shape.features is None
    results = drive(own, sample_groups(4)[:6], Traffic())
    assert results.accepted > 20


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3.5-moe"])
def test_embedding_and_output_matrix_shared_with_the_target_are_held_once(name: str, tmp_path: Path) -> None:
    """Checkpoints may contain copies for the MTP layer."""
    write_mtp_model(name, tmp_path, tables=name == "glm4-moe")
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
def test_planned_bytes_of_a_head_match_its_weights_with_two_ranks(name: str, head: Path, tmp_path: Path) -> None:
    """Each rank has a part of the embedding and output matrices, which the head needs whole."""
    folder, own = (tiny.folder(name), head) if name == "llama" else (tmp_path, tmp_path)
    if name != "llama":
        write_mtp_model(name, tmp_path, tables=False)
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

    head_bytes, _ = tiny.ThreadedRanks().run(work)
    model = checkpoint.read(folder, "dummy")
    draft = model if name != "llama" else checkpoint.read(own, "dummy")
    planned = plan.divide(
        Options(num_shard=2, dtype="bfloat16"), model, Machine(cores=2, memory=1 << 32, fast_bfloat16=False), draft
    )
    assert planned.draft_bytes == pytest.approx(head_bytes, rel=0.02)


def test_plan_counts_prefill_graphs_of_a_head_whose_model_has_none() -> None:
    """The model's own prefill steps with linear attention have none."""
    model = checkpoint.read(tiny.folder("qwen3.5"), "dummy")
    options = Options(device="cuda", speculate="draft=mtp,tokens=3", max_batch_prefill_tokens=512)
    planned = plan.divide(options, model, Machine(cores=2, memory=1 << 32, fast_bfloat16=False, gpus=Gpus((1 << 36,))), model)
    decodes = [*graph_sizes.decodes(None, planned.sequences), *graph_sizes.lean(None, planned.sequences)]
    assert planned.graphs == 2 * len(decodes) + len(graph_sizes.mixed(None, 512, drafts=True))


def deep_shape(name: str, **more: Any) -> Shape:
    """The shape of a tiny model's family, with 48 layers."""
    config = json.loads((tiny.folder(name) / "config.json").read_text())
    return shape(config | {"num_hidden_layers": 48, "layer_types": None} | more)


def features(found: Shape) -> DraftFeatures:
    assert found.features is not None
    return found.features


@pytest.mark.parametrize(
    ("fields", "feature_layers"),
    [
        ({}, (2, 24, 45)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 24, 47]}, (0, 24, 47)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}, (2, 24, 45)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [46, 0]}, "eagle_aux_hidden_state_layer_ids": [5]}, (1, 47)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 24, 45)),
    ],
)
def test_feature_layers_are_read_from_both_conventions_of_config_json(
    fields: dict[str, Any], feature_layers: tuple[int, ...]
) -> None:
    """SpecForge's and SGLang's object in config.json numbers layers by their outputs, vLLM's field by their inputs."""
    config = {name: value for name, value in CONFIG.items() if "eagle" not in name}
    assert features(draft_shape(config | fields, deep_shape("llama"))).layers == feature_layers


@pytest.mark.parametrize(
    ("fields", "message"),
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
def test_unsupported_head_options_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        draft_shape(CONFIG | fields, deep_shape("llama"))


def test_mtp_layer_of_a_model_with_images_is_found() -> None:
    """Its text model has another architecture name than a text model alone."""
    text = json.loads((tiny.folder("qwen3.5") / "config.json").read_text())
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    assert features(draft_shape(config, shape(config), own=True)).behind
    text["mtp_num_hidden_layers"] = 0
    with pytest.raises(Unsupported, match="mtp_num_hidden_layers 0: the model has no layer"):
        draft_shape(config, shape(config), own=True)


@pytest.mark.parametrize("text", [math.nan, {}, [1], "text"])
def test_text_config_that_is_no_object_is_left_out(text: Any) -> None:
    config = json.loads((tiny.folder("glm4-moe") / "config.json").read_text()) | {"text_config": text}
    assert draft_shape(config, shape(config), own=True).layers == 1


@pytest.mark.parametrize("name", ["ernie-moe", "exaone-moe", "llama", "granite-4-h"])
def test_unknown_kinds_of_mtp_layers_are_refused_before_weights_are_read(name: str) -> None:
    """config.json has the field, but the layers have neither DeepSeek's tensor names nor their embedding and output matrices."""
    config = json.loads((tiny.folder(name) / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    with pytest.raises(Unsupported, match="no layer for predicting several tokens that is known here"):
        draft_shape(config, shape(config), own=True)


@pytest.mark.parametrize(
    ("name", "lacking"), [("glm4-moe", r"model.layers.\d.enorm.weight"), ("qwen3.5", "mtp.pre_fc_norm_embedding.weight")]
)
def test_checkpoint_without_its_mtp_layer_is_refused(name: str, lacking: str, tmp_path: Path) -> None:
    """Quantized copies often lack it; random weights (load_format dummy) have every tensor."""
    folder = Path(shutil.copytree(tiny.folder(name), tmp_path / "model"))
    fields = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fields))
    config = ShardConfig(folder=str(folder), model=name, speculate="draft=mtp,tokens=2")
    with pytest.raises(Unsupported, match=f"the checkpoint has no {lacking}: its layer for predicting several tokens was left out"):
        load(config, lambda stage: None)
    assert load(replace(config, load_format="dummy"), lambda stage: None).speculator.drafter is not None
