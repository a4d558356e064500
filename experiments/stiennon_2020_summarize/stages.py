"""The stages of the pipeline (sft, comparisons, reward, ppo), each with a folder of results, and the evaluation."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict, load_from_disk
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
)

from experiments.assets import endings
from experiments.best_of import expected_best_of, kl_of_best
from experiments.evaluation import continued, kl_of_samples
from experiments.run_folders import append, from_recipe, numbers_in, read_history
from experiments.samples import first_and_worst
from experiments.stiennon_2020_summarize import reward as reward_stage
from experiments.stiennon_2020_summarize import sft as sft_stage
from experiments.stiennon_2020_summarize.comparisons import Gold, compared, splits
from experiments.stiennon_2020_summarize.settings import RunConfig
from trimtab_common.sealing import latest_checkpoint
from trimtab_common.tracking import Tracker
from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trimtab_lm.iterative_sft import BestOfNSampler
from trimtab_lm.reward import RewardConfig, RewardTrainer
from trimtab_lm.rewards.model import RewardModel
from trimtab_lm.sft import SFTConfig, SFTTrainer

REFERENCES = 256  # human answers; the reward model's scores are shifted so that their mean is 0
LOOKS = 2  # answers that PPO's policy samples for each prompt of the evaluation
RESULT = "result.json"
Proxy = Callable[[Sequence[str]], list[float]]
"""proxy(texts of prompt and answer) -> the reward model's scores."""


