"""Names that scripts of 2024 import in addition to the trainer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trimtab_diffusion import prompt_stats as by_prompt


class PerPromptStatTracker(by_prompt.PerPromptStatTracker):
    """Statistics per prompt of NumPy's arrays; see `trimtab_diffusion.prompt_stats`."""

    def update(self, prompts: Sequence[str], rewards: Any) -> np.ndarray:  # type: ignore[override]
        """Adds rewards [B], and returns their advantages [B]."""
        return super().update([*map(str, prompts)], torch.as_tensor(np.asarray(rewards))).numpy()

    def get_stats(self) -> dict[str, dict[str, float]]:
        """Mean, population deviation and count of the latest rewards of each prompt."""
        return {
            prompt: {"mean": float(np.mean(seen)), "std": float(np.std(seen)), "count": len(seen)}
            for prompt, seen in self.seen.items()
        }
