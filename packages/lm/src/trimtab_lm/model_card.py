"""The page that goes with a saved model."""

from pathlib import Path

import yaml

PAGE = """# {name}

Fine-tuned with {trainer} of trimtab ({paper}).

## Use

```python
from transformers import AutoTokenizer
from trimtab_lm import {model_class}

model = {model_class}.from_pretrained("{repo_id}")
tokenizer = AutoTokenizer.from_pretrained("{repo_id}")
```

The language model alone loads with transformers' own Auto classes.

## Training

{settings}
"""


def write_model_card(
    path: str | Path,
    *,
    name: str,
    trainer: str,
    paper: str,
    model_class: str,
    base_model: str | None,
    settings: dict[str, object],
    repo_id: str | None = None,
) -> Path:
    """Write README.md into the folder `path`, which is made if need be; returns the file."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tags = ["trimtab", trainer.removesuffix("Trainer").lower(), "reinforcement-learning"]
    header: dict[str, object] = {"library_name": "transformers", "tags": tags}
    if base_model:
        header["base_model"] = base_model
    table = "\n".join(
        ["| setting | value |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in settings.items())]
    )
    page = PAGE.format(
        name=name,
        trainer=trainer,
        paper=paper,
        model_class=model_class,
        repo_id=repo_id or folder.name,
        settings=table,
    )
    file = folder / "README.md"
    file.write_text(f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n{page}", encoding="utf-8")
    return file
