"""The folder of a server's Unix sockets: a private one, or a path prefix that the operator names.

A server holds a lock file while it lives. So a second server on the same prefix is refused, and what a server killed with SIGKILL
has left is distinguished from what is in use, and removed by the next start.
"""

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from .errors import UsageError
from .paths import in_utf8

PREFIX = "penstock-"
LOCK = "lock"
LONGEST_SOCKET = 107  # bytes of a path that fit into sockaddr_un, without the terminating 0


@contextmanager
def private() -> Iterator[Path]:
    """A new folder that only this user can enter; it is removed afterwards with all its contents."""
    with ExitStack() as stack:
        with writing("the temporary folder"):
            home = Path(tempfile.gettempdir())
            if len(os.fsencode(home)) > LONGEST_SOCKET - 40 or not in_utf8(home):
                home = Path("/tmp")  # an unusually long TMPDIR leaves no room for a socket's name
            _sweep(home)
            # With mode 0700. If somebody else removes it first, that is no error.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=home)))
            # systemd-tmpfiles, which removes what has grown old in /tmp, spares a folder that is locked itself.
            own = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, own)
            with suppress(OSError):  # NFS has no locks of folders
                fcntl.flock(own, fcntl.LOCK_EX)
            # Locked before it gets its final name: a sweep never sees it unlocked.
            file = stack.enter_context((folder / "unlocked").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / "unlocked").rename(folder / LOCK)
        yield folder


@contextmanager
def writing(what: str, remedy: str = "name another folder with TMPDIR") -> Iterator[None]:
    """Inside the context, failing to write to a folder is a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{what} can't be written to ({error.strerror}): free space or rights there, or {remedy}") from None


def _sweep(home: Path) -> None:
    """Removes the folders of servers that no longer live."""
    for lock in home.glob(f"{PREFIX}*/{LOCK}"):
        try:
            folder, found = lock.parent.lstat(), lock.lstat()
            own = folder.st_uid == os.getuid() and folder.st_mode == stat.S_IFDIR | 0o700  # not a link either
            if not own or not stat.S_ISREG(found.st_mode) or found.st_size:
                continue  # somebody else's, who took such a name
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
        except OSError:
            continue  # its server lives, or another start is sweeping it, or it is none that a start should remove


@contextmanager
def prefixed(prefix: str, paths: Sequence[Path]) -> Iterator[None]:
    """Inside the context, the paths belong to this server: leftovers are removed before, and the files afterwards. prefix: what
    all of them begin with. Raises UsageError while another server has it."""
    if not in_utf8(prefix):
        raise UsageError(f"--shard-uds-path {prefix} is no UTF-8, as a socket's path has to be: choose another prefix")
    if not paths[0].parent.is_dir():
        raise UsageError(f"--shard-uds-path {prefix}: there is no folder {paths[0].parent}")
    longest = max(paths, key=lambda path: len(os.fsencode(path)))
    if len(os.fsencode(longest)) > LONGEST_SOCKET:
        raise UsageError(f"--shard-uds-path: {longest} is longer than the {LONGEST_SOCKET} bytes that a socket's path may have")
    lock = Path(f"{prefix}-{LOCK}").absolute()
    with writing(f"--shard-uds-path {prefix}", "choose another prefix"):
        file = lock.open("a")
    with file:
        if file.tell():
            raise UsageError(f"--shard-uds-path: {lock} exists and is no lock: choose another prefix")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--shard-uds-path {prefix} is in use by another server: choose another prefix") from None
        for path in paths:
            _clear(path)
        try:
            yield
        finally:
            for path in (*paths, lock):
                path.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Removes a socket that nobody listens on. Raises UsageError for anything else in the way."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise UsageError(f"--shard-uds-path: {path} exists and is no socket: choose another prefix")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # somebody listens, and does not accept
            pass
        except OSError as error:  # another user's, or of another kind
            raise UsageError(f"--shard-uds-path: {path} can't be tried ({error.strerror}): choose another prefix") from None
    raise UsageError(f"--shard-uds-path: a live process listens on {path}: stop it, or choose another prefix")
