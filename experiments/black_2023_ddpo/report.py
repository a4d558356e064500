"""The figure of this experiment, out of what its trainings wrote; `python report.py RUN_FOLDER` redraws it."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from PIL import Image
from torch import Tensor

# The file is run by its path, from anywhere; the experiments are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.figures import Verdict, exit_code, tiled, write_page

matplotlib.use("Agg")  # files only: the machine may have no display

from matplotlib import pyplot as plt

BEFORE, AFTER, MEASURES = "before.png", "after.png", "measures.json"
TITLE = "Rewards for what a diffusion model draws, by DDPO"
CLAIM = (
    "Black et al. 2023, arXiv:2305.13301: denoising, seen as a decision process of several steps, can be trained by "
    "policy gradients on any reward of the finished picture."
)


def contact_sheet(images: Tensor) -> Image.Image:
    """Up to sixteen pictures [B, 3, H, W], four in a row, with a white line between them."""
    return tiled([image.clamp(0, 1) for image in images])


def read_history(path: Path) -> list[dict[str, Any]]:
    """One dict per epoch, in order; of an epoch that a resumed run did again, the later one."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    latest = {row["epoch"]: row for row in rows}
    return [latest[epoch] for epoch in sorted(latest)]


def verdict(run: Path) -> Verdict:
    """Whether the reward of a training rose, on pictures from the same noise."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    before, after = json.loads((run / MEASURES).read_text(encoding="utf-8"))[config["reward"]]
    return Verdict(f"{run.name} raises its reward", f"above {before:.3f}", f"{after:.3f}", after > before)


def write_report(folder: Path) -> tuple[Path, list[Verdict]]:
    """Write report.html and report.png: a row for each training below `folder`, with its curves and its pictures."""
    runs = sorted(path.parent for path in folder.glob("*/history.jsonl"))
    figure, axes = plt.subplots(len(runs), 4, figsize=(15, 3.6 * len(runs)), layout="constrained", squeeze=False)
    for row, run in zip(axes, runs, strict=True):
        history = read_history(run / "history.jsonl")
        queries = [epoch["queries"] for epoch in history]
        row[0].plot(queries, [epoch["reward_mean"] for epoch in history], color="tab:blue")
        row[0].set_title(f"{run.name}: mean reward", fontsize=10)
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
    verdicts = [verdict(run) for run in runs]
    config = json.loads((runs[0] / "config.json").read_text(encoding="utf-8"))
    return write_page(folder, TITLE, CLAIM, verdicts, {"report": figure}, {}, config), verdicts


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python report.py RUN_FOLDER   (the folder of the trainings' folders)")
    page, found = write_report(Path(sys.argv[1]))
    print(*found, f"page: {page}", sep="\n")
    sys.exit(exit_code(found))
