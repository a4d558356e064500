"""The small flow-matching pipeline learns what its captions mean, and survives a save."""

from pathlib import Path

import pytest
import torch
from tests.diffusion import tiny
from torch import Tensor

from experiments import small_flow
from experiments.black_2023_ddpo.pretrain_flow import SHIPPED, recognised

CAPTIONS = ("light", "dark")


def learnt(steps: int) -> small_flow.StableDiffusion3Pipeline:
    """Returns a pipeline whose latents are 1 for the first caption and -1 for the second."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(2, (small_flow.BATCH,), generator=generator)
        return (1.0 - 2 * chosen).view(-1, 1, 1, 1).expand(-1, 4, 4, 4), chosen

    with tiny.from_seed(0):
        vae = tiny.vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0, scaling_factor=1.0)
        pipeline = small_flow.flow_pipeline(vae, tiny.tokenizer(), size=4, patch=2, layers=1, width=32)
        small_flow.pretrain(pipeline, draw, CAPTIONS, steps, tiny.generator())
    return tiny.quiet(pipeline, torch.float32)


def means(pipeline: small_flow.StableDiffusion3Pipeline) -> list[float]:
    """Returns the mean of the latents that each caption gives."""
    arguments = {"num_inference_steps": 8, "guidance_scale": 1.0, "height": 8, "width": 8, "output_type": "latent"}
    latents = pipeline(list(CAPTIONS), generator=tiny.generator(1), **arguments, **small_flow.CALL).images
    return latents.mean((1, 2, 3)).tolist()


@pytest.mark.slow
def test_captions_learn_their_latents_and_a_saved_pipeline_is_the_same(tmp_path: Path):
    pipeline = learnt(150)
    light, dark = means(pipeline)
    assert light == pytest.approx(1, abs=0.4)
    assert dark == pytest.approx(-1, abs=0.4)
    pipeline.save_pretrained(tmp_path)
    again = tiny.quiet(small_flow.load_flow(tmp_path), torch.float32)
    assert means(again) == pytest.approx([light, dark], abs=1e-4)


@pytest.mark.slow
def test_the_shipped_pipeline_draws_what_captions_say():
    colour, shape = recognised(tiny.quiet(small_flow.load_flow(SHIPPED), torch.float32))
    assert colour > 0.7
    assert shape > 0.5
