from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor

from experiments.black_2023_ddpo import train
from experiments.emoji import classifier, pretrain, pretrain_flow
from experiments.emoji.drawings import (
    BASE,
    CAPTIONS,
    COLOURS,
    HELD_OUT,
    NAMES,
    OTHERS,
    SIZE,
    TRAINED,
    drawings,
    recoloured,
    rendered,
)
from experiments.emoji.measure import BASES, accuracy, decibels, sampled, shipped
from experiments.emoji.rewards import (
    CORE,
    agreement,
    colour_alignment,
    colour_match,
    match_probability,
    name_match,
    recognised,
    warmth,
)
from experiments.small_flow import load_flow

RED, BLUE = torch.tensor(COLOURS["red"]), COLOURS["blue"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def disc(colour: Tensor = RED) -> Tensor:
    """Draws a disc of one colour with a grey dot and a green one, on nothing."""
    ticks = torch.arange(64) - 31.5
    drawing = torch.zeros(4, 64, 64)
    for radius, place, paint in ((30, 0, colour), (6, 12, torch.full((3,), 0.5)), (6, -12, torch.tensor([0, 0.7, 0]))):
        inside = (ticks[:, None] ** 2 + (ticks[None, :] - place) ** 2) < radius**2
        drawing[:3, inside], drawing[3, inside] = paint[:, None].expand(3, int(inside.sum())), 1
    return drawing


# Captions and drawings -------------------------------------------------------------------------------------------


def test_a_caption_of_each_name_and_four_of_each_colour_are_held_out():
    assert len(CAPTIONS) == 144
    assert set(TRAINED) | set(HELD_OUT) == set(CAPTIONS)
    assert not set(TRAINED) & set(HELD_OUT)
    assert [caption.split()[2] for caption in HELD_OUT] == list(NAMES)
    assert sorted(caption.split()[1] for caption in HELD_OUT) == sorted(4 * [*COLOURS])


def test_recolouring_changes_the_main_hue_alone():
    before, after = disc(), recoloured(disc(), BLUE)
    middle, grey, green = (slice(None, 3), 32, 32), (slice(None, 3), 32, 44), (slice(None, 3), 32, 20)
    torch.testing.assert_close(after[middle], torch.tensor(BLUE))
    assert torch.equal(after[grey], before[grey])
    torch.testing.assert_close(after[green], before[green])
    assert torch.equal(after[3], before[3])


def test_darker_and_brighter_parts_stay_darker_and_brighter():
    drawing = disc()
    drawing[:3, 50:, :] *= 0.5
    drawing[:3, :14, :] = 0.3 + 0.7 * drawing[:3, :14, :]
    after = recoloured(drawing, BLUE)[:3].mean(0)
    assert after[60, 32] < after[32, 32] < after[4, 32]


def test_a_drawing_that_fills_its_square_fills_the_image():
    drawn = torch.ones(2, 4, 64, 64) * torch.tensor([0.2, 0.4, 0.6, 1.0])[:, None, None]
    images = rendered(drawn, generator(), scales=(1.0, 1.0), shift=0.0)
    torch.testing.assert_close(images[:, :, 1:-1, 1:-1], drawn[:, :3, 1 : SIZE - 1, 1 : SIZE - 1])


def test_where_nothing_is_drawn_there_is_a_light_background():
    images = rendered(torch.zeros(64, 4, 64, 64), generator())
    assert images.shape == (64, 3, SIZE, SIZE)
    assert images.min() >= 0.7
    assert images.max() <= 1


def test_half_of_the_renderings_are_mirrored_and_they_differ_in_place_and_size():
    left = disc()
    left[3, :, 32:] = 0
    images = rendered(left.expand(200, 4, 64, 64), generator(), shift=0.0)
    darker = images.sum(1)
    is_mirrored = darker[..., 12:].sum((1, 2)) < darker[..., :12].sum((1, 2))
    assert 0.35 < is_mirrored.float().mean() < 0.65


# Rewards ---------------------------------------------------------------------------------------------------------


def flat(*colours: object) -> Tensor:
    return torch.stack([torch.as_tensor(colour).view(3, 1, 1).expand(3, SIZE, SIZE) for colour in colours])


def test_warmth_is_red_minus_blue():
    images = flat([1.0, 0.3, 0.0], [0.0, 0.9, 1.0], [0.4, 0.1, 0.4])
    torch.testing.assert_close(warmth(images, CAPTIONS[:3]), torch.tensor([1.0, -1.0, 0.0]))


def test_colour_alignment_is_minus_the_distance_of_the_core():
    images = flat(RED, RED + 0.05, BLUE)
    distance = float((RED - torch.tensor(BLUE)).norm())
    expected = torch.tensor([0.0, -0.05 * 3**0.5, -distance])
    torch.testing.assert_close(colour_alignment(images, ["a red fox"] * 3), expected, atol=2e-4, rtol=0)
    framed = images.clone()
    framed[:, :, : CORE.start] = 0
    assert torch.equal(colour_alignment(framed, ["a red fox"] * 3), colour_alignment(images, ["a red fox"] * 3))


@pytest.mark.parametrize("reward", [warmth, colour_alignment, agreement, match_probability])
def test_rewards_have_a_gradient_that_raises_them(reward):
    torch.manual_seed(0)
    images = (0.2 + 0.6 * torch.rand(3, 3, SIZE, SIZE)).requires_grad_()
    captions = CAPTIONS[:3]
    before = reward(images, captions)
    (slope,) = torch.autograd.grad(before.sum(), images)
    step = 1e-3 * slope / slope.flatten(1).norm(dim=1)[:, None, None, None]
    assert (reward(images.detach() + step, captions) > before).all()


def test_the_reward_of_an_unknown_caption_is_refused():
    with pytest.raises(ValueError, match="'a purple cow' is no caption"):
        agreement(torch.zeros(1, 3, SIZE, SIZE), ["a purple cow"])


def test_probabilities_are_those_of_name_and_colour():
    images = torch.rand(1, 3, SIZE, SIZE, generator=generator()).expand(len(CAPTIONS), -1, -1, -1)
    probabilities = match_probability(images, CAPTIONS)
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-4)
    best = int(probabilities.argmax())
    for measure in (name_match, colour_match, recognised):
        values = measure(images, CAPTIONS)
        assert values[best] == 1
    assert recognised(images, CAPTIONS).sum() == 1
    assert name_match(images, CAPTIONS).sum() == len(COLOURS)
    assert colour_match(images, CAPTIONS).sum() == len(NAMES)


