"""Runs PPO with policy, critic, reference, gradients and optimizer state sharded over processes, under torchrun.

`folder,case,...`: these cases, or all. Each process saves its results as folder/<rank>.pt.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from _pytest.monkeypatch import MonkeyPatch
from accelerate import FullyShardedDataParallelPlugin
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.ppo.run_distributed import GLOBAL_BATCH, global_batch
from tests.lm.ppo.test_overrides import ForwardOf2024, MinibatchOf2024
from tests.lm.sharded.run_trainers import local_size
from tests.processes import let_accelerate_shard_on_cpu, process_of_many

from trimtab_lm import PPOTrainer

STEPS = 2


def gpt2() -> Any:
    return tiny.policy(dtype=torch.float64)


def llama() -> Any:
    return tiny.with_value_head(tiny.exact(tiny.llama()))


def t5() -> Any:
    return tiny.with_value_head(tiny.exact(tiny.t5(initializer_factor=1.0)))


def lora() -> Any:
    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return tiny.with_value_head(get_peft_model(tiny.gpt2(dtype=torch.float64), adapters).double())


def prompts() -> dict[str, Any]:
    return {"dataset": Dataset.from_dict({"input_ids": [row.tolist() for row in tiny.rows(20, 2, 6)]})}


@dataclass(frozen=True)
class Case:
    """Minibatches of two rows on each of two processes, or four on one; two of them make an optimizer step."""

    model: Callable[[], Any] = gpt2
    trainer: type[PPOTrainer] = PPOTrainer
    has_masks: bool = False
    arguments: Callable[[], dict[str, Any]] = dict
    config: dict[str, Any] = field(default_factory=dict)
    plugin: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)  # the launcher's variables, instead of a plugin


LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}
SCALED = {"use_score_scaling": True, "use_score_norm": True, "whiten_rewards": True, "missing_eos_penalty": 0.5}
CASES = {
    "plain": Case(config=SCALED),
    "llama, masks": Case(llama, has_masks=True),
    "t5": Case(t5),
    "lora": Case(lora, has_masks=True),
    "critic": Case(
        arguments=lambda: {"value_model": tiny.scorer(dtype=torch.float64)},
        config={"value_learning_rate": 3e-3, "lr_warmup_steps": 2},
    ),
    "critic of its own kind": Case(lora, arguments=lambda: {"value_model": tiny.exact(tiny.llama(seed=1))}),
    "another reference": Case(arguments=lambda: {"ref_model": tiny.policy(seed=1, dtype=torch.float64)}),
    "shared layers": Case(llama, arguments=lambda: {"num_shared_layers": 1}),
    "exact KL": Case(lora, config={"kl_penalty": "full"}),
    "forward of 2024": Case(trainer=ForwardOf2024, has_masks=True),
    "forward of 2024, lora": Case(lora, trainer=ForwardOf2024),
    "minibatch of 2024": Case(trainer=MinibatchOf2024),
    "stopped early": Case(config={"early_stopping": True, "target_kl": 1e-12}),
    "activation checkpointing": Case(llama, has_masks=True, plugin={"activation_checkpointing": True}),
    "accelerate launch": Case(environment=LAUNCHED),
}
BFLOAT16, REFUSED, CONTINUOUS = "bfloat16", "version 1", "loop with continuous batching"
LOOPS = {
    "loop": Case(llama, arguments=prompts),
    CONTINUOUS: Case(llama, arguments=prompts, config={"rollout_backend": "continuous_batching"}),
}


def make(case: Case, world_size: int, **accelerator_kwargs: Any) -> PPOTrainer:
    """Returns a trainer for this process's share, sharded if there are several processes."""
    model, arguments = case.model(), case.arguments()
    if "value_model" not in arguments:  # otherwise the trainer creates a value head
        # Unlike Adam, SGD shows a gradient of the wrong size, and does not magnify the rounding of a zero gradient.
        arguments["optimizer"] = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.5)
    if world_size > 1 and not case.environment and "deepspeed_plugin" not in accelerator_kwargs:
        plugin = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
        accelerator_kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin(**plugin | case.plugin)
    sizes = {
        "batch_size": GLOBAL_BATCH // world_size,
        "mini_batch_size": 4 // world_size,
        "gradient_accumulation_steps": 2,
        "accelerator_kwargs": accelerator_kwargs,
    }
    terms = {"ppo_epochs": 2, "ratio_threshold": 1e9, "max_grad_norm": 0.1, "init_kl_coef": 0.5, "target": 0.5}
    with MonkeyPatch.context() as patch:
        for name, value in case.environment.items() if world_size > 1 else ():
            patch.setenv(name, value)
        return tiny.ppo(model, case.trainer, arguments=arguments, **sizes | terms | case.config)


