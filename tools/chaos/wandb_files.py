"""Reads W&B's own file of a run, run-<id>.wandb, while the run writes it and after it ends.

The file starts with seven bytes of W&B's, and then is a LevelDB log: blocks of 32 KiB hold chunks of records, which are
W&B's protobuf messages. wandb has these messages in Python, but no reader of the file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # chosen by protobuf's version

HEADER, CHUNK, BLOCK = 7, 7, 32768
WHOLE, LAST = 1, 4  # kinds of chunks that end a record


class RunFile:
    """The file of one run; `update` reads what the run has added since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_id = ""
        self.sweep_id = ""
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}  # a nested name's parts are joined by dots
        self.exit_code: int | None = None
        self.rows: list[dict[str, Any]] = []  # rows of the history
        self._position = HEADER
        self._parts: list[bytes] = []

    def update(self) -> RunFile:
        """Reads what the run has written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        for record in self._records(data):
            self._take(record)
        return self

    def history(self, name: str) -> list[float]:
        """Returns the finite values of a metric, in the order they were logged."""
        return [float(row[name]) for row in self.rows if name in row and is_finite(row[name])]

    def _records(self, data: bytes) -> Iterator[Record]:
        start = self._position
        while True:
            offset = self._position - start
            if (left := BLOCK - self._position % BLOCK) < CHUNK:  # too short for a chunk: filled with zeros
                if len(data) < offset + left:
                    return
                self._position += left
                continue
            if len(data) < offset + CHUNK:
                return
            _, length, kind = struct.unpack("<IHB", data[offset : offset + CHUNK])
            if len(data) < offset + CHUNK + length:
                return  # not yet written to its end
            self._parts.append(data[offset + CHUNK : offset + CHUNK + length])
            self._position += CHUNK + length
            if kind in (WHOLE, LAST):
                record = Record.FromString(b"".join(self._parts))
                self._parts = []
                yield record

    def _take(self, record: Record) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "run":
            self.run_id, self.sweep_id = record.run.run_id, record.run.sweep_id
            self.config.update(_values(record.run.config.update))
        elif kind == "config":
            self.config.update(_values(record.config.update))
        elif kind == "history":
            self.rows.append(_values(record.history.item))
        elif kind == "summary":
            self.summary.update(_values(record.summary.update))
        elif kind == "exit":
            self.exit_code = record.exit.exit_code


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _values(items: Any) -> dict[str, Any]:
    """Returns {name: value} for W&B's items; joins the keys of inner mappings to the name with dots."""
    values: dict[str, Any] = {}
    for item in items:
        name = ".".join(item.nested_key) or item.key
        values.update(_flat(name, json.loads(item.value_json)))
    return values


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    yield name, value
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
