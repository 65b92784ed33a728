"""Promises of docs/security.md that need the whole source tree, or a whole server, to be checked."""

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

# Modules that load code from data, or run text; then calls and attributes that do.
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
CLIENT_TEXT = "xyzzy-frobnicate"  # is in everything that clients send
SECRET = "k3y-which-nobody-shall-see"
OTHER = "another-tenants-key"


def violations(name: str, path: Path, known: list[str]) -> Iterator[str]:
    """Each place at which a module could execute data that it only should read."""
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


def test_no_module_can_execute_data_that_it_reads() -> None:
    known = modules(ROOT)
    assert [fault for name, path in known.items() for fault in violations(name, path, list(known))] == []


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
def test_planted_violation_is_reported(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "planted.py"
    path.write_text(text)
    assert list(violations("planted", path, ["planted"])) == [f"planted {fault}"]


def test_serving_modules_use_no_http_client_but_for_images_and_adapters() -> None:
    """No other HTTP client is in the modules that clients and models reach, so an address in a prompt or a template is never
    fetched. Adapters are fetched from the hub if the operator allows loading them at run time."""
    clients = ("http.client", "urllib.request", "urllib3", "requests", "httpx", "huggingface_hub", "ftplib", "smtplib")
    known = modules(ROOT)
    serving_modules = {name: path for name, path in known.items() if name.split(".")[0] in ("router", "shard", "proto", "kernels")}
    assert len(serving_modules) > 80
    for name, path in serving_modules.items():
        allowed = clients if name != "proto.hub" else set(clients) - {"huggingface_hub"}
        assert not {target for target in imports(name, path, known) if target.startswith(tuple(allowed))}, name
        assert name == "router.api.links" or "ClientSession" not in path.read_text(encoding="utf-8"), name


# A server with two ranks, whose model folder contains code. Every text that is sent to it contains CLIENT_TEXT.


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Server]:
    folder = Path(shutil.copytree(ROOT / "demo/model", tmp_path_factory.mktemp("models") / "model"))
    config = json.loads((folder / "config.json").read_text())
    remote_code = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "canary.Canary")
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": remote_code, "trust_remote_code": True}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"auto_map": remote_code}))
    (folder / "canary.py").write_text(f"open({str(folder / 'sings')!r}, 'w')\nclass Canary: pass\n")
    flags = ("--num-shard", "2", "--kv-pages", "512", "--log-level", "debug", "--json-output", "--isolate-tenants")
    with pytest.MonkeyPatch.context() as patch, serving.scratch() as scratch:
        patch.setenv("API_KEY", f"{SECRET},{OTHER}")
        started = serving.Server(scratch, str(folder), *flags)
        try:
            started.wait_until_ready()
            yield started
            started.stop()
            assert not (folder / "sings").exists()
        finally:
            started.kill()


