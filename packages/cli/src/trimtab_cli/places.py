"""Where models and data are: files and folders, the hub's cache, or the hub."""

from pathlib import Path

from huggingface_hub import get_session, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE, HF_HUB_OFFLINE
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import HFValidationError, build_hf_headers

KINDS = ("model", "dataset")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def refuse_missing_path(name: str) -> None:
    """Raise ValueError for a name that looks like a path but does not exist, or for an empty file of data.

    Libraries would look for a missing path on the hub. A name whose first part is a folder here may be of the hub, too.
    """
    path = Path(name)
    is_path = path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or path.suffix in DATA_SUFFIXES
    is_in_a_folder = len(path.parts) == 2 and path.parent.is_dir()
    if not path.exists() and (is_path or (is_in_a_folder and not is_on_hub(name))):
        raise ValueError(f"There is no file or folder {name}.")
    if path.suffix in DATA_SUFFIXES and path.is_file() and not path.stat().st_size:
        raise ValueError(f"{name} is an empty file. Write at least one row into it.")


def is_on_hub(name: str) -> bool:
    """Whether the hub has a model or dataset of this name, or its cache; False if the hub does not answer."""
    try:
        folders = [Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)) for kind in KINDS]
    except HFValidationError:
        return False
    is_cached = any(folder.is_dir() for folder in folders)
    if is_cached or HF_HUB_OFFLINE:
        return is_cached
    links = [f"{ENDPOINT}/api/{kind}s/{name}" for kind in KINDS]
    try:
        return any(get_session().head(link, headers=build_hf_headers(), timeout=3).status_code < 400 for link in links)
    except Exception:  # the kinds are those of whichever client huggingface_hub uses
        return False


def require_hub(model: str, *, uploads: bool) -> None:
    """Raise ValueError within seconds where the hub is needed and does not answer; libraries retry for half a minute.

    Args:
        model: hub id or folder. A model that is in the cache needs no hub.
        uploads: whether the run uploads what it trains.
    """
    cached = (try_to_load_from_cache(model, file) for file in ("config.json", "model_index.json"))
    is_here = Path(model).exists() or any(isinstance(file, str) for file in cached)
    if is_here and not uploads:
        return
    need = (
        "push_to_hub=True needs the hub" if is_here else f"There is no folder {model}, and the cache has no such model"
    )
    if HF_HUB_OFFLINE:
        raise ValueError(f"{need}; HF_HUB_OFFLINE is set. Unset it.")
    try:
        get_session().head(ENDPOINT, timeout=3)
    except Exception as error:  # the kinds are those of whichever client huggingface_hub uses
        raise ValueError(f"{need}; {ENDPOINT} does not answer: {error}") from error
