"""Child processes: starts them, relays their output, reports when one ends, and ends them. Knows nothing of what they are for."""

import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from ..proto.process import bound_to
from .console import Console

ERROR = re.compile(r'^\S+ ERROR |"level": "ERROR"')  # of a log line in either form that proto/process.py writes
TAIL = 5  # last lines of a child that are repeated when it fails


@dataclass(eq=False)
class Child:
    """A child process. It leads a process group of its own, so that Ctrl-C reaches only the launcher."""

    name: str
    process: subprocess.Popen[str]
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))  # last lines of its stderr, and errors in its log

    def terminate(self) -> None:
        """Sends SIGTERM. Nothing happens if it has ended."""
        self.process.terminate()

    def kill(self) -> None:
        """Kills it at once, with whatever it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # all gone already

    def verdict(self) -> str:
        """How it ended, for people, with its last lines."""
        code = self.process.returncode
        if code >= 0:
            how = f"ended with exit code {code}"
        else:
            known = -code in set(signal.Signals)  # real-time signals have no names
            how = f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
            if code == -signal.SIGKILL:
                how += " (the kernel does that when memory runs out: see dmesg)"
        return "\n".join(
            [f"{self.name} {how}" + (", its last words:" if self.errors else ""), *(f"    {line}" for line in self.errors)]
        )


def start(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
    """Starts a child. The kernel kills it when the calling *thread* ends, so call this on the main thread, before other threads
    start."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        bufsize=1,
        process_group=0,
        cwd=_working_directory(),
        preexec_fn=bound_to(os.getpid()),  # from its first moment on, before it does so itself
    )
    return Child(name, process)


def _working_directory() -> str | None:
    """The child's: ours (None). If that has been removed, the root: torch can't be loaded without one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def follow(child: Child, console: Console, ended: Callable[[Child], None]) -> None:
    """Relays its lines to the console from now on, without ever blocking the child; calls `ended(child)` on another thread when it
    is gone."""
    console.detach()
    assert child.process.stdout is not None
    assert child.process.stderr is not None
    readers = [
        threading.Thread(target=_read, args=(child, child.process.stdout, console, False), daemon=True),
        threading.Thread(target=_read, args=(child, child.process.stderr, console, True), daemon=True),
    ]

    def wait() -> None:
        child.process.wait()
        for reader in readers:
            reader.join(1)  # its last lines first; with a timeout, since a process that it started may hold the pipe open
        ended(child)

    for reader in readers:
        reader.start()
    threading.Thread(target=wait, daemon=True).start()


def _read(child: Child, pipe: IO[str], console: Console, error: bool) -> None:
    with pipe:
        for line in pipe:
            text = line.rstrip("\n")
            if error or ERROR.search(text):
                child.errors.append(text)
            console.relay(child.name, text, error)
