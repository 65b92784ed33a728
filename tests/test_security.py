"""What docs/security.md promises that only the whole tree, or a whole server, can show."""

import ast
import http.client
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.tests import serving
from penstock.tests.test_layers import ROOT, imports, modules

# Modules that read code from data, or run text; and calls that do.
PICKLES = (
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "yaml",
    "runpy",
    "importlib.machinery",
)
CALLS = ("eval", "exec", "compile", "__import__")
ATTRIBUTES = {"torch.load", "torch.hub", "numpy.load", "np.load", "os.system", "os.popen", "jinja2.Environment"}
ALLOWED: dict[str, str] = {}
MARK = "xyzzy-frobnicate"  # of what clients say
SECRET = "k3y-which-nobody-shall-see"
OTHER = "another-tenants-key"


def faults(name: str, path: Path, known: list[str]) -> Iterator[str]:
    """Each way in which a module could run what it was only meant to read."""
    for target in imports(name, path, known):
        if target.split(".")[0] in PICKLES or target in PICKLES:
            yield f"{name} imports {target}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield f"{name} calls {node.func.id}"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ATTRIBUTES:
            yield f"{name} uses {ast.unparse(node)}"
        refused = isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and node.value.value is False
        if isinstance(node, ast.keyword) and node.arg in ("shell", "trust_remote_code", "allow_pickle") and not refused:
            yield f"{name} passes {node.arg}"


def test_nothing_runs_what_it_reads() -> None:
    known = modules(ROOT)
    assert [fault for name, path in known.items() for fault in faults(name, path, list(known))] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import pickle", "imports pickle"),
        ("def f():\n    from dill import loads", "imports dill"),
        ("import torch\ntorch.load('x')", "uses torch.load"),
        ("eval('1')", "calls eval"),
        ("f(trust_remote_code=True)", "passes trust_remote_code"),
        ("f(trust_remote_code=x)", "passes trust_remote_code"),
        ("import jinja2\njinja2.Environment()", "uses jinja2.Environment"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "planted.py"
    path.write_text(text)
    assert list(faults("planted", path, ["planted"])) == [f"planted {fault}"]


def test_what_serves_requests_fetches_images_and_adapters_alone() -> None:
    """No other client of HTTP is in what clients and models reach: an address in a prompt or a template stays text. Adapters are
    fetched from the hub, where the operator lets others be loaded."""
    clients = ("http.client", "urllib.request", "urllib3", "requests", "httpx", "huggingface_hub", "ftplib", "smtplib")
    known = modules(ROOT)
    serving_ones = {name: path for name, path in known.items() if name.split(".")[0] in ("router", "shard", "proto", "kernels")}
    assert len(serving_ones) > 80
    for name, path in serving_ones.items():
        allowed = clients if name != "proto.hub" else set(clients) - {"huggingface_hub"}
        assert not {target for target in imports(name, path, known) if target.startswith(tuple(allowed))}, name
        assert name == "router.api.links" or "ClientSession" not in path.read_text(encoding="utf-8"), name


# A server of two ranks, whose model comes with code, that is asked with a mark in every text.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Server]:
    folder = Path(shutil.copytree(ROOT / "demo/model", tmp_path_factory.mktemp("models") / "model"))
    config = json.loads((folder / "config.json").read_text())
    code = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "canary.Canary")
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": code, "trust_remote_code": True}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"auto_map": code}))
    (folder / "canary.py").write_text(f"open({str(folder / 'sings')!r}, 'w')\nclass Canary: pass\n")
    flags = ("--num-shard", "2", "--kv-pages", "512", "--log-level", "debug", "--json-output", "--isolate-tenants")
    with pytest.MonkeyPatch.context() as patch, serving.scratch() as place:
        patch.setenv("API_KEY", f"{SECRET},{OTHER}")
        started = serving.Server(place, str(folder), *flags)
        try:
            started.wait_until_ready()
            yield started
            started.stop()
            assert not (folder / "sings").exists()
        finally:
            started.kill()


