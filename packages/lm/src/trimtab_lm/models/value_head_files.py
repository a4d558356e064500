"""Value heads on disk: in a file of their own, or inside the weight files of 2024's checkpoints."""

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import cached_file

VALUE_HEAD_FILE = "value_head.safetensors"
WEIGHT_FILES = tuple(n + s for n in ("model.safetensors", "pytorch_model.bin") for s in ("", ".index.json"))

StoredHead = tuple[str, dict[str, Tensor]]


def find_value_head(source: str, is_adapter: bool, hub: dict[str, Any]) -> StoredHead | None:
    """The file that holds a value head, in a folder or hub repository, and its `v_head.*` tensors; None without one."""

    def locate(name: str, **options: Any) -> str | None:
        return cached_file(source, name, **(hub | options), _raise_exceptions_for_missing_entries=False)

    if file := locate(VALUE_HEAD_FILE):
        return file, _read_tensors(file, prefix="")
    # The base model was just loaded from one of these, so it is in the cache; do not download its twins to look inside.
    known = {} if is_adapter else {"local_files_only": True, "force_download": False}
    for name in WEIGHT_FILES:
        file = locate(name, **known)
        if file is None:
            continue
        files = [file]
        if name.endswith(".json"):
            places = json.loads(Path(file).read_text(encoding="utf-8"))["weight_map"]
            shards = {shard for key, shard in places.items() if key.startswith("v_head.")}
            files = [str(cached_file(source, shard, **hub)) for shard in sorted(shards)]
        found = {key: value for part in files for key, value in _read_tensors(part, "v_head.").items()}
        if found:
            return file, found
    return None


def _read_tensors(file: str, prefix: str) -> dict[str, Tensor]:
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as tensors:
            return {key: tensors.get_tensor(key) for key in tensors.keys() if key.startswith(prefix)}  # noqa: SIM118
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    return {key: value.clone() for key, value in state.items() if key.startswith(prefix)}


def write_beside(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write under another name, then rename: a crash leaves the old file or the new one."""
    part = file.with_name(file.name + ".part")
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, part)
    with part.open("rb+") as written:
        os.fsync(written.fileno())
    os.replace(part, file)
