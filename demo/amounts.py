"""Amounts on the command lines of the scripts: what argparse takes for the type of an argument. Knows no script."""

import argparse


def positive(text: str) -> float:
    """An argument that is a number above 0."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0 is needed")
    return value


def amount(text: str) -> int:
    """An argument that is a whole number above 0."""
    positive(text)
    return int(text)
