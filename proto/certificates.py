"""Mutual TLS (mTLS) between processes of several machines: each proves its membership by a certificate of a common authority.

All certificates have the same name, not the names of machines: all are trusted equally, and machines that are created by an
orchestrator have no names known beforehand.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

NAME = "penstock"  # for which every certificate is valid (subjectAltName: DNS:penstock)


class Named(Protocol):
    """Settings that may name the three files."""

    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_ca(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Certificates:
    """Paths of PEM files."""

    certificate: str
    key: str
    authority: str

    def server(self) -> ssl.SSLContext:
        """Context for accepting connections. Raises OSError (ssl.SSLError is one) if a file can't be read or the key does not
        match."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._load(context)

    def client(self) -> ssl.SSLContext:
        """Context for connecting. Raises as `server` does."""
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))  # which requires a certificate, and checks its name

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Contents of the files: certificate, key, authority."""
        certificate, key, authority = (Path(path).read_bytes() for path in (self.certificate, self.key, self.authority))
        return certificate, key, authority

    def check(self) -> None:
        """Raises OSError, with the reason, unless two peers with these files would trust each other."""
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client().wrap_bio(to_client, to_server, server_side=False, server_hostname=NAME)
        server = self.server().wrap_bio(to_server, to_client, server_side=True)
        sides = [client, server]
        while sides:
            side = sides.pop(0)
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                sides.append(side)


def of(settings: Named) -> Certificates | None:
    """The certificates that the settings name, if any."""
    if not settings.tls_cert:
        return None
    return Certificates(settings.tls_cert, settings.tls_key, settings.tls_ca)
