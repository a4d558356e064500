"""`trimtab sft`, `reward`, `dpo`, `grpo` and `ppo`: a trainer on a dataset, by flags and a file."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from datasets import Dataset
from transformers import AutoTokenizer, Trainer

from trimtab_common.sealing import CheckpointError
from trimtab_common.seeding import set_seed
from trimtab_lm import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trimtab_lm.hf.config import TrainerConfig

from .runs import (
    CompletionsConfig,
    EvaluationConfig,
    RewardsConfig,
    RunConfig,
    chat_with,
    checkpoint_of,
    defaults,
    errors_in_one_line,
    finish,
    settings,
    tracker,
)

EVERYDAY = """
--help-all explains the settings that all trainers take from transformers. The everyday ones are --learning_rate,
--num_train_epochs, --max_steps, --per_device_train_batch_size, --gradient_accumulation_steps, --bf16, --seed,
--gradient_checkpointing, --eval_strategy, --save_strategy, --save_steps, --lr_scheduler_type, --warmup_steps."""
SFT = f"""Supervised fine-tuning. The dataset has a column `text`, or `messages`, or `prompt` and `completion`.

  trimtab sft --model gpt2 --dataset texts.jsonl --max_length 512 --num_train_epochs 1
{EVERYDAY}"""
REWARD = f"""A reward model. The dataset has the columns `prompt`, `chosen` and `rejected`.

  trimtab reward --model gpt2 --dataset pairs.jsonl --split "train[:90%]" --eval_split "train[90%:]"
{EVERYDAY}"""
DPO = f"""Learning from preferences. The dataset has the columns `prompt`, `chosen` and `rejected`.

  trimtab dpo --model my-sft-model --dataset pairs.jsonl --beta 0.1 --learning_rate 1e-6
{EVERYDAY}"""
GRPO = f"""Learning from rewards, relative to the other completions of a prompt. The dataset has a column `prompt`; a
reward function gets the others by their names.

  trimtab grpo --model my-sft-model --dataset prompts.jsonl --reward rewards.py:right
{EVERYDAY}"""
PPO = """Learning from rewards with a value head. The dataset has a column `query` or `prompt`; a reward function gets
the others by their names.

  trimtab ppo --model my-sft-model --dataset prompts.jsonl --reward rewards.py:right --steps 200"""
DOUBLES = ("model_name", "query_dataset", "reward_model")
"""Fields of PPOConfig that `trimtab ppo` calls model, dataset and reward."""


def sft(argv: Sequence[str]) -> int:
    """Supervised fine-tuning."""
    kinds = RunConfig, EvaluationConfig, SFTConfig
    run, evaluation, args = settings("sft", argv, *kinds, about=SFT, recipe=defaults("sft"))
    with errors_in_one_line("sft"):
        begin(run, args)
        trainer = SFTTrainer(run.model, args, **rows_of(run, evaluation), peft_config=run.adapters())
    return train("sft", trainer, run, chat_with(args.output_dir, run))


def reward(argv: Sequence[str]) -> int:
    """A reward model."""
    kinds = RunConfig, EvaluationConfig, RewardConfig
    run, evaluation, args = settings("reward", argv, *kinds, about=REWARD, recipe=defaults("reward"))
    with errors_in_one_line("reward"):
        begin(run, args)
        trainer = RewardTrainer(run.model, args, **rows_of(run, evaluation), peft_config=run.adapters("SEQ_CLS"))
    return train("reward", trainer, run, f"Score with it: trimtab grpo --reward {args.output_dir}")


def dpo(argv: Sequence[str]) -> int:
    """Learning from preferences."""
    kinds = RunConfig, EvaluationConfig, DPOConfig
    run, evaluation, args = settings("dpo", argv, *kinds, about=DPO, recipe=defaults("dpo"))
    with errors_in_one_line("dpo"):
        begin(run, args)
        trainer = DPOTrainer(run.model, args=args, **rows_of(run, evaluation), peft_config=run.adapters())
    return train("dpo", trainer, run, chat_with(args.output_dir, run))


def grpo(argv: Sequence[str]) -> int:
    """Learning from rewards, relative to the group."""
    kinds = RunConfig, EvaluationConfig, RewardsConfig, GRPOConfig
    run, evaluation, rewards, args = settings("grpo", argv, *kinds, about=GRPO, recipe=defaults("grpo"))
    with errors_in_one_line("grpo"):
        begin(run, args)
        data = rows_of(run, evaluation)
        trainer = GRPOTrainer(run.model, rewards.functions(), args, **data, peft_config=run.adapters())
    return train("grpo", trainer, run, chat_with(args.output_dir, run))


def begin(run: RunConfig, args: TrainerConfig) -> None:
    """Seed the random numbers, and say how the trainer loads the model."""
    set_seed(args.seed)
    args.model_init_kwargs = run.init_kwargs(args.model_init_kwargs)


class Rows(TypedDict):
    """The datasets of a trainer."""

    train_dataset: Dataset
    eval_dataset: Dataset | None


def rows_of(run: RunConfig, evaluation: EvaluationConfig) -> Rows:
    """The rows to train and to evaluate on."""
    held_out = None if evaluation.eval_split is None else run.rows(evaluation.eval_split)
    return Rows(train_dataset=run.rows(), eval_dataset=held_out)


def train(name: str, trainer: Trainer, run: RunConfig, use: str) -> int:
    """Train, evaluate, and save the model with its tokenizer; the last line says where.

    Args:
        name: the subcommand's name.
        trainer: on transformers.Trainer.
        run: the settings of the subcommand.
        use: how one uses the model.
    """
    with errors_in_one_line(name, (CheckpointError,)):
        trainer.train(checkpoint_of(run, trainer.args))
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    return finish(trainer, use)


def ppo(argv: Sequence[str]) -> int:
    """PPO with a value head."""
    kinds = RunConfig, RewardsConfig, CompletionsConfig, PPOConfig
    logs = {"exp_name": "ppo", "log_with": tracker(), "tracker_project_name": "trimtab"}
    recipe = {"output_dir": "runs/ppo", "remove_unused_columns": False, **logs}
    run, rewards, completions, config = settings("ppo", argv, *kinds, about=PPO, recipe=recipe, without=DOUBLES)
    with errors_in_one_line("ppo"):
        set_seed(config.seed)
        scorers = rewards.functions()
        seq2seq, causal = AutoModelForSeq2SeqLMWithValueHead, AutoModelForCausalLMWithValueHead
        kind = seq2seq if run.is_encoder_decoder else causal
        model = kind.from_pretrained(run.model, **run.init_kwargs(None), peft_config=run.adapters())
        tokenizer = AutoTokenizer.from_pretrained(run.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        trainer = PPOTrainer(config, model, tokenizer=tokenizer, dataset=run.rows())
    is_main = trainer.accelerator.is_main_process

    def report(step: int, stats: Mapping[str, float], batch: object) -> None:
        if is_main:
            score, kl = stats["env/reward_mean"], stats["objective/kl"]
            print(f"step {step} of {config.steps}: reward {score:.4g}, KL {kl:.3g} nats", flush=True)

    sampling = {"max_new_tokens": completions.max_new_tokens}
    with errors_in_one_line("ppo", (CheckpointError,)):
        trainer.train(scorers, generation_kwargs=sampling, resume_from=run.resume_from, on_step=report)
    trainer.save_pretrained(config.output_dir)
    if is_main:
        print(f"The model is in {config.output_dir}. {chat_with(config.output_dir, run)}")
    return 0
