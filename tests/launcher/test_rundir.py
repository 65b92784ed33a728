"""Folders for Unix sockets: private, removed in the end, never taken from a live server."""

import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.launcher import rundir
from penstock.launcher.errors import UsageError


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of pytest's tmp_path may be too long for a socket's
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_private_folder_has_mode_0700_and_is_removed(parent: Path) -> None:
    with rundir.private() as folder:
        assert folder.parent == parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "socket").touch()
    assert list(parent.iterdir()) == []


def test_private_folder_is_locked_against_programs_that_remove_old_files(parent: Path) -> None:
    """systemd-tmpfiles takes a shared lock of each folder before it looks into it."""
    with rundir.private() as folder:
        looking = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(looking)


def test_private_folder_may_have_been_removed_already(parent: Path) -> None:
    with rundir.private() as folder:
        shutil.rmtree(folder)
    assert list(parent.iterdir()) == []


def test_private_folder_is_removed_if_its_lock_fails(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fcntl, "flock", raise_no_space)
    with pytest.raises(UsageError, match="the temporary folder can't be written to"), rundir.private():
        pass
    assert list(parent.iterdir()) == []


def test_folder_of_a_killed_server_is_removed_by_the_next_start(parent: Path) -> None:
    dead, alive, without_lock = parent / "penstock-dead", parent / "penstock-alive", parent / "penstock-other"
    not_private, lock_is_folder, lock_not_empty = parent / "penstock-backup", parent / "penstock-strange", parent / "penstock-full"
    for folder in (dead, alive, without_lock, not_private, lock_is_folder, lock_not_empty):
        folder.mkdir(0o700)
    for folder in (dead, not_private):
        (folder / "lock").touch()
    not_private.chmod(0o755)
    (lock_is_folder / "lock").mkdir()
    (lock_not_empty / "lock").write_text("mine")
    with (alive / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with rundir.private():
            assert not dead.exists()
            assert alive.exists()
            assert without_lock.exists()  # not penstock's: it has no lock file
            # nor are these: penstock's folders have mode 0700, and its lock files are empty
            assert all(folder.exists() for folder in (not_private, lock_is_folder, lock_not_empty))


def test_symlink_to_a_killed_servers_folder_does_not_prevent_its_removal(parent: Path) -> None:
    dead, link = parent / "penstock-zdead", parent / "penstock-alink"
    dead.mkdir(0o700)
    (dead / "lock").touch()
    link.symlink_to(dead)
    with rundir.private():
        assert not dead.exists()
        assert link.is_symlink()


def test_two_servers_have_different_folders(parent: Path) -> None:
    with rundir.private() as first:
        with rundir.private() as second:
            assert first != second
        assert first.exists()


@pytest.mark.parametrize("name", ["x" * 100, "\udcff"], ids=["long", "no UTF-8"])
def test_temporary_folder_that_no_socket_can_be_in_is_replaced_by_tmp(
    name: str, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parent / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent / name))
    with rundir.private() as folder:
        assert folder.parent == Path("/tmp")


def test_prefix_in_use_by_another_server_is_refused(parent: Path) -> None:
    paths = [parent / "p-0", parent / "p-1", parent / "p-relay"]
    with rundir.prefixed(f"{parent}/p", paths):
        paths[0].touch()
        with (
            pytest.raises(UsageError, match="in use by another server"),
            rundir.prefixed(f"{parent}/p", [parent / "p-0"]),
        ):
            pass
    assert list(parent.iterdir()) == []


def test_stale_socket_is_removed_and_a_live_one_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(parent)  # relative, as a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("p-0")
        server.listen()
        with pytest.raises(UsageError, match="a live process listens on"), rundir.prefixed("p", [Path("p-0").absolute()]):
            pass
    assert Path("p-0").exists()
    with rundir.prefixed("p", [Path("p-0").absolute()]):
        assert not Path("p-0").exists()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (socket.SOCK_STREAM, "a live process listens on"),
        (socket.SOCK_DGRAM, r"p-0 can't be tried \(Protocol wrong type for socket\)"),
    ],
)
def test_socket_that_does_not_accept_or_is_of_another_kind_is_refused(kind: int, error: str, parent: Path) -> None:
    path = parent / "p-0"
    with socket.socket(socket.AF_UNIX, kind) as server, socket.socket(socket.AF_UNIX, kind) as client:
        server.bind(str(path))
        if kind == socket.SOCK_STREAM:
            server.listen(0)
        client.connect(str(path))  # nobody else finds room in the queue
        with pytest.raises(UsageError, match=error), rundir.prefixed(f"{parent}/p", [path]):
            pass


def test_file_in_place_of_the_lock_is_neither_emptied_nor_removed(parent: Path) -> None:
    (parent / "p-lock").write_text("precious")
    with pytest.raises(UsageError, match="p-lock exists and is no lock"), rundir.prefixed(f"{parent}/p", [parent / "p-0"]):
        pass
    assert (parent / "p-lock").read_text() == "precious"


def test_prefix_where_sockets_cannot_be_made_is_refused(parent: Path) -> None:
    (parent / "p-0").write_text("precious")
    with pytest.raises(UsageError, match="exists and is no socket"), rundir.prefixed(f"{parent}/p", [parent / "p-0"]):
        pass
    assert (parent / "p-0").read_text() == "precious"
    with pytest.raises(UsageError, match="there is no folder"), rundir.prefixed(f"{parent}/none/p", [parent / "none/p-0"]):
        pass
    with pytest.raises(UsageError, match="is no UTF-8"), rundir.prefixed(f"{parent}/\udcff", [parent / "\udcff-0"]):
        pass
    with (
        pytest.raises(UsageError, match="is longer than the 107 bytes"),
        rundir.prefixed(f"{parent}/{'x' * 100}", [parent / ("x" * 100 + "-0")]),
    ):
        pass


def test_folder_of_another_user_is_not_removed(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (parent / "penstock-theirs").mkdir()
    (parent / "penstock-theirs" / "lock").touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with rundir.private():
        assert (parent / "penstock-theirs").exists()
