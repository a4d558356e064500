"""The seven trainers on tiny models; each is a program that continues from its folder's newest checkpoint.

Every reward and dropout draws random numbers, so a resumed run that lost a generator's state would differ. `run` writes
the state after the last step; the tracker's files hold what was logged.
"""

import os
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tests.diffusion import tiny as tiny_diffusion
from tests.lm import tiny

from trimtab_common import set_seed
from trimtab_common.sealing import latest_checkpoint
from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer
from trimtab_lm import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

STEPS, SAVE_EVERY = 8, 2
TEXTS = ["hello world.", "abc.", "a longer text than the others.", "x y z.", "no.", "some more words.", "go.", "why."]
PAIRS = {
    "prompt": [text[:2] for text in TEXTS],
    "chosen": [text[2:] for text in TEXTS],
    "rejected": [text[3:] + "." for text in TEXTS],
}
Log = list[dict[str, float]]


def noise() -> float:
    """Returns a random number that depends on every library's global generator."""
    return random.random() + random.gauss(0, 0.1) + np.random.rand() + torch.rand(()).item()


def scored(texts: list[str]) -> list[float]:
    """Returns a reward for each text."""
    return [len(set(text)) / 4 + noise() for text in texts]


def per_process(size: int) -> int:
    """Returns this process's share of a batch."""
    return size // int(os.environ.get("WORLD_SIZE", "1"))


def ppo_trainer(folder: Path, tracker: str, **more: Any) -> PPOTrainer:
    """PPO on a few prompts."""
    config = PPOConfig(
        batch_size=per_process(4),
        mini_batch_size=1,
        ppo_epochs=2,
        target=0.5,
        horizon=40,
        use_score_scaling=True,
        use_score_norm=True,
        seed=3,
        save_total_limit=2,
        log_with=tracker,
        project_kwargs={"project_dir": str(folder)},
        accelerator_kwargs={"cpu": True},
        **{"steps": STEPS, "save_steps": SAVE_EVERY, "output_dir": str(folder / "checkpoints"), **more},
    )
    policy = tiny.policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    prompts = Dataset.from_dict({"input_ids": [row.tolist() for row in tiny.rows(14, 2, 6)]})
    return PPOTrainer(
        config, policy, tokenizer=tiny.tokenizer(), dataset=prompts, optimizer=optimizer, lr_scheduler=scheduler
    )


def ppo(folder: Path, tracker: str, **more: Any) -> Any:
    """Runs `PPOTrainer.train`."""
    trainer = ppo_trainer(folder, tracker, **more)
    options = {"max_new_tokens": 6, "do_sample": True}
    trainer.train(
        lambda queries, responses, **_: scored(responses),
        generation_kwargs=options,
        resume_from="latest" if trainer.config.output_dir else None,
    )
    trainer.tracker.finish()
    return trainer, trainer.actor_critic


def ppo_step(folder: Path, tracker: str, **more: Any) -> Any:
    """Loops over `PPOTrainer.step`; the caller saves."""
    trainer = ppo_trainer(folder, tracker, **more)
    root = trainer.config.output_dir
    if root and (newest := latest_checkpoint(root)):
        trainer.load_checkpoint(newest)
    while trainer.steps_done < STEPS:
        for batch in trainer.dataloader or ():
            queries = batch["input_ids"]
            responses = trainer.generate(queries, return_prompt=False, do_sample=True, max_new_tokens=6)
            scores = scored(trainer.tokenizer.batch_decode(responses))
            stats = trainer.step(queries, responses, scores)
            trainer.log_stats(stats, {"query": queries, "response": responses}, scores)
            if root and trainer.steps_done % SAVE_EVERY == 0:
                trainer.save_checkpoint()
            if trainer.steps_done == STEPS:
                break
    trainer.tracker.finish()
    return trainer, trainer.actor_critic


def ddpo_trainer(folder: Path, tracker: str, **more: Any) -> DDPOTrainer:
    """DDPO on images of a few pixels."""
    config = DDPOConfig(
        seed=3,
        num_epochs=STEPS,
        logdir=str(folder),
        project_kwargs={"project_dir": str(folder)},
        num_checkpoint_limit=2,
        log_with=tracker,
        accelerator_kwargs={"cpu": True},
        mixed_precision="no",
        sample_num_steps=3,
        sample_guidance_scale=3.0,
        sample_batch_size=per_process(4),
        sample_num_batches_per_epoch=1,
        train_batch_size=per_process(2),
        train_learning_rate=3e-3,
        train_clip_range=1e-2,
        init_kl_coef=0.1,
        adap_kl_ctrl=True,
        target=0.01,
        horizon=20,
        **{"save_freq": SAVE_EVERY, "resume_from": "latest", **more},
    )
    with tiny_diffusion.from_seed(1):  # LoRA weights are random at the start
        pipeline = DDPOStableDiffusionPipeline(tiny_diffusion.stable_diffusion(), use_lora=True)
    return DDPOTrainer(config, image_reward, lambda: (random.choice(("cat", "dog")), {}), pipeline)


def image_reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """Returns a reward for each image."""
    return images.mean((1, 2, 3)) + torch.tensor([0.1 * noise() for _ in images])


def ddpo(folder: Path, tracker: str, **more: Any) -> Any:
    """Runs `DDPOTrainer.train`."""
    trainer = ddpo_trainer(folder, tracker, **more)
    trainer.train()
    trainer.tracker.finish()
    return trainer, trainer.model