# The classifier and the pipeline ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn() -> Tensor:
    """Draws discs, which differ in size between names: RGB and opacity, [24, 6, 4, 64, 64]."""
    ticks = torch.arange(64) - 31.5
    distance = (ticks[:, None] ** 2 + ticks[None, :] ** 2).sqrt()
    opacity = (distance[None] < torch.linspace(6, 30, len(NAMES))[:, None, None]).float()
    colours = torch.tensor(list(COLOURS.values()))[:, :, None, None]
    rgb = colours.expand(len(COLOURS), 3, 64, 64).expand(len(NAMES), -1, -1, -1, -1)
    return torch.cat([rgb, opacity[:, None, None].expand(-1, len(COLOURS), 1, -1, -1)], dim=2)


@pytest.mark.slow
def test_a_classifier_learns_colours_in_a_few_steps(drawn: Tensor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(classifier, "BATCH", 32)
    model = classifier.trained_classifier(drawn[None], 40)
    with torch.no_grad():
        _, by_colour = model(rendered(drawn.flatten(0, 1), generator(1)))
    is_right = by_colour.argmax(1) == torch.arange(len(CAPTIONS)) % len(COLOURS)
    assert is_right.float().mean() > 0.8


@pytest.mark.slow
def test_the_same_seed_pretrains_a_pipeline_that_plain_diffusers_loads(
    drawn: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pretrain, "BATCH", 4)
    first, second = (pretrain.pretrained_pipeline(drawn.flatten(0, 1), 2) for _ in range(2))
    first.save_pretrained(tmp_path)
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path)
    for part in ("unet", "text_encoder", "vae"):
        for name, weight in getattr(second, part).state_dict().items():
            assert torch.equal(weight, getattr(loaded, part).state_dict()[name]), f"{part}.{name}"
    loaded.set_progress_bar_config(disable=True)
    assert sampled(loaded, CAPTIONS[:2], steps=2, guidance=3.0).shape == (2, 3, SIZE, SIZE)
    assert {len(loaded.tokenizer(caption)["input_ids"]) for caption in CAPTIONS} == {5}


