"""Draft models: found, and compared with the model that they guess for."""

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
from penstock.launcher.machine import Machine
from penstock.launcher.mistake import Mistake
from penstock.launcher.options import Options
from penstock.launcher.replicas import Place
from penstock.proto.speculation import Speculation, parse
from penstock.shard.models.draft_families import LAYERS
from penstock.tests.shard import tiny

DEMO = checkpoint.read(hub.DEMO_FOLDER, "auto")
VOCABULARY = {"a": 0, "b": 1, "c": 2}
# Of a config.json, for a model that has a layer for predicting several tokens.
LAYERED = {
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


def folder(path: Path, vocabulary: Any, added: dict[str, int] | None = None) -> Path:
    """With a tokenizer.json."""
    path.mkdir()
    tokens = [{"id": id, "content": token} for token, id in (added or {}).items()]
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))
    return path


def test_without_a_draft_model() -> None:
    assert resolve(Options(), DEMO) == (Speculation(), None)
    assert resolve(Options(speculate="3"), DEMO) == (Speculation(ngram=3), None)


def test_the_embedded_draft_model() -> None:
    asked = Options(speculate="draft=demo-draft,tokens=4,ngram=2")
    said, draft = resolve(asked, DEMO)
    assert draft is not None
    assert (said.draft, said.most, draft.folder) == (str(hub.DRAFT_FOLDER), 6, hub.DRAFT_FOLDER)
    planned = plan.divide(asked, DEMO, Machine(cores=2, memory=1 << 32, fast_bfloat16=False))
    [shard] = children.shard_configs(asked, "name", planned, Place(0, True, ["a"], "r", "m", (), {}), said)
    assert parse(shard.speculate) == said
    assert children.router_config(asked, "name", hub.DEMO_FOLDER, []).speculate == 6


def test_the_embedded_head() -> None:
    """Which has no tokenizer. A token takes a key and a value of each of its two heads, and the features."""
    asked = Options(speculate="draft=demo-eagle,nodes=8")
    said, draft = resolve(asked, DEMO)
    assert draft is not None
    assert (said.draft, said.most, draft.folder) == (str(hub.DRAFTS["demo-eagle"]), 8, hub.DRAFTS["demo-eagle"])
    machine = Machine(cores=2, memory=1 << 32, fast_bfloat16=False)
    one, two = (plan.divide(replace(asked, num_shard=ranks), DEMO, machine, draft) for ranks in (1, 2))
    assert one.draft_token_bytes == two.draft_token_bytes == 4 * (2 * 2 * 32 + 256)
    assert two.draft_bytes - one.draft_bytes == 4 * 2048 * 256  # of the table it shares, a rank has a part
    assert "with the model's features" in plan.table(one, "demo")


