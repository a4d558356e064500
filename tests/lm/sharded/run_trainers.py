"""Runs trainings with parameters, gradients and optimizer state sharded over the processes, under torchrun.

`folder,case,...`: these cases, or all. Each process saves its logs and the full weights as folder/<rank>.pt.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.kto.run_training import InParts
from tests.processes import let_accelerate_shard_on_cpu, process_of_many
from torch.distributed.tensor import DTensor
from transformers import LlamaForSequenceClassification

from trimtab_common.sharding import is_divided_by_deepspeed
from trimtab_lm import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.rollout import Rollout

GLOBAL_BATCH = 8
TEXTS = ["".join("abcdefgh "[(i * k) % 9] for k in range(1, 3 + 5 * (i % 4))) + "." for i in range(1, 33)]
PAIRS = {
    "prompt": [text[:3] for text in TEXTS],
    "chosen": [text[3:] + "ab" for text in TEXTS],
    "rejected": [text[:1:-1] + "." for text in TEXTS],
}
QUIET = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "report_to": "none"}
RATES = {"learning_rate": 1e-2, "max_grad_norm": 0.1, "max_steps": 3, "gradient_accumulation_steps": 2}
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2() -> Any:
    return tiny.exact(tiny.gpt2(**PLAIN))


def llama() -> Any:
    return tiny.exact(tiny.llama())


# FSDP's own checkpointing would recompute in backward too; here Trainer's argument uses transformers' layers.
CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
SAMPLED = {"generate_during_eval": True, "num_eval_samples": 1, "max_new_tokens": 2}


def with_lora(model: Any, modules: list[str]) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=modules, init_lora_weights=False))


def classifier() -> Any:
    config = tiny.llama().config
    config.num_labels = 1
    return tiny.exact(tiny.seeded(LlamaForSequenceClassification, config))


def settings(
    world_size: int,
    *,
    state_dict_type: str = "FULL_STATE_DICT",
    activation_checkpointing_of_fsdp: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Returns settings for a config: a global batch in two micro-batches, sharded under torchrun."""
    sizes = {"per_device_train_batch_size": GLOBAL_BATCH // 2 // world_size, "per_device_eval_batch_size": 2}
    sharding = {"version": 2, "reshard_after_forward": True, "state_dict_type": state_dict_type}
    sharding["activation_checkpointing"] = activation_checkpointing_of_fsdp
    sharded = {"fsdp": True, "fsdp_config": sharding} if "LOCAL_RANK" in os.environ else {}
    return QUIET | RATES | sizes | sharded | more


def sft(model: Any, folder: str, world_size: int, **more: Any) -> Any:
    return SFTTrainer(
        model,
        SFTConfig(folder, **settings(world_size, **more)),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        eval_dataset=Dataset.from_dict({"text": TEXTS[:7]}),
        processing_class=tiny.tokenizer(),
    )


def reward(model: Any, folder: str, world_size: int, peft_config: LoraConfig | None = None, **more: Any) -> Any:
    return RewardTrainer(
        model,
        RewardConfig(folder, **settings(world_size, **more)),
        train_dataset=Dataset.from_dict(PAIRS),
        eval_dataset=Dataset.from_dict({name: column[:7] for name, column in PAIRS.items()}),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )


def dpo(
    model: Any, folder: str, world_size: int, peft_config: LoraConfig | None = None, ref_model: Any = None, **more: Any
) -> Any:
    return DPOTrainer(
        model,
        ref_model,
        DPOConfig(folder, **settings(world_size, **more)),
        train_dataset=Dataset.from_dict(PAIRS),
        eval_dataset=Dataset.from_dict({name: column[:7] for name, column in PAIRS.items()}),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )


def kto(model: Any, folder: str, world_size: int, peft_config: LoraConfig | None = None, **more: Any) -> Any:
    labels = [i % 3 > 0 for i in range(len(TEXTS))]
    rows = Dataset.from_dict({"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": labels})
    sizes = {"per_device_eval_batch_size": 4 // world_size, "undesirable_weight": 1.7}
    trainer = KTOTrainer(
        model,
        args=KTOConfig(folder, **settings(world_size, **sizes | more)),
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )
    if world_size == 1:  # each of two processes mismatches its own rows
        trainer.data_collator = InParts(trainer.data_collator, 2)
    return trainer


class Scripted:
    """Returns completions that depend only on their prompt; the policy also samples some, which are ignored.

    Each process would sample differently from one policy, so two processes and one could not be compared.
    """

    def __init__(self, sampler: TransformersRollout):
        self.sampler, self.sampled, self.settings = sampler, 0, sampler.settings

    def sync(self, model: Any, version: int) -> None:
        self.sampler.sync(model, version)

    def generate(self, prompts: Sequence[torch.Tensor], *, num_generations: int, **call: Any) -> Rollout:
        mine = prompts[: PartialState().process_index + 1]  # a different number on each process
        self.sampled += len(self.sampler.generate(mine, num_generations=num_generations, **call).completions)
        completions = [
            (prompt.sum() + torch.arange(2 + (int(prompt[-1]) + k) % 4) * (k + 1)) % 20 + 5
            for prompt in prompts
            for k in range(num_generations)
        ]
        return Rollout(completions, [True] * len(completions))


def grpo(model: Any, folder: str, world_size: int, peft_config: LoraConfig | None = None, **more: Any) -> Any:
    tokenizer = tiny.tokenizer()
    sizes = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1, "num_iterations": 2}
    config = GRPOConfig(folder, **settings(world_size, **sizes | more))
    return GRPOTrainer(
        model,
        lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions],
        config,
        train_dataset=Dataset.from_dict({"prompt": PAIRS["prompt"]}),
        eval_dataset=Dataset.from_dict({"prompt": PAIRS["prompt"][:6]}),
        processing_class=tokenizer,
        peft_config=peft_config,
        rollout=Scripted(TransformersRollout(config.sampling(), tokenizer, batch_size=4)),
    )


