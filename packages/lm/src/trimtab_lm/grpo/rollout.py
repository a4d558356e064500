"""Groups of completions, sampled and scored: lines 5 to 9 of Algorithm 1 of the GRPO paper."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab_common.seeding import private_rngs
from trimtab_common.stats import gather_over_ranks
from trimtab_lm.data.formats import Row
from trimtab_lm.data.prompts import PROMPT_IDS, tokenize_prompts
from trimtab_lm.environments.rollout import EnvironmentRollout, environment, roll_out
from trimtab_lm.hf.types import DataSource
from trimtab_lm.interface import Model, base_of
from trimtab_lm.rewards.functions import Rewards, RewardSet, Scored, Tokenizers, as_completions
from trimtab_lm.sampling.generate import response_texts
from trimtab_lm.sampling.rollout import Episodes, Rollout, RolloutBackend
from trimtab_lm.tokens.layout import TokenGroup
from trimtab_lm.tokens.positions import Positions

from .algorithm import Completions
from .config import GRPOConfig
from .loss import advantages


class ScoredRollout(NamedTuple):
    """What is learnt from completions, and what statistics tell of them: P prompts, S completions, G side by side.

    Attributes:
        rollout: what is learnt from.
        prompts: P texts.
        texts: S completions as texts.
        written: [S], float32, tokens that the policy wrote.
        ended: [S], whether a completion ended by itself.
        scored: the rewards of the S completions.
        episodes: what environments say of the S completions; None without environments.
        policy_step: optimizer steps of the policy that sampled; None: it did not sample ahead.
        num_tokens: sampled and read.
    """

    rollout: Completions
    prompts: list[str]
    texts: list[str]
    written: Tensor
    ended: Tensor
    scored: Scored
    episodes: Episodes | None
    policy_step: int | None
    num_tokens: int


class GroupSampler:
    """Samples a group of completions for each prompt, scores it and computes advantages.

    Random numbers, also those that reward functions draw from the global generators, are fixed by the seed of a call;
    those of training are not moved.

    Args:
        model: the policy.
        config: the trainer's config.
        tokenizer: the policy's tokenizer.
        rewards: scores completions.
        has_own_limit: whether the sampling backend does not go by `max_completion_length`.
        is_noisy: whether training adds noise to the policy's layers.

    Raises:
        ValueError: the process sees several GPUs.
    """

    def __init__(
        self,
        model: Model,
        config: GRPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardSet,
        *,
        has_own_limit: bool,
        is_noisy: bool,
    ):
        if config.n_gpu > 1:
            raise ValueError(
                f"This one process sees {config.n_gpu} GPUs, among which completions cannot be divided. Start a "
                "process for each (accelerate launch), or show it one (CUDA_VISIBLE_DEVICES=0)."
            )
        self.config, self.tokenizer, self.rewards = config, tokenizer, rewards
        self.has_own_limit, self.is_noisy = has_own_limit, is_noisy
        self.positions, self.is_encoder_decoder = Positions.of(model), bool(base_of(model).config.is_encoder_decoder)

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
        self,
        backend: RolloutBackend,
        model: Model,
        rows: Sequence[Row],
        *,
        version: int,
        seed: int,
        real_rows: int | None = None,
    ) -> ScoredRollout:
        """Groups for rows of the dataset. Collective with scale_rewards="batch" and with environments: every process
        calls it as often.

        Args:
            backend: samples the completions.
            model: the policy, not wrapped.
            rows: P rows with `prompt`, `prompt_ids` and the columns of the reward functions.
            version: the version of the policy's weights.
            seed: seeds the random numbers.
            real_rows: the rows after these repeat others: nothing is learnt or told of them. None: there are none.
        """
        args, is_encoder_decoder = self.config, self.is_encoder_decoder
        prompts = [torch.tensor(row[PROMPT_IDS]) for row in rows]
        repeated = [prompt for prompt in prompts for _ in range(args.num_generations)]
        with private_rngs(seed):
            backend.sync(model, version)
            options = {"num_generations": args.num_generations, "version": version, "seed": seed}
            sampled = roll_out(backend, prompts, rows, **options)
            remedy = "Let the rollout sample fewer tokens, or lower max_prompt_length."
            for prompt, ids in zip(repeated, sampled.completions, strict=True):
                lengths = len(prompt), len(ids)
                self.positions.check_sample(*lengths, is_encoder_decoder=is_encoder_decoder, remedy=remedy)
            texts = response_texts(self.tokenizer, repeated, sampled.completions, is_encoder_decoder=is_encoder_decoder)
            scored = self._score(rows, texts, sampled)
        shape, ended = (len(rows), args.num_generations), torch.tensor(sampled.ended)
        counted = ended.view(shape) | (not args.mask_truncated_completions)
        rewards, scale, rank = scored.rewards.view(shape), str(args.scale_rewards), args.process_index
        values = everyones_advantages(rewards, counted, scale=scale, rank=rank)
        counted[real_rows:] &= real_rows is None
        if sampled.is_policy and (self.is_noisy or backend.settings.temperature != args.temperature):
            sampled = sampled._replace(is_policy=False)  # of another one than the forward passes of training
        rollout, written = rollout_of(prompts, sampled, is_counted=counted, advantages=values)
        real = slice(None if real_rows is None else real_rows * args.num_generations)
        return ScoredRollout(
            rollout,
            self.tokenizer.batch_decode([prompt.tolist() for prompt in prompts[:real_rows]]),
            texts[real],
            written[real],
            ended[real],
            Scored(*(column[real] for column in scored)),
            sampled.episodes,
            sampled.policy_step,
            sum(map(len, [*repeated, *sampled.completions])),
        )

    def _score(self, rows: Sequence[Row], texts: Sequence[str], sampled: Rollout) -> Scored:
        prompts = [row["prompt"] for row in rows]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", PROMPT_IDS)}
        completions, ids = as_completions(prompts, texts), [row.tolist() for row in sampled.completions]
        totals = None if sampled.episodes is None else [float(row.sum()) for row in sampled.episodes.rewards]
        return self.rewards(prompts, completions, ids, columns, environment_rewards=totals)


def rollout_of(
    prompts: Sequence[Tensor], sampled: Rollout, *, is_counted: Tensor, advantages: Tensor
) -> tuple[Completions, Tensor]:
    """What is learnt from sampled completions, and how many tokens [S] of each the policy wrote.

    A completion that does not count is a branch of one token, which does not count either. is_counted, advantages:
    [P, G].
    """
    size, flags = is_counted.shape[1], is_counted.flatten().tolist()
    masks = (
        [torch.ones_like(ids) for ids in sampled.completions] if sampled.episodes is None else sampled.episodes.masks
    )
    counts = [mask if flag else torch.zeros_like(mask) for mask, flag in zip(masks, flags, strict=True)]
    kept = [slice(None if flag else 1) for flag in flags]
    branches = [ids[part].tolist() for ids, part in zip(sampled.completions, kept, strict=True)]
    counted = [count[part].tolist() for count, part in zip(counts, kept, strict=True)]
    groups = [
        TokenGroup(prompt.tolist(), branches[i * size : (i + 1) * size], counted[i * size : (i + 1) * size])
        for i, prompt in enumerate(prompts)
    ]
    lengths = torch.tensor([sum(count) for count in counted])
    logprobs = sampled.logprobs
    told = None if logprobs is None else torch.cat(logprobs).cpu()[torch.cat(counts).cpu().bool()]
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    rollout = Completions(
        groups,
        is_counted.flatten(),
        lengths,
        sequence,
        advantages.flatten(),
        sampler_logprobs=told,
        sampler_is_policy=sampled.is_policy,
    )
    return rollout, torch.tensor([float(mask.sum()) for mask in masks])


def everyones_advantages(rewards: Tensor, is_counted: Tensor, *, scale: str, rank: int = 0) -> Tensor:
    """The advantages [P, G] of this process's completions; see `advantages`. Collective where scale is "batch"."""
    if scale != "batch":
        return advantages(rewards, scale=scale, mask=is_counted)
    parts = gather_over_ranks((rewards, is_counted))
    all_advantages = advantages(torch.cat([r for r, _ in parts]), scale=scale, mask=torch.cat([c for _, c in parts]))
    start = sum(len(r) for r, _ in parts[:rank])
    return all_advantages[start : start + len(rewards)]


def rewards_of(
    reward_funcs: Rewards | None, config: GRPOConfig, tokenizers: Tokenizers, backend: RolloutBackend
) -> RewardSet:
    """The reward functions and, after them, the environment that the backend samples with.

    Args:
        reward_funcs: see `RewardSet`; with an environment, None leaves them out.
        config: the trainer's config.
        tokenizers: the tokenizers of reward models.
        backend: samples the completions.
    """
    if isinstance(backend, EnvironmentRollout):
        functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        reward_funcs = [*(function for function in functions if function is not None), environment]
        tokenizers = [*tokenizers, None] if isinstance(tokenizers, list | tuple) else tokenizers
    names, timeout = config.reward_names, config.reward_timeout
    return RewardSet(
        reward_funcs, config.reward_weights, tokenizers, names=names, device=config.device, timeout=timeout
    )
