"""Where a model's files are: the embedded demo model, a folder, or a model of the Hugging Face hub, which is downloaded.

Knows nothing of what is in the files.
"""

import re
from pathlib import Path

from .mistake import Mistake

DEMO = "penstock-demo"  # the name under which clients see the embedded model
DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo" / "model"

# Weights only as safetensors: other formats are pickles, which run code when they are loaded.
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*"]


def locate(model: str, revision: str = "", cache: str = "", progress: bool = True) -> tuple[str, Path]:
    """The name and the folder of `model` ("": the demo model). Downloads what a hub model lacks. Raises Mistake."""
    if not model:
        if not DEMO_FOLDER.is_dir():
            raise Mistake("this installation lacks the embedded demo model: name a model (penstock serve MODEL), or install again")
        return DEMO, DEMO_FOLDER
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision:
            raise Mistake(f"--revision {revision} is for models of the hub, and {model} is a folder: leave it out")
        return model, folder.resolve()
    if folder.exists():
        raise Mistake(f"{model} is a file: name the folder that holds config.json")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise Mistake(f"no folder {model} (and that is no id of a hub model, which looks like owner/name)")
    return model, _download(model, revision, cache, progress)


def _download(model: str, revision: str, cache: str, progress: bool) -> Path:
    # Lazy: takes half a second that the demo model and a local folder need not wait for.
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress:
        disable_progress_bars()
    at = f"{model} at revision {revision}" if revision else model
    try:
        return Path(
            huggingface_hub.snapshot_download(model, revision=revision or None, cache_dir=cache or None, allow_patterns=PATTERNS)
        )
    except errors.GatedRepoError:
        raise Mistake(f"{model} asks for consent: accept its terms on the hub, then set HF_TOKEN or run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise Mistake(f"no folder {model}, and no such model on the hub (a private one needs HF_TOKEN)") from None
    except errors.RevisionNotFoundError:
        raise Mistake(f"{model} has no revision {revision} on the hub") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise Mistake(
            f"no folder {model}, no copy of {at} in the cache, and the hub can't be reached: go online (HF_HUB_OFFLINE unset), "
            "or copy the model here and name its folder"
        ) from None
    except errors.HFValidationError as error:
        raise Mistake(f"no folder {model}, and the hub has no such ids: {_line(error)}") from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise Mistake(f"{at} could not be downloaded: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
