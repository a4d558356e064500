"""The page of each trainer names the statistics to watch first, which are those that its printed lines show."""

import re
from pathlib import Path

import pytest

import trimtab_diffusion
import trimtab_lm

PAGES = Path(__file__).resolve().parents[2] / "docs" / "trainers"
TRAINERS = {
    "sft": trimtab_lm.SFTTrainer,
    "reward": trimtab_lm.RewardTrainer,
    "dpo": trimtab_lm.DPOTrainer,
    "kto": trimtab_lm.KTOTrainer,
    "grpo": trimtab_lm.GRPOTrainer,
    "ppo": trimtab_lm.PPOTrainer,
    "iterative-sft": trimtab_lm.IterativeSFTTrainer,
    "ddpo": trimtab_diffusion.DDPOTrainer,
    "diffusion-nft": trimtab_diffusion.DiffusionNFTTrainer,
    "alignprop": trimtab_diffusion.AlignPropTrainer,
    "diffusion-dpo": trimtab_diffusion.DiffusionDPOTrainer,
}


def test_every_trainer_has_a_page():
    assert {path.stem for path in PAGES.glob("*.md")} == {*TRAINERS, "index"}


@pytest.mark.parametrize("page", TRAINERS)
def test_a_page_names_the_statistics_that_the_printed_lines_show(page: str):
    metrics = (PAGES / f"{page}.md").read_text(encoding="utf-8").partition("\n## Metrics\n")[2]
    sentence = " ".join(metrics.split("Watch first: ")[1].split("\n\n")[0].split())
    assert tuple(re.findall(r"`([^`]+)`", sentence.partition(". ")[0])) == TRAINERS[page].watched
    assert len(TRAINERS[page].watched) == 5
