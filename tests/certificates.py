"""Certificate authorities and node certificates for tests of TLS, made with the openssl command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authority:
    """A certificate authority, and the certificate of a node that it has signed."""

    files: tuple[str, str, str]  # certificate and key of the node, certificate of the authority

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags for `penstock serve`."""
        certificate, key, authority = self.files
        return ("--tls-cert", certificate, "--tls-key", key, "--tls-ca", authority)


def authorities(folder: Path) -> tuple[Authority, Authority]:
    """Two authorities, neither of which trusts the other. Skips the test if there is no openssl command."""
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl command")
    return make(folder / "ours"), make(folder / "others")


def make(folder: Path, name: str = "penstock") -> Authority:
    """An authority in a new folder, and a node certificate that is valid for `name`."""
    folder.mkdir()

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=20)

    extensions = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
    added = [word for extension in extensions for word in ("-addext", extension)]
    openssl("req", "-x509", *KEY, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=nodes", *added)
    openssl("req", *KEY, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    (folder / "extensions").write_text(f"subjectAltName=DNS:{name}\nextendedKeyUsage=serverAuth,clientAuth\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions")
    openssl("x509", "-req", "-in", "node.csr", *signed, "-out", "node.pem")
    return Authority((str(folder / "node.pem"), str(folder / "node.key"), str(folder / "ca.pem")))
