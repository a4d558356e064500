"""SFT, reward model, PPO and best-of-n (Stiennon et al. 2020, arXiv:2009.01325). Claim, cost, numbers: README.md."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import transformers
from accelerate import PartialState

from experiments.assets import model_folder
from experiments.assets.registry import scratch
from experiments.reports import report_on_run
from experiments.run_folders import close_folder, open_folder, write_per_prompt
from experiments.samples import SAMPLES
from experiments.stiennon_2020_summarize.comparisons import gold_score
from experiments.stiennon_2020_summarize.report import CLAIM, TITLE, read
from experiments.stiennon_2020_summarize.settings import RunConfig, settings
from experiments.stiennon_2020_summarize.stages import (
    Record,
    compare,
    evaluate,
    fine_tune,
    learn_rewards,
    optimise,
    policy_name,
    read_data,
)
from trimtab_common.config import to_flat_dict
from trimtab_common.tracking import start_tracking
from trimtab_lm import PPOConfig, set_seed

STAGES = ("sft", "comparisons", "reward")


def main(run: RunConfig, ppo: PPOConfig) -> None:
    """Runs the unfinished stages, evaluates, and writes the run's report into its folder."""
    if PartialState().num_processes > 1:
        raise SystemExit("The pipeline runs in one process. Start it with python, not with torchrun or accelerate.")
    transformers.logging.set_verbosity_error()
    root = Path(ppo.output_dir or Path("runs", ppo.exp_name))
    config = to_flat_dict(run, ppo)
    open_folder(root, config, goes_on=run.resume)
    if not run.resume:
        clean(root)
    tracking = start_tracking(
        ppo.log_with,
        project=ppo.tracker_project_name,
        config=config,
        name=ppo.exp_name,
        tags=[ppo.task_name] if ppo.task_name else [],
        folder=ppo.project_kwargs.get("logging_dir", "."),
        init_kwargs=ppo.tracker_kwargs,
    )
    with tracking as tracker:
        record = Record(root, tracker, goes_on=run.resume)
        summary = pipeline(root, run, ppo, record)
        final = {f"final/{name}": value for name, value in summary.items()}
        record.log(final)
        tracker.finish(final)
    close_folder(root, summary)
    if not run.keep_models:
        clean(root)
    report_on_run(TITLE, CLAIM, read, [root])


def pipeline(root: Path, run: RunConfig, ppo: PPOConfig, record: Record) -> dict[str, float]:
    """Runs the stages and the evaluation, and returns its numbers. A stage's folder appears whole or not at all."""
    name = model_folder(run.model)
    data, gold, seed = read_data(run, ppo.seed), gold_score(run.gold), ppo.seed
    sft, pairs, reward = (root / stage for stage in STAGES)
    common = {"record": record, "seed": seed}
    stages = {
        sft: lambda folder: fine_tune(name, run, data, folder=folder, **common),
        pairs: lambda folder: compare(sft, run, data, gold, folder=folder, **common),
        reward: lambda folder: learn_rewards(sft, pairs, run, data, folder=folder, **common),
    }
    for coefficient in run.kl_coefs:
        settings = replace(ppo, init_kl_coef=coefficient)
        stages[root / policy_name(coefficient)] = partial(optimise, sft, reward, run, settings, data, gold, record)
    for folder, build in stages.items():
        if folder.exists():
            print(f"{folder.name}: done before")
            continue
        print(f"{folder.name} ...", flush=True)
        set_seed(seed)  # the same whether or not the earlier stages ran in this process
        with scratch(root) as part:
            build(folder=part)
            part.rename(folder)
    summary, per_prompt, samples = evaluate(sft, reward, root, run, data, gold, seed=seed)
    write_per_prompt(root, per_prompt)
    record.table("samples", samples)
    (root / SAMPLES).write_text(json.dumps(samples, indent=2) + "\n", encoding="utf-8")
    return summary


def clean(root: Path) -> None:
    """Removes the stages' models and data."""
    for folder in (*(root / name for name in STAGES), *root.glob("ppo_*")):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*settings())
