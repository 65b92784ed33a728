"""Value types of flags and variables: each function parses a text, and raises ValueError with what is needed instead."""

import ipaddress
import os
import re
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from ..proto.speculation import MOST_DRAFTS
from ..proto.speculation import parse as parse_speculation
from ..router.config import ANY_ORIGIN, NO_ORIGIN, addresses_of
from ..shard.graph_sizes import parse as parse_sizes
from .paths import expanded

MOST = 1 << 31  # tokens, pages, requests...
LONGEST = 1e9  # seconds: more than anybody waits, and less than clocks and locks can count
THREADS = 4  # for each core, at most; 64 on any machine


def count(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, 1)


def limit(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, 0)


def size(text: str) -> int:
    """A number of bytes."""
    return _whole(text, 1, 1 << 50)


def pixels(text: str) -> int:
    """Pixels of an image: from those of the smallest that models take to more than one can hold in memory."""
    return _whole(text, 1 << 12, 1 << 26)


def hosts(text: str) -> str:
    """Where images may come from: hosts, or a word for all of them or none."""
    if not all(re.fullmatch(r"[\w.-]+(:\d{1,5})?|\[[\da-fA-F:.]+\](:\d{1,5})?", part, re.ASCII) for part in text.split(",")):
        raise ValueError("public, none, or hosts with commas between them are needed")
    return text


def _whole(text: str, least: int, most: int = MOST) -> int:
    digits = text.lstrip("0")
    if not text.isascii() or not text.isdigit() or int(digits[:20] or "0") < least:
        raise ValueError(f"a whole number from {least} is needed")
    if int(digits[:20] or "0") > most:
        raise ValueError(f"{most:,} is the most there can be")
    return int(digits or "0")


def threads(text: str) -> int:
    """Compute threads: as many as this machine can start without harm."""
    value, cores = count(text), os.cpu_count() or 1
    if value > max(64, THREADS * cores):
        raise ValueError(f"{max(64, THREADS * cores)} is the most there can be: this machine has cores: {cores}")
    return value


def port(text: str) -> int:
    value = count(text)
    if value > 65535:
        raise ValueError("a port is at most 65535")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number is needed") from None


def fraction(text: str) -> float:
    value = number(text)
    if not 0 < value <= 1:
        raise ValueError("a number above 0 and up to 1 is needed")
    return value


def seconds(text: str) -> float:
    value = number(text)
    if not value >= 0:
        raise ValueError("a number from 0 is needed")
    return _bounded(value)


def positive(text: str) -> float:
    value = number(text)
    if not value > 0:
        raise ValueError("a number above 0 is needed")
    return _bounded(value)


def _bounded(value: float) -> float:
    if value > LONGEST:
        raise ValueError(f"{LONGEST:,.0f} is the most there can be")
    return value


def milliseconds(text: str) -> float:
    """Milliseconds, returned in seconds."""
    value = number(text)
    if not 0 < value < float("inf"):
        raise ValueError("a number of milliseconds above 0 is needed")
    return value / 1000


def boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise ValueError("true or false is needed")
    return values[text.lower()]


def path(text: str) -> str:
    """The path of a route."""
    if not re.fullmatch(r"/[\w./:~-]*", text):
        raise ValueError("a path that begins with / is needed")
    return text


def graphs(text: str) -> str:
    """Batch sizes of CUDA graphs, as the shards parse them."""
    parse_sizes(text)
    return text


def speculation(text: str) -> str:
    """Speculation settings, as the shards parse them, except for the draft model's name."""
    if text.isascii() and text.isdigit():
        text = str(_whole(text, 0, MOST_DRAFTS))
    parse_speculation(text)
    return text


def rank_groups(text: str) -> str:
    """Rank addresses as the router parses them; groups separated by semicolons."""
    named = [rank for group in text.split(";") for rank in addresses_of(group)]
    if len(set(named)) < len(named):
        raise ValueError("the same rank is named twice")
    return text


def place(text: str) -> str:
    """host:port to listen at."""
    host, _, number = text.rpartition(":")
    if not host or text.startswith("unix:"):
        raise ValueError("host:port is needed")
    port(number)
    return text


def file(text: str) -> str:
    """An existing file, as an absolute path, whatever the working directory of a child."""
    found = expanded(text)
    if not found.is_file():  # before it is resolved, which raises for links in a circle
        raise ValueError("there is no such file")
    return str(found.resolve())


def origins(text: str) -> str:
    """Origins of web pages, separated by commas."""
    for origin in text.split(","):
        if text not in (ANY_ORIGIN, NO_ORIGIN) and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/,\s*]+/?", origin.strip()):
            raise ValueError(f"origins such as https://chat.example, with commas between them, or {ANY_ORIGIN}, or {NO_ORIGIN}")
    return text


def url(text: str) -> str:
    """A URL of HTTP or HTTPS."""
    with suppress(ValueError):  # the port is no number, or none that there is; a bracket is missing
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not re.search(r"\s", text):
            return text
    raise ValueError("a URL such as http://localhost:4318 is needed")


def address(text: str) -> str:
    """An address that the router can bind: an IP address, or localhost."""
    try:
        return text if text == "localhost" else str(ipaddress.ip_address(text))  # :: however it is written
    except ValueError:
        raise ValueError("an IP address of this machine is needed, or localhost, or 0.0.0.0 for all") from None


def keys_of(text: str) -> tuple[str, ...]:
    """The API keys in a text, separated by commas."""
    return tuple(key for part in text.split(",") if (key := part.strip()))


def keys(text: str) -> str:
    """At least one API key: a server whose operator wants a key must not be open because its file is empty."""
    if not keys_of(text):
        raise ValueError("there is no key in it; leave it out for a server that asks for none")
    return key(text)


def key(text: str) -> str:
    """Characters that an HTTP header can carry, and that every client encodes alike."""
    if not (text.isascii() and text.isprintable()):
        raise ValueError("a key has letters, digits and signs of ASCII only, since HTTP carries no others")
    return text


METAVARS: dict[Any, str] = {
    count: "N",
    limit: "N",
    size: "BYTES",
    pixels: "N",
    hosts: "public|none|HOST[,...]",
    threads: "N",
    port: "PORT",
    fraction: "X",
    seconds: "X",
    positive: "X",
    milliseconds: "MS",
    boolean: "{true,false}",
    address: "ADDRESS",
    graphs: "SIZES",
    speculation: "N|KEY=VALUE,...",
    rank_groups: "ADDRESS[,...]",
    place: "HOST:PORT",
    path: "PATH",
    origins: "ORIGINS",
    url: "URL",
    keys: "KEY[,...]",
    file: "FILE",
}
