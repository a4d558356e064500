"""Rewards against PIL's own files and against models run by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.diffusion import tiny
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForImageClassification,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from trimtab_diffusion.rewards import (
    AestheticScore,
    ClassifierReward,
    ClipAlignment,
    ClipScore,
    HumanPreferenceScore,
    ImageReward,
    PickScore,
    WeightedSum,
    jpeg_compressibility,
    jpeg_incompressibility,
)
from trimtab_diffusion.rewards.loading import settle

SIZE = 12  # what the models see; pictures are larger
LABELS = ("cat", "dog", "horse")
PROMPTS = ("a cat", "a dog riding a bike", "a cat", "an ant playing chess", "a bee")
MODEL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
PICTURE = {"image_size": SIZE, "patch_size": 4}
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def pictures(count: int = 5, seed: int = 0) -> Tensor:
    """[count, 3, 18, 18], blotches of random colours."""
    coarse = torch.rand(count, 3, 3, 3, generator=tiny.generator(seed))
    return coarse.repeat_interleave(6, dim=2).repeat_interleave(6, dim=3)


def by_pil(images: Tensor) -> list[Image.Image]:
    return [Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()) for image in images]


def pixel_values(images: Tensor, resample: Image.Resampling, mean: Any, std: Any) -> Tensor:
    resized = [np.asarray(picture.resize((SIZE, SIZE), resample), dtype=np.float32) for picture in by_pil(images)]
    values = (np.stack(resized) / 255 - np.array(mean)) / np.array(std)
    return torch.tensor(values, dtype=torch.float32).permute(0, 3, 1, 2)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP in half precision, as many are stored, with its tokenizer and image processor."""
    folder = tmp_path_factory.mktemp("clip")
    tiny.save_clip(folder, {**MODEL, "image_size": SIZE})
    return folder


