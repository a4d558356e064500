"""What the config and the trainer accept: each mistake has an error that says how to fix it."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from tests.diffusion import modern, tiny
from transformers import HfArgumentParser

from trimtab_common.config import parse_config, to_flat_dict
from trimtab_diffusion import (
    DDPOConfig,
    DDPOStableDiffusionPipeline,
    DDPOTrainer,
    DefaultDDPOStableDiffusionPipeline,
)
from trimtab_diffusion.ddpo.sampling import Batches
from trimtab_diffusion.training.sampling import rewards_of

SMALL = {
    "mixed_precision": "no",
    "sample_num_steps": 2,
    "sample_guidance_scale": 1.0,
    "sample_batch_size": 2,
    "sample_num_batches_per_epoch": 2,
    "train_batch_size": 2,
    "train_learning_rate": 1e-2,
}


def redness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return images[:, 0].mean((1, 2))


def a_cat() -> tuple[str, dict[str, Any]]:
    return "a cat", {}


def trainer(reward: Any = redness, prompts: Any = a_cat, pipeline: Any = None, **settings: Any) -> DDPOTrainer:
    return DDPOTrainer(DDPOConfig(**SMALL | settings), reward, prompts, pipeline or tiny.stable_diffusion())


def weights(one: DDPOTrainer) -> torch.Tensor:
    return torch.cat([weight.flatten() for weight in one.model.parameters()]).detach().clone()


# ------------------------------------------------------------------------------ config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample_batch_size": 3, "train_batch_size": 4}, r"3 x .* 2 = 6 samples .* 4 x .* 1 = 4.* one of 1, 2, 3, 6"),
        ({"sample_batch_size": 4, "train_batch_size": 3}, r"4 x .* 2 = 8 samples .* one of 1, 2, 4, 8"),
        ({"train_gradient_accumulation_steps": 3}, r"2 x train_gradient_accumulation_steps 3 = 6.* one of 1, 2, 4"),
        (
            {"sample_batch_size": 3, "train_batch_size": 3, "group_size": 4},
            r"group_size=4 .* 3 x .* = 6: .* 1, 2, 3, 6",
        ),
        ({"scale_rewards": "none"}, "scale_rewards='none' is none of group, batch"),
        ({"scale_rewards": "batch", "per_prompt_stat_tracking": True}, "rules of their own.*Set it to 'group'"),
        ({"scale_rewards": "batch", "estimator": "rwr"}, "rules of their own.*Set it to 'group'"),
        ({"sample_eta": 0}, "sample_eta=0 must be a finite number above 0"),
        ({"sample_num_steps": 4, "train_timestep_fraction": 0.2}, "less than one step.*at least 0.25"),
        ({"train_timestep_fraction": 1.5}, "above 0 and up to 1"),
        ({"train_cfg": False, "sample_guidance_scale": 5.0}, "one policy and train another.*sample_guidance_scale=1"),
        ({"negative_prompts": "dull"}, "'dull' needs guidance, and sample_guidance_scale=1.0 is none.*above 1"),
        ({"sample_guidance_scale": float("nan")}, "sample_guidance_scale=nan must be a finite number"),
        ({"sample_guidance_scale": float("inf")}, "sample_guidance_scale=inf must be a finite number"),
        ({"estimator": "sf", "train_batch_size": 1}, r"makes 4 updates per epoch.*= 4 and train_num_inner_epochs=1"),
        ({"estimator": "sf", "train_batch_size": 4, "train_num_inner_epochs": 2}, "makes 2 updates per epoch"),
        ({"estimator": "reinforce"}, "'reinforce' is none of is, sf, rwr, rwr_sparse"),
        ({"mixed_precision": "fp8"}, "'fp8' is none of no, fp16, bf16"),
        ({"trajectory_dtype": "int8"}, "'int8' is none of None, float32, float16, bfloat16"),
        ({"log_with": "comet"}, "'comet' is not a tracker.*one of .*comet_ml.*wandb.*none"),
        ({"group_size": 2, "per_prompt_stat_tracking": True}, "two measures"),
        ({"estimator": "rwr", "per_prompt_stat_tracking": True}, "estimator='rwr' has weights.*tracking=False"),
        ({"estimator": "rwr_sparse", "per_prompt_stat_tracking": True}, "estimator='rwr_sparse' has weights"),
        ({"per_prompt_stat_tracking_min_count": 17}, "17 rewards never fit into a buffer of 16"),
        ({"init_kl_coef": 0.1, "estimator": "rwr"}, "reward-weighted regression has none"),
        ({"adap_kl_ctrl": True}, "start above it"),
        ({"accelerator_kwargs": {"gradient_accumulation_steps": 2}}, "Set train_gradient_accumulation_steps instead"),
        ({"seed": -1}, r"outside \[0, 2\*\*32\)"),
        ({"train_adam_beta2": 1.0}, "from 0 to below 1"),
    ],
)
def test_a_config_that_cannot_work(settings, message):
    with pytest.raises(ValueError, match=message):
        DDPOConfig(**SMALL | settings)


@pytest.mark.parametrize("value", [0, -1, 1.5])
@pytest.mark.parametrize(
    "name",
    [
        "num_epochs",
        "save_freq",
        "num_checkpoint_limit",
        "sample_num_steps",
        "sample_batch_size",
        "sample_num_batches_per_epoch",
        "train_batch_size",
        "train_gradient_accumulation_steps",
        "train_num_inner_epochs",
        "per_prompt_stat_tracking_buffer_size",
        "per_prompt_stat_tracking_min_count",
        "max_workers",
        "group_size",
    ],
)
def test_counts_are_whole_and_positive(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be a whole number of at least 1"):
        DDPOConfig(**{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name",
    [
        "train_learning_rate",
        "train_max_grad_norm",
        "train_adv_clip_max",
        "train_clip_range",
        "train_clip_range_nats",
        "sample_eta",
        "target",
        "horizon",
        "train_adam_epsilon",
    ],
)
def test_numbers_are_positive(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be a finite number above 0"):
        DDPOConfig(**{name: value})


def test_the_flags_of_both_parsers():
    words = [
        "--num_epochs",
        "3",
        "--train_clip_range",
        "1e-3",
        "--per_prompt_stat_tracking",
        "true",
        "--log_with",
        "wandb",
        "--negative_prompts",
        "dull",
        "--sample_guidance_scale",
        "2",
    ]
    [ours] = parse_config(DDPOConfig, argv=words)
    [theirs] = HfArgumentParser(DDPOConfig).parse_args_into_dataclasses(words)
    assert ours == theirs
    assert (ours.num_epochs, ours.train_clip_range, ours.per_prompt_stat_tracking) == (3, 1e-3, True)
    assert (ours.log_with, ours.negative_prompts, ours.is_guided) == ("wandb", "dull", True)
    for parsed in (parse_config(DDPOConfig, argv=[])[0], *HfArgumentParser(DDPOConfig).parse_args_into_dataclasses([])):
        assert parsed == DDPOConfig()


def test_flags_of_nested_settings_and_of_what_may_be_nothing():
    words = ["--project_kwargs.total_limit=2", "--ddpo.train_clip_range_nats=0.5", "--negative_prompts=None"]
    [config] = parse_config(DDPOConfig, argv=words)
    assert config.project_kwargs == {"total_limit": 2}
    assert (config.train_clip_range_nats, config.negative_prompts) == (0.5, None)


def test_a_mistake_on_the_command_line_is_one_message(capsys):
    with pytest.raises(SystemExit):
        parse_config(DDPOConfig, argv=["--sample_eta=0"])
    assert "DDPOConfig: sample_eta=0.0 must be a finite number above 0" in capsys.readouterr().err


def test_every_field_has_a_help_and_reaches_the_tracker(capsys):
    with pytest.raises(SystemExit):
        parse_config(DDPOConfig, argv=["--help"])
    text = capsys.readouterr().out
    for name, field in DDPOConfig.__dataclass_fields__.items():
        assert f"--{name}" in text
        assert len(field.metadata["help"]) > 10, name
    assert to_flat_dict(DDPOConfig(project_kwargs={"total_limit": 3}))["project_kwargs.total_limit"] == 3


def test_a_config_that_was_changed_is_checked_again():
    config = DDPOConfig(**SMALL)
    config.train_batch_size = 3
    with pytest.raises(ValueError, match="one of 1, 2, 4"):
        DDPOTrainer(config, redness, a_cat, tiny.stable_diffusion())


# ----------------------------------------------------------------------------- rewards


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda images, *_: torch.zeros(3), "What reward_function returned has 3 scores for 2 items"),
        (lambda images, *_: torch.tensor(1.0), r"shape \[\] and type .*: a list of 2 numbers"),
        (lambda images, *_: images.mean(1), r"shape \[2, 16, 16\] and .*: a list of 2 numbers"),
        (
            lambda images, *_: torch.tensor([0.5, float("nan")]),
            r"nan for image 1 of a batch, prompt 'a cat': a score must be",
        ),
        (lambda images, *_: (torch.tensor([float("inf")] * 2), {}), "inf for image 0 .*Nothing was trained"),
    ],
)
def test_unusable_rewards_train_nothing(reward, message, is_async):
    calls = []

    def good_once(*arguments: Any) -> Any:
        calls.append(arguments)
        return redness(*arguments) if len(calls) == 1 else reward(*arguments)

    one = trainer(good_once, async_reward_computation=is_async)
    before = weights(one)
    with pytest.raises(ValueError, match=message):
        one.step(0, 0)
    assert torch.equal(weights(one), before)
    assert (one.global_step, one.first_epoch) == (0, 0)


@pytest.mark.parametrize("number", [float, np.float32, torch.tensor], ids=["Python", "NumPy", "torch"])
def test_a_tuple_of_two_numbers_is_rewards(number: Any):
    rewards, metadata = rewards_of((number(0.25), number(0.5)), ["a", "b"], "reward_function")
    assert (rewards.tolist(), metadata) == ([0.25, 0.5], {})
    for whole in ([number(0.25), number(0.5)], torch.tensor([0.25, 0.5]), iter([0.25, 0.5])):
        rewards, metadata = rewards_of((whole, {"judge": 2}), ["a", "b"], "reward_function")
        assert (rewards.tolist(), metadata) == ([0.25, 0.5], {"judge": 2})


def test_another_reward_that_is_unusable_is_named():
    with pytest.raises(ValueError, match=r"What brightness returned is a Tensor of shape \[\]"):
        DDPOTrainer(
            DDPOConfig(**SMALL),
            redness,
            a_cat,
            tiny.stable_diffusion(),
            other_rewards={"brightness": lambda images, *_: images.mean()},
        ).step(0, 0)


@pytest.mark.parametrize(
    "form",
    [
        lambda rewards: rewards,
        lambda rewards: rewards[:, None],
        lambda rewards: rewards.tolist(),
        lambda rewards: rewards.numpy(),
        lambda rewards: (rewards, {"note": 1}),
        lambda rewards: (rewards.to(torch.bfloat16), {}),
        lambda rewards: rewards.clone().requires_grad_(rewards.is_floating_point()),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_rewards_in_any_form_train_alike(form, dtype):
    def ranks(images: torch.Tensor) -> torch.Tensor:
        return redness(images, None, None).argsort().to(dtype)

    one, other = trainer(lambda images, *_: form(ranks(images))), trainer(lambda images, *_: ranks(images).float())
    before = weights(one)
    for each in (one, other):
        each.step(0, 0)
    assert torch.equal(weights(one), weights(other))
    assert not torch.equal(weights(one), before)
    assert one.last_stats["reward_mean"] == 0.5
    assert one.draw(1).rewards.dtype is torch.float32


# ------------------------------------------------------------------- prompts, schedules


@pytest.mark.parametrize("answer", ["a cat", ("a cat",), ["a cat", {}], (3, {}), ("a", "cat", {})])
def test_a_prompt_function_returns_a_pair(answer):
    with pytest.raises(TypeError, match=r"returned .*; a tuple of a text and its metadata is needed"):
        trainer(prompts=lambda: answer).step(0, 0)


def test_prompts_drawn_by_numpy_are_saved_and_resumed_as_texts(tmp_path):
    animals, settings = ["a cat", "a dog"], {"num_epochs": 1, "logdir": str(tmp_path), "resume_from": "latest"}

    def build() -> DDPOTrainer:
        return trainer(prompts=lambda: (np.random.choice(animals), {}), per_prompt_stat_tracking=True, **settings)

    one = build()
    one.train()
    statistics = build().prompt_stats.state_dict()
    assert statistics == one.prompt_stats.state_dict()
    assert {type(prompt) for prompt in statistics} == {str}
    assert sum(len(rewards) for rewards in statistics.values()) == 4


def test_a_schedule_without_noise_is_refused_before_sampling():
    pipeline = tiny.stable_diffusion()
    pipeline.scheduler = tiny.ddim(steps_offset=0, set_alpha_to_one=True)
    one = trainer(pipeline=pipeline, sample_num_steps=1)
    one.draw = lambda epoch: pytest.fail("images were sampled")
    with pytest.raises(ValueError, match="No step of this schedule has noise"):
        one.step(0, 0)


def test_a_schedule_that_loses_its_noise_later_trains_nothing_and_says_so():
    one = trainer(sample_num_steps=1)
    one.step(0, 0)
    one.sd_pipeline.scheduler = tiny.ddim(steps_offset=0, set_alpha_to_one=True)
    before = weights(one)
    with pytest.raises(ValueError, match="No step of this schedule has noise"):
        one.step(1, one.global_step)
    assert torch.equal(weights(one), before)


def test_the_learning_rate_is_that_of_the_last_update():
    one, rates = trainer(train_warmup_steps=4), []
    for epoch in range(2):  # of two updates
        one.step(epoch, one.global_step)
        rates.append(one.last_stats["learning_rate"])
    assert rates == pytest.approx([5e-3, 1e-2])


@pytest.mark.parametrize("is_async", [False, True])
def test_rewards_are_computed_without_gradients(is_async):
    modes = []

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return redness(images, prompts, metadata)

    trainer(reward, async_reward_computation=is_async).step(0, 0)
    assert modes == [False, False]
    assert torch.is_grad_enabled()


def test_a_part_of_the_batches_is_a_list():
    one = trainer()
    sampled = Batches(one.sd_pipeline, [("a cat", {})] * 6, tiny.generator(), one.config)
    assert [len(batch[1]) for batch in sampled[1:]] == [2, 2]
    assert sampled[1:][0] is sampled[1]


def test_steps_without_noise_are_left_out_and_that_is_said():
    pipeline = tiny.stable_diffusion()
    pipeline.scheduler = tiny.ddim(steps_offset=0, set_alpha_to_one=True)
    one = trainer(pipeline=pipeline)
    with pytest.warns(UserWarning, match="1 of 2 steps have no noise.*steps_offset=1"):
        one.step(0, 0)


def test_more_noise_than_ddim_has_is_refused():
    with pytest.raises(ValueError, match=r"eta=1\.5: DDIM takes 0 to 1"):
        trainer(sample_eta=1.5).step(0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_inference_steps", 9),
        ("output_type", "latent"),
        ("eta", 0.5),
        ("guidance_scale", 2.0),
        ("negative_prompt", "dull"),
        ("prompt", "a dog"),
        ("num_images_per_prompt", 2),
    ],
)
def test_arguments_of_the_trainer_are_refused_in_call_kwargs(name: str, value: Any):
    wrapped = DDPOStableDiffusionPipeline(tiny.stable_diffusion(), call_kwargs={name: value})
    with pytest.raises(ValueError, match=f"call_kwargs has {name}, which the trainer passes itself.*sample_num_steps"):
        trainer(pipeline=wrapped, sample_guidance_scale=3.0)


@pytest.mark.parametrize(
    ("settings", "came"),
    [
        ({"sample_num_steps": 3}, "sample_num_steps=3"),
        ({"sample_num_steps": 2, "eval_num_steps": 7}, "eval_num_steps=7"),
    ],
)
def test_steps_of_a_pipeline_that_are_not_those_of_the_config_are_refused(settings: dict[str, Any], came: str):
    wrapped = DDPOStableDiffusionPipeline(tiny.stable_diffusion_3(), call_kwargs={"sigmas": [1.0, 0.5]})
    with pytest.raises(ValueError, match=f"call_kwargs has 2 sigmas, .* and {came} came. Set sample_num_steps"):
        trainer(pipeline=wrapped, **settings)


def test_calculate_loss_refuses_a_timestep_that_is_not_of_the_schedule():
    with pytest.raises(ValueError, match=r"Timesteps \[7\] came"):
        trainer().calculate_loss(torch.zeros(1, 4, 8, 8), torch.tensor([7]), *[torch.zeros(1)] * 4)


def test_calculate_loss_asks_for_a_call_of_the_pipeline_where_the_steps_depend_on_the_images():
    one = trainer(pipeline=modern.flux(), sample_guidance_scale=2.0)
    with pytest.raises(ValueError, match=r"calculate_loss came before .* \(use_dynamic_shifting\).* Call the pipeline"):
        one.calculate_loss(torch.zeros(1, 16, 16), torch.tensor([500.0]), *[torch.zeros(1)] * 4)


# ------------------------------------------------------------------ a script of 2024


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard", None])
@pytest.mark.parametrize("use_lora", [True, False])
def test_the_documented_example_runs_with_its_import_changed(tmp_path, offline_wandb, tracker, use_lora):
    tiny.stable_diffusion().save_pretrained(tmp_path / "base")
    animals = ["cat", "dog", "horse", "monkey", "rabbit"]
    logged = []

    def prompt_fn():
        return random.choice(animals), {}

    def scorer(images, prompts, metadata):
        images = (images * 255).round().clamp(0, 255).to(torch.uint8)
        return images.float().mean((1, 2, 3)) / 255, {}

    def image_outputs_logger(image_data, global_step, accelerate_logger):
        result = {}
        images, prompts, _, rewards, _ = image_data[-1]
        for i, image in enumerate(images):
            result[f"{prompts[i]:.25} | {rewards[i].item():.2f}"] = image.unsqueeze(0).float()
        accelerate_logger.log_images(result, step=global_step)
        logged.append((global_step, list(result)))

    config = DDPOConfig(
        num_epochs=2,
        train_gradient_accumulation_steps=1,
        sample_num_steps=3,
        sample_batch_size=2,
        train_batch_size=2,
        sample_num_batches_per_epoch=2,
        per_prompt_stat_tracking=True,
        per_prompt_stat_tracking_buffer_size=32,
        tracker_project_name="stable_diffusion_training",
        log_with=tracker,
        train_learning_rate=1e-2,
        num_checkpoint_limit=1,
    )
    config.project_kwargs = {
        "logging_dir": str(tmp_path / "logs"),
        "automatic_checkpoint_naming": True,
        "total_limit": 5,
        "project_dir": str(tmp_path / "save"),
    }
    pipeline = DefaultDDPOStableDiffusionPipeline(
        str(tmp_path / "base"), pretrained_model_revision="main", use_lora=use_lora
    )
    with pytest.warns(UserWarning, match="fp16.*float32"):
        ddpo_trainer = DDPOTrainer(config, scorer, prompt_fn, pipeline, image_samples_hook=image_outputs_logger)
    history = ddpo_trainer.train()
    ddpo_trainer.save_pretrained(tmp_path / "out")
    ddpo_trainer.tracker.finish()

    assert [step for step, _ in logged] == [0, 2]
    assert [stats["epoch"] for stats in history] == [0.0, 1.0]
    assert all(caption.partition(" | ")[0] in animals for _, captions in logged for caption in captions)
    assert sorted(path.name for path in (tmp_path / "save" / "checkpoints").iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    assert_pictures_are_logged(tmp_path / "logs", tracker)
    base = StableDiffusionPipeline.from_pretrained(tmp_path / "base")
    fresh = StableDiffusionPipeline.from_pretrained(tmp_path / ("base" if use_lora else "out"))
    if use_lora:
        fresh.load_lora_weights(tmp_path / "out")
    trained, loaded, untrained = (
        each("cat", num_inference_steps=2, output_type="pt", generator=tiny.generator()).images
        for each in (pipeline.sd_pipeline, fresh, base)
    )
    torch.testing.assert_close(loaded, trained, atol=1e-5, rtol=0)
    assert (loaded - untrained).abs().max() > 1e-3


def assert_pictures_are_logged(folder: Path, tracker: str | None) -> None:
    if tracker == "wandb":
        pictures = [*folder.rglob("hook_*.png")]
        assert len(pictures) == 4
        assert all(Image.open(path).size == (16, 16) for path in pictures)
    elif tracker == "tensorboard":
        assert [*folder.rglob("events.out.tfevents*")]
    else:
        assert not folder.exists()


def test_what_is_kept_of_a_config_is_a_copy():
    config = DDPOConfig(**SMALL)
    one = DDPOTrainer(config, redness, a_cat, DDPOStableDiffusionPipeline(tiny.stable_diffusion(), use_lora=True))
    config.train_batch_size = 3
    one.step(0, 0)
    assert one.global_step == 2