def ddpo_step(folder: Path, tracker: str, **more: Any) -> Any:
    """Loops over `DDPOTrainer.step`; the caller saves."""
    trainer = ddpo_trainer(folder, tracker, **more)
    for epoch in range(trainer.first_epoch, STEPS):
        trainer.step(epoch, trainer.global_step)
        if (epoch + 1) % SAVE_EVERY == 0:
            trainer.save_checkpoint()
    trainer.tracker.finish()
    return trainer, trainer.model


def settings(folder: Path, tracker: str, **more: Any) -> dict[str, Any]:
    """Returns the settings that the configs of the trainers on `transformers.Trainer` share."""
    return {
        "output_dir": str(folder / "checkpoints"),
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": tracker,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVE_EVERY,
        "save_total_limit": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": per_process(2),
        "learning_rate": 1e-2,
    } | more


def sft(folder: Path, tracker: str, **more: Any) -> Any:
    """Runs `SFTTrainer.train`."""
    data = Dataset.from_dict({"text": TEXTS})
    config = SFTConfig(**settings(folder, tracker, **more))
    model = tiny.gpt2(resid_pdrop=0.3)
    return trained(SFTTrainer(model, config, train_dataset=data, processing_class=tiny.tokenizer()))


def dpo(folder: Path, tracker: str, **more: Any) -> Any:
    """Runs `DPOTrainer.train`."""
    data = Dataset.from_dict(PAIRS)
    config = DPOConfig(**settings(folder, tracker, **more))
    return trained(DPOTrainer(tiny.gpt2(), args=config, train_dataset=data, processing_class=tiny.tokenizer()))


def reward(folder: Path, tracker: str, **more: Any) -> Any:
    """Runs `RewardTrainer.train`."""
    data = Dataset.from_dict(PAIRS)
    config = RewardConfig(**settings(folder, tracker, **more))
    return trained(RewardTrainer(tiny.scorer(), config, train_dataset=data, processing_class=tiny.tokenizer()))


def grpo(folder: Path, tracker: str, **more: Any) -> Any:
    """Runs `GRPOTrainer.train`."""
    config = GRPOConfig(
        num_generations=2, max_completion_length=4, steps_per_generation=2, **settings(folder, tracker, **more)
    )
    prompts = Dataset.from_dict({"prompt": PAIRS["prompt"]})
    data = {"train_dataset": prompts, "processing_class": tiny.tokenizer()}
    return trained(GRPOTrainer(tiny.gpt2(), lambda completions, **_: scored(completions), config, **data))


def iterative_sft(folder: Path, tracker: str, **more: Any) -> Any:
    """Loops over `IterativeSFTTrainer.step`; each call is two optimizer steps."""
    config = IterativeSFTConfig(**settings(folder, tracker, **more))
    trainer = IterativeSFTTrainer(tiny.gpt2(resid_pdrop=0.3), config, processing_class=tiny.tokenizer())
    if latest_checkpoint(str(config.output_dir)):
        trainer.train(resume_from_checkpoint=True)
    texts = len(TEXTS) // 2 // (2 // per_process(2))
    for call in count(trainer.progress.calls):
        if trainer.state.global_step == STEPS:
            return trainer, trainer.model
        trainer.step(texts=[text + "abcd"[call] for text in TEXTS[:texts]])


def trained(trainer: Any) -> Any:
    """Runs the steps that the trainer's newest checkpoint lacks; returns the trainer and its model."""
    trainer.train(resume_from_checkpoint=latest_checkpoint(trainer.args.output_dir) is not None or None)
    return trainer, trainer.model


WORKS: dict[str, Callable[..., Any]] = {
    work.__name__: work for work in (ppo, ddpo, sft, dpo, reward, grpo, iterative_sft, ppo_step, ddpo_step)
}
"""The programs by name. A name that ends in _step runs a second loop of the same trainer."""


def run(name: str, folder: Path, tracker: str, **more: Any) -> None:
    """Trains to the end in this process, and writes the final state to final-<rank>.pt."""
    torch.set_num_threads(1)
    is_new = latest_checkpoint(folder / "checkpoints") is None
    set_seed(11 if is_new else os.getpid())  # a resumed run must not depend on the seed of its process
    trainer, model = WORKS[name](folder, tracker, **more)
    left = {
        "weights": trainer.accelerator.unwrap_model(model).state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "logged": logged(trainer),
    }
    if isinstance(trainer, PPOTrainer | DDPOTrainer):  # Trainer does not restore generators for a finished run
        left["random"] = noise()
    torch.save(left, folder / f"final-{trainer.accelerator.process_index}.pt")
    trainer.accelerator.end_training()


def logged(trainer: Any) -> Log:
    """Returns the log of a trainer on `transformers.Trainer`, as its checkpoints hold it, without durations."""
    if isinstance(trainer, PPOTrainer | DDPOTrainer):
        return []
    lines: Log = [line for line in trainer.state.log_history if "loss" in line]
    return [{name: value for name, value in line.items() if is_repeatable(name)} for line in lines]


def is_repeatable(name: str) -> bool:
    """Whether a logged number must be equal in two runs.

    Durations differ, processes repeat the checks of a first epoch, and `train_loss` averages the steps of one process.
    """
    return not any(word in name for word in ("time", "per_second", "selfcheck", "train_loss"))
