"""The value head, and its files: a separate one, or the weight files of old TRL's checkpoints."""

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import cached_file

from trimtab_lm.tokens.logprobs import linear_in_own_dtype

VALUE_HEAD_FILE = "value_head.safetensors"
WEIGHT_FILES = tuple(n + s for n in ("model.safetensors", "pytorch_model.bin") for s in ("", ".index.json"))

StoredHead = tuple[str, dict[str, Tensor]]
"""The file that holds a value head, and its tensors by their keys `v_head.*`."""

InitStrategy = Literal["random", "normal", "zero"]


class ValueHead(nn.Module):
    """A linear map from the decoder's last hidden state to a scalar value.

    It computes in its own dtype, also over a model in bfloat16 and under autocast: values are regression targets, and
    the three digits of bfloat16 are too few for them.

    Args:
        hidden_size: the width of the hidden state.
        summary_dropout_prob: dropout on the input, in training mode.
        device, dtype: where the weights lie, and their dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        summary_dropout_prob: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.dropout = nn.Dropout(summary_dropout_prob)
        self.summary = nn.Linear(hidden_size, 1, device=device, dtype=dtype)

    def init_weights(self, strategy: InitStrategy | None, initializer_range: float) -> None:
        """Sets the weights.

        Args:
            strategy: None or "random": the default of torch's Linear. "normal": weights from N(0, initializer_range),
                bias 0. "zero": all 0, as in Ziegler et al. 2019 (arXiv:1909.08593), so that the first advantages depend
                on the rewards alone.
            initializer_range: standard deviation for "normal".

        Raises:
            ValueError: the strategy is unknown.
        """
        if strategy in (None, "random"):
            self.summary.reset_parameters()
        elif strategy == "normal":
            nn.init.normal_(self.summary.weight, std=initializer_range)
            nn.init.zeros_(self.summary.bias)
        elif strategy == "zero":
            nn.init.zeros_(self.summary.weight)
            nn.init.zeros_(self.summary.bias)
        else:
            raise ValueError(f"v_head_init_strategy={strategy!r} is unknown. Use None, 'random', 'normal' or 'zero'.")

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns values [...] in the head's dtype, from hidden states [..., hidden_size] of any dtype and device."""
        return linear_in_own_dtype(self.summary, self.dropout(hidden.to(self.summary.weight))).squeeze(-1)


def find_value_head(source: str, is_adapter: bool, hub: dict[str, Any]) -> StoredHead | None:
    """Returns the value head of a stored model, or None without one.

    Args:
        is_adapter: whether the folder holds adapters rather than a whole model.
        hub: cache_dir, revision, token and other options of the download.
    """

    def locate(name: str, **options: bool) -> str | None:
        return cached_file(source, name, **(hub | options), _raise_exceptions_for_missing_entries=False)

    if file := locate(VALUE_HEAD_FILE):
        return file, _read_tensors(file, prefix="")
    # The model was just loaded from one of these files, so that one is in the cache. The others are not downloaded.
    known = {} if is_adapter else {"local_files_only": True, "force_download": False}
    for name in WEIGHT_FILES:
        file = locate(name, **known)
        if file is None:
            continue
        files = [file]
        if name.endswith(".json"):
            shard_of = json.loads(Path(file).read_text(encoding="utf-8"))["weight_map"]
            shards = {shard for key, shard in shard_of.items() if key.startswith("v_head.")}
            files = [str(cached_file(source, shard, **hub)) for shard in sorted(shards)]
        tensors = {key: value for part in files for key, value in _read_tensors(part, "v_head.").items()}
        if tensors:
            return file, tensors
    return None


def _read_tensors(file: str, prefix: str) -> dict[str, Tensor]:
    """Returns the tensors of a file whose keys begin with a prefix."""
    if file.endswith(".safetensors"):
        with safe_open(file, framework="pt") as tensors:
            return {key: tensors.get_tensor(key) for key in tensors.keys() if key.startswith(prefix)}  # noqa: SIM118
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    return {key: value.clone() for key, value in state.items() if key.startswith(prefix)}


def write_beside(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Writes tensors to a temporary file and renames it, so that a crash leaves either the old file or the new one.

    Args:
        tensors: by name, on any device.
        file: a path that ends in .safetensors; its folder exists.
    """
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, part)
    with part.open("rb+") as written:
        os.fsync(written.fileno())
    os.replace(part, file)