def share(columns: dict[str, list[Any]], rank: int, world_size: int) -> dict[str, list[Any]]:
    """Returns this process's rows of a global batch."""
    rows = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
    return {name: column[rows] for name, column in columns.items()}


def stepped(name: str, rank: int = 0, world_size: int = 1, **accelerator_kwargs: Any) -> dict[str, Any]:
    """Returns the statistics of two steps, a few greedy samples before each step, and the final weights."""
    case = CASES[name]
    trainer = make(case, world_size, **accelerator_kwargs)
    history, samples = [], []
    for step in range(STEPS):
        columns = global_batch(step, has_masks=case.has_masks)
        queries = columns["queries"][: 3 + rank]  # processes sample different numbers of rows
        options = {"do_sample": False, "max_new_tokens": 5, "batch_size": 2, "generate_ref_response": True}
        samples.append([row.tolist() for rows in trainer.generate(queries, **options) for row in rows[:3]])
        history.append(trainer.step(**share(columns, rank, world_size)))
    return {"stats": history, "samples": samples, **state_of(trainer)}


def trained(name: str, world_size: int = 1) -> dict[str, Any]:
    """Returns the statistics of two steps of `train`, and the weights after them."""
    history: list[Any] = []
    trainer = make(LOOPS[name], world_size)
    options = {"max_new_tokens": 5, "do_sample": name == CONTINUOUS}
    trainer.train(
        tiny.scorer(dtype=torch.float64),
        generation_kwargs=options,
        steps=2,
        on_step=lambda step, stats, batch: history.append(stats),
    )
    return {"stats": history, **state_of(trainer)}


def state_of(trainer: PPOTrainer) -> dict[str, Any]:
    """Returns the full weights, and the number of elements of weights and moments on this process."""
    weights = trainer.accelerator.get_state_dict(trainer.actor_critic) or {}
    moments = [value for state in trainer.optimizer.state.values() for name, value in state.items() if name != "step"]
    return {
        "weights": {name: weight.clone() for name, weight in weights.items()},
        "local": sum(map(local_size, trainer.actor_critic.parameters())),
        "moments": sum(map(local_size, moments)),
        "reference": sum(map(local_size, trainer.reference_policy.actor.parameters())),
        "kl_coef": trainer.kl_ctl.value,
    }


def in_bfloat16(rank: int, world_size: int) -> dict[str, Any]:
    """Returns numbers of a step in which a policy with float32 weights computes in bfloat16."""
    trainer = make(Case(tiny.policy), world_size, mixed_precision="bf16")
    stats = trainer.step(**share(global_batch(0, has_masks=False), rank, world_size))
    rows = tiny.rows(2, 3, 5), tiny.rows(2, 4, 6)
    logprobs, _, values, _ = trainer.batched_forward_pass(trainer.model, *rows, trainer.prepare_model_inputs(*rows))
    dtypes = sorted({str(weight.dtype) for weight in trainer.actor_critic.state_dict().values()})
    assert values is not None
    numbers = {"values": values.detach(), "logprobs": logprobs.detach()}
    return {"loss": stats["ppo/loss/total"], "dtypes": dtypes, **numbers}


def refused(world_size: int) -> dict[str, Any]:
    """Returns the error for version 1 of FSDP."""
    try:
        make(Case(plugin={"fsdp_version": 1, "reshard_after_forward": "FULL_SHARD"}), world_size)
    except ValueError as error:
        return {"message": str(error)}
    return {}


def session(case: str, rank: int, world_size: int) -> dict[str, Any]:
    if case == BFLOAT16:
        return in_bfloat16(rank, world_size)
    if case == REFUSED:
        return refused(world_size)
    return stepped(case, rank, world_size) if case in CASES else trained(case, world_size)


def main(folder: str, *cases: str) -> None:
    with process_of_many(let_accelerate_shard_on_cpu) as (rank, world_size):
        results = {case: session(case, rank, world_size) for case in cases or [*CASES, *LOOPS, BFLOAT16, REFUSED]}
        torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1].split(";"))
