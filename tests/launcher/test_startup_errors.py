"""Starts that cannot succeed: one line that says what is wrong and how to fix it, exit code 2, nothing left behind.

Errors that the launcher detects are tested in this process; those that only the router or a shard detects, with a real server.
"""

import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from penstock.launcher import checkpoint, cli, hub, machine, nvidia, replicas
from penstock.launcher.console import Console
from penstock.proto import process
from penstock.shard.models import fields
from penstock.tests import serving

FIRST = "model-00001-of-00002.safetensors"
Change = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model, for the test to break."""
    return Path(shutil.copytree(hub.DEMO_FOLDER, tmp_path / "model"))


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder for a server's files; fails unless it is empty in the end."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def set_config(**fields: Any) -> Change:
    """Sets fields of config.json; `...` removes one."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))

    return change


def only_gguf_weights(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / checkpoint.INDEX]:
        path.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


def only_gguf_file(folder: Path) -> None:
    only_gguf_weights(folder)
    (folder / "config.json").unlink()


def only_an_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/b"}))


def replace_file(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def set_index(**files: object) -> Change:
    """Sets the files that the index names for some tensors."""

    def change(folder: Path) -> None:
        path = folder / checkpoint.INDEX
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | {"weight_map": values["weight_map"] | files}))

    return change


def truncate(length: int) -> Change:
    """Truncates the first file of weights to `length` bytes; negative: that many fewer."""
    return lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:length])


def set_header(tensors: object, body: bytes = b"") -> Change:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return replace_file(FIRST, len(text).to_bytes(8, "little") + text + body)


