"""The command `penstock` as a whole: help, errors, and a server's start and stop with fake router and shard processes."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.launcher import banner, checkpoint, children, cli, hub, machine, plan, serve, tgi
from penstock.launcher.machine import Machine
from penstock.launcher.options import Options
from penstock.launcher.replicas import Place
from penstock.proto import settings
from penstock.router.config import RouterConfig
from penstock.shard.config import ShardConfig

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # stdout is, as usual
# Runs the command with fake child processes, which write the arguments and settings that they get into the folder `records`.
SCRIPT = """
import sys
from penstock.launcher import children, cli
fake_child, folder, port = sys.argv[1:4]
def command(module, configuration):
    name = module.rpartition(".")[2]
    behaviour = "serves" if name == "router" else "runs"
    return [sys.executable, "-S", fake_child, name, port, behaviour, "records", folder, configuration]
children.command = command
sys.exit(cli.main(sys.argv[4:]))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def run(*arguments: str, module: str = "penstock.launcher") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=60)


def test_version_and_help() -> None:
    for arguments in (["--version"], ["serve", "--version"], ["plan", "--version"]):
        assert run(*arguments).stdout.startswith("penstock 0.")
    assert run("--version", module="penstock").stdout.startswith("penstock 0.")
    assert "penstock serve --help" in run().stdout
    for client in ("chat", "top"):
        assert (
            "Knows" not in run(client, "--help").stdout
        )  # module docstrings, which say this of modules, must not show up in the help
    assert "--max-batch-prefill-tokens" in run("serve", "--help").stdout


def test_help_imports_no_heavy_packages() -> None:
    code = (
        "import sys; from penstock.launcher import cli\ntry: cli.main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'huggingface_hub', 'grpc', 'google.protobuf', 'aiohttp', 'asyncio'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert answer.stdout.endswith("\n[]\n")


@pytest.mark.parametrize(
    ("redirection", "exit_code", "error"),
    [
        (">&-", 0, ""),
        ("<&- >&-", 0, ""),
        (">/dev/full", 1, "penstock: error: stdout can't be written to (No space left on device): free space there\n"),
    ],
)
def test_closed_standard_streams_are_harmless_and_a_full_one_is_an_error(redirection: str, exit_code: int, error: str) -> None:
    command = f'"$0" -m penstock.launcher plan "$1" {redirection}'
    words = ["sh", "-c", command, sys.executable, str(hub.DEMO_FOLDER)]
    answer = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60, env=BUFFERED)
    assert (answer.returncode, answer.stderr) == (exit_code, error)


@pytest.mark.parametrize("command", ["", " plan", " serve --help", " top --help", " simulate --help", ".tgi --version"])
def test_closed_pipe_on_stdout_is_no_error_message(command: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-m", *f"penstock.launcher{command}".split()]
    with open(write_end, "wb") as pipe:
        answer = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, env=BUFFERED)
    assert (answer.returncode < 2, answer.stderr) == (True, "")


