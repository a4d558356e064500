"""Measures what a reward can reach without training: `python -m experiments.black_2023_ddpo.reachable`.

For each caption, it takes the best of BEST samples of the base model, so that their quality is the base's. The
reachable range is the distance of this best reward from the mean reward, averaged over captions.
"""

import torch

from experiments.black_2023_ddpo.bases import BASES
from experiments.black_2023_ddpo.train import OF_FILES, settings
from experiments.emoji.judging import RANGES
from experiments.emoji.measure import sampled, shipped

CAPTIONS, BEST = 48, 64


def main() -> None:
    """Prints a line for each base model, and one for each of its rewards."""
    torch.set_num_threads(1)
    _, ddpo = settings([])
    base = BASES["emoji"]
    asked = [caption for caption in base.captions[:CAPTIONS] for _ in range(BEST)]
    metadata = [{}] * len(asked)
    steps, guidance = ddpo.sample_num_steps, ddpo.sample_guidance_scale
    for name, ranges in RANGES.items():
        images = sampled(shipped(name), asked, steps=steps, guidance=guidance)
        recognised = base.measures["recognised"](images, asked, metadata).view(CAPTIONS, BEST)
        print(f"{name}: {steps} steps, recognised {recognised.mean():.3f}")
        for reward in ranges:
            rewards = {**OF_FILES, **base.measures}[reward](images, asked, metadata).view(CAPTIONS, BEST)
            best, places = rewards.max(dim=1, keepdim=True)
            shown = recognised.gather(1, places).mean()
            print(
                f"{reward}: mean {rewards.mean():.4f}, deviation for a caption {rewards.std(1).mean():.4f}, "
                f"best of {BEST} {best.mean():.4f} (recognised {shown:.3f}), range {best.mean() - rewards.mean():.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
