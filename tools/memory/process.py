"""Measures one step of one side: `python -m tools.memory.process JSON` prints the peak in bytes, or "out of memory".

It runs in a side's environment of tools.bench, with tests/pretend on Python's path, and runs that bench's tasks.
"""

import contextlib
import importlib
import json
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tools.bench.measuring import Clock
from tools.bench.models import write_language_models
from tools.bench.sizes import LLAMA_TINY, TINY, Size

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 16_384}
"""Of a Llama of two layers, so that what depends on the vocabulary shows."""
LONGEST = 512  # tokens of a completion


class Peak(Exception):
    """Ends a task before it measures the rate of matrix products."""


def size_of(vocabulary: int, tokens: int) -> Size:
    """Rows of exactly so many tokens; see `tools.memory.__main__`."""
    return replace(
        TINY,
        device="musa",
        llama=LLAMA_TINY | SHAPE | {"vocab_size": vocabulary},
        median=8 * tokens,  # all rows are cut to the longest
        longest=tokens,
        rows=1,
        prompts=1,
        group=2,
        new_tokens=min(tokens // 3, LONGEST),
        ppo_batch=2,
        ppo_minibatch=1,
        images=4,
    )


def as_triton(function: Any) -> Any:
    """A tile's function on 16 rows at a time: like TRL's Triton kernel, it needs no further memory of a tile's size."""

    def by_rows(tile: Any, stride: int, *columns: Any, **options: Any) -> None:
        per_row, rest = columns[:-2], columns[-2:]
        for start in range(0, len(tile), 16):
            rows = slice(start, start + 16)
            function(tile[rows], stride, *(column[rows] for column in per_row), *rest, **options)

    return by_rows


def main(order: dict[str, Any]) -> int | str:
    """Runs a task's steps.

    Args:
        order: `task`, `package` (trimtab_lm or trl), `vocabulary`, `tokens`, `memory` (of the device, in bytes),
            `triton`: whether TRL chooses positions and folds tiles as on CUDA, and `pipeline`: the folder of the
            Stable Diffusion that both sides load.
    """
    device: Any = importlib.import_module("torch_musa")
    device.set_total_memory(order["memory"])
    if order["triton"]:
        names = ("trl.kernels.chunked_logprob", "trl.trainer.utils")
        kernels, utils = map(importlib.import_module, names)
        utils._use_triton = lambda device: True
        kernels._forward_tile, kernels._backward_tile = map(as_triton, (kernels._forward_tile, kernels._backward_tile))
    size, settings = size_of(order["vocabulary"], order["tokens"]), {"phase": "step"} if order["task"] == "ppo" else {}
    task = importlib.import_module(f"tools.bench.tasks.{order['task']}")

    def stop(*_: object) -> None:
        raise Peak

    Clock.measurement = stop  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        if order["task"] == "ddpo":
            folder = order["pipeline"]
        else:
            write_language_models(size, Path(folder))
        try:
            task.run(order["package"], size, settings, folder)
        except torch.OutOfMemoryError:
            return "out of memory"
        except Peak:
            return device.peak()
    raise RuntimeError("the task has not ended with a measurement")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        result = main(json.loads(sys.argv[1]))
    print(json.dumps(result))
