"""Measures how much each sampling or mask trick speeds up a whole step: time without it / time with it.

    python -m tools.bench.ablation                          every case; writes ablation.json
    python -m tools.bench.ablation --only grpo --rounds 3   these cases

The trainers of a case take turns in one process. The first has all tricks, each other lacks one. A round is one step of
each trainer; a ratio divides a trainer's processor time by that of the first trainer in the same round.
"""

import argparse
import contextlib
import inspect
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from tools.bench.environments import FOLDER
from tools.bench.measuring import Clock
from tools.bench.models import load, text, tokenizer, write_language_models
from tools.bench.sizes import SIZES, Size, token_ids
from tools.bench.tasks import dpo, pairs, ppo
from tools.bench.tasks.training import shared_arguments
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, TrainerCallback

from trimtab_lm.tokens import forward

RECORD = Path(__file__).with_name("ablation.json")
LM = "trimtab_lm"
Patches = dict[str, object]


INVERSION: Patches = {"sampling.fast.loop.LARGE_VOCABULARY": 10**9}
LEAVING: Patches = {"sampling.fast.loop.LEAVE": 0.0}
LOOP: Patches = {"sampling.generate.loop_for": lambda *_, **__: None}


def agrees_without_groups(model: Any, layout: str) -> bool:
    """Makes `best_layout` choose rows of several sequences; answers other callers as usual."""
    caller = inspect.stack()[1].function
    return not (layout == "row" and caller == "best_layout") and AGREES(model, layout)


AGREES = forward._agrees
GROUPS: Patches = {
    "tokens.forward._agrees": agrees_without_groups,
    "tokens.inputs.TokenReader.runs_by_group": lambda reader, ids: False,
}
SAMPLING = {"draw_by_inversion": INVERSION, "rows leave": LEAVING, "own loop": LOOP}
MASKS = {"GroupMask": GROUPS}


@contextlib.contextmanager
def without(patches: Patches) -> Iterator[None]:
    """Runs the block with a trick's attributes replaced."""
    with contextlib.ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(patch(f"{LM}.{name}", value))
        yield


