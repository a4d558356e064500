"""Runs the trainings of `run_trainers` under DeepSpeed, with torchrun and the environment of `make test-deepspeed`.

`folder;stage;case;...`: these cases, or all, under ZeRO-2 or ZeRO-3. Each process saves its logs, its share of the
weights and, if it holds them, the full weights, as folder/<rank>.pt.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate import DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from tests.lm.sharded import run_ppo
from tests.lm.sharded.run_trainers import CASES, dpo, llama, local_size, train, untimed
from tests.processes import process_of_many
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

FSDP_ALONE = ("checkpointed", "first", "precomputed")
DEEPSPEED_CASES: dict[str, Callable[..., Any]] = {
    **{case: build for case, build in CASES.items() if not case.endswith(FSDP_ALONE)},
    "dpo by name": lambda folder, world_size, **more: dpo(saved(folder), folder, world_size, **more),
    "dpo and reference by name": lambda folder, *size, **more: dpo(
        saved(folder), folder, *size, ref_model=saved(folder), **more
    ),
}
NOT_OF_DEEPSPEED = ("accelerate launch", "activation checkpointing", "stopped early")
PPO_CASES = [case for case in run_ppo.CASES if case not in NOT_OF_DEEPSPEED]
"""PPO's cases, without two that concern FSDP and one that is rejected."""
RESUMED_CASES = {f"{case}, resumed": case for case in ("sft", "dpo adapters", "grpo", "iterative sft")}
BATCH = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")


def saved(folder: str) -> str:
    """Saves a model for trainers that load it, and returns its folder: ZeRO-3 divides its weights during loading."""
    name = f"{folder}/model"
    if PartialState().is_main_process:
        llama().save_pretrained(name)
    PartialState().wait_for_everyone()
    return name


def under_deepspeed(stage: int) -> dict[str, Any]:
    """Returns settings for a config. By default DeepSpeed would not divide weights of fewer than 100,000 numbers."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    config = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **dict.fromkeys(BATCH, "auto")}
    return {"deepspeed": config, "use_cpu": False, "optim": "adamw_torch", "fsdp": None, "fsdp_config": None}


def let_accelerate_use_gloo() -> None:
    """Makes accelerate run DeepSpeed on a CPU for the rest of this process; otherwise it requests a GPU backend."""
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)


def share(model: torch.nn.Module) -> int:
    """Returns the number of weight elements on this process."""
    return sum(map(local_size, model.parameters()))


def stepped_by_ppo(case: str, rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """Returns `run_ppo.stepped`; PPO prepares its models itself, and tells DeepSpeed its batch sizes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    unset_hf_deepspeed_config()
    plugin = DeepSpeedPlugin(hf_ds_config=under_deepspeed(stage)["deepspeed"])
    return run_ppo.stepped(case, rank, world_size, deepspeed_plugin=plugin, cpu=False)


def trained(case: str, folder: str, stage: int | None = None, world_size: int = 1) -> dict[str, Any]:
    """Returns the logs of three steps and an evaluation, the weights, and this process's share of them."""
    # An earlier trainer's config would divide the next model before it is initialized.
    unset_hf_deepspeed_config()
    more = {} if stage is None else under_deepspeed(stage)
    trainer = DEEPSPEED_CASES[case](folder, world_size, **more)
    train(trainer)
    trainer.evaluate()
    trainer.save_model(f"{folder}/{case}")
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped) or {}
    reference = getattr(trainer, "reference", None)
    return {
        "logs": untimed(trainer.state.log_history),
        "weights": {name: weight.double() for name, weight in weights.items()},
        "parameters": share(trainer.model),
        "reference": 0 if reference is None or reference.is_policy else share(reference.model),
    }


class StopAfterTwo(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == 2


def resumed(case: str, folder: str, stage: int, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the weights after three steps at once, and after two steps, a save, a resume and the third."""

    def run(name: str, *, resume: bool = False, callback: type[TrainerCallback] | None = None) -> Any:
        unset_hf_deepspeed_config()
        torch.manual_seed(0)  # adapters are random at the start
        saving = {"save_strategy": "steps", "save_steps": 1}
        trainer = CASES[case](f"{folder}/{case}/{name}", world_size, **under_deepspeed(stage), **saving)
        if callback is not None:
            trainer.add_callback(callback)
        train(trainer, resume=resume)
        return trainer

    whole = run("whole")
    run("stopped", callback=StopAfterTwo)
    trainers = {"whole": whole, "resumed": run("stopped", resume=True)}
    return {name: one.accelerator.get_state_dict(one.model_wrapped) or {} for name, one in trainers.items()}


def main(folder: str, stage: str, *cases: str) -> None:
    with process_of_many(let_accelerate_use_gloo) as (rank, world_size):
        results = {}
        for case in cases or [*DEEPSPEED_CASES, *PPO_CASES]:
            if case in RESUMED_CASES:
                results[case] = resumed(RESUMED_CASES[case], folder, int(stage), world_size)
            elif case in DEEPSPEED_CASES:
                results[case] = trained(case, folder, int(stage), world_size)
            else:
                results[case] = stepped_by_ppo(case, rank, world_size, int(stage))
        torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1].split(";"))
