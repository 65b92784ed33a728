"""Downloads files from the Hugging Face hub into its cache, where they are missing there. Knows nothing of their content."""

from collections.abc import Sequence
from pathlib import Path


class Unavailable(Exception):
    """The files are not available. One line that says why, and what would help."""


def download(
    model: str, revision: str, cache: str, patterns: Sequence[str], ignored: Sequence[str] = (), progress: bool = False
) -> Path:
    """The folder with those of a model's files that match. cache: another folder than the hub's own; progress: show progress bars.
    Raises Unavailable."""
    # Lazy: takes half a second that the demo model and a local folder need not wait for.
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    at = f"{model} at revision {revision}" if revision else model
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision or None,
                cache_dir=cache or None,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
            )
        )
    except errors.GatedRepoError:
        raise Unavailable(
            f"{model} asks for consent: accept its terms on the hub, then set HF_TOKEN or run `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise Unavailable(f"no folder {model}, and no such model on the hub (a private one needs HF_TOKEN)") from None
    except errors.RevisionNotFoundError:
        raise Unavailable(f"{model} has no revision {revision} on the hub") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = f" ({_line(error.__cause__)})" if isinstance(error.__cause__, errors.HfHubHTTPError) else ""
        raise Unavailable(
            f"no folder {model}, no copy of {at} in the cache, and the hub can't be reached{why}: go online "
            "(HF_HUB_OFFLINE unset), or copy the model here and name its folder"
        ) from None
    except errors.HFValidationError as error:
        raise Unavailable(f"no folder {model}, and the hub has no such ids: {_line(error)}") from None
    except Exception as error:  # the HTTP client's own errors have no common base with the hub's, and another one by version
        raise Unavailable(f"{at} could not be downloaded: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