def iterative(model: Any, folder: str, world_size: int, **more: Any) -> Any:
    return IterativeSFTTrainer(
        model,
        IterativeSFTConfig(folder, **settings(world_size, **more)),
        eval_dataset=Dataset.from_dict({"text": TEXTS[:7]}),
        processing_class=tiny.tokenizer(),
    )


def lora(**more: Any) -> LoraConfig:
    """Returns adapters with weights that matter from the first step on."""
    return LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "down_proj"], init_lora_weights="gaussian", **more)


CASES: dict[str, Callable[..., Any]] = {
    "sft": lambda *at, **more: sft(llama(), *at, **more),
    "sft tied": lambda *at, **more: sft(gpt2(), *at, **more),
    "sft adapters on the head": lambda *at, **more: sft(with_lora(llama(), ["q_proj", "lm_head"]), *at, **more),
    "reward": lambda *at, **more: reward(classifier(), *at, **more),
    "reward adapters": lambda *at, **more: reward(classifier(), *at, peft_config=lora(), **more),
    "dpo": lambda *at, **more: dpo(llama(), *at, **more),
    "dpo adapters": lambda *at, **more: dpo(llama(), *at, peft_config=lora(), **more),
    "dpo sampled": lambda *at, **more: dpo(llama(), *at, **SAMPLED, **more),
    "kto": lambda *at, **more: kto(llama(), *at, **more),
    "kto adapters": lambda *at, **more: kto(llama(), *at, peft_config=lora(), **more),
    "grpo": lambda *at, **more: grpo(llama(), *at, **more),
    "grpo adapters": lambda *at, **more: grpo(llama(), *at, peft_config=lora(), **more),
    "iterative sft": lambda *at, **more: iterative(gpt2(), *at, **more),
    "sft checkpointed": lambda *at: sft(llama(), *at, **CHECKPOINTED),
    "sft evaluated first": lambda *at: evaluated(sft(llama(), *at)),
    "dpo precomputed": lambda folder, world_size: dpo(
        llama(), folder, world_size, precompute_ref_log_probs=True, ref_log_probs_cache=f"{folder}/{world_size}"
    ),
    "dpo adapters precomputed": lambda folder, world_size: dpo(
        llama(),
        folder,
        world_size,
        peft_config=lora(),
        precompute_ref_log_probs=True,
        ref_log_probs_cache=f"{folder}/{world_size}",
    ),
    "iterative sft evaluated first": lambda *at: evaluated(iterative(gpt2(), *at)),
}


