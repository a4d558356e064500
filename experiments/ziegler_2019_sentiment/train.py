"""PPO towards positive continuations (Ziegler et al. 2019, arXiv:1909.08593). Claim, cost and numbers: README.md."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trimtab_common.config import parse_config, to_flat_dict
from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed

# The file is run by its path, from anywhere; the experiments are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.assets import openings, stories15m
from experiments.ziegler_2019_sentiment.report import read_history, summarize, write_report
from experiments.ziegler_2019_sentiment.reward import sentiment


@dataclass(frozen=True)
class RunConfig:
    """What this experiment adds to PPO's own settings."""

    model: str = field(
        default="stories15m",
        metadata={"help": "Hub id or folder of a causal model; stories15m is downloaded."},
    )
    max_new_tokens: int = field(default=24, metadata={"help": "Tokens of a continuation at most."})
    samples: int = field(default=6, metadata={"help": "Continuations shown before and after training."})
    resume_from: str | None = field(
        default=None,
        metadata={"help": "Checkpoint folder to go on from, or 'latest' (needs output_dir, save_steps)."},
    )


def _default(name: str, value: Any) -> Any:
    (known,) = (known for known in fields(PPOConfig) if known.name == name)
    return field(default=value, metadata=known.metadata)


def _run_folder() -> str:
    # A sweep agent names its runs by this variable; their folders must not collide.
    return str(Path("runs", "ziegler_2019_sentiment", os.environ.get("WANDB_RUN_ID", "")))


@dataclass(frozen=True)
class SentimentPPOConfig(PPOConfig):
    """PPO with this experiment's defaults: a few minutes on two cores."""

    exp_name: str = _default("exp_name", "ziegler_2019_sentiment")
    tracker_project_name: str = _default("tracker_project_name", "ziegler_2019_sentiment")
    log_with: str | None = _default("log_with", "wandb")
    output_dir: str | None = field(
        default_factory=_run_folder, metadata={"help": "Folder of history.jsonl, report.png and checkpoints."}
    )
    steps: int = _default("steps", 50)
    batch_size: int = _default("batch_size", 32)
    mini_batch_size: int = _default("mini_batch_size", 16)
    gradient_accumulation_steps: int = _default("gradient_accumulation_steps", 2)
    ppo_epochs: int = _default("ppo_epochs", 2)
    learning_rate: float = _default("learning_rate", 2e-5)
    max_grad_norm: float | None = _default("max_grad_norm", 1.0)
    init_kl_coef: float | None = _default("init_kl_coef", 0.1)
    target: float | None = _default("target", 8.0)
    horizon: float | None = _default("horizon", 160.0)


def prompts(tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Openings of sentences from children's books, as the policy's queries."""
    queries = openings()
    return Dataset.from_dict({"query": queries, "input_ids": tokenizer(queries)["input_ids"]})


def continuations(trainer: PPOTrainer, queries: Sequence[str], run: RunConfig) -> list[str]:
    """What the policy makes of `queries` now, with the same random numbers at every call and none of the trainer's."""
    model, tokenizer = trainer.model.pretrained_model, trainer.tokenizer
    batch = tokenizer(list(queries), return_tensors="pt", padding=True, padding_side="left").to(model.device)
    with torch.random.fork_rng():
        torch.manual_seed(trainer.config.seed)
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=True,
            top_k=0,
            max_new_tokens=run.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def main(run: RunConfig, ppo: PPOConfig) -> None:
    """Train, and leave history.jsonl, config.json and report.png in the output folder."""
    set_seed(ppo.seed)
    name = str(stories15m()) if run.model == "stories15m" else run.model
    # This model's hidden states are large: a random head would start with values five times the largest reward.
    model = AutoModelForCausalLMWithValueHead.from_pretrained(name, v_head_init_strategy="zero")
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dataset = prompts(tokenizer)
    ppo = replace(ppo, model_name=run.model)  # for the tracker's config
    trainer = PPOTrainer(ppo, model, tokenizer=tokenizer, dataset=dataset)
    is_main = trainer.accelerator.is_main_process

    folder = Path(ppo.output_dir or _run_folder())
    if is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(to_flat_dict(run, ppo), indent=2) + "\n", encoding="utf-8")
    shown = dataset["query"][: run.samples]
    before = continuations(trainer, shown, run)
    if is_main:
        print_samples("before training", shown, before)

    history = folder / "history.jsonl"
    if is_main and not run.resume_from:
        history.unlink(missing_ok=True)

    def on_step(step: int, stats: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        if not is_main:
            return
        with history.open("a", encoding="utf-8") as file:
            numbers = {key: value for key, value in stats.items() if isinstance(value, int | float)}
            file.write(json.dumps({"step": step} | numbers) + "\n")
        if step == 1 or step % 5 == 0:
            tqdm.write(
                f"step {step:4d}/{ppo.steps}   reward {stats['ppo/mean_scores']:+.3f}   "
                f"KL {stats['objective/kl']:6.2f} nats   coefficient {stats['objective/kl_coef']:.3f}"
            )

    trainer.train(
        lambda queries, responses, **columns: sentiment(responses),
        generation_kwargs={"max_new_tokens": run.max_new_tokens},
        resume_from=run.resume_from,
        on_step=on_step,
    )

    after = continuations(trainer, shown, run)
    if not is_main:
        return
    print_samples("after training", shown, after)
    summary = summarize(read_history(history), target=ppo.target if ppo.adap_kl_ctrl else None)
    with trainer.tracker as tracker:
        for stage, texts in (("before", before), ("after", after)):
            rows = zip([stage] * len(texts), shown, texts, sentiment(texts), strict=True)
            tracker.table("samples", ["stage", "query", "response", "reward"], rows, trainer.steps_done)
        tracker.finish(summary.numbers())
    print(f"\n{summary}\nfigure: {write_report(folder)}")


def print_samples(title: str, queries: Sequence[str], responses: Sequence[str]) -> None:
    """Show continuations with their rewards, the query set apart from what the model wrote."""
    print(f"\n{title}\n{'-' * len(title)}")
    for query, response, score in zip(queries, responses, sentiment(responses), strict=True):
        print(f"{score:+.2f}  [{query}] {' '.join(response.split())}")
    print(flush=True)


if __name__ == "__main__":
    main(*parse_config(RunConfig, SentimentPPOConfig))
