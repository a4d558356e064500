"""GRPO's loss weights tokens by the ratio of the policy's probability to that at sampling."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.lm import tiny
from tests.lm.grpo.run_distributed import Scripted, trainer
from torch import Tensor

from trimtab_lm.sampling.rollout import Rollout

pytestmark = pytest.mark.filterwarnings("ignore:step .* health/")


class Off(Scripted):
    """Returns scripted completions with log-probabilities `gap` nats below the policy's."""

    def __init__(self, gap: float):
        super().__init__(limit=4)
        self.gap = gap

    def sync(self, model: Any, version: int) -> None:
        self.model = model
        super().sync(model, version)

    def generate(self, prompts: Sequence[Tensor], **options: Any) -> Rollout:
        rollout = super().generate(prompts, **options)
        repeated = [prompt for prompt in prompts for _ in range(options["num_generations"])]
        pairs = zip(repeated, rollout.completions, strict=True)
        return rollout._replace(logprobs=[tiny.taken_of(self.model, *pair) - self.gap for pair in pairs])


def first_log(folder: Path, rollout: Any, **settings: Any) -> dict[str, float]:
    grpo = trainer(str(folder), tiny.gpt2(), rollout=rollout, max_steps=1, max_grad_norm=0.0, **settings)
    grpo.train()
    return grpo.state.log_history[0]


def test_weights_scale_the_gradient_up_to_the_cap(tmp_path: Path):
    plain = first_log(tmp_path, Off(0.0))
    assert plain["sampling/token_ratio/max"] == pytest.approx(1, abs=1e-4)
    told = first_log(tmp_path, Off(1.0))
    assert told["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert told["sampling/token_ratio/mean"] == pytest.approx(2.71828, rel=1e-3)
    for cap, weight, share in ((1.5, 1.5, 1.0), (4.0, 2.71828, 0.0)):
        log = first_log(tmp_path, Off(1.0), importance_sampling_cap=cap)
        assert log["grad_norm"] == pytest.approx(weight * plain["grad_norm"], rel=1e-3)
        assert log["sampling/token_ratio/truncated"] == share


def test_a_cap_without_log_probabilities_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"importance_sampling_cap=2.0 needs the log-probabilities of the sampler"):
        first_log(tmp_path, Scripted(limit=4), importance_sampling_cap=2.0)


def test_a_cap_is_above_zero(tmp_path: Path):
    with pytest.raises(ValueError, match="importance_sampling_cap"):
        first_log(tmp_path, Off(0.0), importance_sampling_cap=0.0)