def test_a_layer_for_predicting_several_tokens(tmp_path: Path) -> None:
    with pytest.raises(
        Mistake, match=r"^--speculate draft=mtp: config.json says num_nextn_predict_layers 0: the model has no layer"
    ):
        resolve(Options(speculate="draft=mtp"), DEMO)
    fields = json.loads((tiny.folder("glm4-moe") / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = checkpoint.read(tmp_path, "dummy")
    asked = Options(speculate="draft=mtp,tokens=2", load_format="dummy")
    said, draft = resolve(asked, model)
    assert (said.draft, draft) == ("mtp", model)
    planned = plan.divide(asked, model, Machine(cores=2, memory=1 << 32, fast_bfloat16=False), draft)
    assert planned.draft is not None
    assert planned.draft.described.startswith("Glm4MoeForCausalLM's layer for predicting several tokens, 0.1 M")


@pytest.mark.parametrize("speculate", ["", "3", "draft=demo-eagle"])
def test_a_model_that_is_not_supported_is_named_by_its_folder(speculate: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["StrangeForCausalLM"]}')
    model, asked = checkpoint.read(tmp_path, "dummy"), Options(speculate=speculate)
    with pytest.raises(Mistake, match=f"^{tmp_path}: architecture StrangeForCausalLM is not supported"):
        plan.divide(asked, model, Machine(cores=2, memory=1 << 32, fast_bfloat16=False), resolve(asked, model)[1])


def test_drafts_that_the_model_can_not_judge(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny.folder("qwen3.5") / "config.json").read_text())
    model = checkpoint.read(tmp_path, "dummy")
    assert resolve(Options(speculate="3"), model) == (Speculation(ngram=3), None)
    with pytest.raises(
        Mistake, match=r"^--speculate draft=demo-draft,tree=2x1,verify=gumbel: with linear attention drafts must be a chain"
    ):
        resolve(Options(speculate="draft=demo-draft,tree=2x1"), model)


def test_a_folder_wherever_the_server_is_started_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").symlink_to(hub.DRAFT_FOLDER)
    monkeypatch.chdir(tmp_path)
    said, _ = resolve(Options(speculate="draft=mine"), DEMO)
    assert said.draft == str(hub.DRAFT_FOLDER)


def test_without_weights_and_tokenizers_nothing_is_compared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((hub.DRAFT_FOLDER / "config.json").read_text())
    said, _ = resolve(Options(speculate=f"draft={tmp_path}", load_format="dummy"), DEMO)
    assert said.draft == str(tmp_path)


def test_what_is_wrong_with_it_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"^--speculate draft=\S+: \S+ has no config.json"):
        resolve(Options(speculate=f"draft={tmp_path}"), DEMO)
    (tmp_path / "config.json").write_text('{"architectures": ["StrangeForCausalLM"]}')
    with pytest.raises(Mistake, match=r"^--speculate draft=\S+: .*StrangeForCausalLM"):
        resolve(Options(speculate=f"draft={tmp_path}", load_format="dummy"), DEMO)
    other = folder(tmp_path / "other", {"<unk>": 0})
    for name in ("config.json", "model.safetensors"):
        (other / name).symlink_to(hub.DRAFT_FOLDER / name)
    with pytest.raises(Mistake, match=r"^--speculate draft=\S+: its tokens are not the model's, id \d+ is .*same tokenizer$"):
        resolve(Options(speculate=f"draft={other}"), DEMO)


def test_vocabularies(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", VOCABULARY, {"<end>": 3})
    same = [
        folder(tmp_path / "same", dict(reversed(VOCABULARY.items())), {"<end>": 3}),
        folder(tmp_path / "unigram", [[token, -1.5] for token in VOCABULARY], {"<end>": 3}),
        folder(tmp_path / "fewer", VOCABULARY),  # of those that were added
        folder(tmp_path / "more", VOCABULARY, {"<end>": 3, "<tool>": 4}),
        folder(tmp_path / "added", {"a": 0, "b": 1}, {"c": 2}),
    ]
    for one in same:
        check_vocabulary(one, model)
    others = {
        "id 2 is 'd' there and 'c'": folder(tmp_path / "d", {"a": 0, "b": 1, "d": 2}),
        "id 1 is 'c' there and 'b'": folder(tmp_path / "swapped", {"a": 0, "c": 1, "b": 2}),
        "id 2 is none there and 'c'": folder(tmp_path / "short", {"a": 0, "b": 1}),
        "id 3 is 'x' there and '<end>'": folder(tmp_path / "long", {**VOCABULARY, "x": 3}),
        "id 3 is '<stop>' there and '<end>'": folder(tmp_path / "stop", VOCABULARY, {"<stop>": 3}),
        "no vocabulary": folder(tmp_path / "empty", None),
    }
    for problem, one in others.items():
        with pytest.raises(Mistake, match=problem):
            check_vocabulary(one, model)


def test_a_lossy_rule_is_named_when_the_server_starts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "Supervisor", lambda **given: type("Supervisor", (), {"run": lambda self: 0})())
    port = str(machine.free_port())
    for verify, said in (("typical", True), ("gumbel", False)):
        assert cli.main(["serve", "--port", port, "--speculate", f"ngram=3,verify={verify}"]) == 0
        assert ("verify=typical is lossy" in "".join(capfd.readouterr())) is said


def test_errors_are_told_before_anything_starts(capfd: pytest.CaptureFixture[str]) -> None:
    for text in ("tokens=3", "draft=/nowhere/at/all", "200"):
        assert cli.main(["serve", "--speculate", text]) == 2
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith("penstock: error: --speculate")


