"""The arguments of a PPOTrainer, checked and completed."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType, send_to_device
from datasets import Dataset
from peft import PeftType
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from trimtab_common.accelerate_trackers import trackers_of
from trimtab_common.accelerators import WeighingAccelerator, create_accelerator, fused_if_possible
from trimtab_common.config import to_flat_dict
from trimtab_common.health import HealthMonitor
from trimtab_common.run import Run, Stateful
from trimtab_common.run_record import RunRecord, rows_fingerprint
from trimtab_common.sharding import keep_output_precision, tell_deepspeed_of_batches
from trimtab_common.tracking import start_tracking
from trimtab_lm import interface
from trimtab_lm.data.media import check_features
from trimtab_lm.data.prompts import (
    PROMPT_COLUMNS,
    ShuffledBatches,
    as_queries,
    collate_columns,
    open_dataset,
    refuse_stream,
)
from trimtab_lm.data.sources import is_stream
from trimtab_lm.interface import base_of
from trimtab_lm.models.loading import check_precision, refuse_adapter, refuse_init_kwargs, tokenizer_options
from trimtab_lm.models.reference import Reference, create_reference_model
from trimtab_lm.models.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
)
from trimtab_lm.rewards.functions import RewardSet, rewards_of
from trimtab_lm.sampling.backends import check_backend
from trimtab_lm.sampling.rollout import RolloutBackend, takes_rows
from trimtab_lm.tokens.router import refuse_router_loss

from .config import PPOConfig
from .passes import Trainer
from .policy import ActorCritic

WITHOUT_EFFECT = (
    *("exp_name", "log_*", "task_name", "tracker_*", "project_kwargs", "push_to_hub_if_best_kwargs"),
    *("compare_steps", "steps", "model_name", "model_init_kwargs", "query_dataset", "reward_model", "output_dir"),
    *("optimize_device_cache", "save_*", "resume_with_changes", "*backward_batch_size", "global_batch_size"),
    *("reward_timeout", "on_save_error", "gradient_checkpointing", "dataset_num_proc"),
)
"""Fields of PPOConfig that change no result; of the model and the data the checkpoint knows more than their names."""
HELD = ("learning_rate", "value_learning_rate", "init_kl_coef")
"""Fields of PPOConfig whose values the optimizer and the KL controller bring along from a checkpoint."""


def accelerator_of(config: PPOConfig, model: ActorCritic) -> WeighingAccelerator:
    """The accelerator that the config asks for. Collective; see `check_engine` and `check_precision`."""
    accelerator = create_accelerator(config.accelerator_kwargs, config.project_kwargs)
    check_engine(config, accelerator.distributed_type)
    check_precision(model, accelerator)
    keep_output_precision(accelerator)
    tell_deepspeed_of_batches(accelerator, size=config.mini_batch_size, max_grad_norm=config.max_grad_norm)
    return accelerator


def check_engine(config: PPOConfig, engine: DistributedType) -> None:
    """Raises ValueError if DeepSpeed could not save, or would keep gradients of an update that early stopping drops."""
    if engine != DistributedType.DEEPSPEED:
        return
    if config.save_steps:
        raise ValueError(
            f"save_steps={config.save_steps}: DeepSpeed's engine holds weights and moments in parts, so that there are "
            "no checkpoints to resume from. Set save_steps=None and call save_pretrained, or train with FSDP2."
        )
    if config.early_stopping and config.gradient_accumulation_steps > 1:
        raise ValueError(
            f"early_stopping drops an update that has moved too far, and with gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps} DeepSpeed's engine keeps the gradients of its first minibatches for "
            "the next update. Set gradient_accumulation_steps=1, or train with FSDP2."
        )


def checked(config: PPOConfig | None, rollout: RolloutBackend | None) -> PPOConfig:
    """The config, checked again, because its fields may have been assigned."""
    config = replace(config or PPOConfig())
    if rollout is not None and config.rollout_backend != "transformers":
        raise ValueError(f"rollout_backend={config.rollout_backend!r} and a rollout came. Leave one out.")
    check_backend(config.rollout_backend, config.rollout_backend_kwargs or {})
    return config


def policy_of(config: PPOConfig, model: Any) -> PreTrainedModelWrapper:
    """The model with a value head to train: the caller's, or `config.model_name`."""
    if model is None:
        if config.model_name is None:
            raise ValueError("PPOTrainer needs a model: give it one with a value head, or PPOConfig a model_name.")
        options = tokenizer_options(config.model_init_kwargs)
        refuse_adapter(config.model_name, options)
        is_encoder_decoder = AutoConfig.from_pretrained(config.model_name, **options).is_encoder_decoder
        kind = AutoModelForSeq2SeqLMWithValueHead if is_encoder_decoder else AutoModelForCausalLMWithValueHead
        model = kind.from_pretrained(config.model_name, **(config.model_init_kwargs or {}))
    else:
        refuse_init_kwargs(config.model_init_kwargs)
    if not isinstance(model, PreTrainedModelWrapper):
        raise TypeError(
            f"PPOTrainer trains a model with a value head, got {type(model).__name__}. Wrap it: "
            "AutoModelForCausalLMWithValueHead.from_pretrained(model)."
        )
    refuse_router_loss(model.pretrained_model, "PPOTrainer", ", or train with GRPOTrainer, which adds it")
    peft = model.pretrained_model.active_peft_config if model.is_peft_model else None
    if peft is not None and peft.is_prompt_learning and peft.peft_type != PeftType.PREFIX_TUNING:
        raise ValueError(
            f"PPOTrainer cannot train {type(peft).__name__}, which puts virtual tokens before each row. Use LoRA or "
            "prefix tuning."
        )
    interface.check_generation_config(model.pretrained_model)
    return model