def ask(server: serving.Server, path: str, body: object = None, key: str = SECRET, **more: str) -> tuple[int, bytes]:
    """more: headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **more}
        connection.request("POST" if body is not None else "GET", path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_it_listens_at_its_port_and_else_within_the_machine(server: serving.Server) -> None:
    mine = {os.readlink(path) for pid in server.children() for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:  # 0A: it listens
                found.add((address, int(port, 16) == server.port))
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert (loopback, True) in found
    assert {address for address, _ in found} == {loopback}  # where the ranks meet, and Gloo


def test_sockets_and_settings_are_this_users_alone(server: serving.Server) -> None:
    [folder] = server.runs.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    sockets = [path for path in folder.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    assert sorted(path.name for path in sockets) == ["shard-0", "shard-1", "shard-relay"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in sockets} == {0o600}


def test_the_key_is_nowhere_to_be_seen(server: serving.Server) -> None:
    assert len(server.children()) == 3
    assert not any(SECRET in line for line in server.children().values())
    shards = [pid for pid, line in server.children().items() if "penstock.shard" in line]
    assert not any(SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes() for pid in server.children())
    assert len(shards) == 2
    for path in ("/info", "/metrics", "/openapi.json", "/v1/models"):
        status, body = ask(server, path)
        assert status == 200
        assert SECRET.encode() not in body
    assert ask(server, "/info", key=SECRET[:-1])[0] == 401
    assert ask(server, "/info", key=SECRET.upper())[0] == 401
    assert SECRET not in server.log


def test_who_speaks_no_http_leaves_one_line_without_the_key(server: serving.Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {SECRET}\x01\r\n\r\n".encode())
        assert b" 400 " in client.recv(100)
    deadline = time.monotonic() + 20
    while "no HTTP from 127.0.0.1: " not in server.log and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "no HTTP from 127.0.0.1: " in server.log
    assert SECRET not in server.log


def test_no_line_of_the_log_has_a_text_whatever_its_level(server: serving.Server) -> None:
    limit = {"max_tokens": 4}
    chat = {"messages": [{"role": "user", "content": MARK}], **limit}
    schema = {"type": "object", "properties": {MARK: {"type": "null"}}, "required": [MARK]}
    tool = {"type": "function", "function": {"name": "mark", "description": MARK, "parameters": schema}}
    asked: list[tuple[str, object]] = [
        ("/generate", {"inputs": MARK, "parameters": {"max_new_tokens": 4, "stop": [MARK], "decoder_input_details": True}}),
        ("/generate_stream", {"inputs": MARK, "parameters": {"max_new_tokens": 4}}),
        ("/generate", {"inputs": MARK, "parameters": {"grammar": {"type": "regex", "value": MARK}}}),
        ("/generate", {"inputs": MARK, "parameters": {"grammar": {"type": "regex", "value": f"({MARK}"}}}),
        ("/generate", {"inputs": MARK, "parameters": {"max_new_tokens": MARK}}),
        ("/generate", {"inputs": MARK, MARK: MARK, "parameters": {"max_new_tokens": 10**9}}),
        ("/generate", {"inputs": MARK, "parameters": {"num_beams": 2, "max_new_tokens": 4, "stop": [MARK]}}),
        ("/tokenize", {"inputs": MARK}),
        ("/chat_tokenize", chat),
        ("/v1/completions", {"prompt": MARK, "echo": True, "logprobs": 1, "user": MARK, **limit}),
        ("/v1/completions", {"prompt": MARK, "suffix": MARK, **limit}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required", "max_tokens": 30}),
        ("/v1/chat/completions", {**chat, "chat_template": "{{ " + MARK}),
        (
            "/v1/chat/completions",
            {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        ),
        ("/v1/responses", {"input": MARK, "max_output_tokens": 4}),
        ("/v1/messages", {**chat, "system": MARK, "stop_sequences": [MARK], "metadata": {"user_id": MARK}, **limit}),
        ("/v1/messages/count_tokens", {"messages": MARK}),
        (f"/{MARK}", {MARK: MARK}),
        ("/v1/chat/completions", MARK),
    ]
    ids = [f"asked-{number}-here" for number in range(len(asked))]
    statuses = [ask(server, path, body, **{"X-Request-ID": id})[0] for id, (path, body) in zip(ids, asked, strict=True)]
    assert statuses[0] == statuses[1] == 200
    assert not [status for status in statuses if status >= 500]
    deadline = time.monotonic() + 20  # lines come by way of the launcher, a moment after the answers
    while not all(id in server.log for id in ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(id in server.log for id in ids)
    assert len([line for line in server.log.splitlines() if '"status"' in line]) >= len(asked)
    for part in (MARK, "xyzzy", "frobnicate"):
        assert part not in server.log


def test_what_one_tenant_has_asked_speeds_nobody_elses_answer(server: serving.Server) -> None:
    def cached(key: str) -> int:
        body = {"prompt": "Once upon a time there was a little girl who lived. " * 12, "max_tokens": 1}
        status, answer = ask(server, "/v1/completions", body, key)
        assert status == 200
        return int((json.loads(answer)["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    assert cached(SECRET) == 0
    assert cached(SECRET) > 32
    assert cached(OTHER) == 0
    assert cached(OTHER) > 32
