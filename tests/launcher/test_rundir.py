"""Sockets' places: private, released, never taken from a live process."""

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
from penstock.launcher.mistake import Mistake


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own may leave no room for a socket's name
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_private_folder(home: Path) -> None:
    with rundir.private() as folder:
        assert folder.parent == home
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "socket").touch()
    assert list(home.iterdir()) == []


def test_a_folder_that_somebody_removed_first(home: Path) -> None:
    with rundir.private() as folder:
        shutil.rmtree(folder)
    assert list(home.iterdir()) == []


def test_a_folder_in_which_nothing_can_be_made_does_not_stay(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fcntl, "flock", full)
    with pytest.raises(Mistake, match="the temporary folder can't be written to"), rundir.private():
        pass
    assert list(home.iterdir()) == []


def test_what_a_killed_server_left_is_swept(home: Path) -> None:
    dead, alive, other = home / "penstock-dead", home / "penstock-alive", home / "penstock-other"
    backup, strange, full = home / "penstock-backup", home / "penstock-strange", home / "penstock-full"
    for folder in (dead, alive, other, backup, strange, full):
        folder.mkdir(0o700)
    for folder in (dead, backup):
        (folder / "lock").touch()
    backup.chmod(0o755)
    (strange / "lock").mkdir()
    (full / "lock").write_text("mine")
    with (alive / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with rundir.private():
            assert not dead.exists()
            assert alive.exists()
            assert other.exists()  # not one of ours: no lock in it
            assert all(folder.exists() for folder in (backup, strange, full))  # nor these: ours are private, and locks are empty


def test_a_link_to_what_a_killed_server_left_does_not_keep_it_there(home: Path) -> None:
    dead, link = home / "penstock-zdead", home / "penstock-alink"
    dead.mkdir(0o700)
    (dead / "lock").touch()
    link.symlink_to(dead)
    with rundir.private():
        assert not dead.exists()
        assert link.is_symlink()


def test_two_servers_do_not_meet(home: Path) -> None:
    with rundir.private() as first:
        with rundir.private() as second:
            assert first != second
        assert first.exists()


def test_a_long_temporary_folder_leaves_room_for_a_socket(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = home / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with rundir.private() as folder:
        assert folder.parent == Path("/tmp")


def test_a_prefix(home: Path) -> None:
    with rundir.prefixed(f"{home}/p", ["0", "1", "relay"]) as paths:
        assert paths == [f"{home}/p-0", f"{home}/p-1", f"{home}/p-relay"]
        Path(paths[0]).touch()
        with (
            pytest.raises(Mistake, match="in use by another server"),
            rundir.prefixed(f"{home}/p", ["0"]),
        ):
            pass
    assert list(home.iterdir()) == []


def test_a_stale_socket_is_removed_and_a_live_one_is_not(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("p-0")
        server.listen()
        with pytest.raises(Mistake, match="a live process listens on"), rundir.prefixed("p", ["0"]):
            pass
    assert Path("p-0").exists()
    with rundir.prefixed("p", ["0"]):
        assert not Path("p-0").exists()


def test_what_is_no_place_for_sockets(home: Path) -> None:
    (home / "p-0").write_text("precious")
    with pytest.raises(Mistake, match="exists and is no socket"), rundir.prefixed(f"{home}/p", ["0"]):
        pass
    assert (home / "p-0").read_text() == "precious"
    with pytest.raises(Mistake, match="there is no folder"), rundir.prefixed(f"{home}/none/p", ["0"]):
        pass
    with pytest.raises(Mistake, match="is longer than the 107 bytes"), rundir.prefixed(f"{home}/{'x' * 100}", ["0"]):
        pass


def test_a_folder_of_another_user_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "penstock-theirs").mkdir()
    (home / "penstock-theirs" / "lock").touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with rundir.private():
        assert (home / "penstock-theirs").exists()
