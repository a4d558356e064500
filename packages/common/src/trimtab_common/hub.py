"""What goes with a saved model: its page, and the way to the hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import create_repo, upload_folder

PAGE = """# {name}

Fine-tuned with {trainer} of trimtab ({paper}).

## Use

```python
{usage}
```

## Training

{settings}
"""


def write_model_card(
    path: str | Path,
    *,
    name: str,
    trainer: str,
    paper: str,
    usage: str,
    library: str,
    base_model: str | None,
    settings: dict[str, object],
    tags: Sequence[str] = (),
    repo_id: str | None = None,
) -> Path:
    """Write README.md into the folder `path`, which is made if need be; returns the file.

    usage: Python that loads the model; {repo_id} in it becomes `repo_id`, or the folder's name. library: the one that
    loads it. base_model: named in the header unless it is a path, which the hub refuses.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {
        "library_name": library,
        "tags": ["trimtab", trainer.removesuffix("Trainer").lower(), "reinforcement-learning", *tags],
    }
    if base_model and not Path(base_model).exists():
        header["base_model"] = base_model
    table = "\n".join(
        ["| setting | value |", "| --- | --- |"]
        + [f"| {key} | {value} |" for key, value in settings.items() if value not in (None, {}, "")]
    )
    page = PAGE.format(
        name=name,
        trainer=trainer,
        paper=paper,
        usage=usage.format(repo_id=repo_id or folder.resolve().name),
        settings=table,
    )
    file = folder / "README.md"
    file.write_text(f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n{page}", encoding="utf-8")
    return file


def push_folder(folder: Path, repo_id: str, *, private: bool | None = None, **options: Any) -> Any:
    """Upload a folder as the repository `repo_id`, made if need be; returns what huggingface_hub.upload_folder does."""
    repo_id = create_repo(repo_id, private=private, token=options.get("token"), exist_ok=True).repo_id
    return upload_folder(repo_id=repo_id, folder_path=folder, **{"commit_message": "Upload model", **options})
