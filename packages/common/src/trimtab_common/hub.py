"""A saved model's card, and its upload to the hub."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitInfo, create_repo, upload_folder

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
    """Writes a model card, README.md.

    Args:
        path: the folder, created where it does not exist.
        name: title of the page.
        trainer: name of the trainer's class.
        paper: the algorithm's paper.
        usage: Python that loads the model; inside its double quotes {repo_id} becomes `repo_id`, or the folder's name,
            and {base} the base model.
        library: the library that loads the model.
        base_model: named in the header unless it is a path, which the hub refuses.
        settings: rows of a table; empty ones are left out.
        tags: more tags for the header.
        repo_id: the model's repository.

    Returns:
        The file.
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
        + [
            f"| {_as_markdown(key)} | {_as_markdown(value)} |"
            for key, value in settings.items()
            if value not in (None, {}, "")
        ]
    )
    page = PAGE.format(
        name=_as_markdown(name),
        trainer=trainer,
        paper=paper,
        usage=usage.format(
            repo_id=_in_quotes(repo_id or folder.resolve().name), base=_in_quotes(base_model or "<the base model>")
        ),
        settings=table,
    )
    file = folder / "README.md"
    file.write_text(f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n{page}", encoding="utf-8")
    return file


def _as_markdown(value: object) -> str:
    """A text on one line, in which no character formats, links or ends a cell; _ inside a word does nothing."""
    return re.sub(r"([\\`*\[\]<>|~&#]|\b_|_\b)", r"\\\1", " ".join(str(value).split()))


def _in_quotes(text: str) -> str:
    """A text as it stands between double quotes in Python."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def push_folder(folder: Path, repo_id: str, *, private: bool | None = None, **options: Any) -> CommitInfo:
    """Uploads a folder to a repository.

    Args:
        folder: uploads its files, except names that begin with `_`, such as a run's lock.
        repo_id: the repository, created where it does not exist.
        private: whether a created repository is private.
        options: more arguments of `huggingface_hub.upload_folder`.
    """
    repo_id = create_repo(repo_id, private=private, token=options.get("token"), exist_ok=True).repo_id
    defaults = {"commit_message": "Upload model", "ignore_patterns": ["_*"]}
    return upload_folder(repo_id=repo_id, folder_path=folder, **defaults | options)
