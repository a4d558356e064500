"""RAFT: fine-tuning on the best of K samples (Dong et al. 2023, arXiv:2304.06767). Claim and results: README.md."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from torch import Tensor

from experiments.assets import Split, model_folder, openings
from experiments.dong_2023_raft.measures import DISTINCT, NATS, distinct, nats_per_token
from experiments.evaluation import continued
from experiments.run_folders import begin, finish, from_recipe, show, write_per_prompt
from experiments.samples import write_answers
from experiments.sentiment import sentiment
from trimtab_cli.raft import one_round, rows_of_round
from trimtab_lm.data.prompts import PROMPT_IDS
from trimtab_lm.hf.tracking import Tables
from trimtab_lm.iterative_sft import IterativeSFTConfig, IterativeSFTTrainer
from trimtab_lm.rewards.functions import RewardSet
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.rollout import SamplingSettings

PAPER = "dong_2023_raft"
RECIPE = Path(__file__).with_name("recipe.yaml")
PANELS = {
    "reward (VADER, -1 to 1)": ["reward", "reward_of_best", "eval_reward"],
    "loss (nats per token)": ["loss"],
}


@dataclass(frozen=True)
class RunConfig:
    """The model, and the size of the rounds."""

    model: str = field(
        default="stories15m",
        metadata={"help": "stories15m or smollm2, which are downloaded; or hub id or folder of a causal model."},
    )
    rounds: int = field(default=8, metadata={"help": "Times that it samples, and learns from the best."})
    prompts: int = field(default=64, metadata={"help": "Prompts of a round, the b of Algorithm 1, over all processes."})
    k: int = field(default=8, metadata={"help": "Samples for each prompt; the best one is kept."})
    max_new_tokens: int = field(default=24, metadata={"help": "Tokens of a sample at most."})
    eval_split: Split = field(
        default="test", metadata={"help": "Prompts for the reward after each round: test, or tune to choose settings."}
    )
    eval_prompts: int = field(default=128, metadata={"help": "Of these prompts, how many are used."})
    samples: int = field(default=5, metadata={"help": "How many of them the report shows."})


def main(run: RunConfig, raft: IterativeSFTConfig) -> None:
    """Trains in rounds; measures the reward of held-out prompts before the first round and after each."""
    history = begin(PAPER, run, raft)
    name = model_folder(run.model)
    queries, held_out = openings("train"), openings(run.eval_split)[: run.eval_prompts]
    trainer = IterativeSFTTrainer(name, raft, callbacks=[history])
    tables, is_main = Tables(), trainer.is_world_process_zero()
    limit = SamplingSettings(max_completion_length=run.max_new_tokens)
    backend = TransformersRollout(limit, trainer.tokenizer, batch_size=64)
    reference = deepcopy(trainer.accelerator.unwrap_model(trainer.model)).eval()
    if raft.resume_from_checkpoint:
        trainer.train(resume_from_checkpoint=raft.resume_from_checkpoint)

    def look() -> tuple[list[float], list[Tensor], list[str]]:
        """The rewards of the held-out prompts, with the same random numbers every time, and the answers."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        settings = {"max_new_tokens": run.max_new_tokens, "seed": raft.seed}
        rows, answers = continued(model, trainer.tokenizer, held_out, **settings)
        rewards = sentiment(answers)
        shown = list(zip(held_out, answers, rewards, strict=True))[: run.samples]
        tables.add(trainer, "samples", ["prompt", "answer", "reward"], shown)
        return rewards, rows, answers

    before, rows, first_answers = look()
    after, answers = before, first_answers
    trainer.log({"round": int(trainer.state.epoch or 0), "eval_reward": fmean(before)})
    if is_main:
        show("before training", held_out[: run.samples], first_answers[: run.samples])
    for number in range(int(trainer.state.epoch or 0), run.rounds):
        mine = rows_of_round(queries, raft, prompts=run.prompts, number=number)
        encoded = [{"prompt": prompt, PROMPT_IDS: trainer.tokenizer(prompt)["input_ids"]} for prompt in mine]
        mean, best = one_round(trainer, RewardSet(sentiment), backend, encoded, samples=run.k, number=number)
        stats = {"reward": mean, "reward_of_best": best}
        after, rows, answers = look()
        trainer.log({"round": number + 1, "eval_reward": fmean(after), **stats})
        if is_main:
            print(f"round {number + 1} of {run.rounds}: reward {stats['reward']:+.3f}, ", end="")
            print(f"of the best of {run.k} {stats['reward_of_best']:+.3f}, of other prompts {fmean(after):+.3f}")
    if is_main:
        show("after training", held_out[: run.samples], answers[: run.samples])
        print(f"reward of {len(held_out)} other prompts: {fmean(before):+.3f} -> {fmean(after):+.3f}   ", end="")
        print(f"more positive: {'yes' if fmean(after) > fmean(before) else 'NO'}")
        nats = nats_per_token(reference, trainer.tokenizer, held_out, rows)
        folder = Path(str(raft.output_dir))
        write_per_prompt(folder, {"reward_before": before, "reward": after, NATS: nats})
        write_answers(folder, held_out, first_answers, answers, after, run.samples)
    summary = {"reward_before": fmean(before), "reward": fmean(after), DISTINCT: distinct(answers, 2)}
    finish(trainer, f"RAFT: {run.model}, K = {run.k}", PANELS, summary)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, IterativeSFTConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, IterativeSFTConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