def actor_critic_of(config: PPOConfig, model: PreTrainedModelWrapper, value_model: Any) -> ActorCritic:
    """Policy and value function; both recompute activations if the config says so."""
    actor_critic = ActorCritic(model, value_model)
    if config.gradient_checkpointing:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # see `PreTrainedModelWrapper`
            for trained in (model,) if value_model is None else (model, value_model):
                trained.gradient_checkpointing_enable()
    return actor_critic


def reference_of(
    model: PreTrainedModelWrapper, ref_model: Any, num_shared_layers: int | None
) -> tuple[Reference, PreTrainedModelWrapper | None]:
    """The reference of a policy, and as a model with a value head; None if it is the policy without its adapters.

    Its values are not used. See `Reference.of` for the arguments.
    """
    if ref_model is None and not model.is_peft_model:
        ref_model, num_shared_layers = create_reference_model(model, num_shared_layers), None
    reference = Reference.of(model, ref_model, num_shared_layers)
    if reference.is_adapter_off:
        return reference, None
    if isinstance(ref_model, PreTrainedModelWrapper):
        return reference, ref_model.eval()
    device = reference.model.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # nn.Linear draws its first weights
        wrapper = PreTrainedModelWrapper(reference.model, v_head_init_strategy="zero")
    return reference, wrapper.requires_grad_(False).eval()


def tokenizer_of(config: PPOConfig, tokenizer: Any) -> PreTrainedTokenizerBase:
    """The tokenizer: the caller's, a processor's, or `config.model_name`'s; it must have a pad token."""
    if tokenizer is None and config.model_name is None:
        raise ValueError("PPOTrainer needs a tokenizer: give it one, or PPOConfig a model_name.")
    options = tokenizer_options(config.model_init_kwargs)
    tokenizer = interface.tokenizer_of(tokenizer or AutoTokenizer.from_pretrained(config.model_name, **options))
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "The tokenizer has no pad token. Set tokenizer.pad_token = tokenizer.eos_token: that is harmless here, "
            "because padding is told by length and not by its token."
        )
    return tokenizer


