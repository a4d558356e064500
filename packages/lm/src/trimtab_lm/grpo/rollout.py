"""Groups of completions, sampled and scored: lines 5 to 9 of Algorithm 1 of the GRPO paper."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from trimtab_common.seeding import private_rngs
from trimtab_lm.data.formats import Row
from trimtab_lm.data.prompts import PROMPT_IDS, tokenize_prompts
from trimtab_lm.environments.rollout import roll_out
from trimtab_lm.hf.types import DataSource
from trimtab_lm.interface import Model, base_of
from trimtab_lm.rewards.functions import RewardSet, Scored, as_completions
from trimtab_lm.sampling.generate import response_texts
from trimtab_lm.sampling.rollout import Episodes, Rollout, RolloutBackend
from trimtab_lm.tokens.positions import Positions

from .batches import Group, as_groups, everyones_advantages
from .config import GRPOConfig


class SampledGroups(NamedTuple):
    """P prompts with G completions each, scored.

    Attributes:
        groups: P groups, as they are learnt from.
        prompts: P texts.
        texts: P x G completions as texts, those of a prompt side by side.
        ended: P x G, whether a completion ended by itself.
        scored: the rewards of the P x G completions.
        episodes: what environments say of the P x G completions; None without environments.
    """

    groups: list[Group]
    prompts: list[str]
    texts: list[str]
    ended: list[bool]
    scored: Scored
    episodes: Episodes | None = None


@dataclass(frozen=True)
class GroupSampler:
    """Samples a group of completions for each prompt, scores it and computes advantages.

    Random numbers, also those that reward functions draw from the global generators, are fixed by the seed of a call;
    those of training are not moved.

    Args:
        config: of the trainer.
        tokenizer: of the policy.
        rewards: scores completions.
        positions: of the policy.
        is_encoder_decoder: whether the policy is one.
        has_own_limit: whether the sampling backend does not go by `max_completion_length`.
    """

    config: GRPOConfig
    tokenizer: PreTrainedTokenizerBase
    rewards: RewardSet
    positions: Positions
    is_encoder_decoder: bool
    has_own_limit: bool

    @classmethod
    def of(
        cls,
        model: Model,
        config: GRPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardSet,
        *,
        has_own_limit: bool,
    ) -> "GroupSampler":
        """The one of a policy.

        Raises:
            ValueError: the process sees several GPUs.
        """
        if config.n_gpu > 1:
            raise ValueError(
                f"This one process sees {config.n_gpu} GPUs, among which completions cannot be divided. Start a "
                "process for each (accelerate launch), or show it one (CUDA_VISIBLE_DEVICES=0)."
            )
        is_encoder_decoder = bool(base_of(model).config.is_encoder_decoder)
        return cls(config, tokenizer, rewards, Positions.of(model), is_encoder_decoder, has_own_limit)

    def tokenize(self, dataset: DataSource) -> DataSource:
        """The dataset with the token ids of its prompts."""
        return tokenize_prompts(
            dataset,
            tokenizer=self.tokenizer,
            is_encoder_decoder=self.is_encoder_decoder,
            needed_for="GRPO",
            max_length=self.config.max_prompt_length,
            # Completions of a backend with its own limit are measured as they come.
            max_completion_length=0 if self.has_own_limit else self.config.max_completion_length,
            positions=self.positions,
            chat_template_kwargs=self.config.chat_template_kwargs,
            num_proc=self.config.dataset_num_proc,
        )

    def sample(
        self, backend: RolloutBackend, model: Model, rows: Sequence[Row], *, version: int, seed: int
    ) -> SampledGroups:
        """Groups for rows of the dataset. Collective with scale_rewards="batch" and with environments: every process
        calls it as often.

        Args:
            backend: samples the completions.
            model: the policy, not wrapped.
            rows: P rows with `prompt`, `prompt_ids` and the columns of the reward functions.
            version: of the policy's weights.
            seed: of the random numbers.
        """
        args = self.config
        prompts = [torch.tensor(row[PROMPT_IDS]) for row in rows]
        repeated = [prompt for prompt in prompts for _ in range(args.num_generations)]
        with private_rngs(seed):
            backend.sync(model, version)
            options = {"num_generations": args.num_generations, "version": version, "seed": seed}
            rollout = roll_out(backend, prompts, rows, **options)
            remedy = "Let the rollout sample fewer tokens, or lower max_prompt_length."
            for prompt, ids in zip(repeated, rollout.completions, strict=True):
                lengths = len(prompt), len(ids)
                self.positions.check_sample(*lengths, is_encoder_decoder=self.is_encoder_decoder, remedy=remedy)
            texts = response_texts(
                self.tokenizer, repeated, rollout.completions, is_encoder_decoder=self.is_encoder_decoder
            )
            scored = self._score(rows, texts, rollout)
        shape = (len(rows), args.num_generations)
        counted = torch.tensor(rollout.ended).view(shape) | (not args.mask_truncated_completions)
        scale, rank = str(args.scale_rewards), args.process_index
        advantages = everyones_advantages(scored.rewards.view(shape), counted, scale=scale, rank=rank)
        groups = as_groups(prompts, rollout, is_counted=counted, advantages=advantages)
        read = self.tokenizer.batch_decode([prompt.tolist() for prompt in prompts])
        return SampledGroups(groups, read, texts, rollout.ended, scored, rollout.episodes)

    def _score(self, rows: Sequence[Row], texts: Sequence[str], rollout: Rollout) -> Scored:
        prompts = [row["prompt"] for row in rows]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", PROMPT_IDS)}
        completions, ids = as_completions(prompts, texts), [row.tolist() for row in rollout.completions]
        totals = None if rollout.episodes is None else [float(row.sum()) for row in rollout.episodes.rewards]
        return self.rewards(prompts, completions, ids, columns, environment_rewards=totals)
