"""`trimtab sft`, `reward`, `dpo`, `kto`, `grpo` and `ppo`: a trainer on a dataset, by flags and a file."""

from collections.abc import Callable, Sequence
from typing import Any

from trimtab_common.seeding import set_seed
from trimtab_lm import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trimtab_lm.hf.adapter import TrainerAdapter

from .subcommands import (
    DURING_TRAINING,
    EVERYDAY,
    CompletionsConfig,
    EvaluationConfig,
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
    tracker,
)

SFT = f"""Supervised fine-tuning. The dataset has a column `text`, or `messages`, or `prompt` and `completion`.

  trimtab sft --model gpt2 --dataset texts.jsonl --max_length 512 --num_train_epochs 1
{EVERYDAY}"""
REWARD = f"""A reward model. The dataset has the columns `prompt`, `chosen` and `rejected`.

  trimtab reward --model gpt2 --dataset pairs.jsonl --split "train[:90%]" --eval_split "train[90%:]"
{EVERYDAY}"""
DPO = f"""Learning from preferences. The dataset has the columns `prompt`, `chosen` and `rejected`.

  trimtab dpo --model my-sft-model --dataset pairs.jsonl --beta 0.1 --learning_rate 1e-6
{EVERYDAY}"""
KTO = f"""Learning from answers that are desirable or not. The dataset has the columns `prompt`, `completion` and
`label`, true where the completion is desirable. Pairs (`prompt`, `chosen`, `rejected`) become two rows each.

  trimtab kto --model my-sft-model --dataset answers.jsonl --beta 0.1 --learning_rate 1e-6
{EVERYDAY}"""
GRPO = f"""Learning from rewards, relative to the other completions of a prompt. The dataset has a column `prompt`; a
reward function gets the others by their names.

  trimtab grpo --model my-sft-model --dataset prompts.jsonl --reward rewards.py:right
{EVERYDAY}"""
PPO = """Learning from rewards with a value head. The dataset has a column `query` or `prompt`; a reward function gets
the others by their names.

  trimtab ppo --model my-sft-model --dataset prompts.jsonl --reward rewards.py:right --steps 200

Another default: in a sweep log_with is wandb."""
DOUBLES = ("model_name", "query_dataset", "reward_model")
"""Fields of PPOConfig that `trimtab ppo` calls model, dataset and reward."""


def train(
    name: str,
    about: str,
    kind: Callable[..., TrainerAdapter[Any, Any]],
    *configs: type,
    argv: Sequence[str],
    task: str | None = None,
) -> int:
    """Train on transformers.Trainer, evaluate, and save the model with its tokenizer; the last line says where.

    Args:
        kind: makes the trainer of the model, the reward functions if there are any, its config and the data.
        configs: the classes of its settings besides the model and the data, that of the trainer at the end.
        task: PEFT's name of what the model does; None: it writes texts.
    """
    recipe = defaults(name)
    run, evaluation, *rewards, args = settings(
        name, argv, RunConfig, EvaluationConfig, *configs, about=about, recipe=recipe
    )
    with errors_in_one_line(name):
        set_seed(args.seed)
        args.model_init_kwargs = run.init_kwargs(args.model_init_kwargs)
        held_out = evaluation.rows(run)
        data = {"train_dataset": run.rows(), "eval_dataset": held_out}
        functions = [each.functions() for each in rewards]
        options = {"processing_class": run.tokenizer} if run.chat_template else {}
        trainer = kind(run.model, *functions, args=args, **data, peft_config=run.adapters(task), **options)
        trainer.about = {**trainer.about, **about_run(run)}
    with errors_in_one_line(name, DURING_TRAINING):
        trainer.train(checkpoint_of(run, args))
    if held_out is not None:
        trainer.evaluate()
    use = f"Score with it: trimtab grpo --reward {args.output_dir}" if task else chat_with(args.output_dir, run)
    return finish(trainer, use)


def sft(argv: Sequence[str]) -> int:
    """Supervised fine-tuning."""
    return train("sft", SFT, SFTTrainer, SFTConfig, argv=argv)


def reward(argv: Sequence[str]) -> int:
    """A reward model."""
    return train("reward", REWARD, RewardTrainer, RewardConfig, argv=argv, task="SEQ_CLS")


def dpo(argv: Sequence[str]) -> int:
    """Learning from preferences."""
    return train("dpo", DPO, DPOTrainer, DPOConfig, argv=argv)


def kto(argv: Sequence[str]) -> int:
    """Learning from answers that are labelled desirable or undesirable."""
    return train("kto", KTO, KTOTrainer, KTOConfig, argv=argv)


def grpo(argv: Sequence[str]) -> int:
    """Learning from rewards, relative to the group."""
    return train("grpo", GRPO, GRPOTrainer, RewardsConfig, GRPOConfig, argv=argv)


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
        options = {"v_head_init_strategy": "zero", **run.init_kwargs(config.model_init_kwargs)}
        config.model_init_kwargs = {}  # the trainer gets the model
        model = kind.from_pretrained(run.model, **options, peft_config=run.adapters())
        tokenizer = run.tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        trainer = PPOTrainer(config, model, tokenizer=tokenizer, dataset=run.rows())
        trainer.run.about = about_run(run)
        prompts, new = trainer.dataset["input_ids"], completions.max_new_tokens
        check_room(model.pretrained_model, prompts, new, is_encoder_decoder=run.is_encoder_decoder)
    sampling = {"max_new_tokens": new}
    with errors_in_one_line("ppo", DURING_TRAINING):
        trainer.train(scorers, generation_kwargs=sampling, resume_from=run.resume_from)
    trainer.save_pretrained(config.output_dir)
    if trainer.accelerator.is_main_process:
        print(f"The model is in {config.output_dir}. {chat_with(config.output_dir, run)}")
    return 0
