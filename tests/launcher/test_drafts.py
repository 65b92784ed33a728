"""Draft models and draft heads for `--speculate`: found, compared with the model that they draft for, and planned."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from penstock.launcher import checkpoint, children, cli, command_line, hub, machine, plan, serve
from penstock.launcher.drafts import check_vocabulary, resolve, with_base_model
from penstock.launcher.errors import UsageError
from penstock.launcher.machine import Machine
from penstock.launcher.options import Options
from penstock.launcher.replicas import Place
from penstock.proto.speculation import Speculation, parse
from penstock.shard.models.draft_families import LAYERS
from penstock.tests.shard import tiny

DEMO = checkpoint.read(hub.DEMO_FOLDER, "auto")
VOCABULARY = {"a": 0, "b": 1, "c": 2}
# Fields of config.json for a model with a layer for multi-token prediction (MTP).
MTP_FIELDS = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def tokenizer_folder(path: Path, vocabulary: Any, added: dict[str, int] | None = None) -> Path:
    """A new folder with a tokenizer.json of this vocabulary."""
    path.mkdir()
    tokens = [{"id": id, "content": token} for token, id in (added or {}).items()]
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))
    return path


def test_resolve_without_a_draft_model() -> None:
    assert resolve(Options(), DEMO) == (Speculation(), None)
    assert resolve(Options(speculate="3"), DEMO) == (Speculation(ngram=3), None)


def test_embedded_draft_model_reaches_the_settings() -> None:
    options = Options(speculate="draft=demo-draft,tokens=4,ngram=2")
    speculation, draft = resolve(options, DEMO)
    assert draft is not None
    assert (speculation.draft, speculation.most, draft.folder) == (str(hub.DRAFT_FOLDER), 6, hub.DRAFT_FOLDER)
    planned = plan.divide(options, DEMO, Machine(cores=2, memory=1 << 32, fast_bfloat16=False))
    [shard] = children.shard_configs(options, "name", planned, Place(0, True, ["a"], "r", "m", (), {}), speculation)
    assert parse(shard.speculate) == speculation
    assert children.router_config(options, "name", hub.DEMO_FOLDER, []).speculate == 6


def test_embedded_eagle_head_is_planned() -> None:
    """The EAGLE head has no tokenizer. A token takes a key and a value in each of its two KV heads, and the features."""
    options = Options(speculate="draft=demo-eagle,nodes=8")
    speculation, draft = resolve(options, DEMO)
    assert draft is not None
    assert (speculation.draft, speculation.most, draft.folder) == (str(hub.DRAFTS["demo-eagle"]), 8, hub.DRAFTS["demo-eagle"])
    machine = Machine(cores=2, memory=1 << 32, fast_bfloat16=False)
    one, two = (plan.divide(replace(options, num_shard=ranks), DEMO, machine, draft) for ranks in (1, 2))
    assert one.draft_token_bytes == two.draft_token_bytes == 4 * (2 * 2 * 32 + 256)
    # Over 2 ranks the head needs the whole embedding table for itself, as a rank of the model has only a slice.
    assert two.draft_bytes - one.draft_bytes == 4 * 2048 * 256
    assert "with the model's features" in plan.table(one, "demo")


def test_mtp_layer_is_the_draft_or_refused_if_the_model_has_none(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^--speculate draft=mtp: config.json says num_nextn_predict_layers 0: the model has no layer"
    ):
        resolve(Options(speculate="draft=mtp"), DEMO)
    fields = json.loads((tiny.folder("glm4-moe") / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = checkpoint.read(tmp_path, "dummy")
    options = Options(speculate="draft=mtp,tokens=2", load_format="dummy")
    speculation, draft = resolve(options, model)
    assert (speculation.draft, draft) == ("mtp", model)
    planned = plan.divide(options, model, Machine(cores=2, memory=1 << 32, fast_bfloat16=False), draft)
    assert planned.draft is not None
    assert planned.draft.described.startswith("Glm4MoeForCausalLM's layer for predicting several tokens, 0.1 M")


@pytest.mark.parametrize("speculate", ["", "3", "draft=demo-eagle"])
def test_unsupported_model_is_named_by_its_folder_not_by_the_draft(speculate: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["StrangeForCausalLM"]}')
    model, options = checkpoint.read(tmp_path, "dummy"), Options(speculate=speculate)
    with pytest.raises(UsageError, match=f"^{tmp_path}: architecture StrangeForCausalLM is not supported"):
        plan.divide(options, model, Machine(cores=2, memory=1 << 32, fast_bfloat16=False), resolve(options, model)[1])


def test_draft_trees_are_refused_with_linear_attention(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny.folder("qwen3.5") / "config.json").read_text())
    model = checkpoint.read(tmp_path, "dummy")
    assert resolve(Options(speculate="3"), model) == (Speculation(ngram=3), None)
    with pytest.raises(
        UsageError, match=r"^--speculate draft=demo-draft,tree=2x1,verify=gumbel: with linear attention drafts must be a chain"
    ):
        resolve(Options(speculate="draft=demo-draft,tree=2x1"), model)


def test_relative_draft_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").symlink_to(hub.DRAFT_FOLDER)
    monkeypatch.chdir(tmp_path)
    speculation, _ = resolve(Options(speculate="draft=mine"), DEMO)
    assert speculation.draft == str(hub.DRAFT_FOLDER)


def test_vocabularies_are_not_compared_for_random_weights_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((hub.DRAFT_FOLDER / "config.json").read_text())
    speculation, _ = resolve(Options(speculate=f"draft={tmp_path}", load_format="dummy"), DEMO)
    assert speculation.draft == str(tmp_path)


def test_invalid_draft_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--speculate draft=\S+: \S+ has no config.json"):
        resolve(Options(speculate=f"draft={tmp_path}"), DEMO)
    (tmp_path / "config.json").write_text('{"architectures": ["StrangeForCausalLM"]}')
    with pytest.raises(UsageError, match=r"^--speculate draft=\S+: .*StrangeForCausalLM"):
        resolve(Options(speculate=f"draft={tmp_path}", load_format="dummy"), DEMO)
    other = tokenizer_folder(tmp_path / "other", {"<unk>": 0})
    for name in ("config.json", "model.safetensors"):
        (other / name).symlink_to(hub.DRAFT_FOLDER / name)
    with pytest.raises(UsageError, match=r"^--speculate draft=\S+: its tokens are not the model's, id \d+ is .*same tokenizer$"):
        resolve(Options(speculate=f"draft={other}"), DEMO)


def test_check_vocabulary_accepts_equal_tokens_and_refuses_others(tmp_path: Path) -> None:
    model = tokenizer_folder(tmp_path / "model", VOCABULARY, {"<end>": 3})
    matching = [
        tokenizer_folder(tmp_path / "same", dict(reversed(VOCABULARY.items())), {"<end>": 3}),
        tokenizer_folder(tmp_path / "unigram", [[token, -1.5] for token in VOCABULARY], {"<end>": 3}),
        tokenizer_folder(tmp_path / "fewer", VOCABULARY),  # without the token that the model has added
        tokenizer_folder(tmp_path / "more", VOCABULARY, {"<end>": 3, "<tool>": 4}),
        tokenizer_folder(tmp_path / "added", {"a": 0, "b": 1}, {"c": 2}),
    ]
    for candidate in matching:
        check_vocabulary(candidate, model)
    mismatched = {
        "id 2 is 'd' there and 'c'": tokenizer_folder(tmp_path / "d", {"a": 0, "b": 1, "d": 2}),
        "id 1 is 'c' there and 'b'": tokenizer_folder(tmp_path / "swapped", {"a": 0, "c": 1, "b": 2}),
        "id 2 is none there and 'c'": tokenizer_folder(tmp_path / "short", {"a": 0, "b": 1}),
        "id 3 is 'x' there and '<end>'": tokenizer_folder(tmp_path / "long", {**VOCABULARY, "x": 3}),
        "id 3 is '<stop>' there and '<end>'": tokenizer_folder(tmp_path / "stop", VOCABULARY, {"<stop>": 3}),
        "no vocabulary": tokenizer_folder(tmp_path / "empty", None),
    }
    for problem, candidate in mismatched.items():
        with pytest.raises(UsageError, match=problem):
            check_vocabulary(candidate, model)


def test_lossy_verification_is_logged_when_the_server_starts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "Supervisor", lambda **arguments: type("Supervisor", (), {"run": lambda self: 0})())
    port = str(machine.free_port())
    for verify, is_logged in (("typical", True), ("gumbel", False)):
        assert cli.main(["serve", "--port", port, "--speculate", f"ngram=3,verify={verify}"]) == 0
        assert ("verify=typical is lossy" in "".join(capfd.readouterr())) is is_logged


def test_speculate_errors_are_reported_before_anything_starts(capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("tokens=3", "draft=/nowhere/at/all", "200"):
        assert cli.main(["serve", "--speculate", text]) == 2
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith("penstock: error: --speculate")


def test_mtp_works_in_a_folder_with_a_comma_in_its_name(tmp_path: Path) -> None:
    """The shards' setting is `draft=mtp`, without the model's folder, whose name may have commas."""
    model_folder = tmp_path / "a,b"
    model_folder.mkdir()
    fields = json.loads((hub.DEMO_FOLDER / "config.json").read_text()) | MTP_FIELDS
    (model_folder / "config.json").write_text(json.dumps(fields))
    model = checkpoint.read(model_folder, "dummy")
    options = Options(speculate="draft=mtp,tokens=2", load_format="dummy")
    speculation, draft = resolve(options, model)
    assert draft is model
    planned = plan.divide(options, model, Machine(cores=2, memory=1 << 36, fast_bfloat16=False), draft)
    [shard] = children.shard_configs(options, "name", planned, Place(0, True, ["a"], "r", "m", (), {}), speculation)
    assert parse(shard.speculate) == speculation
    assert speculation.draft == "mtp"
    with pytest.raises(UsageError, match=r"^--speculate draft=mtp: config.json says num_nextn_predict_layers 0"):
        resolve(Options(speculate="draft=mtp"), DEMO)


def test_draft_head_needs_no_tokenizer(tmp_path: Path) -> None:
    """A draft head has no tokenizer of its own, so its folder needs no tokenizer.json; a draft model's does."""
    fields = json.loads((hub.DEMO_FOLDER / "config.json").read_text())
    head = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 300, LAYERS: [0, 3]}
    (tmp_path / "config.json").write_text(json.dumps(fields | head))
    save_file({"norm.weight": numpy.ones(4, numpy.float32)}, tmp_path / "model.safetensors")
    speculation, draft = resolve(Options(speculate=f"draft={tmp_path}"), DEMO)
    assert draft is not None
    assert speculation.draft == str(draft.folder) == str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UsageError, match=r"lacks tokenizer.json"):
        resolve(Options(speculate=f"draft={tmp_path}"), DEMO)


