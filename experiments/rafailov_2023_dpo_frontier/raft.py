"""RAFT on the reward that labels DPO's pairs, for the comparison of their frontiers. See README.md."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.assets import model_folder, openings
from experiments.rafailov_2023_dpo_frontier.pairs import PAPER, LookConfig, Looks, follow
from experiments.run_folders import begin, from_recipe
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation
from trimtab_cli.raft import one_round, rows_of_round
from trimtab_lm.data.prompts import PROMPT_IDS
from trimtab_lm.iterative_sft import IterativeSFTConfig, IterativeSFTTrainer
from trimtab_lm.rewards.functions import RewardSet
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.rollout import SamplingSettings

RECIPE = Path(__file__).with_name("recipe_raft.yaml")
PANELS = {
    "reward (VADER, -1 to 1)": ["reward", "reward_of_best", "eval_reward"],
    "KL to the reference (nats per response)": ["eval_kl"],
}


@dataclass(frozen=True)
class RunConfig(LookConfig):
    """The looks, and the size of the rounds."""

    rounds: int = field(default=16, metadata={"help": "Times that it samples, and learns from the best."})
    prompts: int = field(default=32, metadata={"help": "Openings of a round, over all processes."})
    k: int = field(default=4, metadata={"help": "Continuations of each; the most positive is learnt."})


def main(run: RunConfig, raft: IterativeSFTConfig) -> None:
    """Trains in rounds, and evaluates reward and KL on held-out prompts after every `look_every` of them."""
    history = begin(PAPER, run, raft)
    trainer = IterativeSFTTrainer(model_folder(run.model), raft, callbacks=[history])
    tokenizer, queries = trainer.tokenizer, openings("train")
    policy = trainer.accelerator.unwrap_model(trainer.model)
    evaluation = Evaluation(policy, tokenizer, sentiment, run, seed=raft.seed)
    backend = TransformersRollout(SamplingSettings(max_completion_length=run.max_new_tokens), tokenizer, batch_size=64)

    def learn(looks: Looks) -> None:
        for number in range(run.rounds):
            prompts = rows_of_round(queries, raft, prompts=run.prompts, number=number)
            rows = [{"prompt": prompt, PROMPT_IDS: tokenizer(prompt)["input_ids"]} for prompt in prompts]
            mean, best = one_round(trainer, RewardSet(sentiment), backend, rows, samples=run.k, number=number)
            trainer.log({"round": number + 1, "reward": mean, "reward_of_best": best})
            if (number + 1) % run.look_every == 0 and number + 1 < run.rounds:
                looks.look()

    scored = run.rounds * run.prompts * run.k
    title = f"RAFT: {run.model}, K = {run.k}"
    follow(trainer, evaluation, run, scored_texts=scored, title=title, panels=PANELS, learn=learn)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, IterativeSFTConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, IterativeSFTConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
