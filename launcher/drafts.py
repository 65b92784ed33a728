"""The draft model for speculative decoding, named by `--speculate draft=...` or as the model: finds it, and checks that it fits the
model that is served."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from ..proto.speculation import OWN, Speculation, says_shape
from ..shard.models.draft_families import check_speculation, draft_shape, is_head, shaped
from ..shard.models.families import shape
from ..shard.models.readout_families import head_count, is_readout, stands_alone, with_sizes
from ..shard.models.shape import Shape
from . import checkpoint, hub, option_types, options
from .checkpoint import Checkpoint
from .errors import UsageError
from .options import Options

TOKENIZER = "tokenizer.json"
REMEDY = "take a draft model of the same family, made with the same tokenizer"


def with_base_model(asked: Options, folder: Path, weights: bool = True) -> tuple[Options, Path]:
    """The options unchanged, unless MODEL, which is in that folder, is only draft heads (as text-generation-inference takes them):
    then options that name both heads and base model, and the base model's folder. Raises UsageError.

    weights: whether those of the base model are needed.
    """
    # A router alone may have a folder with a tokenizer and no more.
    config = checkpoint.config_of(folder) if (folder / "config.json").is_file() else {}
    if not stands_alone(config):
        return asked, folder
    name, base = asked.model_id, config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UsageError(
            f"{name} only drafts for another model, which its config.json does not name (base_model_name_or_path): say penstock "
            f"serve MODEL --speculate draft={name}"
        )
    named = f"{name} only drafts for {base}"
    if asked.revision or asked.speculation.draft or "," in name:
        what = "--revision is said" if asked.revision else "its name has a comma" if "," in name else "--speculate names others"
        raise UsageError(f"{named}, and {what}: name that model, and with --speculate draft= the folder of what drafts for it")
    try:
        speculate = option_types.speculation(_with_heads(name, head_count(config), asked.speculate))
        meant = options.check(dataclasses.replace(asked, model_id=base, speculate=speculate))
        _, there = hub.locate(base, "", asked.huggingface_hub_cache, not asked.json_output, weights)
    except (UsageError, ValueError) as error:
        raise UsageError(f"{named}: {error}") from None
    return meant, there


def _with_heads(name: str, heads: int, said: str) -> str:
    """The value of `--speculate` with the heads added, where it does not name them. Raises ValueError."""
    if not said.isdigit():
        return f"draft={name},tokens={heads}" + (f",{said}" if said else "")
    if int(said) > heads:
        raise ValueError(f"its {heads} heads draft one token each: say --speculate {heads}, or less")
    return f"draft={name},tokens={said}" if int(said) else said


def resolve(asked: Options, model: Checkpoint, weights: bool = True) -> tuple[Speculation, Checkpoint | None]:
    """The parsed `--speculate`, with the draft model's folder instead of its name, and one token for each of its heads where no
    shape is given; and the draft model, if there is one. Raises UsageError.

    weights: whether they are needed; without, a download takes the small files only.
    """
    said = asked.speculation
    if not said.most:
        return said, None
    target = _target(model, said)
    if not said.draft:
        return said, None
    try:
        draft = model if said.draft == OWN else _located(said.draft, asked, model, weights)
        found = draft_shape(draft.config, target, own=said.draft == OWN)
        said = shaped(found, said, says_shape(asked.speculate))
    except (UsageError, ValueError) as error:
        raise UsageError(f"--speculate draft={said.draft}: {error}") from None
    return said if draft is model else dataclasses.replace(said, draft=str(draft.folder)), draft


def _target(model: Checkpoint, said: Speculation) -> Shape:
    """The shape of the served model, if it can verify such drafts. Raises UsageError."""
    try:
        found = shape(model.config)
    except ValueError as error:
        raise UsageError(f"{model.folder}: {error}") from None
    try:
        check_speculation(found, said)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return found


def _located(name: str, asked: Options, model: Checkpoint, weights: bool) -> Checkpoint:
    _, folder = hub.locate(name, "", asked.huggingface_hub_cache, not asked.json_output, weights)
    if "," in str(folder):  # a comma would end the folder's name in the shards' settings
        raise UsageError(f"{folder} has a comma in its name: copy it to where there is none")
    ask = functools.partial(hub.remote, name, "") if hub.on_hub(name) and not weights else None
    draft = checkpoint.read(folder, asked.load_format, ask, text=False)
    if not is_head(draft.config):  # a head is made for its model's tokens
        if not draft.random:
            checkpoint.check_tokenizer(folder)
        check_vocabulary(folder, model.folder)
    if not is_readout(draft.config) or not draft.here:
        return draft
    sizes = {} if draft.random else checkpoint.elements(folder)
    return dataclasses.replace(draft, config=with_sizes(draft.config, sizes))


def check_vocabulary(draft: Path, model: Path) -> None:
    """Raises UsageError unless both have the same tokens; tokens that only one of them adds behind those do not matter. Without a
    tokenizer, as with random weights, nothing is compared."""
    texts = [folder / TOKENIZER for folder in (draft, model)]
    if not all(path.is_file() for path in texts) or texts[0].read_bytes() == texts[1].read_bytes():
        return
    (guessed, guessed_added), (known, known_added) = map(_tokens, texts)
    for id in sorted(guessed.keys() | known.keys() | (guessed_added.keys() & known_added.keys())):
        one, other = guessed.get(id, guessed_added.get(id)), known.get(id, known_added.get(id))
        if one != other:
            raise UsageError(
                f"its tokens are not the model's, id {id} is {_shown(one)} there and {_shown(other)} in {model}: {REMEDY}"
            )


def _tokens(path: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Tokens by id: the vocabulary's own, and added ones."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            own = {int(id): str(token) for token, id in vocabulary.items()}
        else:  # Unigram: tokens with scores, in the order of the ids
            own = {id: str(token) for id, (token, _) in enumerate(vocabulary)}
        return own, {int(one["id"]): str(one["content"]) for one in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path} has no vocabulary: save the tokenizer with transformers' AutoTokenizer") from None


def _shown(token: str | None) -> str:
    return "none" if token is None else repr(token)