def test_the_own_layer_of_a_model_wherever_that_is(tmp_path: Path) -> None:
    """Shards are told that it is its own; the name of its folder, which may have commas, tells them nothing."""
    place = tmp_path / "a,b"
    place.mkdir()
    fields = json.loads((hub.DEMO_FOLDER / "config.json").read_text()) | LAYERED
    (place / "config.json").write_text(json.dumps(fields))
    model = checkpoint.read(place, "dummy")
    asked = Options(speculate="draft=mtp,tokens=2", load_format="dummy")
    said, draft = resolve(asked, model)
    assert draft is model
    planned = plan.divide(asked, model, Machine(cores=2, memory=1 << 36, fast_bfloat16=False), draft)
    [shard] = children.shard_configs(asked, "name", planned, Place(0, True, ["a"], "r", "m", (), {}), said)
    assert parse(shard.speculate) == said
    assert said.draft == "mtp"
    with pytest.raises(Mistake, match=r"^--speculate draft=mtp: config.json says num_nextn_predict_layers 0"):
        resolve(Options(speculate="draft=mtp"), DEMO)


def test_a_head_has_its_models_tokens(tmp_path: Path) -> None:
    """And so none of its own, which nobody looks for."""
    fields = json.loads((hub.DEMO_FOLDER / "config.json").read_text())
    head = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 300, LAYERS: [0, 3]}
    (tmp_path / "config.json").write_text(json.dumps(fields | head))
    save_file({"norm.weight": numpy.ones(4, numpy.float32)}, tmp_path / "model.safetensors")
    said, draft = resolve(Options(speculate=f"draft={tmp_path}"), DEMO)
    assert draft is not None
    assert said.draft == str(draft.folder) == str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(Mistake, match=r"lacks tokenizer.json"):
        resolve(Options(speculate=f"draft={tmp_path}"), DEMO)


def heads(folder: Path, hidden: int = 256, **more: Any) -> Path:
    """Medusa's, two of them, for the demo model."""
    folder.mkdir(exist_ok=True)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": str(hub.DEMO_FOLDER)} | more
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"0.linear.weight": (hidden, hidden), "0.linear.bias": (hidden,), "1.weight": (2048, hidden)}
    tensors = {f"{level}.{name}": numpy.zeros(size, numpy.float16) for level in range(2) for name, size in shapes.items()}
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


@pytest.mark.parametrize(
    ("shape", "widths", "nodes"), [("", (1, 1), 0), (",tokens=1", (1,), 0), (",tree=3x2", (3, 2), 0), (",nodes=9", (), 9)]
)
def test_heads_guess_a_token_each(shape: str, widths: tuple[int, ...], nodes: int, tmp_path: Path) -> None:
    asked = Options(speculate=f"draft={heads(tmp_path)}{shape}")
    said, draft = resolve(asked, DEMO)
    assert said == Speculation(draft=str(tmp_path), widths=widths, nodes=nodes)
    planned = plan.divide(asked, DEMO, Machine(cores=2, memory=1 << 32, fast_bfloat16=False), draft)
    assert planned.draft_bytes == 4 * 2 * (256 * 256 + 256 + 2048 * 256)
    assert planned.draft_token_bytes == 4 * 256