@pytest.fixture(scope="module")
def clip(clip_folder: Path) -> CLIPModel:
    return CLIPModel.from_pretrained(clip_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classifier")
    config = ViTConfig(
        **MODEL,
        **PICTURE,
        initializer_range=0.3,
        hidden_dropout_prob=0.2,
        id2label=dict(enumerate(LABELS)),
        label2id={name: index for index, name in enumerate(LABELS)},
    )
    with tiny.from_seed(1):
        ViTForImageClassification(config).half().save_pretrained(folder)
    ViTImageProcessor(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def logprobs(classifier_folder: Path) -> Tensor:
    """Of every class for `pictures()`, [5, 3], by hand."""
    model = AutoModelForImageClassification.from_pretrained(classifier_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(pixel_values(pictures(), Image.Resampling.BILINEAR, (0.5,) * 3, (0.5,) * 3)).logits
    assert logits.std(0).min() > 0.01  # pictures differ, or order would not show
    return logits.log_softmax(1)


def predictor(width: int) -> dict[str, Tensor]:
    """Random weights under the names and of the shapes of LAION's file."""
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
        (torch.ones(3, 8, 8), r"shape \(3, 8, 8\) came in; \[B, 3, H, W\] is needed"),
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
    assert cosines.std(0).min() > 0.001  # pictures differ
    assert cosines[:, [0, 1, 3, 4]].std(1).min() > 0.001  # and prompts
    alignment = ClipAlignment(clip_folder, batch_size=2)(pictures(), PROMPTS, ({},) * 5)
    torch.testing.assert_close(alignment, cosines.diagonal(), rtol=0, atol=1e-5)
    assert not alignment.requires_grad


def test_alignment_needs_a_prompt_for_each_image(clip_folder: Path):
    with pytest.raises(ValueError, match="4 prompts came with 5 images"):
        ClipAlignment(clip_folder)(pictures(), PROMPTS[:4], ({},) * 5)


def test_nothing_is_loaded_before_the_first_call(tmp_path: Path):
    absent = tmp_path / "absent"
    rewards = [AestheticScore(absent, clip=absent), ClipScore(absent), PickScore(absent), HumanPreferenceScore(absent)]
    rewards += [ClipAlignment(absent), ClassifierReward(absent, label=0), ImageReward(absent, tokenizer=absent)]
    for reward in rewards:
        with pytest.raises(OSError, match="absent"):
            reward(pictures(1), PROMPTS[:1], ({},))


def logits(clip: CLIPModel, prompts: tuple[str, ...]) -> Tensor:
    """CLIP's own logits of each image and its prompt."""
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


def in_open_clip(clip: CLIPModel) -> dict[str, Tensor]:
    """A model's weights by open_clip's names: query, key and value in one matrix, projections transposed."""
    weights = dict(clip.state_dict())
    renamed = {"logit_scale": weights["logit_scale"]}
    for half, begin in (("vision", "visual."), ("text", "")):
        embeddings = f"{half}_model.embeddings"
        renamed[f"{begin}positional_embedding"] = weights[f"{embeddings}.position_embedding.weight"]
        for layer in range(MODEL["num_hidden_layers"]):
            here, there = f"{half}_model.encoder.layers.{layer}", f"{begin}transformer.resblocks.{layer}"
            for end in ("weight", "bias"):
                parts = [weights[f"{here}.self_attn.{letter}_proj.{end}"] for letter in "qkv"]
                renamed[f"{there}.attn.in_proj_{end}"] = torch.cat(parts)
                renamed[f"{there}.attn.out_proj.{end}"] = weights[f"{here}.self_attn.out_proj.{end}"]
                renamed[f"{there}.ln_1.{end}"] = weights[f"{here}.layer_norm1.{end}"]
                renamed[f"{there}.ln_2.{end}"] = weights[f"{here}.layer_norm2.{end}"]
                renamed[f"{there}.mlp.c_fc.{end}"] = weights[f"{here}.mlp.fc1.{end}"]
                renamed[f"{there}.mlp.c_proj.{end}"] = weights[f"{here}.mlp.fc2.{end}"]
    for end in ("weight", "bias"):
        renamed[f"visual.ln_pre.{end}"] = weights[f"vision_model.pre_layrnorm.{end}"]
        renamed[f"visual.ln_post.{end}"] = weights[f"vision_model.post_layernorm.{end}"]
        renamed[f"ln_final.{end}"] = weights[f"text_model.final_layer_norm.{end}"]
    renamed["visual.class_embedding"] = weights["vision_model.embeddings.class_embedding"]
    renamed["visual.conv1.weight"] = weights["vision_model.embeddings.patch_embedding.weight"]
    renamed["token_embedding.weight"] = weights["text_model.embeddings.token_embedding.weight"]
    renamed["visual.proj"] = weights["visual_projection.weight"].T
    renamed["text_projection"] = weights["text_projection.weight"].T
    return renamed


def test_human_preference_is_the_cosine_of_the_whole_image_between_black_bars(
    clip_folder: Path, clip: CLIPModel, tmp_path: Path
):
    for version in ("v2", "v2.1"):
        torch.save({"epoch": 1, "state_dict": in_open_clip(clip)}, tmp_path / f"HPS_{version}_compressed.pt")
    wide = pictures()[:, :, :12]  # 12 x 18, so that 8 x 12 pixels stay, with two black rows on either side
    whole = F.interpolate((wide * 255).round() / 255, (8, 12), mode="bicubic", antialias=True)
    values = torch.zeros(5, 3, SIZE, SIZE)
    values[:, :, 2:10] = whole
    values = (values - torch.tensor(CLIP_MEAN)[:, None, None]) / torch.tensor(CLIP_STD)[:, None, None]
    tokens = tiny.tokenizer()(list(PROMPTS), padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        cosines = clip(pixel_values=values, **tokens).logits_per_image.diagonal() / clip.logit_scale.exp()
    scores = HumanPreferenceScore(tmp_path, clip=clip_folder, batch_size=2)(wide, PROMPTS, ({},) * 5)
    torch.testing.assert_close(scores, cosines, rtol=0, atol=1e-5)
    assert cosines.std() > 0.001


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


@pytest.mark.parametrize("label", ["dog", 1])
def test_classifier_reward_of_one_label_for_all_images(label: str | int, classifier_folder: Path, logprobs: Tensor):
    reward = ClassifierReward(classifier_folder, label=label, batch_size=2)
    rewards = reward(pictures(), PROMPTS, (None,) * 5)
    torch.testing.assert_close(rewards, logprobs[:, 1], rtol=0, atol=1e-5)
    assert not rewards.requires_grad


def test_classifier_reward_of_the_label_in_the_metadata(classifier_folder: Path, logprobs: Tensor):
    classes = [2, 0, 1, 1, 2]
    reward = ClassifierReward(classifier_folder, label_key="noun", batch_size=2)
    expected = logprobs[range(5), classes]
    for label in (LABELS.__getitem__, int):
        metadata = [{"noun": label(index), "activity": "none"} for index in classes]
        torch.testing.assert_close(reward(pictures(), PROMPTS, metadata), expected, rtol=0, atol=1e-5)


def test_probabilities_of_all_classes_sum_to_one(classifier_folder: Path):
    shares = [
        ClassifierReward(classifier_folder, label=name, log_probability=False)(pictures(), PROMPTS, ())
        for name in LABELS
    ]
    torch.testing.assert_close(sum(shares), torch.ones(5))


def test_a_model_in_training_mode_is_taken_with_its_processor(classifier_folder: Path, logprobs: Tensor):
    model = AutoModelForImageClassification.from_pretrained(classifier_folder, dtype=torch.float32).train()
    processor = ViTImageProcessor.from_pretrained(classifier_folder)
    reward = ClassifierReward(model, label="cat", processor=processor)
    torch.testing.assert_close(reward(by_pil(pictures()), PROMPTS, ()), logprobs[:, 0], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="A model came without its image processor"):
        ClassifierReward(model, label="cat")


def test_classes_that_are_missing_or_unknown_are_refused(classifier_folder: Path):
    for wrong in ({}, {"label": "cat", "label_key": "noun"}):
        with pytest.raises(ValueError, match="Pass exactly one of them"):
            ClassifierReward(classifier_folder, **wrong)
    with pytest.raises(
        ValueError, match=r"label is 'cow', which is not a class .* It has 'cat', 'dog', 'horse'; an index"
    ):
        ClassifierReward(classifier_folder, label="cow")(pictures(1), PROMPTS[:1], ({},))
    with pytest.raises(ValueError, match=r"label is 3, which is not .* from 0 to 2 does as well"):
        ClassifierReward(classifier_folder, label=3)(pictures(1), PROMPTS[:1], ({},))
    reward = ClassifierReward(classifier_folder, label_key="noun")
    with pytest.raises(ValueError, match="'noun' of image 1 is 'cow', which is not a class of this model"):
        reward(pictures(2), PROMPTS[:2], ({"noun": "cat"}, {"noun": "cow"}))
    for metadata in ({"verb": "run"}, None):
        with pytest.raises(
            ValueError, match=r"metadata of image 1 is .*, without the key 'noun'. Let the prompt function"
        ):
            reward(pictures(2), PROMPTS[:2], ({"noun": "cat"}, metadata))
    with pytest.raises(ValueError, match="1 metadata came with 2 images"):
        reward(pictures(2), PROMPTS[:2], ({"noun": "cat"},))


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
