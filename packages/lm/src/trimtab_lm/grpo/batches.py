"""Prompts for one call of generation, and the micro-batches of its rollout."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler

from trimtab_common.seeding import sampling_seed
from trimtab_lm.data.formats import Row
from trimtab_lm.data.prompts import epoch_order
from trimtab_lm.tokens.layout import TokenGroup

from .algorithm import Completions
from .config import GRPOConfig


class PromptBatches(Sampler[list[int]]):
    """Row numbers of the prompts of each generation call, on one process: each batch `repeats` times in a row.

    rows: the number of rows in the dataset. Rows that are left after the last whole call wait for another epoch. With
    fewer rows than a call takes, an epoch is one call, which goes through the rows as often as it must.
    prompts_per_step: prompts in an optimizer step, on each process. steps: optimizer steps that a call serves. repeats:
    micro-batches that a call serves, as often as transformers' Trainer asks for one. looks_ahead: each batch is
    followed by the next call's row numbers, as many. The order is fixed by (seed, epoch): `set_epoch`.

    An optimizer step has the same prompts however many processes share it.
    """

    def __init__(
        self,
        rows: int,
        *,
        prompts_per_step: int,
        steps: int,
        repeats: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        looks_ahead: bool = False,
    ):
        self.shape = (steps, world_size, prompts_per_step)
        self.per_call = steps * world_size * prompts_per_step
        if rows == 0:
            raise ValueError(
                "The dataset has no prompts: there is nothing to sample from. Check its filters and split."
            )
        self.rows, self.repeats, self.seed, self.rank, self.shuffle = rows, repeats, seed, rank, shuffle
        self.looks_ahead, self.epoch = looks_ahead, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return max(self.rows // self.per_call, 1) * self.repeats

    def __iter__(self) -> Iterator[list[int]]:
        calls = self._calls(self.epoch)
        following = [*calls[1:], self._calls(self.epoch + 1)[0]] if self.looks_ahead else [[]] * len(calls)
        for call, next_call in zip(calls, following, strict=True):
            for _ in range(self.repeats):
                yield call + next_call

    def _calls(self, epoch: int) -> list[list[int]]:
        """The row numbers of each call of an epoch, on this process."""
        order = torch.tensor(epoch_order(self.rows, self.per_call, epoch, self._permutation))
        calls = order[: len(order) - len(order) % self.per_call].view(-1, *self.shape)
        return calls[:, :, self.rank].flatten(1).tolist()

    def _permutation(self, number: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.rows))
        # The same on all processes, and unlike the order of any other (seed, epoch).
        generator = torch.Generator().manual_seed(sampling_seed(self.seed, rank=0, draw=number))
        return torch.randperm(self.rows, generator=generator).tolist()


def prompt_loader(rows: Dataset | None, config: GRPOConfig, *, prompts_per_step: int) -> DataLoader[Row]:
    """Returns a data loader of the prompts of each generation call, once for each micro-batch that the call serves.

    Each process reads its own rows, so accelerate must not divide them again.

    Args:
        rows: the training set; None is refused.
        prompts_per_step: prompts in an optimizer step, on this process.
    """
    if rows is None:
        raise ValueError("GRPOTrainer: training requires a train_dataset.")
    micro_batches = config.gradient_accumulation_steps * config.steps_per_generation
    batches = PromptBatches(
        len(rows),
        prompts_per_step=prompts_per_step,
        steps=config.steps_per_generation,
        repeats=micro_batches * config.num_iterations,
        seed=config.seed if config.data_seed is None else config.data_seed,
        rank=config.process_index,
        world_size=config.world_size,
        shuffle=config.shuffle_dataset and config.train_sampling_strategy == "random",
        looks_ahead=config.asynchronous_rollouts,
    )
    loader = DataLoader(
        cast(torch.utils.data.Dataset[Row], rows),  # rows are a torch dataset in all but name
        batch_sampler=batches,
        collate_fn=list,
        generator=torch.Generator(),  # starting an epoch must not move the random numbers of training
        num_workers=config.dataloader_num_workers,
        persistent_workers=config.dataloader_persistent_workers,
        prefetch_factor=config.dataloader_prefetch_factor,
        multiprocessing_context=config.dataloader_multiprocessing_context,
        in_order=config.dataloader_in_order,
    )
    loader.set_epoch = batches.set_epoch
    return loader


class RolloutBuffer:
    """Splits the rollout of one generation call into micro-batches: each prompt once per pass.

    micro_batches: in each pass. The first pass takes the prompts in order, later ones in orders fixed by the seed.
    parts: groups of a rollout that have one prompt and stay together.
    """

    def __init__(self, *, micro_batches: int, passes: int, parts: int = 1):
        self.micro_batches, self.passes, self.parts = micro_batches, passes, parts
        self.rollout: Completions | None = None
        self.seed, self.used = 0, micro_batches * passes

    def serves(self, prompts: int) -> bool:
        """Whether micro-batches are left of a rollout with this many prompts."""
        is_used_up = self.used == self.micro_batches * self.passes
        return self.rollout is not None and not is_used_up and len(self.rollout.groups) == prompts * self.parts

    def fill(self, rollout: Completions, *, seed: int) -> None:
        """The next rollout; its groups are a multiple of `micro_batches`."""
        self.rollout, self.seed, self.used = rollout, seed, 0

    def take(self, count: int) -> list[Completions]:
        """The micro-batches of the next optimizer step, in which the policy moves: see `Completions.after_update`."""
        assert self.rollout is not None
        parts, groups = [], torch.arange(len(self.rollout.groups)).view(-1, self.parts)
        for number in range(self.used, self.used + count):
            this_pass, place = divmod(number, self.micro_batches)
            order = groups
            if this_pass:
                generator = torch.Generator().manual_seed(sampling_seed(self.seed, rank=0, draw=this_pass))
                order = groups[torch.randperm(len(groups), generator=generator)]
            parts.append(self.rollout[order.view(self.micro_batches, -1)[place].tolist()])
        self.used += count
        self.rollout = self.rollout.after_update()
        return parts

    def state_dict(self) -> dict[str, object]:
        """For torch.save; leaves out a rollout that is used up."""
        rollout = None
        if self.rollout is not None and self.used < self.micro_batches * self.passes:
            rollout = {**vars(self.rollout), "groups": [vars(group) for group in self.rollout.groups]}
        return {"rollout": rollout, "seed": self.seed, "used": self.used, "shape": [self.micro_batches, self.passes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a half-used rollout from a buffer with another shape."""
        if state["rollout"] is None:
            return
        if state["shape"] != [self.micro_batches, self.passes]:
            raise ValueError(
                f"The rollout in the checkpoint has {state['shape'][0]} micro-batches and {state['shape'][1]} passes, "
                f"the settings say {self.micro_batches} and {self.passes}. Resume with the settings of the checkpoint "
                "(gradient_accumulation_steps, steps_per_generation, num_iterations)."
            )
        groups = [TokenGroup(**group) for group in state["rollout"]["groups"]]
        self.rollout = Completions(**state["rollout"] | {"groups": groups})
        self.seed, self.used = state["seed"], state["used"]
