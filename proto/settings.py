"""Serializes frozen dataclasses as JSON in a process's arguments. The launcher writes them, the router and the shards read them.

An argument `@PATH` names a file that holds the JSON, for settings with a secret in them: arguments are public (`ps`).
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def dump(settings: Any) -> str:
    """The dataclass as one line of JSON."""
    return json.dumps(dataclasses.asdict(settings), separators=(",", ":"))


def load(kind: type[Settings], text: str) -> Settings:
    """The inverse of `dump`. Raises ValueError that names a key which `kind` does not have, or one that is missing."""
    if text.startswith("@"):
        text = Path(text[1:]).read_text(encoding="utf-8")
    values = json.loads(text)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"{kind.__name__} has no setting {', '.join(unknown)}")
    try:
        return kind(**{name: _frozen(value) for name, value in values.items()})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None


def _frozen(value: Any) -> Any:
    """Lists as tuples, nested ones too."""
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value
