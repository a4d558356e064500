"""Prompts for one call of generation, and the rollout that it becomes, micro-batch by micro-batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import gather_over_ranks
from trimtab_lm.data.formats import Row
from trimtab_lm.data.prompts import epoch_order
from trimtab_lm.hf.types import Batch
from trimtab_lm.sampling.rollout import Rollout
from trimtab_lm.tokens.layout import Layout, TokenGroup, lay_out

from .config import GRPOConfig
from .loss import advantages
from .weights import Window

# Prompts -------------------------------------------------------------------------------------------------------------


class PromptBatches(Sampler[list[int]]):
    """Row numbers of the prompts of each call of generation, on one process: every batch `repeats` times in a row.

    rows: of the dataset; what is left of it after the last whole call is another epoch's. With fewer rows than a call
    takes, an epoch is one call, which goes through the rows as often as it must. prompts_per_step: of an
    optimizer step, on each process. steps: of optimizer, that a call serves. repeats: micro-batches that a call serves,
    as often as transformers' Trainer asks for one. looks_ahead: each batch is followed by the next call's row numbers,
    as many. The order is fixed by (seed, epoch): `set_epoch`.

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


class PromptLoader(DataLoader[Row]):
    """Batches of rows by a `PromptBatches`, which is of one process already: not for accelerate to divide again."""

    def __init__(self, rows: Dataset, batches: PromptBatches, **options: Any):
        # A generator of its own: starting an epoch must not move the random numbers of training.
        super().__init__(
            _Remembering(rows),  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=as_list,
            generator=torch.Generator(),
            **options,
        )

    @classmethod
    def of_process(cls, rows: Dataset, config: GRPOConfig, *, prompts_per_step: int) -> "PromptLoader":
        """Each batch holds the prompts of one call of generation, and comes as often as that serves a micro-batch.

        Args:
            rows: of the training set.
            config: of the trainer.
            prompts_per_step: of an optimizer step, on this process.
        """
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
        return cls(
            rows,
            batches,
            num_workers=config.dataloader_num_workers,
            persistent_workers=config.dataloader_persistent_workers,
            prefetch_factor=config.dataloader_prefetch_factor,
            multiprocessing_context=config.dataloader_multiprocessing_context,
            in_order=config.dataloader_in_order,
        )

    def set_epoch(self, epoch: int) -> None:
        cast(PromptBatches, self.batch_sampler).set_epoch(epoch)


def as_list(rows: Sequence[Row]) -> Any:
    """Collates nothing: prompts are laid out with their completions."""
    return list(rows)


