"""Compares the rewards in examples/rewards that classify or rank with the same models run by hand."""

from pathlib import Path

import pytest
import torch
from examples.rewards.classifier import ClassifierReward
from examples.rewards.human_preference import HumanPreferenceScore
from examples.rewards.image_reward import ImageReward
from PIL import Image
from tests.diffusion import tiny
from tests.diffusion.pictures import CLIP_MEAN, CLIP_STD, MODEL, PROMPTS, SIZE, by_pil, pictures, pixel_values
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForImageClassification,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

LABELS = ("cat", "dog", "horse")
PICTURE = {"image_size": SIZE, "patch_size": 4}


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    tiny.save_clip(folder, {**MODEL, "image_size": SIZE})
    return folder


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
    """Returns the log-probabilities of every class for `pictures()`, [5, 3], computed by hand."""
    model = AutoModelForImageClassification.from_pretrained(classifier_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(pixel_values(pictures(), Image.Resampling.BILINEAR, (0.5,) * 3, (0.5,) * 3)).logits
    assert logits.std(0).min() > 0.01  # pictures differ, so a wrong order would show
    return logits.log_softmax(1)


def in_open_clip(clip: CLIPModel) -> dict[str, Tensor]:
    """Returns a model's weights under open_clip's names: query, key and value in one matrix, projections transposed."""
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


def test_human_preference_is_the_cosine_of_the_whole_image_between_black_bars(clip_folder: Path, tmp_path: Path):
    clip = CLIPModel.from_pretrained(clip_folder, dtype=torch.float32).eval()
    for version in ("v2", "v2.1"):
        torch.save({"epoch": 1, "state_dict": in_open_clip(clip)}, tmp_path / f"HPS_{version}_compressed.pt")
    wide = pictures()[:, :, :12]  # 12 x 18, resized to 8 x 12 with two black rows above and below
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


def test_nothing_is_loaded_before_the_first_call(tmp_path: Path):
    absent = tmp_path / "absent"
    rewards = [HumanPreferenceScore(absent), ClassifierReward(absent, label=0), ImageReward(absent, tokenizer=absent)]
    for reward in rewards:
        with pytest.raises(OSError, match="absent"):
            reward(pictures(1), PROMPTS[:1], ({},))
