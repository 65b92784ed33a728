"""Amounts on the command lines of scripts: what argparse takes for the type of an argument. Knows no script."""

import argparse
from collections.abc import Callable


def positive(text: str) -> float:
    """An argument that is a number above 0."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0 is needed")
    return value


def amount(text: str) -> int:
    """An argument that is a whole number above 0."""
    positive(text)
    return int(text)


def amounts(text: str) -> list[int]:
    """An argument that is whole numbers above 0, separated by commas."""
    return [amount(part) for part in text.split(",")]


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number, `least` or more."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text}: a whole number from {least} on is needed")
        return value

    return number
