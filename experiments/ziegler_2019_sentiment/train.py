"""PPO towards positive continuations (Ziegler et al. 2019, arXiv:1909.08593). Claim, cost and numbers: README.md."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from accelerate import PartialState

from experiments.assets import openings
from experiments.proxy import Proxy, Sampler, Samples, learn_proxy, shuffled
from experiments.reports import report_on_run
from experiments.run_folders import from_recipe
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import StoriesRun, load, train
from experiments.ziegler_2019_sentiment.report import CLAIM, TITLE, read
from trimtab_lm import PPOConfig

RECIPE = Path(__file__).with_name("recipe.yaml")
ALTERNATIVES = 4  # a label names the best one, as in the paper (section 2)
HELD_OUT = 128  # choices that the accuracy of a learnt reward is measured on


@dataclass(frozen=True)
class RunConfig(StoriesRun):
    """Which reward PPO learns from."""

    labels: int = field(
        default=0,
        metadata={"help": "Choices among four samples of the initial policy to learn the reward from. 0: the reward."},
    )
    penalty: float = field(default=100.0, metadata={"help": "Weight of |w|^2 / 2 in the loss of a learnt reward."})

    def __post_init__(self) -> None:
        if self.labels < 0:
            raise ValueError(
                f"labels={self.labels}: use the number of choices to learn the reward from, or 0 for none."
            )


def main(run: RunConfig, ppo: PPOConfig) -> None:
    """Trains, and writes the report of this run into its folder, unless it belongs to a sweep."""
    if run.labels:
        proxy, accuracy = learnt_reward(run, seed=ppo.seed)
        folder = train(run, ppo, proxy, judge=sentiment, facts={"choice_accuracy": accuracy})
    else:
        folder = train(run, ppo, sentiment)
    if PartialState().is_main_process:
        report_on_run(TITLE, CLAIM, read, [folder])
        if (figure := folder / "figure.png").exists():
            print(f"figure: {figure}")


def learnt_reward(run: RunConfig, *, seed: int) -> tuple[Proxy, float]:
    """Learns a reward from choices that the true reward makes.

    Returns:
        The reward, with mean 0 and variance 1 over samples of the initial policy, and its accuracy: the share of
        HELD_OUT other choices in which its best sample is a best one.
    """
    state = PartialState()
    policy, tokenizer = load(run.model)
    initial = policy.pretrained_model.eval().requires_grad_(False).to(state.device)
    sampler = Sampler(initial, tokenizer, sentiment, run.max_new_tokens, (run.model, "vader"))
    prompts = shuffled(openings("train"), seed, run.labels + HELD_OUT)
    with state.main_process_first():
        samples = sampler(prompts, ALTERNATIVES, seed=seed)
    proxy = learn_proxy(sampler, samples, run.labels, penalty=run.penalty)
    accuracy = choice_accuracy(proxy, Samples(*(part[run.labels :] for part in samples)))
    if state.is_main_process:
        print(f"reward of {run.labels} labels: finds the best of {ALTERNATIVES} in {accuracy:.0%} of other choices")
    return proxy, accuracy


def choice_accuracy(proxy: Proxy, samples: Samples) -> float:
    """The share of prompts whose best sample by the proxy is also the best by the gold score."""
    best = proxy.of_states(samples.states).argmax(1, keepdim=True)
    return fmean((samples.golds.gather(1, best)[:, 0] == samples.golds.amax(1)).tolist())


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, PPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, PPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