def medusa_heads(folder: Path, hidden: int = 256, **fields: Any) -> Path:
    """A folder with two Medusa heads for the demo model. hidden: their hidden size; fields: of config.json."""
    folder.mkdir(exist_ok=True)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": str(hub.DEMO_FOLDER)} | fields
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"0.linear.weight": (hidden, hidden), "0.linear.bias": (hidden,), "1.weight": (2048, hidden)}
    tensors = {f"{level}.{name}": numpy.zeros(size, numpy.float16) for level in range(2) for name, size in shapes.items()}
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


@pytest.mark.parametrize(
    ("draft_shape", "widths", "nodes"), [("", (1, 1), 0), (",tokens=1", (1,), 0), (",tree=3x2", (3, 2), 0), (",nodes=9", (), 9)]
)
def test_medusa_heads_draft_one_token_each(draft_shape: str, widths: tuple[int, ...], nodes: int, tmp_path: Path) -> None:
    options = Options(speculate=f"draft={medusa_heads(tmp_path)}{draft_shape}")
    speculation, draft = resolve(options, DEMO)
    assert speculation == Speculation(draft=str(tmp_path), widths=widths, nodes=nodes)
    planned = plan.divide(options, DEMO, Machine(cores=2, memory=1 << 32, fast_bfloat16=False), draft)
    assert planned.draft_bytes == 4 * 2 * (256 * 256 + 256 + 2048 * 256)
    assert planned.draft_token_bytes == 4 * 256


