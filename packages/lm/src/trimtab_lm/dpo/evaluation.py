"""What a DPO evaluation needs beside the loss: which pairs are no repetitions, and samples of both models."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor

from trimtab_common.seeding import private_rng, sampling_seed
from trimtab_common.stats import gather_over_ranks, world_size
from trimtab_lm.sampling.generate import eos_token_ids, generate, response_texts, sampling_config
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.positions import Positions

from .setup import placed


def real_pairs(accelerator: Accelerator, count: int) -> int:
    """How many of this process's `count` pairs are no repetition that filled up the last batch of a data loader."""
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder <= 0:
        return count
    return min(max(state.remainder - accelerator.process_index * count, 0), count)


def prompts_to_sample(dataset: Any, count: int, *, seed: int) -> list[Tensor]:
    """Token ids of `count` prompts of a tokenized dataset: chosen at random, or the first of a stream."""
    if isinstance(dataset, Dataset):
        chosen = random.Random(seed).sample(range(len(dataset)), min(count, len(dataset)))
        rows: Any = (dataset[i] for i in chosen)
    else:
        rows = itertools.islice(iter(dataset), count)
    return [torch.as_tensor(row["prompt_input_ids"], dtype=torch.long) for row in rows]


def unpadded(batch: Mapping[str, Any]) -> list[Tensor]:
    """The prompts of padded columns, 1-D."""
    rows = zip(batch["prompt_input_ids"], batch["prompt_attention_mask"], strict=True)
    return [ids[mask.bool()] for ids, mask in rows]


def sample_answers(trainer: Any, model: Any, prompts: Sequence[Tensor]) -> tuple[list[str], list[str]]:
    """Answers of `model` and of a DPOTrainer's reference to prompts, as texts.

    The reference's are none where it is no model that is at hand. The random numbers of training are neither used nor
    moved.
    """
    with without_dropout(model), torch.no_grad():
        policy = _texts(trainer, trainer.accelerator.unwrap_model(model), prompts)
    if not trainer.has_reference_model:
        return policy, []
    with trainer.reference.active() as reference:
        return policy, _texts(trainer, placed(reference, trainer.args.device), prompts)


def log_samples(trainer: Any, dataset: Any, name: str) -> None:
    """A table of prompts and the answers of policy and reference, in a DPOTrainer's trackers. Collective."""
    config = trainer.args
    seed = sampling_seed(config.seed, rank=0, draw=trainer.state.global_step)
    prompts = prompts_to_sample(dataset, config.num_eval_samples, seed=seed)[config.process_index :: world_size()]
    columns = [
        [trainer.tokenizer.decode(prompt) for prompt in prompts],
        *sample_answers(trainer, trainer.model, prompts),
    ]
    names = ["prompt", "policy", "reference"] if trainer.has_reference_model else ["prompt", "policy"]
    rows = list(zip(*columns[: len(names)], strict=True))
    turns = itertools.zip_longest(*gather_over_ranks(rows))
    trainer.tables.add(trainer, name, names, [row for turn in turns for row in turn if row is not None])


def _texts(trainer: Any, model: Any, prompts: Sequence[Tensor]) -> list[str]:
    args, tokenizer = trainer.args, trainer.tokenizer
    settings = {"do_sample": True, "max_new_tokens": args.max_new_tokens, **(args.generation_kwargs or {})}
    config, rest = sampling_config(model, pad_token_id=trainer.padding_value, **settings)
    is_encoder_decoder, longest = model.config.is_encoder_decoder, max(map(len, prompts), default=0)
    room = Positions.of(model).room(longest, is_encoder_decoder=is_encoder_decoder)
    if room is not None:  # a table of shorter answers is better than a run that ends in its evaluation
        config.max_new_tokens = min(config.max_new_tokens, max(room, 1))
    seed = sampling_seed(args.seed, rank=args.process_index, draw=trainer.state.global_step)
    with private_rng(seed, model.device):
        answers = generate(
            model, prompts, config, eos_ids=eos_token_ids(model, tokenizer.eos_token_id, config),
            batch_size=args.per_device_eval_batch_size, return_prompt=False, **rest,
        )  # fmt: skip
    return response_texts(tokenizer, prompts, answers, is_encoder_decoder=is_encoder_decoder)
