"""DPO on sentiment (Rafailov et al. 2023, arXiv:2305.18290, section 6.1). What you should see: README.md."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from trimtab_common.config import parse_config
from trimtab_lm.dpo import DPOConfig, DPOTrainer
from trimtab_lm.packing import TokenGroup, lay_out, sum_per_sequence, token_columns

# The file is run by its path, from anywhere; the experiments are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.assets import openings, stories15m
from experiments.runs import begin, changed, finish, run_folder, sampled, show
from experiments.sentiment import sentiment

PAPER = "rafailov_2023_dpo_frontier"
PANELS = {
    "accuracy of the implicit reward": ["rewards/accuracies"],
    "implicit reward": ["rewards/chosen", "rewards/rejected"],
    "loss": ["loss"],
}


@dataclass(frozen=True)
class RunConfig:
    """What samples, and how much."""

    model: str = field(
        default="stories15m", metadata={"help": "Hub id or folder of a causal model; stories15m is downloaded."}
    )
    prompts: int = field(default=512, metadata={"help": "Openings that are continued to make pairs."})
    per_prompt: int = field(
        default=4, metadata={"help": "Continuations of each; the most positive is preferred to the least."}
    )
    max_new_tokens: int = field(default=24, metadata={"help": "Tokens of a continuation at most."})
    eval_prompts: int = field(default=128, metadata={"help": "Other openings, for reward and KL before and after."})
    samples: int = field(default=5, metadata={"help": "Of them, how many are shown."})


@dataclass
class SentimentDPOConfig(DPOConfig):
    """DPO with this experiment's defaults: a few minutes on two cores."""

    output_dir: str | None = run_folder(PAPER)
    report_to: None | str | list[str] = changed(DPOConfig, "report_to", "wandb")  # noqa: RUF036
    run_name: str | None = changed(DPOConfig, "run_name", "dpo")
    save_strategy: str = changed(DPOConfig, "save_strategy", "no")
    logging_steps: float = changed(DPOConfig, "logging_steps", 4)
    num_train_epochs: float = changed(DPOConfig, "num_train_epochs", 2)
    per_device_train_batch_size: int = changed(DPOConfig, "per_device_train_batch_size", 16)
    learning_rate: float = changed(DPOConfig, "learning_rate", 5e-5)
    warmup_steps: float = changed(DPOConfig, "warmup_steps", 8)
    beta: float = changed(DPOConfig, "beta", 0.1)


def labelled(prompts: Sequence[str], answers: Sequence[str], per_prompt: int) -> Dataset:
    """The most positive of each prompt's `per_prompt` answers as chosen and the least as rejected.

    Ties are left out, and so are answers without a word: the model has ended its text at the prompt.
    """
    rewards = sentiment(answers)
    rows = []
    for i, prompt in enumerate(prompts):
        written = [j for j in range(i * per_prompt, (i + 1) * per_prompt) if answers[j].strip()]
        ranked = sorted(written, key=lambda j: rewards[j])
        if ranked and rewards[ranked[-1]] > rewards[ranked[0]]:
            rows.append({"prompt": prompt, "chosen": answers[ranked[-1]], "rejected": answers[ranked[0]]})
    return Dataset.from_list(rows)


@torch.no_grad()
def kl_of_samples(trainer: DPOTrainer, prompts: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]) -> float:
    """Mean over sampled answers of log pi(answer) - log ref(answer): an estimate of the KL, in nats per response."""
    pad = trainer.padding_value
    groups = [TokenGroup(prompt.tolist(), [answer.tolist()], [[1] * len(answer)])
              for prompt, answer in zip(prompts, answers, strict=True)]  # fmt: skip
    batch = {name: x.to(trainer.args.device) for name, x in lay_out(groups, "padded", pad_token_id=pad).items()}

    def logps(model: torch.nn.Module) -> torch.Tensor:
        return sum_per_sequence(model(tokens=token_columns(batch)).logprobs, batch["sequence"], len(groups))

    policy = logps(trainer.model.eval())
    with trainer.reference.active() as reference:
        return float((policy - logps(reference)).mean())


def answers_of(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], run: RunConfig, *, seed: int
) -> tuple[list[torch.Tensor], list[str]]:
    """Continuations as tokens, and as texts with the space that stands before them."""
    rows = sampled(model, tokenizer, prompts, max_new_tokens=run.max_new_tokens, seed=seed)
    whole = [torch.cat([torch.tensor(tokenizer(prompt)["input_ids"]), row])
             for prompt, row in zip(prompts, rows, strict=True)]  # fmt: skip
    decoded = tokenizer.batch_decode(whole, skip_special_tokens=True)
    return rows, [text.removeprefix(prompt) for prompt, text in zip(prompts, decoded, strict=True)]


def main(run: RunConfig, dpo: DPOConfig) -> None:
    """Sample pairs, learn from them, and print reward and KL of other prompts, before and after."""
    history = begin(PAPER, run, dpo)
    name = str(stories15m()) if run.model == "stories15m" else run.model
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    queries = openings()
    held_out, queries = queries[: run.eval_prompts], queries[run.eval_prompts :][: run.prompts]
    repeated = [query for query in queries for _ in range(run.per_prompt)]
    _, written = answers_of(model.to(dpo.device), tokenizer, repeated, run, seed=dpo.seed + 1)
    train = labelled(queries, written, run.per_prompt)
    trainer = DPOTrainer(model, None, dpo, train_dataset=train, processing_class=tokenizer, callbacks=[history])
    is_main = trainer.is_world_process_zero()
    if is_main:
        print(f"{len(train)} pairs out of {len(repeated)} continuations")

    def look(stage: str) -> tuple[float, float]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        rows, answers = answers_of(model, tokenizer, held_out, run, seed=dpo.seed)
        if is_main:
            show(f"{stage} training", held_out[: run.samples], [" ".join(a.split()) for a in answers[: run.samples]])
        prompts = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in held_out]
        return fmean(sentiment(answers)), kl_of_samples(trainer, prompts, rows)

    before, _ = look("before")
    trainer.train(resume_from_checkpoint=dpo.resume_from_checkpoint)
    after, kl = look("after")
    if is_main:
        print(f"reward of {len(held_out)} other prompts: {before:+.3f} -> {after:+.3f}   ", end="")
        print(f"more positive: {'yes' if after > before else 'NO'}\nKL to the reference: {kl:.2f} nats per response")
    summary = {"reward_before": before, "reward": after, "kl": kl}
    finish(trainer, f"DPO: {run.model}, beta = {dpo.beta:g}", PANELS, summary)


if __name__ == "__main__":
    main(*parse_config(RunConfig, SentimentDPOConfig))