def test_characters_that_stdout_cannot_encode_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "caf\u00e9"
    folder.symlink_to(hub.DEMO_FOLDER)
    command = [sys.executable, "-m", "penstock.launcher", "plan", str(folder)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert r"caf\xe9" in answer.stdout


@pytest.mark.parametrize("arguments", [["plan", "/a\nb\x1b[31m\u2028"], ["serve", "--a\nb\x1b[31m\u2028"], ["a\nb\x1b[31m\u2028"]])
def test_control_characters_in_arguments_are_escaped_in_the_error(arguments: list[str]) -> None:
    answer = run(*arguments)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert r"a\nb\x1b[31m\u2028" in answer.stderr


def test_invalid_commands_end_with_one_line_and_exit_code_2() -> None:
    for arguments in (["srve"], ["--nonsense"], ["serve", "--nonsense"], ["plan", "/no/such/folder"]):
        answer = run(*arguments)
        assert answer.returncode == 2
        assert answer.stdout == ""
        assert answer.stderr.startswith("penstock: error: ")
        assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("variable", ["", "true", "1"])
def test_error_is_a_json_line_with_json_output(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log collector that parses JSON would otherwise lose the one line that says why the server has not started."""
    monkeypatch.setenv("JSON_OUTPUT", variable)
    for name in ("--nonsense", "/no/such/folder"):
        assert cli.main(["serve", name, *([] if variable else ["--json-output"])]) == 2
        log_record = json.loads(capsys.readouterr().err)
        assert (log_record["level"], log_record["name"]) == ("ERROR", "launcher")
        assert name in log_record["message"]
    assert tgi.main(["--ngrok", *([] if variable else ["--json-output"])]) == 2
    assert "--ngrok" in json.loads(capsys.readouterr().err)["message"]


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("srve", "srve is no command: did you mean serve?"),
        ("Bench", "Bench is no command: did you mean bench?"),
        ("xyzzy", "xyzzy is no command (penstock --help lists what there is)"),
        ("./serve", "./serve is no command: did you mean penstock serve ./serve?"),
        ("gpt-4.1", "gpt-4.1 is no command: did you mean penstock serve gpt-4.1?"),
        ("plans", "plans is no command: did you mean penstock serve plans?"),  # there is a folder of that name
        ("--verison", "no flag --verison: did you mean --version?"),
        ("--port", "no flag --port (penstock --help lists what there is)"),
    ],
)
def test_unknown_command_or_flag_gets_a_suggestion(
    word: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main([word]) == 2
    assert capsys.readouterr().err == f"penstock: error: {error}\n"


def test_simulate_passes_its_arguments_to_the_simulator() -> None:
    answer = run("simulate", "--help")
    assert answer.returncode == 0
    assert "--trace" in answer.stdout
    answer = run("simulate", "--nonsense")
    assert answer.returncode == 2
    assert "--nonsense" in answer.stderr
    assert "penstock simulate --help" in run("--help").stdout
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "penstock.launcher", "simulate", "--requests", "2"]
        answer = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (answer.returncode, answer.stderr.count("\n")) == (1, 1)
    assert "stdout can't be written to (No space left on device)" in answer.stderr


def test_plan_prints_ranks_and_capacity(model: Path) -> None:
    answer = run("plan", str(model), "--load-format", "dummy", "--kv-pages", "10", "--device", "cpu", "--num-shard", "2")
    assert answer.returncode == 0
    assert "ranks         2" in answer.stdout
    assert "capacity      160 tokens" in answer.stdout


def run_until_ready(model: Path, tmp_path: Path, *flags: str, **environment: str) -> tuple[int, str]:
    """Starts a server, stops it once it is ready, and checks that no temporary files are left. Returns its port and all its output.

    The folder `records` has what its fake children were given.
    """
    temporary = tmp_path / "tmp"
    for folder in (temporary, tmp_path / "records"):
        folder.mkdir()
    port = machine.free_port()
    fake_child = str(Path(__file__).with_name("fake_child.py"))
    arguments = ["serve", str(model), "--load-format", "dummy", "--device", "cpu", "--port", str(port), *flags]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, fake_child, str(tmp_path / "records"), str(port), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), **environment},
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "Ctrl-C stops it" in line:
            process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 0, lines
    process.stdout.close()
    assert list(temporary.iterdir()) == []
    return port, "".join(lines)


def test_server_starts_its_children_with_their_settings_and_stops_on_ctrl_c(model: Path, tmp_path: Path) -> None:
    secrets = {"API_KEY": "secret!", "HF_TOKEN": "hf_secret!"}
    flags = ["--num-shard", "2", "--threads", "3", "--waiting-served-ratio", "0.3"]
    port, text = run_until_ready(model, tmp_path, *flags, **secrets, MAX_WAITING_TOKENS="5")
    assert f"at http://127.0.0.1:{port}" in text
    assert "curl -N" in text
    assert "secret!" not in text
    assert "may use this server" not in text

    child_records = [json.loads(path.read_text()) for path in sorted((tmp_path / "records").iterdir(), key=lambda path: path.name)]
    assert len(child_records) == 3
    for arguments, environment, _ in child_records:
        assert "secret!" not in str(arguments)
        assert "secret!" not in str(environment)
        assert environment["OMP_NUM_THREADS"] == "3"
    router = settings.load(RouterConfig, child_records[0][2])
    shards = sorted(
        (settings.load(ShardConfig, child_record[2]) for child_record in child_records[1:]), key=lambda shard: shard.rank
    )
    assert (router.api_keys, router.port, router.folder) == (("secret!",), port, str(hub.DEMO_FOLDER))
    assert "has no tokenizer.json: the embedded demo model's tokenizer stands in" in text
    assert "no effect without --prefill-policy pause: --max-waiting-tokens, --waiting-served-ratio" in text
    assert router.groups == (tuple(f"unix:{shard.socket}" for shard in shards),)
    assert [shard.rank for shard in shards] == [0, 1]
    assert len({shard.relay for shard in shards}) == 1
    assert shards[0].relay
    assert (shards[0].ranks, shards[0].threads, shards[0].load_format, shards[0].dtype) == (2, 3, "dummy", "float32")


@pytest.mark.parametrize("hostname", ["0.0.0.0", "127.0.0.1"])
def test_warning_without_api_key_unless_listening_on_loopback_only(hostname: str, model: Path, tmp_path: Path) -> None:
    port, text = run_until_ready(model, tmp_path, "--hostname", hostname, API_KEY="")
    line = f"penstock: anybody who reaches {hostname}:{port} may use this server: API_KEY is empty, which counts as unset\n"
    assert (line in text) == (hostname == "0.0.0.0")
    assert ("may use this server" in text) == (hostname == "0.0.0.0")


def test_embedded_tokenizer_is_used_for_random_weights_if_it_fits_vocab_size(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 100}))
    answer = run("serve", str(model), "--load-format", "dummy", "--device", "cpu", "--port", str(machine.free_port()))
    assert answer.returncode == 2
    assert "vocab_size 100 is below the 2048 tokens of the embedded tokenizer that would stand in: raise it" in answer.stderr
    planned = plan.divide(Options(), checkpoint.read(model, "dummy"), Machine(cores=2, memory=1 << 30, fast_bfloat16=False))
    (model / "tokenizer.json").touch()
    assert serve.text_folder(planned) == model


def test_port_in_use_is_refused_before_anything_starts(model: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        began = time.monotonic()
        answer = run("serve", str(model), "--load-format", "dummy", "--port", str(server.getsockname()[1]))
        assert time.monotonic() - began < 30  # less than loading a model would take
    assert answer.returncode == 2
    assert "is in use by process" in answer.stderr


def test_options_reach_router_and_shard_settings(tmp_path: Path) -> None:
    options = Options(
        max_total_tokens=100,
        api_key="k, l,",
        page_size=4,
        kv_pages=9,
        cuda_memory_fraction=0.5,
        json_output=True,
        itl_target=0.1,
        prefill_policy="mixed",
        prefix_caching="off",
    )
    router = children.router_config(options, "name", tmp_path, [["a", "b"]])
    assert (router.max_total_tokens, router.api_keys, router.model, router.groups) == (100, ("k", "l"), "name", (("a", "b"),))
    assert (router.itl_target, router.prefill_policy) == (0.1, "mixed")
    model = checkpoint.Checkpoint(folder=tmp_path, config=CONFIG, dtype="float32", bytes=0, files=0)
    planned = plan.divide(options, model, Machine(cores=2, memory=1 << 30, fast_bfloat16=False))
    place = Place(0, True, ["a"], "r", "m", (), {})
    [shard] = children.shard_configs(options, "name", planned, place)
    assert (shard.page_size, shard.kv_pages, shard.memory_fraction, shard.meeting) == (4, 9, 0.5, "")
    assert (shard.json_output, shard.relay, shard.socket, shard.model) == (True, "", "a", "name")
    assert not shard.prefix_caching
    assert shard.longest == 0  # not used by this model, so nodes may differ in it
    rope = replace(planned.shape.rope, kind="longrope")
    planned = replace(planned, shape=replace(planned.shape, rope=rope))
    assert children.shard_configs(options, "name", planned, place)[0].longest == 100
    assert Options(max_batch_total_tokens=100, page_size=16).pool_pages == 6
    assert (Options(max_batch_total_tokens=3).pool_pages, Options(kv_pages=7).pool_pages, Options().pool_pages) == (1, 7, 0)
    assert children.router_config(Options(), "name", tmp_path, []).api_keys == ()


def test_banner_example_is_a_chat_only_if_the_model_has_a_chat_template(tmp_path: Path) -> None:
    assert "/generate_stream" in banner.example("http://u", "n", tmp_path, key=False)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    text = banner.example("http://u", "n", tmp_path, key=True)
    assert "/v1/chat/completions" in text
    assert "$API_KEY" in text
    assert banner.reachable("::") == "::1"
    assert "http://[::1]:3000" in banner.banner(Options(hostname="::"), "n", tmp_path, 1.0)


def test_banner_example_is_quoted_for_the_shell(tmp_path: Path) -> None:
    """A shell splits it into curl's arguments, even if the model's name has an apostrophe."""
    words = shlex.split(banner.example("http://u", "it's", tmp_path, key=False))
    assert words[:3] == ["curl", "-N", "http://u/generate_stream"]
    assert json.loads(words[-1])["inputs"]
    (tmp_path / "chat_template.jinja").touch()
    words = shlex.split(banner.example("http://u", "it's", tmp_path, key=False))
    assert json.loads(words[-1])["model"] == "it's"


def test_description_for_bug_reports_has_versions() -> None:
    assert "torch 2." in banner.describe()
    assert hub.DEMO == "penstock-demo"


def test_sigterm_before_anything_has_started_ends_with_exit_code_143() -> None:
    """By a handler: the first process of a container gets no signal that it has none for."""
    code = (
        "import sys, time\nfrom penstock.launcher import cli, nodes\n"
        "def settle(*given):\n    print('waits', flush=True)\n    time.sleep(60)\n"
        "nodes.settle = settle\nsys.exit(cli.main(['serve']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 128 + signal.SIGTERM


def test_ctrl_c_while_modules_are_imported_ends_with_exit_code_130() -> None:
    code = (
        "import sys\nclass Pressed:\n    def find_spec(self, name, *_):\n"
        "        if name == 'penstock.launcher.serve': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Pressed())\nfrom penstock.launcher import __main__\nsys.exit(__main__.main())"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (130, "")
