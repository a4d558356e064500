"""The figure and the verdict of this experiment, out of what a run wrote; `python report.py RUN_FOLDER` redraws it."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: the machine may have no display

from matplotlib import pyplot as plt

REWARD, KL, ENTROPY, LENGTH = (
    "ppo/mean_scores",
    "objective/kl",
    "objective/entropy",
    "tokens/responses_len_mean",
)
PANELS = {
    REWARD: "reward (VADER, -1 to 1)",
    KL: "KL to the pretrained model (nats per response)",
    ENTROPY: "entropy (nats per response)",
    LENGTH: "response length (tokens)",
}


@dataclass(frozen=True)
class Summary:
    """The numbers that decide whether the paper's claim was reproduced."""

    first_reward: float  # mean over the first tenth of the steps
    last_reward: float  # mean over the last tenth
    last_kl: float  # nats per response, mean over the last third
    target: float | None  # of the KL; None if its coefficient was fixed

    @property
    def is_reward_up(self) -> bool:
        """Whether the continuations became more positive."""
        return self.last_reward > self.first_reward

    @property
    def is_kl_held(self) -> bool:
        """Whether the KL stayed within a factor of two of its target."""
        return self.target is None or self.target / 2 <= self.last_kl <= 2 * self.target

    def numbers(self) -> dict[str, float]:
        """What the tracker keeps as the run's summary."""
        return {
            "final/reward_first_tenth": self.first_reward,
            "final/reward_last_tenth": self.last_reward,
            "final/kl_last_third": self.last_kl,
            "final/reproduced": float(self.is_reward_up and self.is_kl_held),
        }

    def __str__(self) -> str:
        """Two lines for the screen."""
        aim = "no target" if self.target is None else f"target {self.target:g}, held within x2: {_yes(self.is_kl_held)}"
        return (
            f"reward, first to last tenth of the steps: {self.first_reward:+.3f} -> {self.last_reward:+.3f}   "
            f"more positive: {_yes(self.is_reward_up)}\n"
            f"KL per response, last third: {self.last_kl:.2f} nats   {aim}"
        )


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "NO"


def read_history(path: Path) -> list[dict[str, Any]]:
    """One dict per step, in order; of a step that a resumed run did again, the later one."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    latest = {row["step"]: row for row in rows}
    return [latest[step] for step in sorted(latest)]


def summarize(history: Sequence[Mapping[str, Any]], *, target: float | None) -> Summary:
    """First against last tenth of the rewards (a step at least), and the KL of the last third."""
    tenth, third = max(1, len(history) // 10), max(1, len(history) // 3)
    return Summary(
        first_reward=_mean(history[:tenth], REWARD),
        last_reward=_mean(history[-tenth:], REWARD),
        last_kl=_mean(history[-third:], KL),
        target=target,
    )


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def write_report(folder: Path) -> Path:
    """Draw report.png from history.jsonl and config.json of a run's folder."""
    history = read_history(folder / "history.jsonl")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    steps = [row["step"] for row in history]
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    for axis, (key, title) in zip(axes.flat, PANELS.items(), strict=True):
        axis.plot(steps, [row[key] for row in history], color="tab:blue", linewidth=1.2)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        if key == KL and config["adap_kl_ctrl"]:
            axis.axhline(config["target"], color="tab:red", linestyle="--", label=f"target {config['target']:g}")
            axis.axhspan(config["target"] / 2, config["target"] * 2, color="tab:red", alpha=0.08)
            axis.legend(frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("PPO step")
    figure.suptitle(f"{config['exp_name']}: {config['model']}, {config['batch_size']} responses per step", fontsize=11)
    path = folder / "report.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python report.py RUN_FOLDER   (the folder with history.jsonl and config.json)")
    print(write_report(Path(sys.argv[1])))
