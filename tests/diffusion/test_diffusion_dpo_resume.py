"""A resumed run of Diffusion-DPO compares its pairs with those of the checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diffusion import tiny

from trimtab_common.sealing import CheckpointError
from trimtab_diffusion import DiffusionDPOConfig, DiffusionDPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Row = dict[str, Any]


def pairs() -> list[Row]:
    return [{"prompt": "a cat", "chosen": torch.ones(3, 16, 16), "rejected": torch.zeros(3, 16, 16)} for _ in range(2)]


def trainer(folder: Path, rows: list[Row], **settings: Any) -> DiffusionDPOTrainer:
    config = DiffusionDPOConfig(num_epochs=1, train_batch_size=2, mixed_precision="no", logdir=str(folder), **settings)
    return DiffusionDPOTrainer(config, tiny.stable_diffusion(), rows)


@pytest.mark.parametrize(
    "rows",
    [
        [*pairs(), *pairs()],
        [pairs()[0] | {"prompt": "a dog"}, pairs()[1]],
        [pairs()[0], pairs()[1] | {"rejected": torch.full((3, 16, 16), 0.5)}],
    ],
    ids=["more", "caption", "picture"],
)
def test_other_pairs_are_refused(rows: list[Row], tmp_path: Path) -> None:
    trainer(tmp_path, pairs()).train()
    with pytest.raises(CheckpointError, match="training data was "):
        trainer(tmp_path, rows, resume_from="latest")
    assert trainer(tmp_path, rows, resume_from="latest", resume_with_changes=True).first_epoch == 1


def test_the_same_pairs_resume_in_batches_of_another_size(tmp_path: Path) -> None:
    trainer(tmp_path, pairs()).train()
    assert trainer(tmp_path, pairs(), resume_from="latest", encode_batch_size=1).first_epoch == 1