def halves(batch: list[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of a call of generation and those of the next, of a `PromptBatches` that looks ahead."""
    return batch[: len(batch) // 2], batch[len(batch) // 2 :]


class _Remembering:
    """Rows of a dataset; those that were asked for last are not read again."""

    def __init__(self, rows: Dataset):
        self.rows = rows
        self._last: tuple[list[int], list[Row]] = ([], [])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, numbers: list[int]) -> list[Row]:
        if self._last[0] != numbers:
            self._last = (numbers, self.rows.__getitems__(numbers))
        return self._last[1]


# Rollouts ------------------------------------------------------------------------------------------------------------


@dataclass
class Group:
    """A prompt and its G completions, as they are learnt from.

    prompt, completions: token ids. is_counted: [G], whether a completion is learnt from. advantages: [G]. logprobs:
    columns of the N tokens that count, [N] each: `old` (of the policy that sampled them), `ref`, `sampler`; on the CPU.
    masks: for each completion, 1 where the policy wrote the token; None: it wrote all of them. policy_step: optimizer
    steps of the policy that sampled; None: it did not sample ahead. is_policy: see `Rollout`.
    """

    prompt: list[int]
    completions: list[list[int]]
    is_counted: list[bool]
    advantages: Tensor
    logprobs: dict[str, Tensor] = field(default_factory=dict)
    masks: list[list[int]] | None = None
    policy_step: int | None = None
    is_policy: bool = False

    @property
    def written(self) -> list[list[int]]:
        """For each completion, 1 where the policy wrote the token."""
        return [[1] * len(ids) for ids in self.completions] if self.masks is None else self.masks

    @property
    def counts(self) -> list[list[int]]:
        """For each completion, 1 where a token is learnt from."""
        pairs = zip(self.written, self.is_counted, strict=True)
        return [mask if counted else [0] * len(mask) for mask, counted in pairs]

    @property
    def num_sequences(self) -> int:
        return sum(self.is_counted)

    @property
    def num_tokens(self) -> int:
        return sum(map(sum, self.counts))

    def leave_out(self) -> None:
        """Learn from none of the completions."""
        self.is_counted = [False] * len(self.completions)
        self.logprobs = {name: values[:0] for name, values in self.logprobs.items()}

    def only(self, i: int) -> "Group":
        """The prompt with one of its completions, without log-probabilities."""
        part = slice(i, i + 1)
        masks = None if self.masks is None else self.masks[part]
        return Group(self.prompt, self.completions[part], self.is_counted[part], self.advantages[part], masks=masks)

    def tokens(self) -> TokenGroup:
        """A completion that does not count is a branch of one token, which does not count either."""
        kept = [None if counted else 1 for counted in self.is_counted]
        branches, counts = (
            [row[:end] for row, end in zip(rows, kept, strict=True)] for rows in (self.completions, self.counts)
        )
        return TokenGroup(self.prompt, branches, counts)


def as_groups(prompts: Sequence[Tensor], rollout: Rollout, *, is_counted: Tensor, advantages: Tensor) -> list[Group]:
    """A rollout of P prompts with G completions each as groups. is_counted, advantages: [P, G]."""
    size = advantages.shape[1]
    groups = []
    for i, prompt in enumerate(prompts):
        rows = slice(i * size, (i + 1) * size)
        group = Group(
            prompt.tolist(),
            [ids.tolist() for ids in rollout.completions[rows]],
            is_counted[i].tolist(),
            advantages[i].clone(),
            masks=None if rollout.episodes is None else [mask.tolist() for mask in rollout.episodes.masks[rows]],
            policy_step=rollout.policy_step,
            is_policy=rollout.is_policy,
        )
        if rollout.logprobs is not None:
            counts = torch.tensor([one for row in group.counts for one in row], dtype=torch.bool)
            group.logprobs["sampler"] = torch.cat(rollout.logprobs[rows])[counts]
        groups.append(group)
    return groups


def everyones_advantages(rewards: Tensor, is_counted: Tensor, *, scale: str, rank: int = 0) -> Tensor:
    """The advantages [P, G] of this process's completions; see `advantages`. Collective where scale is "batch"."""
    if scale != "batch":
        return advantages(rewards, scale=scale, mask=is_counted)
    parts = gather_over_ranks((rewards, is_counted))
    all_advantages = advantages(torch.cat([r for r, _ in parts]), scale=scale, mask=torch.cat([c for _, c in parts]))
    start = sum(len(r) for r, _ in parts[:rank])
    return all_advantages[start : start + len(rewards)]


def window_of(groups: Sequence[Group]) -> Window:
    """These groups as all that a step learns from, on one process."""
    tokens = sum(group.num_tokens for group in groups)
    return Window(sum(group.num_sequences for group in groups), tokens, rank_tokens=tokens)


def micro_batch(
    groups: Sequence[Group], layout: Layout, *, pad_token_id: int, decoder_start_token_id: int | None = None
) -> Batch:
    """Whole groups as model inputs (see `lay_out`); what belongs to their tokens stays in `groups`, in their order.

    Numbers of float32 must not be among the inputs: Trainer gives those the dtype of a DeepSpeed model.
    """
    batch = lay_out(
        [group.tokens() for group in groups],
        layout,
        pad_token_id=pad_token_id,
        decoder_start_token_id=decoder_start_token_id,
    )
    return {**batch, "groups": list(groups)}


def column(groups: Sequence[Group], name: str, device: torch.device) -> Tensor | None:
    """[N], log-probabilities of the tokens of a micro-batch; None if there are none of this name."""
    if name not in groups[0].logprobs:
        return None
    return torch.cat([group.logprobs[name] for group in groups]).to(device)


def add_column(groups: Sequence[Group], name: str, logprobs: Tensor) -> None:
    """Give each group its part of the log-probabilities [N] of the tokens of a micro-batch."""
    for group, part in zip(groups, logprobs.cpu().split([group.num_tokens for group in groups]), strict=True):
        group.logprobs[name] = part.clone()


class RolloutBuffer:
    """The groups of one call of generation, given out in micro-batches, each of them once per pass.

    micro_batches: of a pass. The first pass takes the groups in their order, later ones in orders fixed by the seed.
    """

    def __init__(self, *, micro_batches: int, passes: int):
        self.micro_batches, self.passes = micro_batches, passes
        self.groups: list[Group] = []
        self.seed, self.used = 0, micro_batches * passes

    @property
    def is_used_up(self) -> bool:
        return self.used == self.micro_batches * self.passes

    def fill(self, groups: Sequence[Group], *, seed: int) -> None:
        """The next rollout; the number of groups is a multiple of micro_batches."""
        self.groups, self.seed, self.used = list(groups), seed, 0

    def slices(self, groups: Sequence[Group]) -> list[list[Group]]:
        """Groups in the micro-batches of the first pass."""
        size = len(groups) // self.micro_batches
        return [list(groups[start : start + size]) for start in range(0, len(groups), size)]

    def next(self) -> list[Group]:
        """The groups of the next micro-batch."""
        number, place = divmod(self.used, self.micro_batches)
        order = list(range(len(self.groups)))
        if number:
            generator = torch.Generator().manual_seed(sampling_seed(self.seed, rank=0, draw=number))
            order = torch.randperm(len(order), generator=generator).tolist()
        self.used += 1
        return self.slices([self.groups[i] for i in order])[place]

    def state_dict(self) -> dict[str, object]:
        """For torch.save; the groups of a rollout that is used up are left out."""
        groups = [] if self.is_used_up else [vars(group) for group in self.groups]
        shape = [self.micro_batches, self.passes]
        return {"groups": groups, "seed": self.seed, "used": self.used, "shape": shape}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError for a half-used rollout of a buffer of another shape."""
        if not state["groups"]:
            return
        if state["shape"] != [self.micro_batches, self.passes]:
            raise ValueError(
                f"The rollout in the checkpoint has {state['shape'][0]} micro-batches and {state['shape'][1]} passes, "
                f"the settings say {self.micro_batches} and {self.passes}. Resume with the settings of the checkpoint "
                "(gradient_accumulation_steps, steps_per_generation, num_iterations)."
            )
        self.groups = [Group(**group) for group in state["groups"]]
        self.seed, self.used = state["seed"], state["used"]
