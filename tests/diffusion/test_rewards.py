"""Compares rewards with PIL's files and with models run by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.diffusion import tiny
from tests.diffusion.pictures import CLIP_MEAN, CLIP_STD, MODEL, PROMPTS, SIZE, by_pil, pictures, pixel_values
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPModel

from trimtab_diffusion.rewards import (
    AestheticScore,
    ClipAlignment,
    ClipScore,
    PickScore,
    WeightedSum,
    jpeg_compressibility,
    jpeg_incompressibility,
)
from trimtab_diffusion.rewards.loading import settle


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a half-precision CLIP, as many are stored, with its tokenizer and image processor."""
    folder = tmp_path_factory.mktemp("clip")
    tiny.save_clip(folder, {**MODEL, "image_size": SIZE})
    return folder


@pytest.fixture(scope="module")
def clip(clip_folder: Path) -> CLIPModel:
    return CLIPModel.from_pretrained(clip_folder, dtype=torch.float32).eval()


def predictor(width: int) -> dict[str, Tensor]:
    """Returns random weights with the names and shapes of LAION's file."""
    widths, places = (width, 1024, 128, 64, 16, 1), (0, 2, 4, 6, 7)
    generator, weights = tiny.generator(2), {}
    for place, inputs, outputs in zip(places, widths[:-1], widths[1:], strict=True):
        weights[f"layers.{place}.weight"] = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        weights[f"layers.{place}.bias"] = torch.randn(outputs, generator=generator)
    return weights


def test_incompressibility_is_the_size_of_the_file_that_pil_writes(tmp_path: Path):
    images = torch.rand(3, 3, 40, 24, generator=tiny.generator())
    kilobytes = []
    for picture in by_pil(images):
        picture.save(tmp_path / "picture.jpg", quality=95)
        kilobytes.append((tmp_path / "picture.jpg").stat().st_size / 1000)
    rewards = jpeg_incompressibility(images, ("",) * 3, ({},) * 3)
    assert rewards.dtype == torch.float32
    torch.testing.assert_close(rewards, torch.tensor(kilobytes))
    torch.testing.assert_close(jpeg_compressibility(images, ("",) * 3, ({},) * 3), -torch.tensor(kilobytes))


def test_noise_is_larger_than_blotches_and_these_than_one_colour():
    noise = torch.rand(1, 3, 18, 18, generator=tiny.generator())
    rewards = jpeg_incompressibility(torch.cat([noise, pictures(1), torch.full_like(noise, 0.3)]), ("",) * 3, ({},) * 3)
    assert rewards[0] > rewards[1] > rewards[2]


