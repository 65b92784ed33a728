"""Starts that cannot succeed: one line that says what is wrong and what helps, exit code 2, nothing left behind.

What the launcher itself finds is asked of it in this process; what only the router or a shard can find, of a real server.
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
    """The demo model, to be spoiled."""
    return Path(shutil.copytree(hub.DEMO_FOLDER, tmp_path / "model"))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for what lives as long as a server; empty in the end."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def config(**fields: Any) -> Change:
    """Other fields in config.json; ... takes one away."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))

    return change


def gguf(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / checkpoint.INDEX]:
        path.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF")


def only_gguf(folder: Path) -> None:
    gguf(folder)
    (folder / "config.json").unlink()


def only_an_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/b"}))


def file(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def index(**places: object) -> Change:
    """Another file for some tensors."""

    def change(folder: Path) -> None:
        path = folder / checkpoint.INDEX
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | {"weight_map": values["weight_map"] | places}))

    return change


def cut(length: int) -> Change:
    """The first file of weights without what comes after `length` bytes; negative: counted from its end."""
    return lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:length])


def header(tensors: object, body: bytes = b"") -> Change:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return file(FIRST, len(text).to_bytes(8, "little") + text + body)


def tensor(start: object = 0, stop: object = 4, shape: object = (1,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


BROKEN = [f"{FIRST} has a broken header", "download it again"]
FAULTS: list[tuple[str, Change, list[str]]] = [
    ("no config", lambda folder: (folder / "config.json").unlink(), ["has no config.json", "name a folder"]),
    ("half a config", file("config.json", b'{"a":'), ["config.json can't be read", "download it again"]),
    ("a config in another code", file("config.json", b"\xff\xfe{}"), ["config.json can't be read"]),
    ("a config that is no object", file("config.json", b"[]"), ["holds no JSON object"]),
    ("a deep config", file("config.json", b'{"a":' * 100_000), ["config.json is nested too deeply"]),
    ("a number of a config that never ends", file("config.json", b'{"a":' + b"9" * 10_000 + b"}"), ["config.json can't be read"]),
    ("no architecture", config(architectures=...), ["config.json names no architectures", "download it again"]),
    ("an architecture that is no list", config(architectures="LlamaForCausalLM"), ["architectures 'Llama", "a list of names"]),
    ("architectures that are no names", config(architectures=[["x"]]), ["architectures [['x']]", "a list of names"]),
    ("an unknown architecture", config(architectures=["evil.Model"]), ["architecture evil.Model is not supported"]),
    ("no layers named", config(num_hidden_layers=...), ["lacks 'num_hidden_layers'", "is it complete?"]),
    ("too much memory", config(hidden_size=1 << 20, num_hidden_layers=4096), ["weights take", "free memory"]),
    ("key heads that do not fit", config(num_key_value_heads=3), ["8 attention heads and 3 key/value heads", "multiple"]),
    ("odd heads", config(head_dim=31), ["heads of 31 numbers", "even"]),
    ("heads of nothing", config(head_dim=None, num_attention_heads=512, num_key_value_heads=4), ["heads of 0 numbers"]),
    ("switches that are words", config(tie_word_embeddings="yes"), ["tie_word_embeddings 'yes'", "true or false"]),
    ("an epsilon that is no number", config(rms_norm_eps="x"), ["rms_norm_eps 'x'", "a number above 0"]),
    ("a rotary base of nothing", config(rope_theta=0), ["rope_theta 0", "a number above 0"]),
    ("rotary settings that are none", config(rope_parameters=5), ["rope_parameters 5", "an object"]),
    ("a rotary factor in words", config(rope_parameters={"rope_type": "linear", "factor": "x"}), ["factor 'x'"]),
    ("windows for other layers", config(layer_types=["full_attention"]), ["layer_types", "a name for each"]),
    ("no tokenizer", lambda folder: (folder / "tokenizer.json").unlink(), ["lacks tokenizer.json", "AutoTokenizer"]),
    ("a missing file", lambda folder: (folder / FIRST).unlink(), [f"lacks {FIRST}", "complete the download"]),
    ("half an index", file(checkpoint.INDEX, b"{"), ["index.json can't be read"]),
    ("an empty index", file(checkpoint.INDEX, b"{}"), ["has no weight_map", "download the model again"]),
    ("an index of nothing", file(checkpoint.INDEX, b'{"weight_map": {}}'), ["has no weight_map"]),
    ("an index that names a file that is not there", index(x="gone.safetensors"), ["lacks gone.safetensors"]),
    ("an index that names a tensor that is not there", index(x=FIRST), [f"{FIRST} has no tensor x"]),
    (
        "an index that leads out of the folder",
        index(x="../run/model.safetensors"),
        ["names '../run/model.safetensors'", "same folder"],
    ),
    ("an index that leads to the root", index(x="/etc/passwd"), ["names '/etc/passwd'", "same folder"]),
    ("an index that names a number", index(x=5), ["names 5", "same folder"]),
    ("an index that names no safetensors", index(x="config.json"), ["config.json is no safetensors file"]),
    ("an adapter", only_an_adapter, ["is an adapter: serve its model (a/b), with --lora-adapters NAME="]),
    ("weights of llama.cpp", gguf, ["has its weights only as model.gguf", "GGUF is not supported", "safetensors"]),
    ("nothing but llama.cpp's", only_gguf, ["has no config.json, and model.gguf", "GGUF is not supported", "safetensors"]),
    ("an empty file", cut(0), [f"{FIRST} is no safetensors file", "download it again"]),
    ("half a header", cut(300), [f"{FIRST} is no safetensors file", "download it again"]),
    ("a byte too few", cut(-1), [f"{FIRST} is cut short", "download it again"]),
    (
        "a byte too many",
        lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes() + b"x"),
        ["1 bytes longer", "download it again"],
    ),
    ("a header longer than anything", file(FIRST, b"\xff" * 100), [f"{FIRST} is no safetensors file"]),
    ("a header that is no JSON", header(b"\xff\xff"), BROKEN),
    ("a header that is no object", header([]), BROKEN),
    ("a deep header", header(b'{"a":' * 100_000), BROKEN),
    ("a tensor that is none", header({"x": 5}), BROKEN),
    ("a shape that is not its bytes", header({"x": tensor(shape=[2])}, b"0000"), BROKEN),
    ("a negative shape", header({"x": tensor(shape=[-1, -1])}, b"0000"), BROKEN),
    ("a shape beyond all memory", header({"x": tensor(shape=[1 << 40, 1 << 40])}, b"0000"), BROKEN),
    ("offsets backwards", header({"x": tensor(4, 0)}, b"0000"), BROKEN),
    ("offsets that are fractions", header({"x": tensor(0.0, 4.0)}, b"0000"), BROKEN),
    ("tensors in each other", header({"x": tensor(), "y": tensor()}, b"0000"), [*BROKEN, "overlaps"]),
    ("a tensor beyond the end", header({"x": tensor(0, 4 << 40, [1 << 40])}, b"0000"), [f"{FIRST} is cut short, x lies"]),
]


@pytest.mark.parametrize(("change", "words"), [pytest.param(*fault, id=name) for name, *fault in FAULTS])
def test_a_spoilt_model(model: Path, runs: Path, capsys: pytest.CaptureFixture[str], change: Change, words: list[str]) -> None:
    change(model)
    check(["serve", str(model), "--device", "cpu", "--port", str(machine.free_port())], words, capsys)


def test_a_folder_without_rights_is_not_tried_again(
    model: Path, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it of the file or of the folder. Root, as whom tests may run, has all rights."""
    path = model / "config.json"

    def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
        def refused(asked: Path, *more: Any, **named: Any) -> Any:
            if asked == path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return method(asked, *more, **named)

        return refused

    for name in ("read_text", "is_file"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refusing(getattr(Path, name)))
            check(["plan", str(model), "--device", "cpu"], [str(path), "Permission denied"], capsys)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
def test_a_size_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    shutil.copy(hub.DEMO_FOLDER / "config.json", tmp_path)
    for value in (0, -1, 10**30, 1.5, "64", [1], {}, True, None, float("nan")):
        config(**{name: value})(tmp_path)
        words = [f"config.json says {name} {fields.shown(value)}", f"an integer from 1 to {fields.SIZES[name]}"]
        check(["plan", str(tmp_path), "--load-format", "dummy"], words, capsys)


def check(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with exit code 2 and one line with these words."""
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("penstock: error: ")
    assert told.err.count("\n") == 1
    for word in words:
        assert word in told.err


def test_settings_that_the_machine_does_not_have(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if machine.inspect().gpu_memory:
        pytest.skip("there is a GPU")
    port = str(machine.free_port())
    check(["serve", "--device", "cuda", "--port", port], ["nvidia-smi shows no GPU here", "use --device cpu"], capsys)
    check(["serve", "--kv-pages", "999999999", "--port", port], ["may be used", "lower --kv-pages"], capsys)
    for nowhere in ("/nowhere", "~nobody-has-this-name/x"):
        check(["serve", "--chat-template", nowhere, "--port", port], ["there is no such file"], capsys)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        check(["serve", "--hostname", "127.0.0.1", "--port", port], [f"port {port} is in use by process", "--port"], capsys)


def test_a_driver_that_hangs_or_whose_device_has_failed(
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
    check(["plan"], ["nvidia-smi has not answered for 1 s", "CUDA_VISIBLE_DEVICES=-1"], capsys)


@pytest.mark.parametrize(
    ("blocks", "said"), [(0, "the temporary folder can't be written to"), (1, "can't be written to (File too large)")]
)
def test_a_disk_without_room(runs: Path, blocks: int, said: str) -> None:
    """Files may have no byte, or 1 kB and no more. The settings have more, by the key."""
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
    assert said in answer.stderr
    assert "name another folder with TMPDIR" in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(("files", "said"), [(6, "only 6"), (20, "only 20 open files are allowed here"), (127, "only")])
def test_too_few_open_files(runs: Path, files: int, said: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "penstock.launcher", "serve", "--device", "cpu", "--port", str(machine.free_port())],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode in (1, 2)
    assert said in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_soft_limit_of_open_files_is_raised_as_far_as_needed() -> None:
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


def test_an_address_where_shards_cannot_listen(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told at once, where shards would be started again and again; but a name may become known yet."""

    def complaint(address: str, *more: str) -> str:
        assert cli.main(["serve", "--device", "cpu", "--no-router", "--insecure-nodes", "--shard-listen", address, *more]) == 2
        return capsys.readouterr().err

    assert "--shard-listen takes an address of this machine" in complaint("192.0.2.1:7000")
    assert "is the first of 2 ports, and there are none above 65535" in complaint("127.0.0.1:65535", "--num-shard", "2")
    own = "127.9.8.7"  # where nobody else takes the port before it
    with socket.create_server((own, 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} is in use by process {os.getpid()}" in complaint(f"{own}:{port - 1}", "--num-shard", "2")
    names = replicas.Place(0, True, [], "", "", ["nowhere.invalid:1", "[::1]:7001"], None)
    assert list(replicas.listening([names])) == [("::1", 7001)]


def test_no_room_for_a_thread() -> None:
    """Parts that were started before end with it."""
    code = (
        "import resource, threading; from penstock.launcher import cli, processes\n"
        "def follow(*_):\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (1, -1))\n"
        "    try:\n"
        "        threading.Thread(target=print).start()\n"
        "    finally:\n"  # other threads can't even end without memory
        "        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "processes.follow = follow\n"
        f"raise SystemExit(cli.main(['serve', '--device', 'cpu', '--port', '{machine.free_port()}']))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    assert "penstock: error: can't start new thread: more memory or processes have to be allowed" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_a_umask_takes_nothing_from_ourselves() -> None:
    code = "import os; from penstock.launcher import cli; os.umask(0o725); cli.main(['serve', '/nowhere']); print(oct(os.umask(0)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "0o25\n"


@pytest.mark.parametrize("flag", ["--model-id", "--tls-cert", "--shard-uds-path", "--speculate"])
def test_a_name_longer_than_any_file_has(flag: str) -> None:
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


def test_a_disk_that_is_full_later_costs_lines_and_nothing_else() -> None:
    with full_disk() as full:
        console = Console(False, full, full)
        for _ in range(3):
            console.say("x" * 10_000)
            console.relay("shard 0", "y", True)


@contextmanager
def full_disk() -> Iterator[TextIO]:
    """A file on a disk without room."""
    file = Path("/dev/full").open("w")  # noqa: SIM115 -- to close it is what needs care
    try:
        yield file
    finally:
        os.dup2(devnull := os.open(os.devnull, os.O_WRONLY), file.fileno())  # what it could not write is no hindrance
        os.close(devnull)
        file.close()


# What only a part of the server can find.


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        pytest.param(
            file("tokenizer.json", b'{"a":'), "router", ["tokenizer.json is no tokenizer", "download it again"], id="tokenizer"
        ),
        pytest.param(
            config(intermediate_size=708),
            "shard 0",
            ["mlp.gate_proj.weight is [704, 256], config.json says [708, 256]"],
            id="a config that lies",
        ),
    ],
)
def test_a_part_that_gives_up(model: Path, change: Change, name: str, words: list[str]) -> None:
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
