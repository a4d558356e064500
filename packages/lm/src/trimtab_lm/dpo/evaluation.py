"""Samples of policy and reference for the table of a DPO evaluation."""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from trimtab_common.seeding import private_rng, sampling_seed
from trimtab_common.sharding import placed
from trimtab_common.stats import gather_over_ranks, world_size
from trimtab_lm.data.formats import Row
from trimtab_lm.interface import Data, Model
from trimtab_lm.models.reference import Reference
from trimtab_lm.sampling.generate import generate, response_texts
from trimtab_lm.sampling.rollout import sampling_config
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.positions import Positions

from .collator import DPODataCollatorWithPadding


def runnable(reference: Reference | None, policy: Model) -> Reference | None:
    """The reference, if it is a model that can be run at any time, also after training."""
    is_apart = reference is not None and (reference.is_policy or reference.model is not policy)
    return reference if is_apart else None


def sample_answers(trainer: Any, model: Model, prompts: Sequence[Tensor]) -> tuple[list[str], list[str]]:
    """Answers of the model, and of the reference if it can be run, to prompts (1-D token ids), as texts.

    The random numbers of training are neither used nor moved. Answers at another optimizer step have others.
    """
    with without_dropout(model), torch.no_grad():
        policy = _sampled_texts(trainer, trainer.accelerator.unwrap_model(model), prompts)
    if (fixed := runnable(trainer.reference, trainer.model)) is None:
        return policy, []
    with fixed.active() as reference, trainer.accelerator.autocast():  # as the policy, which accelerate prepared
        texts = _sampled_texts(trainer, placed(reference, trainer.config.device), prompts)
    trainer.datasets.set_reference_aside()
    return policy, texts


def log_answers(trainer: Any, dataset: Data, name: str) -> None:
    """A table of prompts of a tokenized dataset, and of the answers of policy and reference. Collective."""
    config = trainer.config
    seed = sampling_seed(config.seed, rank=0, draw=trainer.state.global_step)
    prompts = prompts_to_sample(dataset, config.num_eval_samples, seed=seed)
    mine = prompts[config.process_index :: world_size()]
    shown = mine or prompts[:1]  # all processes sample, because the weights may be divided among them
    texts = [trainer.tokenizer.decode(prompt) for prompt in shown]
    answers: tuple[list[str], list[str]] = ([], [])
    if shown:
        rows = [{"prompt_input_ids": prompt, "prompt_attention_mask": torch.ones_like(prompt)} for prompt in shown]
        collate = DPODataCollatorWithPadding(trainer.padding_value, is_encoder_decoder=trainer.is_encoder_decoder)
        answers = trainer.get_batch_samples(trainer.model, {**collate(rows), "prompt": texts})
    names = ["prompt", "policy"]
    if runnable(trainer.reference, trainer.model) is not None:
        names.append("reference")
    table = list(zip(*[texts, *answers][: len(names)], strict=True))[: len(mine)]
    turns = itertools.zip_longest(*gather_over_ranks(table))
    trainer.tables.add(trainer, name, names, [row for turn in turns for row in turn if row is not None])


def prompts_to_sample(dataset: Data, count: int, *, seed: int) -> list[Tensor]:
    """Token ids of `count` prompts of a tokenized dataset: chosen at random, or the first of a stream."""
    if isinstance(dataset, Dataset):
        chosen = random.Random(seed).sample(range(len(dataset)), min(count, len(dataset)))
        rows: Iterable[Row] = (dataset[i] for i in chosen)
    else:
        rows = itertools.islice(iter(dataset), count)
    return [torch.as_tensor(row["prompt_input_ids"], dtype=torch.long) for row in rows]


def unpadded(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The prompts of padded columns, 1-D."""
    rows = zip(batch["prompt_input_ids"], batch["prompt_attention_mask"], strict=True)
    return [ids[mask.bool()] for ids, mask in rows]


def _sampled_texts(trainer: Any, model: Model, prompts: Sequence[Tensor]) -> list[str]:
    config, tokenizer = trainer.config, trainer.tokenizer
    settings = {"do_sample": True, "max_new_tokens": config.max_new_tokens, "pad_token_id": trainer.padding_value}
    generation, rest = sampling_config(model, tokenizer, **settings | (config.generation_kwargs or {}))
    is_encoder_decoder, longest = model.config.is_encoder_decoder, max(map(len, prompts), default=0)
    room = Positions.of(model).room(longest, is_encoder_decoder=is_encoder_decoder)
    if room is not None:  # a table of shorter answers is better than a run that ends in its evaluation
        generation.max_new_tokens = min(generation.max_new_tokens, max(room, 1))
    seed = sampling_seed(config.seed, rank=config.process_index, draw=trainer.state.global_step)
    options = {"batch_size": config.per_device_eval_batch_size, "return_prompt": False, **rest}
    with private_rng(seed, model.device):
        answers = generate(model, prompts, generation, **options)
    return response_texts(tokenizer, prompts, answers, is_encoder_decoder=is_encoder_decoder)