def test_pil_images_and_arrays_are_rewarded_as_the_tensor_is():
    images = pictures()
    expected = jpeg_incompressibility(images, PROMPTS, ({},) * 5)
    for same in (by_pil(images), [np.asarray(picture) for picture in by_pil(images)], list(images)):
        assert torch.equal(jpeg_incompressibility(same, PROMPTS, ({},) * 5), expected)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (2 * torch.ones(1, 3, 8, 8), r"values from 2.0 to 2.0 .* floats must lie in \[0, 1\]"),
        (-torch.ones(1, 3, 8, 8), r"values from -1.0 to -1.0 .* floats must lie in \[0, 1\]"),
        (torch.full((1, 3, 8, 8), torch.nan), "values from nan to nan"),
        (torch.ones(3, 8, 8), r"shape \(8, 8\) came in; \[3, H, W\]"),
        (torch.ones(2, 1, 8, 8), r"shape \(1, 8, 8\) came in; \[3, H, W\]"),
    ],
)
def test_images_of_other_values_or_shapes_are_refused(images: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        jpeg_incompressibility(images, ("",) * len(images), ({},) * len(images))


@pytest.mark.parametrize("kind", ["file", "folder", "safetensors"])
def test_aesthetic_score_is_the_perceptron_of_the_unit_embedding(
    kind: str, clip_folder: Path, clip: CLIPModel, tmp_path: Path
):
    weights = predictor(width=10)
    if kind == "safetensors":
        from safetensors.torch import save_file

        save_file(weights, tmp_path / "weights.safetensors")
    else:
        torch.save(weights, tmp_path / "weights.pth")
    reward = AestheticScore(tmp_path / "weights.pth" if kind == "file" else tmp_path, clip=clip_folder, batch_size=2)
    with torch.no_grad():
        values = pixel_values(pictures(), Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD)
        hidden = clip.visual_projection(clip.vision_model(values).pooler_output)
        hidden = hidden / hidden.pow(2).sum(1, keepdim=True).sqrt()
        for place in (0, 2, 4, 6, 7):
            hidden = F.linear(hidden, weights[f"layers.{place}.weight"], weights[f"layers.{place}.bias"])
    assert hidden.std() > 0.01
    scores = reward(pictures(), PROMPTS, ({},) * 5)
    torch.testing.assert_close(scores, hidden[:, 0], rtol=0, atol=1e-5)
    assert not scores.requires_grad


def test_weights_that_are_no_aesthetic_predictor_for_this_clip_are_refused(clip_folder: Path, tmp_path: Path):
    torch.save(predictor(width=768), tmp_path / "large.pth")
    with pytest.raises(ValueError, match=r"large.pth is not an aesthetic predictor for .* of 10 numbers"):
        AestheticScore(tmp_path / "large.pth", clip=clip_folder)(pictures(1), PROMPTS[:1], ({},))
    torch.save({}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"has 2 files of weights \(large.pth, other.pt\), and one is needed"):
        AestheticScore(tmp_path, clip=clip_folder)(pictures(1), PROMPTS[:1], ({},))
    with pytest.raises(FileNotFoundError, match=r"There is no file .*absent.pth. Pass one"):
        AestheticScore(tmp_path / "absent.pth", clip=clip_folder)(pictures(1), PROMPTS[:1], ({},))


def test_alignment_is_the_cosine_behind_clips_logits(clip_folder: Path, clip: CLIPModel):
    tokens = tiny.tokenizer()(list(PROMPTS), padding=True, truncation=True, return_tensors="pt")
    values = pixel_values(pictures(), Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD)
    with torch.no_grad():
        cosines = clip(pixel_values=values, **tokens).logits_per_image / clip.logit_scale.exp()
    assert cosines.std(0).min() > 0.001  # images differ
    assert cosines[:, [0, 1, 3, 4]].std(1).min() > 0.001  # and prompts
    alignment = ClipAlignment(clip_folder, batch_size=2)(pictures(), PROMPTS, ({},) * 5)
    torch.testing.assert_close(alignment, cosines.diagonal(), rtol=0, atol=1e-5)
    assert not alignment.requires_grad


def test_alignment_needs_a_prompt_for_each_image(clip_folder: Path):
    with pytest.raises(ValueError, match="4 prompts came with 5 images"):
        ClipAlignment(clip_folder)(pictures(), PROMPTS[:4], ({},) * 5)


def test_nothing_is_loaded_before_the_first_call(tmp_path: Path):
    absent = tmp_path / "absent"
    rewards = [AestheticScore(absent, clip=absent), ClipScore(absent), PickScore(absent), ClipAlignment(absent)]
    for reward in rewards:
        with pytest.raises(OSError, match="absent"):
            reward(pictures(1), PROMPTS[:1], ({},))


def logits(clip: CLIPModel, prompts: tuple[str, ...]) -> Tensor:
    """Returns CLIP's own logits for each image and its prompt."""
    tokens = tiny.tokenizer()(list(prompts), padding=True, truncation=True, return_tensors="pt")
    values = pixel_values(pictures(), Image.Resampling.BICUBIC, CLIP_MEAN, CLIP_STD)
    with torch.no_grad():
        return clip(pixel_values=values, **tokens).logits_per_image.diagonal()


def test_clip_score_is_two_and_a_half_times_the_positive_cosine(clip_folder: Path, clip: CLIPModel):
    cosines = logits(clip, tuple(f"A photo depicts {prompt}" for prompt in PROMPTS)) / clip.logit_scale.exp()
    assert cosines.min() < 0 < cosines.max()
    scores = ClipScore(clip_folder, batch_size=2)(pictures(), PROMPTS, ({},) * 5)
    torch.testing.assert_close(scores, 2.5 * cosines.clamp(min=0), rtol=0, atol=1e-5)


def test_pick_score_is_the_models_logit(clip_folder: Path, clip: CLIPModel, tmp_path: Path):
    clip.save_pretrained(tmp_path)  # without a tokenizer, as it is published
    scores = PickScore(tmp_path, processor=clip_folder, batch_size=2)(pictures(), PROMPTS, ({},) * 5)
    torch.testing.assert_close(scores, logits(clip, PROMPTS), rtol=0, atol=1e-3)


def test_a_model_in_bfloat16_gives_float32(clip_folder: Path):
    exact = ClipAlignment(clip_folder)(pictures(), PROMPTS, ({},) * 5)
    reward = ClipAlignment(clip_folder, dtype=torch.bfloat16)
    rounded = reward(pictures(), PROMPTS, ({},) * 5)
    assert (reward.clip.model.dtype, rounded.dtype) == (torch.bfloat16, torch.float32)
    assert 0 < (rounded - exact).abs().max() < 0.05


def test_a_weighted_sum_by_hand():
    def brightness(images, prompts, metadata):
        return images.mean(dim=(1, 2, 3)).double()

    def length(images, prompts, metadata):
        return [len(prompt) for prompt in prompts]

    images = torch.full((2, 3, 4, 4), 0.5)
    total = WeightedSum((brightness, 2.0), (length, -0.1))(images, ["abc", "a"], ({}, {}))
    torch.testing.assert_close(total, torch.tensor([0.7, 0.9]))
    with pytest.raises(ValueError, match=r"returns \(1,\) for 2 images"):
        WeightedSum((lambda *_: [1.0], 1.0))(images, ["a", "b"], ({}, {}))
    with pytest.raises(ValueError, match="nothing to add"):
        WeightedSum()


@pytest.mark.parametrize(
    ("images", "asked", "expected"),
    [
        (torch.ones(1, 3, 8, 8, device="meta"), None, "meta"),
        (torch.ones(1, 3, 8, 8, device="meta"), "cpu", "cpu"),
        (torch.ones(1, 3, 8, 8), "meta", "meta"),
        ([np.ones((3, 8, 8))], None, "cpu"),
    ],
)
def test_models_go_where_they_are_asked_to_or_to_the_images(images: Any, asked: str | None, expected: str):
    model = torch.nn.Linear(2, 2)
    settle(model, images, asked)
    assert model.weight.device.type == expected
