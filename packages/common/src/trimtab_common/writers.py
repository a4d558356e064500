"""Writes what a `Tracker` has checked: to TensorBoard, and to every tracker that accelerate has a class for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate.tracking import GeneralTracker, TensorBoardTracker
from PIL import Image

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Cell = str | float | bool | None
IMAGES: dict[str, Callable[[Image.Image, str], Any]] = {
    "aim": lambda image, caption: (image, caption),
    "clearml": lambda image, caption: image,
    "swanlab": lambda image, caption: [image],
}
"""What `log_images` of accelerate's trackers takes for one image; the others have no such method."""


class Writer:
    """Writes numbers to one of accelerate's trackers, and images and tables if it supports them.

    Args:
        accelerate: the tracker, before its start; `accelerator.get_tracker` reaches its methods.
    """

    def __init__(self, accelerate: GeneralTracker, config: Mapping[str, object]) -> None:
        self.accelerate = accelerate
        accelerate.start()
        self.describe(config)

    def describe(self, settings: Mapping[str, object]) -> None:
        self.accelerate.store_init_configuration(dict(settings))

    def stats(self, scalars: dict[str, float], histograms: dict[str, np.ndarray], step: int) -> None:
        self.accelerate.log(scalars, step=step)

    def table(self, name: str, columns: list[str], types: list[type], rows: list[list[Cell]], step: int) -> None:
        if hasattr(self.accelerate, "log_table"):
            self.accelerate.log_table(name, columns=columns, data=rows, step=step)

    def images(self, name: str, images: list[Image.Image], captions: list[str], step: int) -> None:
        if taken := IMAGES.get(self.accelerate.name):
            pairs = enumerate(zip(images, captions, strict=True))
            self.accelerate.log_images({f"{name}/{i}": taken(*pair) for i, pair in pairs}, step=step)

    def end(self, summary: dict[str, float], exit_code: int) -> None:
        if summary:
            self.accelerate.log(summary)
        self.accelerate.finish()


class MLflowWriter(Writer):
    """Writes to MLflow, which refuses a parameter's second value: a resumed run keeps the first ones."""

    def describe(self, settings: Mapping[str, object]) -> None:
        stored: dict[str, str] = self.accelerate.tracker.data.params
        new = {name: value for name, value in settings.items() if name not in stored}
        self.accelerate.store_init_configuration(new)
        stored.update((name, str(value)) for name, value in new.items())


class TensorBoardWriter(Writer, TensorBoardTracker):
    """Writes TensorBoard events; begins at the first step, because a resumed run repeats steps and replaces them."""

    def __init__(self, kwargs: dict[str, Any], config: Mapping[str, object]) -> None:
        self.accelerate, self._kwargs, self._config = self, kwargs, dict(config)
        self._opened: SummaryWriter | None = None

    @property
    def writer(self) -> SummaryWriter:
        return self._at(None)

    def describe(self, settings: Mapping[str, object]) -> None:
        self._config |= settings
        if self._opened is not None:
            self._write_config(self._opened)

    def _write_config(self, writer: SummaryWriter) -> None:
        rows = [[key, repr(value)] for key, value in self._config.items()]
        writer.add_text("config", markdown_table(["name", "value"], rows))

    def _at(self, step: int | None) -> SummaryWriter:
        if self._opened is None:
            from torch.utils.tensorboard import SummaryWriter

            self._opened = SummaryWriter(**{"purge_step": step, **self._kwargs})
            self._write_config(self._opened)
        return self._opened

    def stats(self, scalars: dict[str, float], histograms: dict[str, np.ndarray], step: int) -> None:
        writer = self._at(step)
        for name, array in histograms.items():
            writer.add_histogram(name, array, step)
        self.log(scalars, step)  # flushes: a kill loses no step that a checkpoint counts as done

    def table(self, name: str, columns: list[str], types: list[type], rows: list[list[Cell]], step: int) -> None:
        self._at(step).add_text(name, markdown_table(columns, rows), step)

    def images(self, name: str, images: list[Image.Image], captions: list[str], step: int) -> None:
        writer = self._at(step)
        for index, image in enumerate(images):
            writer.add_image(f"{name}/{index}", np.asarray(image), step, dataformats="HWC")
        writer.add_text(f"{name}/captions", markdown_table(["image", "caption"], list(enumerate(captions))), step)

    def end(self, summary: dict[str, float], exit_code: int) -> None:
        if summary:
            self.writer.add_text("summary", markdown_table(["name", "value"], list(summary.items())))
        if self._opened is not None:
            self._opened.close()


def markdown_table(columns: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table as Markdown, which TensorBoard shows; line breaks in a cell become <br>."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
    return "\n".join("|" + "|".join(line) + "|" for line in cells)
