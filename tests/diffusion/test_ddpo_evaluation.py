"""DDPO's evaluations: images of held-out prompts by the pipeline's own sampler, in steps of their own number."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diffusion import tiny
from tests.diffusion.run_ddpo_distributed import KINDS, brightness, trainer, weights

from trimtab_common.health import TrainingDivergedError
from trimtab_common.seeding import sampling_seed

PROMPTS = [("a cat", {}), ("two dogs", {}), ("an owl", {})]
EVALUATION: dict[str, Any] = {"eval_prompts": PROMPTS, "eval_num_steps": 7}


@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_images_are_those_of_the_stock_pipeline(kind: str, tmp_path: Path):
    pipeline = KINDS[kind]()
    seen: list[Any] = []

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        seen.extend(zip(images, prompts, metadata, strict=True))
        return brightness(images, prompts, metadata)

    ddpo = trainer(str(tmp_path), pipeline, reward, seed=5, **EVALUATION)
    stats = ddpo.evaluate()
    seeds = [sampling_seed(5, rank=number, draw=2**32 - 1) for number in range(3)]
    with torch.no_grad():
        stock = KINDS[kind]()(
            [prompt for prompt, _ in PROMPTS],
            negative_prompt=[""] * 3,
            num_inference_steps=7,
            guidance_scale=3.0,
            generator=[tiny.generator(seed) for seed in seeds],
            output_type="pt",
        ).images
    assert [(prompt, metadata) for _, prompt, metadata in seen] == PROMPTS
    torch.testing.assert_close(torch.stack([image for image, *_ in seen]), stock, rtol=1e-4, atol=1e-5)
    assert stats["eval/reward_mean"] == pytest.approx(float(stock.mean()), rel=1e-4)
    assert set(stats) == {"eval/reward_mean", "eval/jpeg_kb"}
    assert ddpo.evaluate() == stats


def test_an_evaluation_scores_as_training_does(tmp_path: Path):
    ddpo = trainer(str(tmp_path), **EVALUATION)
    ddpo.compute_rewards = lambda batches, is_async=False: ([torch.full((len(b[1]),), 7.0) for b in batches], [])
    assert ddpo.evaluate()["eval/reward_mean"] == 7


@pytest.mark.filterwarnings("ignore")
def test_evaluations_come_every_so_many_epochs_and_leave_training_alone(tmp_path: Path):
    runs = {}
    for freq in (0, 2):
        ddpo = trainer(str(tmp_path / str(freq)), eval_freq=freq, **EVALUATION)
        history = ddpo.train(4)
        assert ["eval/reward_mean" in epoch for epoch in history] == [False, freq > 0] * 2
        runs[freq] = weights(ddpo)
        assert not freq or history[-1]["eval/reward_mean"] == pytest.approx(ddpo.evaluate()["eval/reward_mean"])
        assert not freq or history[-1]["eval/reward_mean"] != history[1]["eval/reward_mean"]
    assert all(torch.equal(weight, runs[2][name]) for name, weight in runs[0].items())


def test_pictures_that_are_not_finite_are_not_scored(tmp_path: Path):
    ddpo = trainer(str(tmp_path), reward=lambda images, *_: (images > 0.5).float().mean((1, 2, 3)), **EVALUATION)
    ddpo.sd_pipeline.vae.decoder.register_forward_hook(lambda module, inputs, output: output * torch.nan)
    with pytest.raises(TrainingDivergedError, match="the pixels of image 0"):
        ddpo.evaluate()


def test_prompts_that_no_evaluation_can_take(tmp_path: Path):
    for settings, came in (({"eval_freq": 2}, "eval_freq=2"), ({"eval_num_steps": 7}, "eval_num_steps=7")):
        with pytest.raises(ValueError, match=rf"{came} came without prompts of evaluations.*eval_prompts="):
            trainer(str(tmp_path), **settings)
    with pytest.raises(TypeError, match="eval_prompts holds 'a cat'; a tuple of a text and its metadata"):
        trainer(str(tmp_path), eval_prompts=["a cat"])
    with pytest.raises(ValueError, match=r"evaluate\(\) needs prompts"):
        trainer(str(tmp_path)).evaluate()
