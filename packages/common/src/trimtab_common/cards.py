"""The card of a saved model: what it is, how it is loaded, and with what it was trained."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

PAGE = """---
{header}
---

# {name}

{subject}, trained with {method} ({paper}) by trimtab's {trainer}.

## Use

```python
{usage}
```

## Training

{facts}

## Versions

{versions}

## Settings

{settings}
"""
UNNAMED = (None, "TRL Model", "TRL DDPO Model")
"""Titles that name no model: None, and the defaults that scripts of 2024 know."""
LIBRARIES = ("trimtab_common", "trimtab_lm", "trimtab_diffusion", "torch", "transformers", "diffusers", "peft")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def write_model_card(
    path: str | Path,
    *,
    trainer: str,
    method: str,
    paper: str,
    usage: str,
    library: str,
    base_model: str | None,
    settings: Mapping[str, object],
    facts: Mapping[str, object] | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    repo_id: str | None = None,
    **header: Any,
) -> Path:
    """Writes a model card, README.md, and returns the file.

    Args:
        path: the folder, created where it does not exist.
        paper: the algorithm's paper; an arXiv number becomes a link.
        usage: Python that loads the model; inside its double quotes {repo_id} becomes `repo_id`, or the folder, and
            {base} the base model.
        library: the library that loads the model.
        base_model: named in the header unless it is a path, which the hub refuses.
        settings: rows of a table; empty ones are left out.
        facts: what the model was trained on, such as data and reward, in rows of another table; a `dataset` of the hub
            is named in the header, too.
        name: title of the page; by default the last part of `repo_id`.
        tags: more tags for the header.
        repo_id: the model's repository; by default `path`, or the name of a folder whose path is absolute.
        header: more entries of the header; see `huggingface_hub.ModelCardData`.
    """
    folder, facts = Path(path), facts or {}
    folder.mkdir(parents=True, exist_ok=True)
    repo_id = repo_id or (folder.resolve().name if folder.is_absolute() or folder == Path() else folder.as_posix())
    algorithm = trainer.removesuffix("Trainer").lower()
    arxiv = [f"arxiv:{number}" for number in ARXIV.findall(paper)]
    data = ModelCardData(
        base_model=base_model if _is_of_hub(base_model) else None,
        datasets=[str(facts["dataset"])] if _is_of_hub(facts.get("dataset")) else None,
        library_name=library,
        tags=["trimtab", algorithm, *arxiv, *tags],
        **header,
    )
    page = PAGE.format(
        header=data.to_yaml(),
        name=_as_markdown(Path(repo_id).name if name in UNNAMED else name),
        subject=_subject(base_model),
        method=method,
        paper=ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", paper),
        trainer=trainer,
        usage=usage.format(repo_id=_in_quotes(repo_id), base=_in_quotes(base_model or "<the base model>")),
        facts=_table({"base model": base_model, **facts}),
        versions=_table({**versions(), "commit of the working directory": commit()}),
        settings=_table(settings),
    )
    card = ModelCard(page, ignore_metadata_errors=True)
    card.save(folder / "README.md")
    return folder / "README.md"


def facts_of(about: Mapping[str, object], **known: object) -> dict[str, object]:
    """The rows of a card on what a model was trained on.

    Args:
        about: what the program says of the run; its dataset, split and reward are taken. A dataset of files is a
            `local dataset`, the last part of its path.
        known: what the trainer says, which they replace.
    """
    said = {name: about[name] for name in ("dataset", "dataset_config", "split", "reward") if name in about}
    if isinstance(dataset := said.get("dataset"), str) and Path(dataset).exists():
        del said["dataset"]
        said["local dataset"] = Path(dataset).name
    return {**known, **said}


def versions() -> dict[str, str]:
    """Python's version, and those of the libraries that this process has imported."""
    found = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):  # a folder on Python's path has no version
            if name in sys.modules:
                found[name] = metadata.version(name)
    return found


@cache
def commit() -> str | None:
    """The commit of the working directory, with -dirty where files differ from it; None if there is none."""
    words = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _is_of_hub(name: object) -> bool:
    """Whether a name is one of the hub, and not that of a file or folder."""
    return isinstance(name, str) and HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _subject(base_model: str | None) -> str:
    if base_model is None:
        return "A model"
    link = f"(https://huggingface.co/{base_model})"
    return f"[{_as_markdown(base_model)}]{link}" if _is_of_hub(base_model) else _as_markdown(base_model)


def _table(rows: Mapping[str, object]) -> str:
    shown = [(key, value) for key, value in rows.items() if value not in (None, {}, "", [])]
    lines = [f"| {_as_markdown(key)} | {_as_markdown(value)} |" for key, value in shown]
    return "\n".join(["| name | value |", "| --- | --- |", *lines])


def _as_markdown(value: object) -> str:
    """A text on one line, in which no character formats, links or ends a cell; _ inside a word does nothing."""
    return re.sub(r"([\\`*\[\]<>|~&#]|\b_|_\b)", r"\\\1", " ".join(str(value).split()))


def _in_quotes(text: str) -> str:
    """A text as it stands between double quotes in Python."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
