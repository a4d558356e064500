"""DDPO's loop on tensors alone, and the batches that a replaced method receives."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diffusion import tiny
from tests.diffusion.run_ddpo_distributed import brightness, config, trainer
from torch import Tensor

from trimtab_common.stats import Mean, Stats, merge_stats
from trimtab_diffusion.ddpo.algorithm import update
from trimtab_diffusion.trajectories import Pairs

pytestmark = pytest.mark.filterwarnings("ignore")


class Counting:
    """An optimizer that counts."""

    def __init__(self) -> None:
        self.shares: list[list[float]] = [[]]

    def parts(self, chunks: Sequence[Tensor]) -> Iterator[Tensor]:
        return iter(chunks)

    def backward(self, loss: Tensor, share: float) -> None:
        self.shares[-1].append(share)

    def step(self) -> Stats:
        self.shares.append([])
        return {"steps": Mean(1.0, 1.0)}


@pytest.mark.parametrize(("fraction", "passes"), [(1.0, 2), (0.5, 1)])
def test_each_sample_trains_its_share_of_steps_once_in_a_pass(tmp_path: Path, fraction: float, passes: int):
    """Eight samples have six steps each, of which 0, 1, 3 and 5 have noise; parts have two pairs."""
    seen: list[tuple[int, int]] = []

    def pairs_of(rows: Tensor, steps: Tensor, generator: object) -> Pairs:
        seen.extend(zip(rows.tolist(), steps.tolist(), strict=True))
        return Pairs(rows, steps, rows, rows, {})

    settings = config(
        str(tmp_path),
        sample_num_steps=6 if fraction == 1 else 4,
        train_timestep_fraction=fraction,
        train_batch_size=2,
        train_gradient_accumulation_steps=2,
    )
    optimizer, advantages = Counting(), torch.arange(8.0)
    stats = update(
        advantages,
        torch.tensor([0, 1, 3, 5]),
        pairs_of,
        lambda latents, times, after, logprobs, gains, conditions: (torch.equal(latents.float(), gains), 2.0),
        optimizer,
        generators=[tiny.generator(i) for i in range(passes)],
        config=settings,
    )
    trained = 4 if fraction == 1 else 2
    assert Counter(row for row, _ in seen) == dict.fromkeys(range(8), trained * passes)
    assert set(Counter(seen).values()) <= set(range(1, passes + 1))
    assert {step for _, step in seen} <= {0, 1, 3, 5}
    assert [row for row, _ in seen] != sorted(row for row, _ in seen)
    assert [sum(shares) for shares in optimizer.shares] == [pytest.approx(1)] * 2 * passes + [0]
    merged = merge_stats(stats)
    assert merged["steps"].weight == 2 * passes
    assert (merged["loss"].value, merged["approx_kl"].value) == (1, 2)  # each pair has a different advantage


@pytest.mark.parametrize("is_async", [False, True])
def test_a_replaced_compute_rewards_may_take_its_batches_as_a_list_or_one_by_one(tmp_path: Path, is_async: bool):
    def own(batches: Any, is_async: bool = False) -> Any:
        assert len(batches) == 4
        last = batches[-1]
        assert [tuple(batch[1]) for batch in batches][-1] == tuple(last[1])
        with pytest.raises(IndexError):
            batches[4]
        return [2 * brightness(*batch) for batch in batches], [{}] * 4

    plain, replaced = (trainer(str(tmp_path), async_reward_computation=is_async) for _ in range(2))
    replaced.compute_rewards = own  # type: ignore[method-assign, assignment]
    mine, theirs = replaced.draw(0), plain.draw(0)
    assert torch.equal(mine.rewards, 2 * theirs.rewards)
    assert torch.equal(mine.trajectories.latents, theirs.trajectories.latents)
