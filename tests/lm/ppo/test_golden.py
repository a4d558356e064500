"""Ten steps of PPO equal a recorded curve: a refactor shows the same numbers, a change of behaviour different ones.

After an intended change, `python -m tests.lm.ppo.test_golden` records the curve again; the commit must say so.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch
from tests.lm import tiny

GOLDEN = Path(__file__).parents[2] / "golden" / "ppo.json"
KEYS = (
    "objective/kl",
    "objective/kl_coef",
    "objective/entropy",
    "ppo/mean_scores",
    "ppo/loss/policy",
    "ppo/loss/value",
    "ppo/policy/clipfrac",
    "ppo/returns/mean",
    "ppo/val/var_explained",
    "tokens/responses_len_mean",
)


def curve() -> dict[str, list[float]]:
    """A tiny GPT-2 in float64 learns to write the letter a."""
    trainer = tiny.ppo(
        tiny.policy(dtype=torch.float64),
        batch_size=16,
        mini_batch_size=4,
        gradient_accumulation_steps=2,
        ppo_epochs=2,
        learning_rate=1e-2,
        horizon=100,
        max_grad_norm=1.0,
        use_score_scaling=True,
    )
    letter = tiny.VOCABULARY["a"]
    history = []
    for step in range(10):
        queries = tiny.rows(16, 2, 5, seed=step)
        responses = trainer.generate(queries, return_prompt=False, do_sample=True, max_new_tokens=6, temperature=0.8)
        scores = [float((response == letter).double().mean()) for response in responses]
        history.append(trainer.step(queries, responses, scores))
    return {key: [stats[key] for stats in history] for key in KEYS}


@pytest.mark.filterwarnings("ignore:step .* health/")
def test_ten_steps_are_the_recorded_ones():
    recorded, now = json.loads(GOLDEN.read_text()), curve()
    assert recorded["ppo/mean_scores"][-1] > recorded["ppo/mean_scores"][0] + 0.2
    for key in KEYS:
        assert now[key] == pytest.approx(recorded[key], rel=1e-5, abs=1e-7), key


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    GOLDEN.write_text(json.dumps(curve(), indent=1) + "\n")