def filled(config: PPOConfig, model: PreTrainedModelWrapper, world_size: int) -> PPOConfig:
    """The config with the fields that are known at run time; ValueError if they contradict it."""
    facts: dict[str, Any] = {
        "world_size": world_size,
        "is_encoder_decoder": model.is_encoder_decoder,
        "is_peft_model": model.is_peft_model,
    }
    for name, value in facts.items():
        if getattr(config, name) not in (None, value):
            raise ValueError(
                f"PPOConfig.{name}={getattr(config, name)}, but it is {value}. Leave it out: it is filled in."
            )
    return config.taken(**facts)


def optimizers_of(
    config: PPOConfig, optimizer: Optimizer | None, lr_scheduler: LRScheduler | None, model: ActorCritic
) -> tuple[Optimizer, LRScheduler | None]:
    """The optimizer, which must hold all trained parameters, and its learning-rate scheduler, if any.

    Args:
        config: the learning rates, and their warm-up.
        optimizer: the caller's; None: Adam.
        lr_scheduler: the caller's; None: the warm-up that the config asks for.

    Raises:
        ValueError: nothing trains, the caller's optimizer lacks parameters, or the config has settings for another one.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError(
            "Nothing to train: no parameter of the model has requires_grad. Unfreeze some, or add an adapter."
        )
    has_groups = config.value_learning_rate is not None or config.lr_warmup_steps > 0
    if optimizer is None:
        groups: list[dict[str, Any]] = [{"params": trainable}]
        if has_groups:
            of_values = {id(weight) for weight in model.value_function.parameters()}
            groups = [{"params": [weight for weight in trainable if id(weight) not in of_values]}]
            rate = config.value_learning_rate or config.learning_rate
            groups += [{"params": [weight for weight in trainable if id(weight) in of_values], "lr": rate}]
        optimizer = torch.optim.Adam(groups, lr=config.learning_rate, fused=fused_if_possible(trainable))
    elif has_groups:
        raise ValueError(
            f"value_learning_rate={config.value_learning_rate} and lr_warmup_steps={config.lr_warmup_steps} are "
            "settings of the trainer's Adam, and PPOTrainer was given an optimizer. Give its parameter groups their "
            "rates and pass an lr_scheduler, or leave the optimizer out."
        )
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    missing = sum(id(weight) not in held for weight in trainable)
    if missing:
        raise ValueError(
            f"{missing} of {len(trainable)} trainable tensors are not in the optimizer. Build it over the "
            "parameters of the model and of value_model, or freeze what is not to be trained (requires_grad_(False))."
        )
    if not config.lr_warmup_steps:
        return optimizer, lr_scheduler
    if lr_scheduler is not None:
        raise ValueError(
            f"lr_warmup_steps={config.lr_warmup_steps} moves the learning rate, and so does the lr_scheduler. Leave "
            "one of them out."
        )
    # The policy's share of its full rate after `steps` steps: 1 / length, 2 / length, ..., 1; the values' share is 1.
    length = config.lr_warmup_steps
    return optimizer, LambdaLR(optimizer, [lambda steps: min((steps + 1) / length, 1.0), lambda steps: 1.0])


def open_data(
    trainer: Trainer, dataset: Any, data_collator: Callable[[Sequence[Any]], Any] | None
) -> tuple[Any, DataLoader[Any] | None, ShuffledBatches | None]:
    """The prompts, their batches, and the position in them, which checkpoints hold."""
    config = trainer.config
    if dataset is None and config.query_dataset:
        dataset = open_dataset(config.query_dataset)
    if dataset is None:
        return None, None, None
    check_features(dataset)
    if data_collator is None and _has_texts(dataset):
        kind, workers = trainer.is_encoder_decoder, config.dataset_num_proc
        dataset = as_queries(dataset, trainer.tokenizer, is_encoder_decoder=kind, num_proc=workers)
    dataloader = trainer.prepare_dataloader(dataset, data_collator)
    batches = dataloader.batch_sampler
    return dataset, dataloader, batches if isinstance(batches, ShuffledBatches) else None


def _has_texts(dataset: Any) -> bool:
    """Whether rows need tokenizing: columns without token ids. Rows of a torch dataset may be anything."""
    if isinstance(dataset, Dataset):
        return "input_ids" not in dataset.column_names
    if is_stream(dataset) or not len(dataset):
        return False
    row = dataset[0]
    has_texts = isinstance(row, Mapping) and any(isinstance(row.get(name), str | list) for name in PROMPT_COLUMNS)
    return has_texts and "input_ids" not in row


def dataloader_of(trainer: Trainer, rows: Any, data_collator: Callable[[Sequence[Any]], Any] | None) -> DataLoader[Any]:
    """See `PPOTrainer.prepare_dataloader`."""
    refuse_stream(rows, "PPO")
    config, accelerator, collate = trainer.config, trainer.accelerator, data_collator or collate_columns
    if config.remove_unused_columns and isinstance(rows, Dataset):
        base = base_of(trainer.model.pretrained_model)  # a PeftModel's forward names no columns
        known = {*inspect.signature(base.forward).parameters, *PROMPT_COLUMNS, "label", "response"}
        if dropped := [name for name in rows.column_names if name not in known]:
            warnings.warn(
                f"The columns {', '.join(dropped)} of the dataset are dropped: reward functions and environments do "
                "not get them. PPOConfig(remove_unused_columns=False) keeps them.",
                stacklevel=5,
            )
        rows = rows.remove_columns(dropped)
    ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    return DataLoader(
        rows,
        batch_sampler=ShuffledBatches(len(rows), config.batch_size, seed=config.seed, **ranks),
        collate_fn=lambda chosen: send_to_device(collate(chosen), trainer.current_device),
        generator=torch.Generator(),  # else each epoch's start, and each resume, draws from torch's global one
    )


def run_of(trainer: Trainer, pending: Stateful | None) -> Run:
    """The run that the config asks for, with what checkpoints hold, under a new id. Collective."""
    config, accelerator = trainer.config, trainer.accelerator
    data = rows_fingerprint(trainer.dataset) if isinstance(trainer.dataset, Dataset) else None
    run = Run(
        accelerator,
        trainer.actor_critic,
        RunRecord.of(config, without=WITHOUT_EFFECT, data=data),
        health=HealthMonitor(kl_target=config.kl_target),
        start_tracker=partial(
            start_tracking,
            config.log_with,
            project=config.tracker_project_name,
            config=to_flat_dict(config),
            name=config.exp_name,
            tags=[config.task_name] if config.task_name else [],
            folder=accelerator.logging_dir or ".",
            init_kwargs=config.tracker_kwargs,
        ),
        accepts_changes=config.resume_with_changes,
        held=HELD,
    )
    accelerator.trackers = trackers_of(run, config.log_with)
    run.keep(
        trainer, "optimizer", "lr_scheduler", "kl_ctl", "running", "batches", "sampler", "steps_done", "best_score"
    )
    run.keep(accelerator, "scaler")
    run.keep_per_rank("unfinished", trainer.unfinished)
    if pending is not None:
        run.keep_per_rank("pending", pending)
    return run


def environment(completions: Sequence[str]) -> list[float]:
    """The scores beside an environment, whose rewards are at the tokens."""
    return [0.0] * len(completions)


def rewards_of_run(trainer: Trainer, reward: Any, weights: Sequence[float] | None) -> RewardSet:
    """The reward functions of a run; none if an environment gives the rewards."""
    reward = trainer.config.reward_model if reward is None else reward
    if reward is None and not takes_rows(trainer.rollout):
        raise ValueError("train() needs a reward: a function or model, or PPOConfig(reward_model=...).")
    given = environment if reward is None else reward
    timeout = trainer.config.reward_timeout
    return rewards_of(given, weights, tokenizer=trainer.tokenizer, device=trainer.current_device, timeout=timeout)
