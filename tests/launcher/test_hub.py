"""Where a model is found: the demo model, a folder, or the Hugging Face hub, whose client library is mocked or offline."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from penstock.launcher import hub
from penstock.launcher.errors import UsageError


def test_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert hub.locate(str(tmp_path)) == (str(tmp_path), tmp_path)


def test_demo_model_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(hub.__file__).parents[1] / "demo" / "model" == hub.DEMO_FOLDER
    monkeypatch.setattr(hub, "DEMO_FOLDER", tmp_path)
    assert hub.locate("") == ("penstock-demo", tmp_path)
    monkeypatch.setattr(hub, "DEMO_FOLDER", tmp_path / "missing")
    with pytest.raises(UsageError, match="lacks the embedded demo model"):
        hub.locate("")


def test_hub_id_is_downloaded_without_weights_if_they_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments_seen: dict[str, Any] = {}

    def download(repository: str, **arguments: Any) -> str:
        arguments_seen.update(arguments, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert hub.locate("owner/name", revision="abc", cache="/cache") == ("owner/name", tmp_path)
    assert arguments_seen == {
        "repository": "owner/name",
        "revision": "abc",
        "cache_dir": "/cache",
        "allow_patterns": ["*.safetensors", "*.json", "*.jinja", "tokenizer*"],
        "ignore_patterns": ["consolidated*", "*/*.safetensors", "*/*.json", "*/tokenizer*"],
    }
    hub.locate("owner/name", weights=False)
    assert arguments_seen["allow_patterns"] == ["*.json", "*.jinja", "tokenizer*"]


def test_download_patterns_select_the_models_own_files() -> None:
    names = ["config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja"]
    names += ["additional_chat_templates/tool_use.jinja", "README.md", "pytorch_model.bin"]
    names += ["consolidated.safetensors", "consolidated.00.pth", "onnx/config.json", "original/tokenizer.model"]
    matching = filter_repo_objects(names, allow_patterns=hub.PATTERNS, ignore_patterns=hub.IGNORED)
    assert list(matching) == names[:5]


def test_hub_metadata_gives_bytes_by_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(repository: str, name: str, revision: str | None) -> Any:
        tensors = {
            "a": SimpleNamespace(dtype="BF16", data_offsets=(0, 20)),
            "b": SimpleNamespace(dtype="F32", data_offsets=(20, 24)),
        }
        return SimpleNamespace(tensors=tensors)

    def metadata(repository: str, revision: str | None) -> Any:
        return SimpleNamespace(files_metadata={"model.safetensors": parse(repository, "model.safetensors", revision)})

    def network_error(repository: str, revision: str | None) -> Any:
        raise OSError

    def not_a_safetensors_repo(repository: str, revision: str | None) -> Any:
        raise errors.NotASafetensorsRepoError

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
    assert hub.remote("owner/name", "") == hub.HubWeights(Counter(BF16=20, F32=4), 1)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", network_error)
    assert hub.remote("owner/name", "") == hub.HubWeights(Counter(), 0)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", not_a_safetensors_repo)
    monkeypatch.setattr(huggingface_hub, "parse_safetensors_file_metadata", parse)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *where, **more: ["config.json", "medusa_lm_head.safetensors"])
    assert hub.remote("owner/name", "") == hub.HubWeights(Counter(BF16=20, F32=4), 1)
    monkeypatch.setattr(
        huggingface_hub, "list_repo_files", lambda *where, **more: ["deeper/model.safetensors", "consolidated.safetensors"]
    )
    with pytest.raises(UsageError, match="owner/name has no weights as safetensors"):
        hub.remote("owner/name", "")


def test_on_hub_is_true_for_hub_ids_only(tmp_path: Path) -> None:
    assert [hub.on_hub(name) for name in ("owner/name", str(tmp_path), "")] == [True, False, False]


def test_offline_without_cache_is_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client library, in its offline mode, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        hub.locate("owner/name", cache=str(tmp_path))
    assert "the hub can't be reached: go online (HF_HUB_OFFLINE unset), or copy the model here" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError, "no folder owner/name, and no such model on the hub"),
        (errors.GatedRepoError, "asks for consent"),
        (errors.RevisionNotFoundError, "has no revision main"),
        (errors.HfHubHTTPError, "could not be downloaded: 500 so to speak"),
        (EOFError, "could not be downloaded: 500 so to speak"),  # stands for those of the HTTP client, such as a cut connection
    ],
)
def test_hub_errors_are_one_line(error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, **arguments: Any) -> str:
        raised = error.__new__(error)  # its constructor needs an HTTP response
        Exception.__init__(raised, "500\nso to speak")
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UsageError) as caught:
        hub.locate("owner/name", revision="main")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "..", "~/nowhere-at-all", "-x"])
def test_name_that_is_neither_folder_nor_hub_id_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    if name == "..":
        assert hub.locate(name)[1] == tmp_path
        return
    with pytest.raises(UsageError, match="no folder"):
        hub.locate(name)


def test_file_as_model_and_revision_of_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(UsageError, match="is a file: name the folder"):
        hub.locate(str(tmp_path / "config.json"))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UsageError, match=r"model\.gguf is a file: name the folder .* GGUF is not supported"):
        hub.locate(str(tmp_path / "model.gguf"))
    for model in (str(tmp_path), "", *hub.DRAFTS):
        with pytest.raises(UsageError, match=f"--revision abc is for models of the hub, not {model or 'the demo model'}: leave"):
            hub.locate(model, revision="abc")


def test_folder_whose_path_is_no_utf8_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for name in (folder, tmp_path / "link"):
        with pytest.raises(UsageError, match=r"the path of a model has to be UTF-8, and .* is not: rename the folder"):
            hub.locate(str(name))


def test_refusal_of_the_hub_is_named_when_there_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, **arguments: Any) -> str:
        refusal = errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)
        Exception.__init__(refusal, "429 Too Many Requests")
        raise errors.LocalEntryNotFoundError("no copy") from refusal

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UsageError, match=r"the hub can't be reached \(429 Too Many Requests\): go online"):
        hub.locate("owner/name")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_download_at_once(number: int) -> None:
    """The hub's client waits for its threads before it passes a KeyboardInterrupt on."""
    code = (
        "import signal, sys, time, huggingface_hub\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from penstock.launcher import hub\n"
        "def download(*where, **more):\n    with ThreadPoolExecutor() as pool:\n        thread = pool.submit(time.sleep, 60)\n"
        "        print('downloads', flush=True)\n        thread.result()\n"
        "huggingface_hub.snapshot_download = download\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "hub.locate('owner/name')"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "downloads\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (128 + number, "")