def test_draft_folder_with_a_comma_in_its_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the draft is named by a relative path without a comma, and the comma is in a parent folder's name."""
    (tmp_path / "a,b").mkdir()
    monkeypatch.chdir(tmp_path / "a,b")
    medusa_heads(Path("heads"))
    with pytest.raises(
        UsageError, match=r"^--speculate draft=heads: \S+/a,b/heads has a comma in its name: copy it to where there is none"
    ):
        resolve(Options(speculate="draft=heads"), DEMO)


def test_medusa_heads_of_another_count_or_size_are_refused(tmp_path: Path) -> None:
    """Medusa's config.json has no sizes: they are those of the tensors."""
    for draft_options, error in (
        ("tokens=3", "3 tokens in a chain are asked for, and its 2 heads draft one each: say tokens=2, or a tree= of"),
        ("tree=4x2x1", "3 tokens in a chain"),
    ):
        with pytest.raises(UsageError, match=f"^--speculate draft={tmp_path}: {error}"):
            resolve(Options(speculate=f"draft={medusa_heads(tmp_path)},{draft_options}"), DEMO)
    with pytest.raises(
        UsageError, match=r": hidden_size of Medusa's heads is 128, and for this model it must be 256: take a draft model"
    ):
        resolve(Options(speculate=f"draft={medusa_heads(tmp_path, 128)}"), DEMO)
    tensors = {"0.0.linear.weight": numpy.zeros((0, 0), numpy.float32), "0.1.weight": numpy.zeros(4, numpy.float32)}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(UsageError, match=r": hidden_size of Medusa's heads is 0, and for this model it must be 256"):
        resolve(Options(speculate=f"draft={tmp_path}"), DEMO)
    save_file({"blocks.0.layers.0.weight": numpy.zeros(4, numpy.float32)}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(UsageError, match=r": config.json says medusa_num_heads 2, and no tensor is named 0.0.linear.weight"):
        resolve(Options(speculate=f"draft={tmp_path}"), DEMO)


def test_cached_medusa_heads_are_planned_by_their_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a plan nothing would be downloaded, but heads that are in the cache are read."""
    monkeypatch.setattr(hub, "locate", lambda name, *rest: (name, medusa_heads(tmp_path)))
    monkeypatch.setattr(hub, "remote", lambda *rest: pytest.fail("they are here"))
    _, draft = resolve(Options(speculate="draft=owner/name"), DEMO, weights=False)
    assert draft is not None
    assert draft.config["medusa_outputs"]


@pytest.mark.parametrize(
    ("flags", "widths", "ngram"), [([], (1, 1), 0), (["--speculate", "1"], (1,), 0), (["--speculate", "ngram=3"], (1, 1), 3)]
)
def test_medusa_heads_as_the_model_serve_their_base_model(
    flags: list[str],
    widths: tuple[int, ...],
    ngram: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As in text-generation-inference: the heads' base model is served, with the heads as its draft."""
    configs = dict[str, Any]()
    make_router_config, make_shard_configs = children.router_config, children.shard_configs
    monkeypatch.setattr(children, "router_config", lambda *arguments: configs.setdefault("router", make_router_config(*arguments)))
    monkeypatch.setattr(children, "shard_configs", lambda *arguments: configs.setdefault("shards", make_shard_configs(*arguments)))
    monkeypatch.setattr(serve, "Supervisor", lambda **arguments: type("Supervisor", (), {"run": lambda self: 0})())
    assert cli.main(["serve", str(medusa_heads(tmp_path)), "--port", str(machine.free_port()), *flags]) == 0
    assert (
        f"{tmp_path} only drafts for {hub.DEMO_FOLDER}, which is served with --speculate draft={tmp_path}" in capfd.readouterr().out
    )
    assert (configs["router"].folder, configs["router"].speculate) == (str(hub.DEMO_FOLDER), len(widths) + ngram)
    [shard_config] = configs["shards"]
    assert shard_config.folder == str(hub.DEMO_FOLDER)
    assert parse(shard_config.speculate) == Speculation(draft=str(tmp_path), widths=widths, ngram=ngram)
    assert cli.main(["plan", str(tmp_path), *flags]) == 0
    assert "Medusa, 2 heads" in capfd.readouterr().out


@pytest.mark.parametrize("speculate", ["0", "verify=typical"])
def test_speculate_flag_applies_when_heads_are_given_as_the_model(speculate: str, tmp_path: Path) -> None:
    """Also a value without a proposer of its own, and 0, which turns speculation off."""
    options = command_line.parse(cli._parsers()[1]["serve"], [str(medusa_heads(tmp_path)), "--speculate", speculate], {})
    with_base, folder = with_base_model(options, tmp_path)
    assert folder == hub.DEMO_FOLDER
    expected = Speculation() if speculate == "0" else Speculation(draft=str(tmp_path), widths=(1, 1), verify="typical")
    assert with_base.speculation == expected


def test_options_are_unchanged_if_the_model_is_not_draft_heads(tmp_path: Path) -> None:
    """Also a folder without config.json: a router alone may have nothing but the tokenizer."""
    for folder in (hub.DEMO_FOLDER, tmp_path):
        assert with_base_model(Options(), folder) == (Options(), folder)


@pytest.mark.parametrize(
    ("fields", "flags", "error"),
    [
        (
            {"base_model_name_or_path": None},
            [],
            "which its config.json does not name .*say penstock serve MODEL --speculate draft=HEADS",
        ),
        ({"base_model_name_or_path": "/no/where"}, [], "HEADS only drafts for /no/where: no folder /no/where"),
        ({"medusa_num_heads": "two"}, [], "only drafts for .*config.json says medusa_num_heads 'two'"),
        ({}, ["--speculate", "draft=demo-draft"], "only drafts for .*, and --speculate names others: name that model, and with"),
        ({}, ["--speculate", "7"], "HEADS only drafts for .*: its 2 heads draft one token each: say --speculate 2, or less"),
        ({}, ["--speculate", "ngram=3,verify=rejection"], "only drafts for .*: verify=rejection takes one proposer: drop ngram="),
        ({}, ["--batch-invariant", "--speculate", "ngram=3"], "only drafts for .*: --batch-invariant needs a chain of drafts"),
        (
            {"base_model_name_or_path": "~nobody-at-all/x"},
            [],
            "HEADS only drafts for ~nobody-at-all/x: no folder ~nobody-at-all/x",
        ),
    ],
)
def test_heads_as_the_model_are_refused_if_their_base_model_is_unusable(
    fields: dict[str, Any], flags: list[str], error: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(medusa_heads(tmp_path, **fields)), *flags]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert re.search(error.replace("HEADS", str(tmp_path)), line), line


def test_hub_is_asked_once_for_a_draft_models_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each request reads the headers of all weight files."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(hub.DRAFT_FOLDER / name)
    requests: list[str] = []

    def remote(name: str, revision: str) -> hub.HubWeights:
        requests.append(name)
        return hub.HubWeights(Counter(BF16=100), 1)

    monkeypatch.setattr(hub, "locate", lambda name, *rest: (name, tmp_path))
    monkeypatch.setattr(hub, "remote", remote)
    _, draft = resolve(Options(speculate="draft=owner/name"), DEMO, weights=False)
    assert draft is not None
    assert requests == ["owner/name"]
