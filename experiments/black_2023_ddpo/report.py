"""The figure of this experiment, out of what its trainings wrote; `python report.py RUN_FOLDER` redraws it."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image
from torch import Tensor

from trimtab_common.tracking import to_pil

matplotlib.use("Agg")  # files only: the machine may have no display

from matplotlib import pyplot as plt

BEFORE, AFTER = "before.png", "after.png"


def contact_sheet(images: Tensor) -> Image.Image:
    """Up to sixteen pictures [B, 3, H, W], four in a row, with a white line between them."""
    tiles = [to_pil(image.clamp(0, 1)) for image in images]
    width, height = tiles[0].size
    sheet = Image.new("RGB", (4 * (width + 1) - 1, -(-len(tiles) // 4) * (height + 1) - 1), "white")
    for i, tile in enumerate(tiles):
        sheet.paste(tile, (i % 4 * (width + 1), i // 4 * (height + 1)))
    return sheet


def read_history(path: Path) -> list[dict[str, Any]]:
    """One dict per epoch, in order; of an epoch that a resumed run did again, the later one."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    latest = {row["epoch"]: row for row in rows}
    return [latest[epoch] for epoch in sorted(latest)]


def write_report(folder: Path) -> Path:
    """Draw report.png: a row for each training below `folder`, with its curves and its pictures before and after."""
    runs = sorted(path.parent for path in folder.glob("*/history.jsonl"))
    figure, axes = plt.subplots(len(runs), 4, figsize=(15, 3.6 * len(runs)), layout="constrained", squeeze=False)
    for row, run in zip(axes, runs, strict=True):
        history = read_history(run / "history.jsonl")
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        queries = [epoch["queries"] for epoch in history]
        row[0].plot(queries, [epoch["reward_mean"] for epoch in history], color="tab:blue")
        row[0].set_title(f"{run.name}: mean reward ({config['reward']})", fontsize=10)
        for name in [name for name in history[-1] if name.startswith("other/")]:
            row[1].plot(queries, [epoch[name] for epoch in history], label=name.removeprefix("other/"))
        row[1].set_title("measures that were not trained on", fontsize=10)
        row[1].legend(frameon=False, fontsize=8)
        for axis in row[:2]:
            axis.set_xlabel("pictures that were scored")
            axis.grid(alpha=0.3)
        for axis, sheet in zip(row[2:], (BEFORE, AFTER), strict=True):
            with Image.open(run / sheet) as picture:
                axis.imshow(np.asarray(picture), interpolation="nearest")
            axis.set_title(f"{Path(sheet).stem} training, the same noise", fontsize=10)
            axis.axis("off")
    path = folder / "report.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python report.py RUN_FOLDER   (the folder of the trainings' folders)")
    print(write_report(Path(sys.argv[1])))