def send_request(server: serving.Server, path: str, body: object = None, key: str = SECRET, **more: str) -> tuple[int, bytes]:
    """Status and body of a response. `more` are headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **more}
        connection.request("POST" if body is not None else "GET", path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_ports_other_than_the_http_port_are_on_loopback_only(server: serving.Server) -> None:
    own_sockets = {
        os.readlink(path) for pid in server.children() for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own_sockets:  # 0A: listening
                found.add((address, int(port, 16) == server.port))
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert (loopback, True) in found
    assert {address for address, _ in found} == {loopback}  # the ranks' rendezvous and Gloo


def test_run_folder_and_sockets_are_accessible_to_this_user_only(server: serving.Server) -> None:
    [folder] = server.run_folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    sockets = [path for path in folder.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    assert sorted(path.name for path in sockets) == ["shard-0", "shard-1", "shard-relay"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in sockets} == {0o600}


def test_api_key_is_not_in_command_lines_environments_responses_or_logs(server: serving.Server) -> None:
    assert len(server.children()) == 3
    assert not any(SECRET in line for line in server.children().values())
    shards = [pid for pid, line in server.children().items() if "penstock.shard" in line]
    assert not any(SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes() for pid in server.children())
    assert len(shards) == 2
    for path in ("/info", "/metrics", "/openapi.json", "/v1/models"):
        status, body = send_request(server, path)
        assert status == 200
        assert SECRET.encode() not in body
    assert send_request(server, "/info", key=SECRET[:-1])[0] == 401
    assert send_request(server, "/info", key=SECRET.upper())[0] == 401
    assert SECRET not in server.log


def test_malformed_http_request_is_logged_without_the_api_key(server: serving.Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {SECRET}\x01\r\n\r\n".encode())
        assert b" 400 " in client.recv(100)
    deadline = time.monotonic() + 20
    while "no HTTP from 127.0.0.1: " not in server.log and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "no HTTP from 127.0.0.1: " in server.log
    assert SECRET not in server.log


def test_logs_at_debug_level_contain_no_text_of_prompts_answers_or_requests(server: serving.Server) -> None:
    limit = {"max_tokens": 4}
    chat = {"messages": [{"role": "user", "content": CLIENT_TEXT}], **limit}
    schema = {"type": "object", "properties": {CLIENT_TEXT: {"type": "null"}}, "required": [CLIENT_TEXT]}
    tool = {"type": "function", "function": {"name": "mark", "description": CLIENT_TEXT, "parameters": schema}}
    requests: list[tuple[str, object]] = [
        (
            "/generate",
            {"inputs": CLIENT_TEXT, "parameters": {"max_new_tokens": 4, "stop": [CLIENT_TEXT], "decoder_input_details": True}},
        ),
        ("/generate_stream", {"inputs": CLIENT_TEXT, "parameters": {"max_new_tokens": 4}}),
        ("/generate", {"inputs": CLIENT_TEXT, "parameters": {"grammar": {"type": "regex", "value": CLIENT_TEXT}}}),
        ("/generate", {"inputs": CLIENT_TEXT, "parameters": {"grammar": {"type": "regex", "value": f"({CLIENT_TEXT}"}}}),
        ("/generate", {"inputs": CLIENT_TEXT, "parameters": {"max_new_tokens": CLIENT_TEXT}}),
        ("/generate", {"inputs": CLIENT_TEXT, CLIENT_TEXT: CLIENT_TEXT, "parameters": {"max_new_tokens": 10**9}}),
        ("/generate", {"inputs": CLIENT_TEXT, "parameters": {"num_beams": 2, "max_new_tokens": 4, "stop": [CLIENT_TEXT]}}),
        ("/tokenize", {"inputs": CLIENT_TEXT}),
        ("/chat_tokenize", chat),
        ("/v1/completions", {"prompt": CLIENT_TEXT, "echo": True, "logprobs": 1, "user": CLIENT_TEXT, **limit}),
        ("/v1/completions", {"prompt": CLIENT_TEXT, "suffix": CLIENT_TEXT, **limit}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "tools": [tool], "tool_choice": "required", "max_tokens": 30}),
        ("/v1/chat/completions", {**chat, "chat_template": "{{ " + CLIENT_TEXT}),
        (
            "/v1/chat/completions",
            {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        ),
        ("/v1/responses", {"input": CLIENT_TEXT, "max_output_tokens": 4}),
        (
            "/v1/messages",
            {**chat, "system": CLIENT_TEXT, "stop_sequences": [CLIENT_TEXT], "metadata": {"user_id": CLIENT_TEXT}, **limit},
        ),
        ("/v1/messages/count_tokens", {"messages": CLIENT_TEXT}),
        (f"/{CLIENT_TEXT}", {CLIENT_TEXT: CLIENT_TEXT}),
        ("/v1/chat/completions", CLIENT_TEXT),
    ]
    ids = [f"asked-{number}-here" for number in range(len(requests))]
    statuses = [send_request(server, path, body, **{"X-Request-ID": id})[0] for id, (path, body) in zip(ids, requests, strict=True)]
    assert statuses[0] == statuses[1] == 200
    assert not [status for status in statuses if status >= 500]
    deadline = time.monotonic() + 20  # the launcher forwards log lines, a moment after the answers
    while not all(id in server.log for id in ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(id in server.log for id in ids)
    assert len([line for line in server.log.splitlines() if '"status"' in line]) >= len(requests)
    for part in (CLIENT_TEXT, "xyzzy", "frobnicate"):
        assert part not in server.log


def test_prefix_cache_is_not_shared_between_tenants(server: serving.Server) -> None:
    def cached(key: str) -> int:
        body = {"prompt": "Once upon a time there was a little girl who lived. " * 12, "max_tokens": 1}
        status, answer = send_request(server, "/v1/completions", body, key)
        assert status == 200
        return int((json.loads(answer)["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    assert cached(SECRET) == 0
    assert cached(SECRET) > 32
    assert cached(OTHER) == 0
    assert cached(OTHER) > 32
