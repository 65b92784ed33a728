"""Who asks: the bearer token of an HTTP request, and what it says of its session. Only digests leave this file."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from aiohttp import web

SESSIONS = ("X-Session-ID", "X-Session-Affinity")  # headers by which clients and gateways say what belongs together
SALT = secrets.token_bytes(16)  # new in each process: the digests are good for nothing else


def bearer(http: web.Request) -> bytes:
    """The token as it was sent, in OpenAI's header or in Anthropic's; nothing, if there is none."""
    scheme, _, rest = http.headers.get("Authorization", "").partition(" ")
    token = rest if scheme.lower() == "bearer" else http.headers.get("X-Api-Key", "")
    return token.strip().encode(errors="surrogateescape")


def digest(token: bytes) -> bytes:
    """To be compared instead of the token: of the same length, whatever that has."""
    return hashlib.blake2b(token, key=SALT).digest()


def bears(http: web.Request, keys: Iterable[bytes]) -> bool:
    """Whether its token is one of those whose digests these are.

    All are compared, each in constant time, so that nobody learns a key letter by letter, or which of them is near.
    """
    given = digest(bearer(http))
    return sum(hmac.compare_digest(given, key) for key in keys) > 0


def tenant_of(http: web.Request) -> str:
    """A name for whoever sent it: each API key is a tenant; where none is asked for, each token that clients send."""
    token = bearer(http)
    return hashlib.blake2b(token, key=SALT, digest_size=8).hexdigest() if token else ""


def session_of(http: web.Request, key: object = None, user: object = None) -> str:
    """A name for what the request belongs to, such as a conversation, if the client says so: OpenAI's `prompt_cache_key`, a header,
    or else OpenAI's `user`."""
    said = (key, *(http.headers.get(name) for name in SESSIONS), user)
    session = next((each for each in said if isinstance(each, str) and each), "")
    if not session:
        return ""
    return hashlib.blake2b(session.encode(errors="surrogatepass") + b"\0" + bearer(http), key=SALT, digest_size=8).hexdigest()
