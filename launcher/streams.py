"""The three standard streams, in whatever state whoever started us has left them."""

import os
import sys


def complete() -> None:
    """Those that are closed (`penstock serve >&-`, a cron job) lead nowhere from now on. Python has None in their place, and the
    next file or socket that is opened would get their number, and what was meant for the stream."""
    for number in range(3):  # in this order: each opened gets the lowest that is free
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - for as long as we live