def test_folders_that_the_shards_could_not_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the folder has a comma that one is in."""
    (tmp_path / "a,b").mkdir()
    monkeypatch.chdir(tmp_path / "a,b")
    heads(Path("heads"))
    with pytest.raises(
        Mistake, match=r"^--speculate draft=heads: \S+/a,b/heads has a comma in its name: copy it to where there is none"
    ):
        resolve(Options(speculate="draft=heads"), DEMO)


def test_heads_that_do_not_fit(tmp_path: Path) -> None:
    """Medusa's config.json names no sizes: tensors have them."""
    for said, words in (
        ("tokens=3", "3 tokens in a chain are asked for, and its 2 heads draft one each: say tokens=2, or a tree= of"),
        ("tree=4x2x1", "3 tokens in a chain"),
    ):
        with pytest.raises(Mistake, match=f"^--speculate draft={tmp_path}: {words}"):
            resolve(Options(speculate=f"draft={heads(tmp_path)},{said}"), DEMO)
    with pytest.raises(
        Mistake, match=r": hidden_size of Medusa's heads is 128, and for this model it must be 256: take a draft model"
    ):
        resolve(Options(speculate=f"draft={heads(tmp_path, 128)}"), DEMO)
    none = {"0.0.linear.weight": numpy.zeros((0, 0), numpy.float32), "0.1.weight": numpy.zeros(4, numpy.float32)}
    save_file(none, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(Mistake, match=r": hidden_size of Medusa's heads is 0, and for this model it must be 256"):
        resolve(Options(speculate=f"draft={tmp_path}"), DEMO)
    save_file({"blocks.0.layers.0.weight": numpy.zeros(4, numpy.float32)}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(Mistake, match=r": config.json says medusa_num_heads 2, and no tensor is named 0.0.linear.weight"):
        resolve(Options(speculate=f"draft={tmp_path}"), DEMO)


def test_heads_that_are_in_the_cache_are_planned_by_their_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though only a plan is wanted, for which nothing would be downloaded."""
    monkeypatch.setattr(hub, "locate", lambda name, *rest: (name, heads(tmp_path)))
    monkeypatch.setattr(hub, "remote", lambda *rest: pytest.fail("they are here"))
    _, draft = resolve(Options(speculate="draft=owner/name"), DEMO, weights=False)
    assert draft is not None
    assert draft.config["medusa_outputs"]


@pytest.mark.parametrize(
    ("said", "widths", "ngram"), [([], (1, 1), 0), (["--speculate", "1"], (1,), 0), (["--speculate", "ngram=3"], (1, 1), 3)]
)
def test_heads_in_the_place_of_a_model(
    said: list[str],
    widths: tuple[int, ...],
    ngram: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As text-generation-inference takes them: their model is served."""
    seen = dict[str, Any]()
    router, shards = children.router_config, children.shard_configs
    monkeypatch.setattr(children, "router_config", lambda *given: seen.setdefault("router", router(*given)))
    monkeypatch.setattr(children, "shard_configs", lambda *given: seen.setdefault("shards", shards(*given)))
    monkeypatch.setattr(serve, "Supervisor", lambda **given: type("Supervisor", (), {"run": lambda self: 0})())
    assert cli.main(["serve", str(heads(tmp_path)), "--port", str(machine.free_port()), *said]) == 0
    assert (
        f"{tmp_path} only drafts for {hub.DEMO_FOLDER}, which is served with --speculate draft={tmp_path}" in capfd.readouterr().out
    )
    assert (seen["router"].folder, seen["router"].speculate) == (str(hub.DEMO_FOLDER), len(widths) + ngram)
    [shard] = seen["shards"]
    assert shard.folder == str(hub.DEMO_FOLDER)
    assert parse(shard.speculate) == Speculation(draft=str(tmp_path), widths=widths, ngram=ngram)
    assert cli.main(["plan", str(tmp_path), *said]) == 0
    assert "Medusa, 2 heads" in capfd.readouterr().out


@pytest.mark.parametrize("said", ["0", "verify=typical"])
def test_what_is_said_of_heads_in_the_place_of_a_model_counts(said: str, tmp_path: Path) -> None:
    """Also where it guesses nothing by itself."""
    asked = command_line.parse(cli._parsers()[1]["serve"], [str(heads(tmp_path)), "--speculate", said], {})
    meant, folder = with_base_model(asked, tmp_path)
    assert folder == hub.DEMO_FOLDER
    heard = Speculation() if said == "0" else Speculation(draft=str(tmp_path), widths=(1, 1), verify="typical")
    assert meant.speculation == heard


def test_models_stay_as_they_are(tmp_path: Path) -> None:
    """Also where only their tokenizer is here, for a router alone."""
    for place in (hub.DEMO_FOLDER, tmp_path):
        assert with_base_model(Options(), place) == (Options(), place)


@pytest.mark.parametrize(
    ("more", "said", "words"),
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
def test_heads_whose_model_is_not_known(
    more: dict[str, Any], said: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(heads(tmp_path, **more)), *said]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert re.search(words.replace("HEADS", str(tmp_path)), line), line


def test_the_hub_is_asked_once_for_what_a_draft_model_weighs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It reads the headers of all files for that."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(hub.DRAFT_FOLDER / name)
    asked: list[str] = []

    def remote(name: str, revision: str) -> hub.HubWeights:
        asked.append(name)
        return hub.HubWeights(Counter(BF16=100), 1)

    monkeypatch.setattr(hub, "locate", lambda name, *rest: (name, tmp_path))
    monkeypatch.setattr(hub, "remote", remote)
    _, draft = resolve(Options(speculate="draft=owner/name"), DEMO, weights=False)
    assert draft is not None
    assert asked == ["owner/name"]
