"""What an operator can cause. Printed as one line, exit code 2, never a traceback."""


class Mistake(Exception):
    """The message says what is wrong and what would do, in one line."""
