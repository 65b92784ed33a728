"""Errors that an operator can cause: printed as one line, exit code 2, never a traceback."""


class Mistake(Exception):
    """An operator's error. The message says in one line what is wrong and what would help."""
