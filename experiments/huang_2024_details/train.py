"""PPO with the details of Huang et al. 2024 (arXiv:2403.17031), each of which can be left out. See README.md."""

import sys
from pathlib import Path

from accelerate import PartialState

from trimtab_common.config import parse_config

# The file is run by its path, from anywhere; the experiments are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.huang_2024_details.details import DetailsPPOConfig, RunConfig, make_trainer
from experiments.huang_2024_details.report import CLAIM, TITLE, judge
from experiments.reports import report_on
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import train


def main(run: RunConfig, ppo: DetailsPPOConfig) -> None:
    """Train, and write the report of this run into its folder."""
    folder = train(run, ppo, sentiment, make_trainer=make_trainer)
    if PartialState().is_main_process:
        report_on(TITLE, CLAIM, judge, [folder])


if __name__ == "__main__":
    main(*parse_config(RunConfig, DetailsPPOConfig))