class Turns(TrainerCallback):
    """Runs a `Trainer` on a thread, one optimizer step at a time."""

    def __init__(self) -> None:
        self.mine, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.mine.acquire()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.done.release()
        self.mine.acquire()

    def step(self, make: Callable[[], Any]) -> None:
        """Runs one step of the trainer that `make` returns; calls `make` once."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._train, args=(make(),), daemon=True)
            self.thread.start()
        self.mine.release()
        self.done.acquire()
        if self.error:
            raise self.error

    def _train(self, trainer: Any) -> None:
        try:
            trainer.train()
        except BaseException as error:
            self.error = error
            self.done.release()


def trainer_step(
    algorithm: str, size: Size, settings: dict[str, Any], clock: Clock, folder: str, **arguments: Any
) -> Callable[[], None]:
    """Returns a function that runs one step of a trainer on `transformers.Trainer`."""
    import trimtab_lm

    turns = Turns()
    settings = shared_arguments(size, tempfile.mkdtemp()) | {"max_steps": 10_000} | settings
    args = getattr(trimtab_lm, f"{algorithm}Config")(**settings)  # resets accelerate's state: all before the first step

    def make() -> Any:
        is_reward = algorithm == "Reward"
        kind = LlamaForSequenceClassification if is_reward else LlamaForCausalLM
        policy = load(kind, folder, "reward" if is_reward else "policy", size)
        clock.watch(policy)
        if algorithm == "DPO":
            arguments["ref_model"] = load(LlamaForCausalLM, folder, "reference", size)
            clock.watch(arguments["ref_model"])
        trainer = getattr(trimtab_lm, f"{algorithm}Trainer")
        return trainer(
            args=args, model=policy, callbacks=[turns], processing_class=tokenizer(size.vocab_size), **arguments
        )

    return lambda: turns.step(make)


def grpo_step(size: Size, clock: Clock, folder: str, **settings: Any) -> Callable[[], None]:
    """Returns a function that runs a GRPO step on the same prompts each time."""
    prompts = [row[: max(2 * len(row) // 3, 1)] for row in token_ids(size, size.prompts, seed=20)]

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    shape = {
        "per_device_train_batch_size": size.prompts,
        "num_generations": size.group,
        "max_completion_length": size.new_tokens,
        "generation_kwargs": {"min_new_tokens": size.new_tokens},
        "shuffle_dataset": False,
    }
    rows = Dataset.from_dict({"prompt": [text(prompt) for prompt in prompts]})
    return trainer_step("GRPO", size, shape | settings, clock, folder, reward_funcs=reward, train_dataset=rows)


def ppo_step(size: Size, clock: Clock, folder: str) -> Callable[[], None]:
    """Returns a function that samples and runs a PPO step."""
    trainer = ppo.trainer_of(LM, size, {}, folder, clock)
    queries, _ = ppo.texts(size)
    tokens = dict.fromkeys(("min_new_tokens", "max_new_tokens"), size.ppo_new_tokens)

    def step() -> None:
        responses = trainer.generate(
            queries, return_prompt=False, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0, **tokens
        )
        trainer.step(queries, responses, [torch.tensor(float(len(row) % 5)) for row in responses])

    return step


def sft_step(size: Size, clock: Clock, folder: str) -> Callable[[], None]:
    """Returns a function that runs an SFT step on the same rows each time."""
    rows = Dataset.from_dict({"input_ids": token_ids(size, size.rows, seed=0)})
    return trainer_step("SFT", size, {"max_length": None}, clock, folder, train_dataset=rows)


def dpo_step(size: Size, clock: Clock, folder: str) -> Callable[[], None]:
    """Returns a function that runs a DPO step on the same pairs each time."""
    rows = dpo.dataset(dpo.pairs_of(size)[: size.rows])
    return trainer_step("DPO", size, {"max_length": None}, clock, folder, train_dataset=rows)


def reward_step(size: Size, clock: Clock, folder: str) -> Callable[[], None]:
    """Returns a function that runs a reward-model step on the same pairs each time."""
    rows = pairs.dataset(pairs.pairs_of(size)[: size.rows])
    settings = {"max_length": None, "disable_dropout": True}
    return trainer_step("Reward", size, settings, clock, folder, train_dataset=rows)


def grpo_ends(size: Size, clock: Clock, folder: str) -> Callable[[], None]:
    """GRPO with completions of very different lengths: 8 prompts x 8, EOS at 1 token in 32, 96 tokens at most."""
    size = replace(size, prompts=8, new_tokens=96)
    ends = {"eos_token_id": list(range(2, 1002))}
    return grpo_step(size, clock, folder, generation_kwargs=ends)


def grpo_large(size: Size, clock: Clock, folder: str) -> Callable[[], None]:
    """GRPO with the vocabulary of Llama 3: two prompts with eight completions each."""
    return grpo_step(replace(size, prompts=2), clock, folder)


LARGE = {"vocab_size": 128_256, "hidden_size": 512, "intermediate_size": 1024}
CASES: dict[str, tuple[Callable[[Size, Clock, str], Callable[[], None]], dict[str, Patches], dict[str, int]]] = {
    "grpo": (grpo_step, SAMPLING | MASKS, {}),
    "grpo, answers of many lengths": (grpo_ends, SAMPLING, {}),
    "ppo": (ppo_step, SAMPLING | MASKS, {}),
    "grpo, 128,256 tokens": (grpo_large, SAMPLING, LARGE),
    "sft": (sft_step, MASKS, {}),
    "dpo": (dpo_step, MASKS, {}),
    "reward": (reward_step, MASKS, {}),
}


def measured(case: str, rounds: int) -> dict[str, Any]:
    """Returns the seconds of each trainer's steps, round by round, and the positions that it reads in a step."""
    build, tricks, llama = CASES[case]
    size = replace(SIZES["cpu"], llama=SIZES["cpu"].llama | llama)
    folder = FOLDER / "models" / ("ablation-" + "-".join(map(str, llama.values())) if llama else "ablation")
    if not (folder / "reward").exists():
        write_language_models(size, folder)
    variants: dict[str, Patches] = {"with all": {}, **tricks}
    clocks = {name: Clock("cpu") for name in variants}
    steps = {}
    for name, patches in variants.items():
        torch.manual_seed(0)
        with without(patches):
            steps[name] = build(size, clocks[name], str(folder))
    processor: dict[str, list[float]] = {name: [] for name in variants}
    wall: dict[str, list[float]] = {name: [] for name in variants}
    positions = dict.fromkeys(variants, 0)
    order = random.Random(0)
    for turn in range(rounds + 1):
        names = list(variants)
        order.shuffle(names)
        for name in names:
            before = clocks[name].count[0]
            torch.manual_seed(turn)
            with without(variants[name]):
                begin = time.process_time(), time.perf_counter()
                steps[name]()
                end = time.process_time(), time.perf_counter()
            if turn:  # the first step warms up
                processor[name].append(end[0] - begin[0])
                wall[name].append(end[1] - begin[1])
                positions[name] += int(clocks[name].count[0] - before) // rounds
        print(case, turn, {name: round(values[-1], 2) for name, values in processor.items() if values}, flush=True)
    return {"processor_seconds": processor, "seconds": wall, "positions": positions}


def table(results: dict[str, Any]) -> str:
    """Returns a Markdown table with a row for each case and trick."""
    lines = ["| case | without | seconds a step | ratio (range) | on the clock | positions read |", "|" + " --- |" * 6]
    for case, result in results.items():
        base, clock = result["processor_seconds"]["with all"], result["seconds"]["with all"]
        lines.append(f"| {case} | nothing | {median(base):.3g} | 1 | 1 | {result['positions']['with all']} |")
        for name, seconds in result["processor_seconds"].items():
            if name == "with all":
                continue
            ratios = sorted(off / on for off, on in zip(seconds, base, strict=True))
            clocks = median(off / on for off, on in zip(result["seconds"][name], clock, strict=True))
            spread = f"**{median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            row = [case, name, f"{median(seconds):.3g}", spread, f"{clocks:.2f}", str(result["positions"][name])]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures the cases selected on the command line, and saves the results."""
    parser = argparse.ArgumentParser(prog="tools.bench.ablation", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ("torch", "transformers", "accelerate")
    for case in options.only:
        found = measured(case, options.rounds)
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        record[case] = {"day": str(date.today()), "versions": {name: version(name) for name in names}, **found}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(table({case: record[case]}), flush=True)


if __name__ == "__main__":
    main()
