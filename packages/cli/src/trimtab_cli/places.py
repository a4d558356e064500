"""Where models and data are: files and folders, the hub's cache, or the hub."""

from pathlib import Path

from huggingface_hub import get_session, try_to_load_from_cache
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def refuse_missing_path(name: str) -> None:
    """Raise ValueError for a name that looks like a path but does not exist, or for an empty file of data.

    Libraries would look for a missing path on the hub.
    """
    path = Path(name)
    is_in_a_folder = len(path.parts) == 2 and path.parent.is_dir()
    is_path = path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or is_in_a_folder
    if (is_path or path.suffix in DATA_SUFFIXES) and not path.exists():
        raise ValueError(f"There is no file or folder {name}.")
    if path.suffix in DATA_SUFFIXES and path.is_file() and not path.stat().st_size:
        raise ValueError(f"{name} is an empty file. Write at least one row into it.")


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