def tensor_entry(start: object = 0, stop: object = 4, shape: object = (1,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


BROKEN_HEADER = [f"{FIRST} has a broken header", "download it again"]
BROKEN_MODELS: list[tuple[str, Change, list[str]]] = [
    ("config.json missing", lambda folder: (folder / "config.json").unlink(), ["has no config.json", "name a folder"]),
    ("config.json truncated", replace_file("config.json", b'{"a":'), ["config.json can't be read", "download it again"]),
    ("config.json not in UTF-8", replace_file("config.json", b"\xff\xfe{}"), ["config.json can't be read"]),
    ("config.json not an object", replace_file("config.json", b"[]"), ["holds no JSON object"]),
    ("config.json nested too deeply", replace_file("config.json", b'{"a":' * 100_000), ["config.json is nested too deeply"]),
    (
        "config.json with a number of 10,000 digits",
        replace_file("config.json", b'{"a":' + b"9" * 10_000 + b"}"),
        ["config.json can't be read"],
    ),
    ("architectures missing", set_config(architectures=...), ["config.json names no architectures", "download it again"]),
    ("architectures not a list", set_config(architectures="LlamaForCausalLM"), ["architectures 'Llama", "a list of names"]),
    ("architectures not names", set_config(architectures=[["x"]]), ["architectures [['x']]", "a list of names"]),
    ("architecture unknown", set_config(architectures=["evil.Model"]), ["architecture evil.Model is not supported"]),
    ("num_hidden_layers missing", set_config(num_hidden_layers=...), ["lacks 'num_hidden_layers'", "is it complete?"]),
    ("weights larger than memory", set_config(hidden_size=1 << 20, num_hidden_layers=4096), ["weights take", "free memory"]),
    (
        "attention heads not a multiple of key heads",
        set_config(num_key_value_heads=3),
        ["8 attention heads and 3 key/value heads", "multiple"],
    ),
    ("head_dim odd", set_config(head_dim=31), ["heads of 31 numbers", "even"]),
    ("head size 0", set_config(head_dim=None, num_attention_heads=512, num_key_value_heads=4), ["heads of 0 numbers"]),
    ("tie_word_embeddings not a boolean", set_config(tie_word_embeddings="yes"), ["tie_word_embeddings 'yes'", "true or false"]),
    ("rms_norm_eps not a number", set_config(rms_norm_eps="x"), ["rms_norm_eps 'x'", "a number above 0"]),
    ("rope_theta 0", set_config(rope_theta=0), ["rope_theta 0", "a number above 0"]),
    ("rope_parameters not an object", set_config(rope_parameters=5), ["rope_parameters 5", "an object"]),
    ("rope factor not a number", set_config(rope_parameters={"rope_type": "linear", "factor": "x"}), ["factor 'x'"]),
    ("layer_types too short", set_config(layer_types=["full_attention"]), ["layer_types", "a name for each"]),
    ("tokenizer.json missing", lambda folder: (folder / "tokenizer.json").unlink(), ["lacks tokenizer.json", "AutoTokenizer"]),
    ("weight file missing", lambda folder: (folder / FIRST).unlink(), [f"lacks {FIRST}", "complete the download"]),
    ("index truncated", replace_file(checkpoint.INDEX, b"{"), ["index.json can't be read"]),
    ("index without weight_map", replace_file(checkpoint.INDEX, b"{}"), ["has no weight_map", "download the model again"]),
    ("index with empty weight_map", replace_file(checkpoint.INDEX, b'{"weight_map": {}}'), ["has no weight_map"]),
    ("index names a missing file", set_index(x="gone.safetensors"), ["lacks gone.safetensors"]),
    ("index names a missing tensor", set_index(x=FIRST), [f"{FIRST} has no tensor x"]),
    (
        "index names a file outside of the folder",
        set_index(x="../run/model.safetensors"),
        ["names '../run/model.safetensors'", "same folder"],
    ),
    ("index names an absolute path", set_index(x="/etc/passwd"), ["names '/etc/passwd'", "same folder"]),
    ("index names a number as a file", set_index(x=5), ["names 5", "same folder"]),
    ("index names a file that is not safetensors", set_index(x="config.json"), ["config.json is no safetensors file"]),
    ("LoRA adapter without its model", only_an_adapter, ["is an adapter: serve its model (a/b), with --lora-adapters NAME="]),
    ("GGUF weights only", only_gguf_weights, ["has its weights only as model.gguf", "GGUF is not supported", "safetensors"]),
    ("GGUF file only", only_gguf_file, ["has no config.json, and model.gguf", "GGUF is not supported", "safetensors"]),
    ("weight file empty", truncate(0), [f"{FIRST} is no safetensors file", "download it again"]),
    ("safetensors header truncated", truncate(300), [f"{FIRST} is no safetensors file", "download it again"]),
    ("weight file one byte short", truncate(-1), [f"{FIRST} is cut short", "download it again"]),
    (
        "weight file one byte too long",
        lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes() + b"x"),
        ["1 bytes longer", "download it again"],
    ),
    ("safetensors header length absurd", replace_file(FIRST, b"\xff" * 100), [f"{FIRST} is no safetensors file"]),
    ("safetensors header not JSON", set_header(b"\xff\xff"), BROKEN_HEADER),
    ("safetensors header not an object", set_header([]), BROKEN_HEADER),
    ("safetensors header nested too deeply", set_header(b'{"a":' * 100_000), BROKEN_HEADER),
    ("tensor entry not an object", set_header({"x": 5}), BROKEN_HEADER),
    ("tensor shape contradicts its offsets", set_header({"x": tensor_entry(shape=[2])}, b"0000"), BROKEN_HEADER),
    ("tensor shape negative", set_header({"x": tensor_entry(shape=[-1, -1])}, b"0000"), BROKEN_HEADER),
    ("tensor shape absurdly large", set_header({"x": tensor_entry(shape=[1 << 40, 1 << 40])}, b"0000"), BROKEN_HEADER),
    ("tensor offsets reversed", set_header({"x": tensor_entry(4, 0)}, b"0000"), BROKEN_HEADER),
    ("tensor offsets not integers", set_header({"x": tensor_entry(0.0, 4.0)}, b"0000"), BROKEN_HEADER),
    ("tensors overlap", set_header({"x": tensor_entry(), "y": tensor_entry()}, b"0000"), [*BROKEN_HEADER, "overlaps"]),
    (
        "tensor beyond the end of the file",
        set_header({"x": tensor_entry(0, 4 << 40, [1 << 40])}, b"0000"),
        [f"{FIRST} is cut short, x lies"],
    ),
]


@pytest.mark.parametrize(("change", "words"), [pytest.param(*broken_model, id=name) for name, *broken_model in BROKEN_MODELS])
def test_broken_model_is_refused_before_anything_starts(
    model: Path, run_folder: Path, capsys: pytest.CaptureFixture[str], change: Change, words: list[str]
) -> None:
    change(model)
    check_refused(["serve", str(model), "--device", "cpu", "--port", str(machine.free_port())], words, capsys)


def test_permission_error_ends_with_one_line_and_exit_code_2(
    model: Path, run_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the file or its folder may not be read. The error is simulated, as tests may run as root, who may read everything."""
    path = model / "config.json"

    def raise_for_config(method: Callable[..., Any]) -> Callable[..., Any]:
        def raise_or_call(accessed: Path, *more: Any, **named: Any) -> Any:
            if accessed == path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return method(accessed, *more, **named)

        return raise_or_call

    for name in ("read_text", "is_file"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, raise_for_config(getattr(Path, name)))
            check_refused(["plan", str(model), "--device", "cpu"], [str(path), "Permission denied"], capsys)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_invalid_size_in_config_json_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    shutil.copy(hub.DEMO_FOLDER / "config.json", tmp_path)
    for value in (0, -1, 10**30, 1.5, "64", [1], {}, True, None, float("nan")):
        set_config(**{name: value})(tmp_path)
        words = [f"config.json says {name} {fields.shown(value)}", f"an integer from 1 to {fields.SIZES[name]}"]
        check_refused(["plan", str(tmp_path), "--load-format", "dummy"], words, capsys)


def check_refused(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Runs the command, which must end with exit code 2 and one line that contains all of `words`."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("penstock: error: ")
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


def test_settings_that_the_machine_cannot_meet_are_refused(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if machine.inspect().gpus.memory:
        pytest.skip("there is a GPU")
    port = str(machine.free_port())
    check_refused(["serve", "--device", "cuda", "--port", port], ["nvidia-smi shows no GPU here", "use --device cpu"], capsys)
    check_refused(["serve", "--kv-pages", "999999999", "--port", port], ["may be used", "lower --kv-pages"], capsys)
    for nowhere in ("/nowhere", "~nobody-has-this-name/x"):
        check_refused(["serve", "--chat-template", nowhere, "--port", port], ["there is no such file"], capsys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check_refused(["serve", "--hostname", "127.0.0.1", "--port", port], [f"port {port} is in use by process", "--port"], capsys)


def test_failed_gpu_is_skipped_and_a_hung_nvidia_smi_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(process, "PROC", tmp_path)
    fake.write_text("#!/bin/sh\necho 0, GPU-a, '[GPU is lost]'; echo 1, GPU-b, 1024\n")
    fake.chmod(0o755)
    assert nvidia.find({}).memory == (1 << 30,)
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(nvidia, "PATIENCE", 1)
    check_refused(["plan"], ["nvidia-smi has not answered for 1 s", "CUDA_VISIBLE_DEVICES=-1"], capsys)


@pytest.mark.parametrize(
    ("blocks", "error"), [(0, "the temporary folder can't be written to"), (1, "can't be written to (File too large)")]
)
def test_full_disk_is_reported_with_tmpdir_as_remedy(run_folder: Path, blocks: int, error: str) -> None:
    """Files are limited to 0 bytes or 1 kB. The file of settings is larger because of the API key."""
    limit = blocks * 1024
    answer = subprocess.run(
        [sys.executable, "-m", "penstock.launcher", "serve", "--device", "cpu", "--port", str(machine.free_port())],
        env={**os.environ, "API_KEY": "k" * 2000},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 2
    assert error in answer.stderr
    assert "name another folder with TMPDIR" in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(("files", "error"), [(6, "only 6"), (20, "only 20 open files are allowed here"), (127, "only")])
def test_too_low_hard_limit_of_open_files_is_refused(run_folder: Path, files: int, error: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "penstock.launcher", "serve", "--device", "cpu", "--port", str(machine.free_port())],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode in (1, 2)
    assert error in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_soft_limit_of_open_files_is_raised_as_far_as_needed() -> None:
    code = "from penstock.launcher import machine; machine.take_files(); import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE))"
    limit = (40, machine.FILES)
    answer = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == f"({machine.FILES}, {machine.FILES})\n"


def test_shard_addresses_that_cannot_be_used_are_refused(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused at once, or shards would be restarted again and again. An unknown host name is accepted: it may resolve later."""

    def error_of(address: str, *more: str) -> str:
        assert cli.main(["serve", "--device", "cpu", "--no-router", "--insecure-nodes", "--shard-listen", address, *more]) == 2
        return capsys.readouterr().err

    assert "--shard-listen takes an address of this machine" in error_of("192.0.2.1:7000")
    assert "is the first of 2 ports, and there are none above 65535" in error_of("127.0.0.1:65535", "--num-shard", "2")
    address = "127.9.8.7"  # no other program takes the port before it at this address
    with socket.create_server((address, 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use by process {os.getpid()}" in error_of(f"{address}:{port - 1}", "--num-shard", "2")
    assert cli.main(["serve", "--device", "cpu", "--no-router", "--shard-uds-path", f"{run_folder}/a b"]) == 2
    assert "/a b has a space, comma or semicolon, with which --replica can't name it" in capsys.readouterr().err
    names = replicas.Place(0, True, [], "", "", ["nowhere.invalid:1", "[::1]:7001"], None)
    assert list(replicas.listening([names])) == [("::1", 7001)]


def test_failure_to_start_a_thread_ends_the_server_with_one_line() -> None:
    """Processes that were started before it end, too."""
    code = (
        "import resource, threading; from penstock.launcher import cli, processes\n"
        "def follow(*_):\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (1, -1))\n"
        "    try:\n"
        "        threading.Thread(target=print).start()\n"
        "    finally:\n"  # without memory, other threads could not even end
        "        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "processes.follow = follow\n"
        f"raise SystemExit(cli.main(['serve', '--device', 'cpu', '--port', '{machine.free_port()}']))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    assert "penstock: error: can't start new thread: more memory or processes have to be allowed" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_umask_keeps_the_owners_permissions() -> None:
    code = "import os; from penstock.launcher import cli; os.umask(0o725); cli.main(['serve', '/nowhere']); print(oct(os.umask(0)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "0o25\n"


@pytest.mark.parametrize("flag", ["--model-id", "--tls-cert", "--shard-uds-path", "--speculate"])
def test_too_long_file_name_is_refused_in_one_line(flag: str) -> None:
    name = "x" * 300
    answer = subprocess.run(
        [sys.executable, "-m", "penstock.launcher", "serve", flag, f"draft={name}" if flag == "--speculate" else name],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 2
    assert name in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_console_survives_a_full_disk() -> None:
    with full_disk() as full:
        console = Console(False, full, full)
        for _ in range(3):
            console.info("x" * 10_000)
            console.relay("shard 0", "y", True)


@contextmanager
def full_disk() -> Iterator[TextIO]:
    """A file that can't be written to: its disk is full."""
    file = Path("/dev/full").open("w")  # noqa: SIM115 -- closing it takes more than a context manager
    try:
        yield file
    finally:
        os.dup2(devnull := os.open(os.devnull, os.O_WRONLY), file.fileno())  # so that flushing the unwritten text does not fail
        os.close(devnull)
        file.close()


# Errors that only the router or a shard can detect.


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        pytest.param(
            replace_file("tokenizer.json", b'{"a":'),
            "router",
            ["tokenizer.json is no tokenizer", "download it again"],
            id="router: tokenizer.json truncated",
        ),
        pytest.param(
            set_config(intermediate_size=708),
            "shard 0",
            ["mlp.gate_proj.weight is [704, 256], config.json says [708, 256]"],
            id="shard: config.json contradicts the weights",
        ),
    ],
)
def test_error_of_router_or_shard_is_quoted_and_ends_with_exit_code_2(
    model: Path, change: Change, name: str, words: list[str]
) -> None:
    change(model)
    with serving.scratch() as folder:
        server = serving.Server(folder, str(model), "--kv-pages", "64")
        try:
            server.check_end(2)
        finally:
            server.kill()
        log = server.log
    assert f"penstock: {name} ended with exit code 2, its last words:\n" in log
    last = log.splitlines()[-1]
    for word in words:
        assert word in last
    assert "Traceback" not in log
