"""Where the sockets of one server lie: a private folder, or beside a prefix that the operator names.

A server holds a lock while it lives. So a second one on the same prefix is refused, and what one left that was killed with
SIGKILL is told from what is in use, and removed by the next start.
"""

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .mistake import Mistake

PREFIX = "penstock-"
LOCK = "lock"
LONGEST_SOCKET = 107  # bytes of a path that fit into sockaddr_un, without the closing 0


@contextmanager
def private() -> Iterator[Path]:
    """A new folder that only this user can enter; gone afterwards, with everything in it."""
    with ExitStack() as stack:
        with writing("the temporary folder"):
            home = Path(tempfile.gettempdir())
            if len(os.fsencode(home)) > LONGEST_SOCKET - 40:
                home = Path("/tmp")  # an unusually long TMPDIR leaves no room for a socket's name
            _sweep(home)
            # With mode 0700. That somebody cleans up before us is no error.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=home)))
            # Locked before it gets its name: a sweep never sees it unlocked.
            file = stack.enter_context((folder / "unlocked").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            (folder / "unlocked").rename(folder / LOCK)
        yield folder


@contextmanager
def writing(what: str, remedy: str = "name another folder with TMPDIR") -> Iterator[None]:
    """Within, a folder that can't be written to is a Mistake."""
    try:
        yield
    except OSError as error:
        raise Mistake(f"{what} can't be written to ({error.strerror}): free space or rights there, or {remedy}") from None


def _sweep(home: Path) -> None:
    """Removes the folders of servers that no longer live."""
    for lock in home.glob(f"{PREFIX}*/{LOCK}"):
        try:
            folder, found = lock.parent.lstat(), lock.lstat()
            own = folder.st_uid == os.getuid() and folder.st_mode == stat.S_IFDIR | 0o700  # no link either
            if not own or not stat.S_ISREG(found.st_mode) or found.st_size:
                continue  # somebody else's, who took such a name
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
        except OSError:
            continue  # it lives, or another start sweeps it at this moment, or it is none that a start should end of


@contextmanager
def prefixed(prefix: str, names: list[str]) -> Iterator[list[str]]:
    """Paths `prefix`-name, free to listen on; gone afterwards. Raises Mistake while another server has them."""
    paths = [Path(f"{prefix}-{name}").absolute() for name in names]
    if not paths[0].parent.is_dir():
        raise Mistake(f"--shard-uds-path {prefix}: there is no folder {paths[0].parent}")
    longest = max(paths, key=lambda path: len(os.fsencode(path)))
    if len(os.fsencode(longest)) > LONGEST_SOCKET:
        raise Mistake(f"--shard-uds-path: {longest} is longer than the {LONGEST_SOCKET} bytes that a socket's path may have")
    lock = Path(f"{prefix}-{LOCK}").absolute()
    with writing(f"--shard-uds-path {prefix}", "choose another prefix"):
        file = lock.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Mistake(f"--shard-uds-path {prefix} is in use by another server: choose another prefix") from None
        for path in paths:
            _clear(path)
        try:
            yield [str(path) for path in paths]
        finally:
            for path in (*paths, lock):
                path.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Removes a socket nobody listens on. Refuses anything else that is in the way."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise Mistake(f"--shard-uds-path: {path} exists and is no socket: choose another prefix")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise Mistake(f"--shard-uds-path: a live process listens on {path}: stop it, or choose another prefix")