@pytest.mark.slow
def test_held_out_captions_are_not_pretrained_on(drawn: Tensor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretrain, "BATCH", 64)
    seen = []
    original = pretrain.rendered
    monkeypatch.setattr(pretrain, "rendered", lambda chosen, rng: seen.append(chosen) or original(chosen, rng))
    flat_drawn = drawn.flatten(0, 1).clone()
    flat_drawn[:, :, 0, 0] = torch.arange(144)[:, None]  # a number that tells drawings apart
    pretrain.pretrained_pipeline(flat_drawn, 3)
    trained_on = {int(number) for chosen in seen[16:] for number in chosen[:, 0, 0, 0]}
    assert len(trained_on) > 50
    assert not {CAPTIONS.index(caption) for caption in HELD_OUT} & trained_on


def test_a_pretrained_flow_is_loaded_again(drawn: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretrain, "BATCH", 4)
    pipeline = pretrain_flow.pretrained_flow(drawn.flatten(0, 1), 2)
    pipeline.save_pretrained(tmp_path)
    pictures = []
    for each in (pipeline, load_flow(tmp_path)):
        each.set_progress_bar_config(disable=True)
        pictures.append(sampled(each, CAPTIONS[:2], steps=2, guidance=3.0))
    assert pictures[0].shape == (2, 3, SIZE, SIZE)
    assert torch.equal(*pictures)


@pytest.mark.parametrize(("base", "most"), [("unet", 8e6), ("flow", 1e7)])
def test_the_shipped_models_draw_what_captions_say(base: str, most: float):
    files = [*BASES[base][1].rglob("*"), classifier.SHIPPED]
    assert sum(file.stat().st_size for file in files if file.is_file()) < most
    pipeline = shipped(base)
    captions = HELD_OUT + TRAINED[::5]
    images = sampled(pipeline, captions, steps=10, guidance=3.0)
    assert colour_match(images, captions).mean() > 0.8
    assert name_match(images, captions).mean() > 0.3  # chance: 0.04
    assert {part.dtype for part in pipeline.components.values() if isinstance(part, torch.nn.Module)} == {torch.float32}


@pytest.mark.downloads
def test_the_published_drawings_are_what_the_page_says():
    for vendor in (*OTHERS, BASE):
        drawn = drawings(vendor)
        assert drawn.shape == (24, 6, 4, 64, 64)
        assert drawn.min() >= 0
        assert drawn.max() <= 1
    by_name, by_colour = accuracy(BASE, repeats=2)
    assert by_name.mean() > 0.7
    assert by_colour > 0.95
    assert all(decibels(shipped(base)) > 35 for base in BASES)


def test_ddpo_trains_emoji_on_their_own_rewards_and_holds_out_captions():
    run = train.RunConfig(model="emoji", hold_out=True)
    reward, others = train.measures("agreement", run)
    assert reward is agreement
    assert set(others) == {"recognised", "name_match", "colour_match", "jpeg_incompressibility"}
    assert train.prompt_set(run, training=True).prompts == TRAINED
    assert sorted(train.prompt_set(run, training=False).prompts) == sorted(CAPTIONS)
    assert train.folder_of(run) == str(pretrain.SHIPPED)
    with pytest.raises(SystemExit, match="shape_match is none of"):
        train.measures("shape_match", run)
