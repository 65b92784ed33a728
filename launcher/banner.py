"""Texts for the operator: the first request to try once the server runs, and the machine's facts for a bug report."""

import importlib.metadata
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..proto import link
from . import machine, plan
from .console import Console
from .options import Options


def reachable(hostname: str) -> str:
    """An address at which a client on this machine reaches a server that listens on `hostname`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(hostname, hostname)


def warn(asked: Options, environment: Mapping[str, str], console: Console) -> None:
    """Warns if anybody who reaches the server from another machine may use it."""
    if not asked.api_key and not link.is_loopback(asked.hostname):
        why = "API_KEY is empty, which counts as unset" if "API_KEY" in environment else "there is no --api-key"
        console.info(f"anybody who reaches {link.joined(asked.hostname, asked.port)} may use this server: {why}")


def banner(asked: Options, name: str, folder: Path, seconds: float) -> str:
    """The message when the server is ready: its URL, and an example request."""
    host = reachable(asked.hostname)
    url = f"http://{f'[{host}]' if ':' in host else host}:{asked.port}"
    ready = f"ready in {seconds:.1f} s: {name} at {url}"
    return ready if asked.json_output else f"{ready}\n\n{example(url, name, folder, bool(asked.api_key))}\n\nCtrl-C stops it."


def shards(addresses: Sequence[Sequence[str]]) -> str:
    """The message with the addresses of rank groups that were started for a router elsewhere."""
    flags = [f"--replica {','.join(ranks)}" for ranks in addresses]
    return f"the shards are starting, and say when they have loaded; a router finds them with {' '.join(flags)}"


def example(url: str, name: str, folder: Path, key: bool) -> str:
    """A streaming request to be pasted into a shell."""
    if _has_chat_template(folder):
        route = "/v1/chat/completions"
        messages = [{"role": "user", "content": "Tell me a story."}]
        body: dict[str, object] = {"model": name, "messages": messages, "max_tokens": 200, "stream": True}
    else:
        route, body = "/generate_stream", {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 200}}
    lines = [f"curl -N {url}{route}", "-H 'Content-Type: application/json'", f"-d {shlex.quote(json.dumps(body))}"]
    if key:
        lines.insert(1, '-H "Authorization: Bearer $API_KEY"')
    return " \\\n     ".join(["  " + lines[0], *lines[1:]])


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    configuration = folder / "tokenizer_config.json"
    return configuration.is_file() and '"chat_template"' in configuration.read_text(encoding="utf-8")


def describe() -> str:
    """Versions and machine, for a bug report."""
    found = machine.inspect()
    packages = ("penstock", "torch", "grpcio", "protobuf", "aiohttp", "tokenizers", "safetensors", "huggingface_hub")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    gpus = ", ".join(plan.size(free) for free in found.gpus.memory) or "none"
    return "\n".join(
        [
            f"Python {platform.python_version()}, {platform.platform()}, {platform.machine()}",
            f"  {versions}",
            f"  cores: {found.cores}, memory: {plan.size(found.memory)}, GPUs (free): {gpus}",
            f"  multiplies bfloat16 in hardware: {'yes' if found.fast_bfloat16 else 'no'}",
        ]
    )