class Record:
    """Writes rows to history.jsonl and to the tracker of the whole pipeline; each row is a step."""

    def __init__(self, folder: Path, tracker: Tracker, *, goes_on: bool):
        self.folder, self.tracker = folder, tracker
        self.step = max((row["step"] for row in read_history(folder)), default=0) if goes_on else 0

    def log(self, row: Mapping[str, float]) -> None:
        self.step += 1
        append(self.folder, {"step": self.step, **row})
        self.tracker.log(row, self.step)

    def table(self, name: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Logs a table of samples: heading -> cells [N]."""
        self.tracker.table(name, list(columns), zip(*columns.values(), strict=True), self.step)


class Logged(TrainerCallback):
    """Passes the logs of a stage's trainer to the record, with the stage's name before each key."""

    def __init__(self, record: Record, stage: str):
        self.record, self.stage = record, stage

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        self.record.log({f"{self.stage}/{name}": value for name, value in logs.items()})


@dataclass(frozen=True)
class Data:
    """Datasets with the columns prompt and completion: for SFT, for comparisons and PPO, and held out."""

    sft: Dataset
    policy: Dataset
    held_out: Dataset


def read_data(run: RunConfig, seed: int) -> Data:
    """Reads the texts and splits them, so that comparisons and PPO use prompts that SFT has not seen."""
    if run.dataset is None:
        train, held_out = (texts_of(endings(split)) for split in ("train", run.eval_split))
    else:
        train, held_out = splits(run.dataset, ["prompt", "completion"])
    train = train.shuffle(seed=seed)
    if not run.sft_steps:
        return Data(train.select([]), train, held_out)
    halves = train.train_test_split(test_size=0.5, shuffle=False)
    return Data(halves["train"], halves["test"], held_out)


def texts_of(completions: Mapping[str, str]) -> Dataset:
    """A dataset with the columns prompt and completion."""
    return Dataset.from_dict({"prompt": [*completions], "completion": [*completions.values()]})


def fine_tune(name: str, run: RunConfig, data: Data, record: Record, *, seed: int, folder: Path) -> None:
    """Stage 1: trains on the human completions by maximum likelihood; with no steps it copies the model."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    if not run.sft_steps:
        AutoModelForCausalLM.from_pretrained(name).save_pretrained(folder)
        return
    (args,) = from_recipe(
        sft_stage.RECIPE,
        SFTConfig,
        argv=[],
        output_dir=str(folder),
        report_to="none",
        seed=seed,
        max_steps=run.sft_steps,
        max_length=run.max_length,
        per_device_train_batch_size=run.sft_batch_size,
        learning_rate=run.sft_learning_rate,
    )
    held_out = data.held_out.select(range(min(run.eval_prompts, len(data.held_out))))
    callbacks = [Logged(record, "sft")]
    trainer = SFTTrainer(
        name, args=args, train_dataset=data.sft, eval_dataset=held_out, processing_class=tokenizer, callbacks=callbacks
    )
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    trainer.model.save_pretrained(folder)


def compare(sft: Path, run: RunConfig, data: Data, gold: Gold, record: Record, *, seed: int, folder: Path) -> None:
    """Stage 2: collects training comparisons, with the labeller's noise, and test comparisons, without noise."""
    if run.preferences is not None:
        train, test = splits(run.preferences, ["prompt", "chosen", "rejected"])
        train = train.shuffle(seed=seed)
    else:
        model, tokenizer = load(sft)
        most = max(run.comparisons)
        # A few prompts more than needed: pairs of equal or empty answers are left out.
        prompts = data.policy["prompt"][: most + most // 8 + 8]
        train = sampled_pairs(model, tokenizer, prompts, run, gold, run.label_temperature, seed)
        others = data.held_out["prompt"][run.eval_prompts :][: run.eval_comparisons]
        test = sampled_pairs(model, tokenizer, others, run, gold, 0.0, seed)
        test = test.filter(lambda row: row["gold_chosen"] != row["gold_rejected"])
        right = [
            row["gold_chosen"] > row["gold_rejected"] for row in train if row["gold_chosen"] != row["gold_rejected"]
        ]
        record.log({"comparisons/agreement": fmean(right), "comparisons/told_apart": len(right) / len(train)})
    if len(train) < max(run.comparisons) or not len(test):
        raise ValueError(
            f"comparisons={run.comparisons} and eval_comparisons={run.eval_comparisons} need more "
            f"comparisons than the {len(train)} for training and {len(test)} for evaluation that exist. Lower them, or "
            "give more prompts (dataset)."
        )
    test = test.select(range(min(run.eval_comparisons, len(test))))
    record.table("comparisons", train.select(range(min(run.samples, len(train)))).to_dict())
    DatasetDict({"train": train, "test": test}).save_to_disk(folder)


def sampled_pairs(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    run: RunConfig,
    gold: Gold,
    temperature: float,
    seed: int,
) -> Dataset:
    """Samples two answers of the model to each prompt, and lets the labeller choose between them."""
    if not prompts:
        return compared([], [], [], temperature=temperature, seed=seed)
    twice = [*prompts, *prompts]
    _, answers = continued(model, tokenizer, twice, max_new_tokens=run.max_new_tokens, seed=seed)
    golds = list(gold(twice, answers))
    count = len(prompts)
    pairs, scores = (list(zip(cells[:count], cells[count:], strict=True)) for cells in (answers, golds))
    return compared(prompts, pairs, scores, temperature=temperature, seed=seed)


def learn_rewards(
    sft: Path, pairs: Path, run: RunConfig, data: Data, record: Record, *, seed: int, folder: Path
) -> None:
    """Stage 3: trains a reward model for each number of comparisons; keeps the one of the largest number.

    Each starts from the fine-tuned model. The scores of the kept one are shifted so that human answers score 0 on
    average, as in the paper.
    """
    comparisons = load_from_disk(pairs)
    accuracies = {}
    for count in sorted(run.comparisons):
        (args,) = from_recipe(
            reward_stage.RECIPE,
            RewardConfig,
            argv=[],
            output_dir=str(folder),
            report_to="none",
            seed=seed,
            max_steps=-1,
            num_train_epochs=run.reward_epochs,
            per_device_train_batch_size=run.reward_batch_size,
            per_device_eval_batch_size=run.reward_batch_size,
            learning_rate=run.reward_learning_rate,
            warmup_steps=0.1,  # share of the steps: few comparisons make few steps
            init_reward_head=False,  # transformers' initialization is smaller: scores start close together
            max_length=run.max_length,
        )
        tokenizer = AutoTokenizer.from_pretrained(sft)
        train = comparisons["train"].select_columns(["prompt", "chosen", "rejected"]).select(range(count))
        test = comparisons["test"].select_columns(["prompt", "chosen", "rejected"])
        callbacks = [Logged(record, f"reward_{count}")]
        trainer = RewardTrainer(
            str(sft), args, train_dataset=train, eval_dataset=test, processing_class=tokenizer, callbacks=callbacks
        )
        trainer.train()
        accuracies[count] = trainer.evaluate()["eval_accuracy"]
        record.log({"reward/comparisons": count, "reward/accuracy": accuracies[count]})
    trainer.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    references = data.policy.select(range(min(REFERENCES, len(data.policy))))
    texts = [row["prompt"] + row["completion"] for row in references]
    result = {f"accuracy_{count}": accuracy for count, accuracy in accuracies.items()}
    result["shift"] = fmean(raw_proxy(folder)(texts))
    (folder / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def raw_proxy(reward: Path) -> Proxy:
    """Loads the reward model of a folder."""
    return RewardModel(str(reward), batch_size=64, device=PartialState().device).score


def normalised_proxy(reward: Path) -> Proxy:
    """Loads the reward model of a folder; subtracts the mean score of human answers from its scores."""
    raw, shift = raw_proxy(reward), reward_result(reward)["shift"]
    return lambda texts: [score - shift for score in raw(texts)]


def reward_result(reward: Path) -> dict[str, float]:
    """Reads accuracy_<comparisons> of each reward model, and the shift."""
    return json.loads((reward / RESULT).read_text(encoding="utf-8"))


def load(folder: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """Loads a causal model in eval mode, on the device, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder).to(PartialState().device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def optimise(
    sft: Path, reward: Path, run: RunConfig, ppo: PPOConfig, data: Data, gold: Gold, record: Record, *, folder: Path
) -> None:
    """Stage 4: trains the fine-tuned model by PPO on the reward model, which also initializes the value function.

    The KL coefficient is that of `ppo`.
    """
    tokenizer = AutoTokenizer.from_pretrained(sft)
    proxy = normalised_proxy(reward)
    queries = data.policy["prompt"][:]
    prompts = [
        {"query": prompt, "input_ids": ids}
        for prompt, ids in zip(queries, tokenizer(queries)["input_ids"], strict=True)
        if len(ids) + run.max_new_tokens <= run.max_length
    ]
    trainer = PPOTrainer(
        replace(ppo, log_with=None),  # the pipeline's tracker is the only one
        AutoModelForCausalLMWithValueHead.from_pretrained(sft),
        tokenizer=tokenizer,
        dataset=Dataset.from_list(prompts),
        value_model=AutoModelForSequenceClassification.from_pretrained(reward),
    )
    head = trainer.accelerator.unwrap_model(trainer.actor_critic).critic.v_head
    torch.nn.init.constant_(head.summary.bias, -reward_result(reward)["shift"])  # values are of normalised scores
    checkpoints = folder.parent / f"{policy_name(ppo.init_kl_coef)}-checkpoints"
    if run.resume and (latest := latest_checkpoint(checkpoints)):
        trainer.load_checkpoint(latest)
    batches = chain.from_iterable(repeat(trainer.dataloader))
    for batch in islice(batches, ppo.steps - trainer.steps_done):
        queries = batch["input_ids"]
        settings = {"batch_size": ppo.batch_size, "max_new_tokens": run.max_new_tokens, "do_sample": True}
        responses = trainer.generate(queries, return_prompt=False, **settings)
        # Decode prompt and answer together: some tokenizers drop the leading space of an answer alone.
        texts = tokenizer.batch_decode(
            [torch.cat(row) for row in zip(queries, responses, strict=True)], skip_special_tokens=True
        )
        answers = [text.removeprefix(query) for query, text in zip(batch["query"], texts, strict=True)]
        stats = trainer.step(queries, responses, proxy(texts))
        numbers = numbers_in(stats)
        numbers |= {"ppo/step": trainer.steps_done, "ppo/gold": fmean(gold(batch["query"], answers))}
        numbers |= {"ppo/coefficient": ppo.init_kl_coef}
        record.log(numbers)
        if trainer.steps_done in (1, ppo.steps) or trainer.steps_done % 5 == 0:
            print(
                f"PPO step {trainer.steps_done:4d}/{ppo.steps}   reward {stats['ppo/mean_scores']:+.3f}   "
                f"gold {numbers['ppo/gold']:+.3f}   KL {stats['objective/kl']:6.2f} nats",
                flush=True,
            )
        if ppo.save_steps and trainer.steps_done % ppo.save_steps == 0:
            trainer.save_checkpoint(checkpoints)
    trainer.model.pretrained_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ranked_samples(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], proxy: Proxy, run: RunConfig, *, seed: int
) -> tuple[list[list[str]], list[list[float]]]:
    """Samples max(best_of) answers to each prompt; returns them by descending proxy score, with these scores."""
    scores: dict[str, float] = {}

    def recorded(texts: Sequence[str]) -> list[float]:
        new_scores = proxy(texts)
        scores.update(zip(texts, new_scores, strict=True))
        return new_scores

    most = max(run.best_of)
    sampler = BestOfNSampler(
        model, tokenizer, recorded, lambda: run.max_new_tokens, sample_size=most, seed=seed, n_candidates=most
    )
    texts = sampler.generate([torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in prompts])
    answers = [[text.removeprefix(prompt) for text in row] for prompt, row in zip(prompts, texts, strict=True)]
    return answers, [[scores[text] for text in row] for row in texts]


def policy_name(coefficient: float) -> str:
    """The name of PPO's policy, in summaries and as a folder."""
    return f"ppo_{coefficient:g}"


def evaluate(
    sft: Path, reward: Path, root: Path, run: RunConfig, data: Data, gold: Gold, *, seed: int
) -> tuple[dict[str, float], dict[str, list[float]], dict[str, list[Any]]]:
    """Measures gold, proxy and KL of each policy on held-out prompts.

    Returns:
        The summary; gold for each prompt, by the name of the policy; and samples, heading -> cells.
    """
    proxy, (before, tokenizer) = normalised_proxy(reward), load(sft)
    held_out = data.held_out.select(range(min(run.eval_prompts, len(data.held_out))))
    prompts, written = held_out["prompt"][:], held_out["completion"][:]
    per_prompt: dict[str, list[float]] = {}
    summary = {name: value for name, value in reward_result(reward).items() if name.startswith("accuracy")}
    summary["gold_reference"] = fmean(gold(prompts, written))

    ranked, proxies = ranked_samples(before, tokenizer, prompts, proxy, run, seed=seed)
    golds = [list(gold([prompt] * len(row), row)) for prompt, row in zip(prompts, ranked, strict=True)]
    for n in sorted({1, *run.best_of}):
        name = "sft" if n == 1 else f"best_of_{n}"
        per_prompt[f"gold_{name}"] = [expected_best_of(row, n) for row in golds]
        summary[f"gold_{name}"] = fmean(per_prompt[f"gold_{name}"])
        summary[f"proxy_{name}"] = fmean(expected_best_of(row, n) for row in proxies)
        summary[f"kl_{name}"] = kl_of_best(n)

    rng = random.Random(seed)
    samples: dict[str, list[Any]] = {
        "prompt": prompts,
        "its writer": written,
        "fine-tuned": [rng.choice(row) for row in ranked],
        f"best of {max(run.best_of)}": [row[0] for row in ranked],
    }
    repeated = prompts * LOOKS
    ids = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in repeated]
    for name in map(policy_name, run.kl_coefs):
        after, _ = load(root / name)
        rows, answers = continued(after, tokenizer, repeated, max_new_tokens=run.max_new_tokens, seed=seed)
        scores = list(gold(repeated, answers))
        per_prompt[f"gold_{name}"] = [fmean(scores[i :: len(prompts)]) for i in range(len(prompts))]
        summary[f"gold_{name}"] = fmean(scores)
        texts = [prompt + answer for prompt, answer in zip(repeated, answers, strict=True)]
        summary[f"proxy_{name}"] = fmean(proxy(texts))
        summary[f"kl_{name}"] = kl_of_samples(after, before, ids, rows)
        samples[f"PPO, {name.removeprefix('ppo_')}"] = answers[: len(prompts)]
        samples[f"gold of PPO, {name.removeprefix('ppo_')}"] = scores[: len(prompts)]
    shown = first_and_worst(scores[: len(prompts)], run.samples)  # of the last policy
    return summary, per_prompt, {heading: [cells[i] for i in shown] for heading, cells in samples.items()}
