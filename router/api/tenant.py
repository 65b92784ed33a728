"""Who asks: the bearer token of an HTTP request. Only a digest of it leaves this file."""

import hashlib
import secrets

from aiohttp import web

SALT = secrets.token_bytes(16)  # new in each process: the digests are good for nothing else


def bearer(http: web.Request) -> bytes:
    """The token as it was sent; nothing, if there is none."""
    scheme, _, rest = http.headers.get("Authorization", "").partition(" ")
    return rest.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""


def digest(token: bytes) -> bytes:
    """To be compared instead of the token: of the same length, whatever that has."""
    return hashlib.blake2b(token, key=SALT).digest()


def tenant_of(http: web.Request) -> str:
    """A name for whoever sent it: each API key is a tenant; where none is asked for, each token that clients send."""
    token = bearer(http)
    return hashlib.blake2b(token, key=SALT, digest_size=8).hexdigest() if token else ""