ROUGH: dict[str, Callable[..., Any]] = {
    "sft": lambda model, folder, **more: sft(model, folder, 2, **more),
    "dpo adapters": lambda model, folder, **more: dpo(model, folder, 2, peft_config=lora(), **more),
    "grpo": lambda model, folder, **more: grpo(model, folder, 2, **more),
}
"""Cases that also run in mixed precision."""


def evaluated(trainer: Any) -> Any:
    trainer.evaluate()
    return trainer


def train(trainer: Any, *, resume: bool = False) -> None:
    """Runs three updates, or as many as a callback allows."""
    if not isinstance(trainer, IterativeSFTTrainer):
        trainer.train(resume_from_checkpoint=resume)
        return
    if resume:
        trainer.train(resume_from_checkpoint=True)
    share = GLOBAL_BATCH // PartialState().num_processes
    mine = slice(PartialState().process_index * share, (PartialState().process_index + 1) * share)
    while trainer.progress.calls < 3 and not trainer.control.should_training_stop:
        trainer.step(tiny.rows(GLOBAL_BATCH, 3, 9, seed=trainer.progress.calls)[mine])


def trained(case: str, folder: str, world_size: int = 1) -> dict[str, Any]:
    """Returns the logs of three steps and of an evaluation on an odd number of rows, and the weights."""
    trainer = CASES[case](folder, world_size)
    train(trainer)
    trainer.evaluate()
    weights = trainer.accelerator.get_state_dict(trainer.model)
    return {
        "logs": untimed(trainer.state.log_history),
        "weights": {name: weight.clone() for name, weight in weights.items()},
        "parameters": sum(local_size(parameter) for parameter in trainer.model.parameters()),
        "moments": sum(
            local_size(state[name]) for state in trainer.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
        ),
    }


def untimed(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the logs without what depends on the clock."""
    timed = ("time", "per_second", "flos")
    return [{name: value for name, value in log.items() if not any(word in name for word in timed)} for log in logs]


def in_bfloat16(name: str, folder: str) -> dict[str, Any]:
    """Returns losses in mixed precision with recomputed activations, and the dtypes of scores and trained weights."""
    base = tiny.llama(dtype=torch.bfloat16 if "adapters" in name else torch.float32)
    trainer = ROUGH[name](base, folder, bf16=True, activation_checkpointing_of_fsdp=True)
    train(trainer)
    ids = torch.ones(1, 4, dtype=torch.long)
    tokens = {"input_ids": ids, "attention_mask": ids, "source": torch.arange(3), "targets": ids[0, 1:]}
    return {
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "scores": str(trainer.model(tokens=tokens).logprobs.dtype),
        "masters": sorted({str(p.dtype) for group in trainer.optimizer.param_groups for p in group["params"]}),
    }


def refusal(folder: str) -> str:
    """Returns a trainer's error for a model that FSDP2 cannot shard."""
    pairs = Dataset.from_dict({"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"]})
    try:
        SFTTrainer(tiny.t5(), SFTConfig(folder, **settings(2)), train_dataset=pairs, processing_class=tiny.tokenizer())
    except ValueError as error:
        return str(error)
    return "no error"


def local_size(tensor: torch.Tensor) -> int:
    """Returns the number of a tensor's elements on this process."""
    if is_divided_by_deepspeed(tensor):
        return tensor.ds_tensor.numel()
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()


def main(folder: str, *cases: str) -> None:
    with process_of_many(let_accelerate_shard_on_cpu) as (rank, world_size):
        results: dict[str, Any] = {case: trained(case, folder, world_size) for case in cases or CASES}
        if not cases:
            results["bfloat16"] = {name: in_bfloat16(name, folder) for name in ROUGH}
            results["refusal"] = refusal(folder)
        torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1].split(","))
