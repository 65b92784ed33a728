"""Where a model is found; up to the network, not across it."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from penstock.launcher import hub
from penstock.launcher.mistake import Mistake


def test_a_folder(tmp_path: Path) -> None:
    assert hub.locate(str(tmp_path)) == (str(tmp_path), tmp_path)


def test_no_model_is_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(hub.__file__).parents[1] / "demo" / "model" == hub.DEMO_FOLDER
    monkeypatch.setattr(hub, "DEMO_FOLDER", tmp_path)
    assert hub.locate("") == ("penstock-demo", tmp_path)
    monkeypatch.setattr(hub, "DEMO_FOLDER", tmp_path / "missing")
    with pytest.raises(Mistake, match="lacks the embedded demo model"):
        hub.locate("")


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repository: str, **arguments: Any) -> str:
        asked.update(arguments, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert hub.locate("owner/name", revision="abc", cache="/cache") == ("owner/name", tmp_path)
    assert asked == {
        "repository": "owner/name",
        "revision": "abc",
        "cache_dir": "/cache",
        "allow_patterns": ["*.safetensors", "*.json", "*.jinja", "tokenizer*"],
    }


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself, told to stay offline, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Mistake) as caught:
        hub.locate("owner/name", cache=str(tmp_path))
    assert "the hub can't be reached: go online (HF_HUB_OFFLINE unset), or copy the model here" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.RepositoryNotFoundError, "no folder owner/name, and no such model on the hub"),
        (errors.GatedRepoError, "asks for consent"),
        (errors.RevisionNotFoundError, "has no revision main"),
        (errors.HfHubHTTPError, "could not be downloaded: 500 so to speak"),
    ],
)
def test_the_hub_refuses(error: type[errors.HfHubHTTPError], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, **arguments: Any) -> str:
        made = error.__new__(error)  # its constructor wants a response
        Exception.__init__(made, "500\nso to speak")
        raise made

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(Mistake) as caught:
        hub.locate("owner/name", revision="main")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "..", "~/nowhere-at-all", "-x"])
def test_what_is_no_folder_and_no_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    if name == "..":
        assert hub.locate(name)[1] == tmp_path
        return
    with pytest.raises(Mistake, match="no folder"):
        hub.locate(name)


def test_a_file_and_a_revision_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(Mistake, match="is a file: name the folder"):
        hub.locate(str(tmp_path / "config.json"))
    with pytest.raises(Mistake, match="--revision abc is for models of the hub"):
        hub.locate(str(tmp_path), revision="abc")
