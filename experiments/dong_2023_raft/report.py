"""Judges RAFT against its reference and against PPO: `python -m experiments.dong_2023_raft.report FOLDER ...`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from matplotlib import pyplot as plt

from experiments.claims import Claim, Numbers
from experiments.dong_2023_raft.measures import DISTINCT, NATS
from experiments.figures import Curve, curves, panels
from experiments.margins import margin_fields
from experiments.reports import Report, main
from experiments.run_folders import Run, by, of_seeds
from experiments.samples import samples_of
from experiments.sentiment_ppo import REWARD

PAPER = "dong_2023_raft"
TITLE = "Fine-tuning on the best of K samples, round after round"
CLAIM = (
    "Dong et al. 2023, arXiv:2304.06767 (RAFT): fine-tuning on the best of K samples raises the reward, more so with a "
    "larger K, and ends with more reward and a lower perplexity than PPO."
)
SCALE = "15M parameters and hundreds of samples"
Groups = Mapping[str, Sequence[Run]]


def read(runs: Sequence[Run]) -> Report:
    """Reads for each setting the reward, the nats per token and the diversity of answers to held-out openings."""
    groups = by_setting(runs)
    measured: dict[str, Numbers] = {}
    for name, group in groups.items():
        measured[f"reward before, {name}"] = of_seeds(group, lambda run: run.per_prompt["reward_before"])
        measured[f"reward, {name}"] = of_seeds(group, lambda run: run.per_prompt["reward"])
        measured[f"nats, {name}"] = of_seeds(group, lambda run: run.per_prompt[NATS])
        measured[f"distinct-2, {name}"] = of_seeds(group, lambda run: run.summary[DISTINCT])
    caption = (
        f"{len(by(runs, 'seed'))} seeds; medians, bands from the lower to the upper quartile. (a) The reward of "
        "held-out openings after each round of RAFT. (b) The reward of the samples during training, over the "
        "samples that were scored so far. (c) Reward and nats per token under the reference after training, a dot "
        "for each seed, in the colours of (b)."
    )
    samples = samples_of({name: group[0] for name, group in groups.items()})
    return Report(measured, list(claims_about(groups)), {"figure": figure(groups)}, {"figure": caption}, samples)


def is_ppo(run: Run) -> bool:
    """Whether ppo.py wrote the run."""
    return "init_kl_coef" in run.config


def by_setting(runs: Sequence[Run]) -> Groups:
    """Groups the runs of RAFT by K and the prompts of a round, then PPO's: name -> runs."""
    raft = by([run for run in runs if not is_ppo(run)], "k", "prompts")
    groups = {f"K = {k}, {prompts} prompts": group for (k, prompts), group in raft.items()}
    ppo = [run for run in runs if is_ppo(run)]
    return groups | ({"PPO": ppo} if ppo else {})


def samples_scored(run: Run) -> int:
    """The number of samples that the reward scores in training."""
    config = run.config
    return config["steps"] * config["batch_size"] if is_ppo(run) else config["rounds"] * config["prompts"] * config["k"]


def claims_about(groups: Groups) -> Iterator[Claim]:
    """The paper's claims for these settings, and ours about K = 1."""
    settings = {name: group[0].config for name, group in groups.items() if name != "PPO"}
    most_prompts = max((config["prompts"] for config in settings.values()), default=0)
    equal_rounds = [name for name, config in settings.items() if config["prompts"] == most_prompts]
    for name in equal_rounds:
        if settings[name]["k"] == 1:
            yield Claim(
                f"{name}: without selection the reward of held-out openings changes little",
                (f"reward, {name}", f"reward before, {name}"),
                "little",
                **margin_fields(PAPER, "reward"),
                origin="ours",
                trivial="a control: nothing is selected",
            )
    for low, high in pairwise(equal_rounds):
        yield more_reward(high, low)
    if "PPO" in groups:
        count = samples_scored(groups["PPO"][0])
        for name in equal_rounds:
            if samples_scored(groups[name][0]) == count:
                yield from against_ppo(name)


def more_reward(high: str, low: str) -> Claim:
    """The claim that one setting ends with more reward than another after equally many rounds."""
    compared = (f"reward, {high}", f"reward, {low}")
    text, fields = f"{high}: more reward than {low}, at equal rounds", margin_fields(PAPER, "reward")
    return Claim(text, compared, "more", **fields, place="section 4.1, the effect of K", scale=SCALE)


def against_ppo(name: str) -> Iterator[Claim]:
    """The paper's comparison of RAFT with its start and with PPO."""
    place = "section 4.1, table of HH-RLHF"
    yield Claim(
        f"{name}: the reward of held-out openings rises",
        (f"reward, {name}", f"reward before, {name}"),
        "more",
        **margin_fields(PAPER, "reward"),
        scale=SCALE,
        trivial="the reward is optimised",
        place=place,
    )
    yield Claim(
        f"{name}: more reward than PPO, at equal numbers of samples",
        (f"reward, {name}", "reward, PPO"),
        "more",
        **margin_fields(PAPER, "reward"),
        scale=SCALE,
        place=place,
        number="2.294 (K = 32) against 2.077",
    )
    yield Claim(
        f"{name}: a lower perplexity than PPO, at equal numbers of samples",
        (f"nats, {name}", "nats, PPO"),
        "less",
        **margin_fields(PAPER, "nats"),
        scale=SCALE,
        place=place,
        number="perplexity 4.031 (K = 32) against 4.156",
    )
    yield Claim(
        f"{name}: more diverse than PPO, at equal numbers of samples",
        (f"distinct-2, {name}", "distinct-2, PPO"),
        "more",
        **margin_fields(PAPER, "distinct-2"),
        scale=SCALE,
        place=place,
    )


def over_samples(run: Run) -> Curve:
    """The reward of the training samples, over the number of samples that were scored before and with them."""
    if is_ppo(run):
        steps, rewards = run.curve("step", REWARD)
        return [step * run.config["batch_size"] for step in steps], rewards
    rounds, rewards = run.curve("round", "reward")
    return [number * run.config["prompts"] * run.config["k"] for number in rounds], rewards


def figure(groups: Groups) -> plt.Figure:
    """Plots the reward over rounds and over samples, and reward against nats per token after training."""
    plot, (rounds, samples, ends) = panels(("held-out openings", "samples of training", "after training"))
    raft = {name: group for name, group in groups.items() if name != "PPO"}
    if raft:
        curves(rounds, {name: [run.curve("round", "eval_reward") for run in group] for name, group in raft.items()})
    curves(samples, {name: [over_samples(run) for run in group] for name, group in groups.items()})
    for group in groups.values():
        ends.scatter(
            [sum(run.per_prompt[NATS]) / len(run.per_prompt[NATS]) for run in group],
            [run.summary["reward"] for run in group],
            s=18,
        )
    ends.grid(alpha=0.3)
    labels = ("rounds done", "samples scored", "nats per token under the reference")
    for axis, label in zip((rounds, samples, ends), labels, strict=True):
        axis.set_xlabel(label)
        axis.set_ylabel("reward (VADER, -1 to 1)")
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
