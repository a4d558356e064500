"""`trimtab iterative-sft`: learns the best of n samples: RAFT (Dong et al. 2023, arXiv:2304.06767, Algorithm 1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor

from trimtab_common.config import Count, setting
from trimtab_common.seeding import sampling_seed, set_seed
from trimtab_common.stats import gather_over_ranks
from trimtab_lm import IterativeSFTConfig, IterativeSFTTrainer
from trimtab_lm.data.prompts import PROMPT_IDS, tokenize_prompts
from trimtab_lm.rewards.functions import RewardSet, as_completions, rewards_of
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.generate import response_texts
from trimtab_lm.sampling.rollout import RolloutBackend, SamplingSettings

from .subcommands import (
    DURING_TRAINING,
    OF_ROUNDS,
    RewardsConfig,
    RunConfig,
    about_run,
    chat_with,
    check_room,
    checkpoint_of,
    defaults,
    errors_in_one_line,
    finish,
    settings,
)

Row = TypeVar("Row")
ABOUT = f"""Fine-tuning in rounds: the model samples several completions of each prompt, and learns the one with the
highest reward. The dataset has a column `prompt`; a reward function gets the others by their names.

  trimtab iterative-sft --model my-sft-model --dataset prompts.jsonl --reward rewards.py:right --rounds 20
{OF_ROUNDS}"""


@dataclass(kw_only=True)
class RaftConfig:
    """The rounds."""

    rounds: Count = setting("Times that the model samples, and learns from the best.", default=10)
    prompts: Count = setting("Prompts of a round, over all processes: the b of Algorithm 1.", default=64)
    samples: Count = setting("Completions for each prompt, to learn the best one: the K.", default=8)
    max_new_tokens: Count = setting("Tokens of a completion at most.", default=64)
    sample_batch_size: Count = setting("Completions to sample at a time, on one process.", default=64)


def iterative_sft(argv: Sequence[str]) -> int:
    """Sample, keep the best, learn; round after round."""
    name, kinds = "iterative-sft", (RunConfig, RewardsConfig, RaftConfig, IterativeSFTConfig)
    recipe = defaults(name) | {"logging_steps": 1, "lr_scheduler_type": "constant"}
    run, rewards, raft, args = settings(name, argv, *kinds, about=ABOUT, recipe=recipe)
    with errors_in_one_line(name):
        check_share(raft.prompts, args.world_size)
        set_seed(args.seed)
        args.model_init_kwargs = run.init_kwargs(args.model_init_kwargs)
        trainer = IterativeSFTTrainer(run.model, args, processing_class=run.tokenizer, peft_config=run.adapters())
        trainer.run.check_settings()
        trainer.about = about_run(run) | {"reward": ", ".join(rewards.reward)}
        scorers = rewards_of(rewards.functions(), None, tokenizer=trainer.tokenizer, device=args.device)
        rows = tokenize_prompts(
            run.rows(),
            trainer.tokenizer,
            is_encoder_decoder=trainer.is_encoder_decoder,
            needed_for=name,
        ).shuffle(seed=args.seed)
        is_encoder_decoder = trainer.is_encoder_decoder
        check_room(trainer.model, rows[PROMPT_IDS], raft.max_new_tokens, is_encoder_decoder=is_encoder_decoder)
    limit = SamplingSettings(max_completion_length=raft.max_new_tokens)
    backend = TransformersRollout(limit, trainer.tokenizer, batch_size=raft.sample_batch_size)
    with errors_in_one_line(name, DURING_TRAINING):
        if checkpoint := checkpoint_of(run, args):
            trainer.train(checkpoint)
        for number in range(trainer.progress.calls, raft.rounds):
            if trainer.run.is_finished:
                break
            trainer.ending.interruption.begin_step()  # before a round is sampled in vain
            batch = rows_of_round(rows, args, prompts=raft.prompts, number=number)
            mean, best = one_round(trainer, scorers, backend, batch, samples=raft.samples, number=number)
            trainer.log({"round": number + 1, "reward": mean, "reward_of_best": best})
    return finish(trainer, chat_with(args.output_dir, run))


def check_share(prompts: int, processes: int) -> None:
    """Raises ValueError if the prompts of a round do not divide among the processes, each of which needs as many."""
    if prompts % processes:
        raise ValueError(
            f"prompts={prompts} do not divide among {processes} processes, which learn the same number of rows in a "
            f"round. Set prompts to a multiple of {processes}."
        )


def rows_of_round(rows: Sequence[Row], args: IterativeSFTConfig, *, prompts: int, number: int) -> list[Row]:
    """This process's share of the `prompts` rows of a round; behind the last row come the first ones again."""
    places = range(number * prompts + args.process_index, (number + 1) * prompts, args.world_size)
    return [rows[place % len(rows)] for place in places]


def one_round(
    trainer: IterativeSFTTrainer,
    rewards: RewardSet,
    backend: RolloutBackend,
    rows: Sequence[Mapping[str, Any]],
    *,
    samples: int,
    number: int,
) -> tuple[float, float]:
    """Sample completions of each prompt, and learn the one with the highest reward. Collective.

    Returns:
        The mean reward of all completions, and of those that were learnt, over all processes.
    """
    args = trainer.args
    prompts = [torch.tensor(row[PROMPT_IDS]) for row in rows]
    seed = sampling_seed(args.seed, rank=args.process_index, draw=number)
    backend.sync(trainer.accelerator.unwrap_model(trainer.model), number)
    completions = backend.generate(prompts, num_generations=samples, version=number, seed=seed).completions
    repeated = [prompt for prompt in prompts for _ in range(samples)]
    is_encoder_decoder = trainer.is_encoder_decoder
    texts = response_texts(trainer.tokenizer, repeated, completions, is_encoder_decoder=is_encoder_decoder)
    asked = [row["prompt"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", PROMPT_IDS)}
    ids = [completion.tolist() for completion in completions]
    scored = rewards(asked, as_completions(asked, texts), ids, columns).rewards.view(len(rows), samples)
    best = [completions[i * samples + int(j)] for i, j in enumerate(scored.argmax(1))]
    input_ids, labels = learnable(prompts, best, is_encoder_decoder=is_encoder_decoder)
    trainer.step(input_ids, labels=labels)
    means = gather_over_ranks((float(scored.mean()), float(scored.amax(1).mean())))
    return fmean(mean for mean, _ in means), fmean(highest for _, highest in means)


def learnable(
    prompts: Sequence[Tensor], completions: Sequence[Tensor], *, is_encoder_decoder: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The `input_ids` and `labels` of `IterativeSFTTrainer.step`, in which the tokens of the completions count."""
    if is_encoder_decoder:
        return list(prompts), list(completions)
    pairs = list(zip(prompts, completions, strict=True))
    labels = [torch.cat([torch.full_like(prompt, -100), completion]) for prompt, completion in pairs]
    return [torch.cat(pair) for pair in pairs], labels
