"""Who sends a request: its bearer token, its tenant and its session. Only digests leave this module."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from aiohttp import web

SESSIONS = ("X-Session-ID", "X-Session-Affinity")  # headers by which clients and gateways group requests
SALT = secrets.token_bytes(16)  # new in each process: the digests are of no use elsewhere


def bearer(http: web.Request) -> bytes:
    """The token as it was sent, in OpenAI's header or in Anthropic's; b"" if there is none."""
    scheme, _, rest = http.headers.get("Authorization", "").partition(" ")
    token = rest if scheme.lower() == "bearer" else http.headers.get("X-Api-Key", "")
    return token.strip().encode(errors="surrogateescape")


def digest(token: bytes) -> bytes:
    """A digest to compare instead of the token: of the same length for all tokens."""
    return hashlib.blake2b(token, key=SALT).digest()


def bears(http: web.Request, keys: Iterable[bytes]) -> bool:
    """Whether the request's token is one of those with these digests.

    All are compared, each in constant time, so that timing reveals no key letter by letter, nor which of them is near.
    """
    given = digest(bearer(http))
    return sum(hmac.compare_digest(given, key) for key in keys) > 0


def tenant_of(http: web.Request) -> str:
    """The tenant of a request: each API key is a tenant; where no key is needed, each token that clients send."""
    token = bearer(http)
    return hashlib.blake2b(token, key=SALT, digest_size=8).hexdigest() if token else ""


def session_of(http: web.Request, key: object = None, user: object = None) -> str:
    """The session of a request, such as a conversation, if the client names one: by OpenAI's `prompt_cache_key`, a header, or else
    OpenAI's `user`."""
    said = (key, *(http.headers.get(name) for name in SESSIONS), user)
    session = next((each for each in said if isinstance(each, str) and each), "")
    if not session:
        return ""
    return hashlib.blake2b(session.encode(errors="surrogatepass") + b"\0" + bearer(http), key=SALT, digest_size=8).hexdigest()
