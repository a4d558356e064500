"""Groups of completions, sampled and scored: lines 5 to 9 of Algorithm 1 of the GRPO paper."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trimtab_common.seeding import private_rngs, sampling_seed
from trimtab_common.stats import Mean, Surprise, gather_over_ranks
from trimtab_lm.data.formats import Row
from trimtab_lm.data.prompts import PROMPT_IDS, tokenize_prompts
from trimtab_lm.hf.adapter import is_noisy
from trimtab_lm.hf.types import DataSource
from trimtab_lm.interface import base_of
from trimtab_lm.rewards.functions import Rewards, RewardSet, Scored, Tokenizers, as_completions
from trimtab_lm.sampling.backends import make_backend
from trimtab_lm.sampling.generate import response_texts
from trimtab_lm.sampling.rollout import Rollout, RolloutBackend, SamplingSettings, new_version, roll_out, takes_rows
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.layout import TokenGroup, split
from trimtab_lm.tokens.positions import Positions
from trimtab_lm.tokens.scores import TokenScores

from .algorithm import Completions
from .config import GRPOConfig
from .loss import OF_THE_BATCH, advantages
from .statistics import SURPRISE, ScoredRollout, rollout_stats

EVALUATION = 2**31  # evaluation's seeds start here; the number of a training step never gets this large


class GroupSampler:
    """Samples a group of completions for each prompt, scores it and computes advantages.

    Random numbers, also those that reward functions draw from the global generators, are fixed by the number of a draw;
    the random numbers of training do not move.

    Args:
        trainer: the GRPOTrainer whose backend samples from its policy, and whose recorder and table get the statistics.
        has_own_limit: whether the sampling backend does not go by `max_completion_length`.

    Attributes:
        version: the number of the policy's weights, as backends count them.
        evaluation_draws: the numbers of the draws of an evaluation.
    """

    def __init__(self, trainer: Any, rewards: RewardSet, *, has_own_limit: bool):
        config: GRPOConfig = trainer.config
        self.trainer, self.config, self.tokenizer, self.rewards = trainer, config, trainer.tokenizer, rewards
        self.has_own_limit = has_own_limit  # so that completions are measured as they come
        self.positions, self.is_noisy = Positions.of(trainer.model), is_noisy(trainer)
        self.is_encoder_decoder = bool(base_of(trainer.model).config.is_encoder_decoder)
        self.seed_of = partial(sampling_seed, config.seed, rank=config.process_index)
        self.version, self.evaluation_draws = new_version(), count(EVALUATION)

    @property
    def pads_with_an_end(self) -> bool:
        """Whether padding is a token that ends completions: a model may not have learnt to stop."""
        settings: SamplingSettings = getattr(self.trainer.backend, "settings", self.config.sampling())
        return self.tokenizer.pad_token_id in settings.end_tokens(self.trainer.model, self.tokenizer)

    def tokenize(self, dataset: DataSource) -> DataSource:
        """The dataset with the token ids of its prompts."""
        return tokenize_prompts(
            dataset,
            tokenizer=self.tokenizer,
            is_encoder_decoder=self.is_encoder_decoder,
            needed_for="GRPO",
            max_length=self.config.max_prompt_length,
            max_completion_length=0 if self.has_own_limit else self.config.max_completion_length,
            positions=self.positions,
            chat_template_kwargs=self.config.chat_template_kwargs,
            num_proc=self.config.dataset_num_proc,
        )

    def for_training(self, rows: Sequence[Row], next_rows: Sequence[Row]) -> Completions:
        """The rollout of the coming updates; see `roll_out`.

        Args:
            rows: the prompts of this call of generation.
            next_rows: the prompts of the next call, for asynchronous rollouts.
        """
        trainer, args, step = self.trainer, self.config, self.trainer.state.global_step
        updates = args.steps_per_generation * args.num_iterations
        if args.asynchronous_rollouts:
            prompts = [torch.tensor(row[PROMPT_IDS]) for row in next_rows]
            upcoming = prompts if step + updates < trainer.state.max_steps else None
            size, seed = args.num_generations, self.seed_of(draw=step + updates)
            trainer.backend.begin_step(step, upcoming, num_generations=size, seed=seed)
        self.version = new_version()
        size = len(rows) * args.group_parts // (args.gradient_accumulation_steps * args.steps_per_generation)
        return self.roll_out(rows, draw=step, updates=updates, size=size)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation: each samples by the same seeds. A data loader draws random numbers there, too."""
        self.version = new_version()
        self.evaluation_draws = count(EVALUATION)
        with private_rngs(self.seed_of(draw=EVALUATION)):
            yield

    def roll_out(
        self, rows: Sequence[Row], *, draw: int, updates: int, size: int, real_rows: int | None = None
    ) -> Completions:
        """Samples by the random numbers of a draw, see `sample`, and records statistics.

        Args:
            draw: its number; in training the number of optimizer steps so far.
            updates: on this rollout; 0 in an evaluation.
            size: groups that the policy and the reference read at a time.

        Returns:
            The rollout with log-probabilities of the policy before the updates and of the reference; in training its
            groups are the `group_parts` of the sampled ones.
        """
        trainer, args, training = self.trainer, self.config, updates > 0
        scored = self.sample(rows, seed=self.seed_of(draw=draw), real_rows=real_rows)
        rollout = scored.rollout
        stats = rollout_stats(scored, names=self.rewards.names, bos=self.tokenizer.bos_token_id)
        if training and scored.sampled.policy_step is not None:
            stats["sampling/steps_behind"] = Mean(float(draw - scored.sampled.policy_step), 1.0)
        trainer.recorder.add(stats, training=training)
        trainer.samples.add(scored, training=training)
        if training:
            trainer.progress.num_tokens += sum(gather_over_ranks(scored.num_tokens))
            rollout = replace(rollout, groups=split(rollout.groups, args.num_generations // args.group_parts))
        if args.clips_to_sampler:
            rollout = replace(rollout, old_logprobs=rollout.sampler_logprobs)
        # Later updates need the log-probabilities of the policy as it is now: the sampler's, if those are the policy's.
        elif updates > 1 and not (rollout.sampler_is_policy and args.importance_sampling_cap is None):
            rollout = replace(rollout, old_logprobs=self.old_logprobs(rollout, size=size))
        if (reference := trainer.reference) is not None:
            reference.prepare(trainer.accelerator)
            with reference.active() as model:
                scores = self._score(rollout, model, size=size)
            rollout = replace(rollout, ref_logprobs=torch.cat([one.logprobs.cpu() for one in scores]))
        return rollout

    def sample(self, rows: Sequence[Row], *, seed: int, real_rows: int | None = None) -> ScoredRollout:
        """A group of completions for each row, with its advantages.

        Collective with a scale `OF_THE_BATCH` and with environments: every process calls it as often.

        Args:
            rows: P rows with `prompt`, `prompt_ids` and the columns of the reward functions.
            real_rows: the rows after these repeat others; the loss and the statistics leave them out. None: no repeats.
        """
        trainer, args, backend = self.trainer, self.config, self.trainer.backend
        size = args.num_generations
        prompts = [torch.tensor(row[PROMPT_IDS]) for row in rows]
        repeated = [prompt for prompt in prompts for _ in range(size)]
        with private_rngs(seed):
            backend.sync(trainer.accelerator.unwrap_model(trainer.model), self.version)
            sampled = roll_out(backend, prompts, rows, num_generations=size, version=self.version, seed=seed)
            remedy = "Let the rollout sample fewer tokens, or lower max_prompt_length."
            kind = {"is_encoder_decoder": self.is_encoder_decoder}
            for prompt, ids in zip(repeated, sampled.completions, strict=True) if self.has_own_limit else ():
                self.positions.check_sample(len(prompt), len(ids), **kind, remedy=remedy)
            texts = response_texts(self.tokenizer, repeated, sampled.completions, **kind)
            rewarded = self._rewards_of(rows, texts, sampled)
        ended = torch.tensor(sampled.ended)
        counted = (ended | (not args.mask_truncated_completions)).view(len(rows), size)
        counted[real_rows:] &= real_rows is None
        rewards, scale = rewarded.rewards.view(len(rows), size), str(args.scale_rewards)
        values = everyones_advantages(rewards, counted, scale=scale, rank=args.process_index)
        if sampled.is_policy and (self.is_noisy or backend.settings.temperature != args.temperature):
            sampled = sampled._replace(is_policy=False)  # of another one than the forward passes of training
        rollout, written = rollout_of(prompts, sampled, is_counted=counted, advantages=values)
        real = slice(None if real_rows is None else real_rows * size)
        return ScoredRollout(
            rollout,
            sampled,
            self.tokenizer.batch_decode(prompts[:real_rows]),
            texts[real],
            written[real],
            ended[real],
            Scored(rewarded.scores[real], rewarded.rewards[real]),
            sum(map(len, [*repeated, *sampled.completions])),
        )

    def _rewards_of(self, rows: Sequence[Row], texts: Sequence[str], sampled: Rollout) -> Scored:
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != PROMPT_IDS}
        prompts = columns.pop("prompt")
        completions, ids = as_completions(prompts, texts), [row.tolist() for row in sampled.completions]
        totals = None if sampled.episodes is None else [float(row.sum()) for row in sampled.episodes.rewards]
        return self.rewards(prompts, completions, ids, columns, environment_rewards=totals)

    def old_logprobs(self, rollout: Completions, *, size: int) -> Tensor:
        """Log-probabilities [N] under the policy as it is wrapped, of `size` groups at a time."""
        scores = self._score(rollout, self.trainer.model_wrapped, size=size)
        for one in scores if self.config.samples_tell_surprise else []:
            self.trainer.recorder.add({SURPRISE: Surprise.of_tokens(one.logprobs, one.entropy)}, training=True)
        return torch.cat([one.logprobs.cpu() for one in scores])

    @torch.no_grad()
    def _score(self, rollout: Completions, model: nn.Module, *, size: int) -> list[TokenScores]:
        scores, options = [], {"temperature": self.config.temperature}
        with without_dropout(model), self.trainer.accelerator.autocast():
            for start in range(0, len(rollout.groups), size):
                tokens = self.trainer.lay_out(rollout.groups[start : start + size])
                scores.append(model(tokens=send_to_device(tokens, self.config.device), **options))
        return scores


def rollout_of(
    prompts: Sequence[Tensor], sampled: Rollout, *, is_counted: Tensor, advantages: Tensor
) -> tuple[Completions, Tensor]:
    """The rollout of sampled completions, and how many tokens [S] of each the policy wrote.

    Masked completions are cut to one masked token. is_counted, advantages: [P, G].
    """
    completions, episodes = sampled.completions, sampled.episodes
    size, flags = is_counted.shape[1], is_counted.flatten()
    lengths = list(map(len, completions))
    sequence = torch.arange(len(flags)).repeat_interleave(torch.tensor(lengths))  # of all tokens
    is_written = torch.ones_like(sequence) if episodes is None else torch.cat(episodes.masks).cpu()
    is_learnt = is_written * flags[sequence]
    branches, counts = [], []
    for ids, learnt, flag in zip(completions, is_learnt.split(lengths), flags.tolist(), strict=True):
        kept = slice(None if flag else 1)
        branches.append(ids[kept].tolist())
        counts.append(learnt[kept].tolist())
    groups = [
        TokenGroup(prompt.tolist(), branches[i * size : (i + 1) * size], counts[i * size : (i + 1) * size])
        for i, prompt in enumerate(prompts)
    ]
    chosen, logprobs = is_learnt.bool(), sampled.logprobs
    rollout = Completions(
        groups,
        flags,
        sequence[chosen].bincount(minlength=len(flags)),
        sequence[chosen],
        advantages.flatten(),
        sampler_logprobs=None if logprobs is None else torch.cat(logprobs).cpu()[chosen],
        sampler_is_policy=sampled.is_policy,
    )
    return rollout, sequence[is_written.bool()].bincount(minlength=len(flags)).float()


def everyones_advantages(rewards: Tensor, is_counted: Tensor, *, scale: str, rank: int = 0) -> Tensor:
    """The advantages [P, G] of this process's completions. Collective if the scale is one `OF_THE_BATCH`."""
    if scale not in OF_THE_BATCH:
        return advantages(rewards, scale=scale, mask=is_counted)
    parts = gather_over_ranks((rewards, is_counted))
    all_advantages = advantages(torch.cat([r for r, _ in parts]), scale=scale, mask=torch.cat([c for _, c in parts]))
    start = sum(len(r) for r, _ in parts[:rank])
    return all_advantages[start : start + len(rewards)]


def backend_and_pending(
    config: GRPOConfig, tokenizer: PreTrainedTokenizerBase, rollout: RolloutBackend | None
) -> tuple[RolloutBackend, Any]:
    """The backend: `rollout`, or the one that the config names, which may sample ahead.

    Raises:
        ValueError: the config asks for another backend than `rollout`, or for other sampling.
    """
    if rollout is None:
        rollout = make_backend(config.rollout_backend, config.sampling(), tokenizer, config.rollout_backend_kwargs)
    else:
        _check_rollout(config, rollout)
    if not config.asynchronous_rollouts:
        return rollout, None
    from trimtab_lm.sampling.asynchronous import AsynchronousRollout, Pending

    pending = Pending()
    return AsynchronousRollout(rollout, pending), pending


def _check_rollout(config: GRPOConfig, rollout: RolloutBackend) -> None:
    if config.rollout_backend != "transformers" or config.rollout_backend_kwargs:
        raise ValueError(
            f"rollout_backend={config.rollout_backend!r} with rollout_backend_kwargs={config.rollout_backend_kwargs}, "
            "and a rollout came. Leave one of them out."
        )
    if (used := getattr(rollout, "settings", None)) is None:  # a sampler of the caller's with rules of its own
        return
    asked = config.sampling()
    unset = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
    unset |= {"generation_kwargs": {}, "temperature": used.temperature}  # log-probabilities need the temperature
    for name in SamplingSettings.__dataclass_fields__.keys() - {"max_completion_length"}:  # a turn is shorter
        if getattr(asked, name) not in (getattr(used, name), unset[name]):
            raise ValueError(
                f"GRPOConfig has {name}={getattr(asked, name)!r}, and the rollout's settings have "
                f"{getattr(used, name)!r}, by which it samples. Make them equal."
            )


def reward_set_of(
    reward_funcs: Rewards | None, config: GRPOConfig, tokenizers: Tokenizers, backend: RolloutBackend
) -> RewardSet:
    """The reward functions and, after them, the environment that the backend samples with.

    Args:
        reward_funcs: see `RewardSet`; with an environment, None leaves them out.
    """
    if takes_rows(backend):
        from trimtab_lm.environments.rollout import environment

        functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        reward_funcs = [*(function for function in functions if function is not None), environment]
        tokenizers = [*tokenizers, None] if isinstance(tokenizers, list | tuple) else tokenizers
    names, timeout = config.reward_names, config.reward_timeout
    return RewardSet(
        reward_funcs, config.reward_weights, tokenizers, names=names, device=config.device, timeout=timeout
    )
