"""DDPOTrainer's promises on tiny pipelines, tested from outside."""

import random
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from tests.diffusion import tiny
from tests.diffusion.run_ddpo_distributed import KINDS, Turns, brightness, trainer, weights
from tests.marks import slow_but
from torch import Tensor

from trimtab_diffusion.ddpo import DDPOTrainer
from trimtab_diffusion.ddpo.selfcheck import ReplayError
from trimtab_diffusion.prompts import simple_animals

pytestmark = pytest.mark.filterwarnings("ignore")
DIMENSIONS = 4 * tiny.SIZE**2
ONE_UPDATE = {"train_batch_size": 8, "train_gradient_accumulation_steps": 1}


def trained(folder: Path, epochs: int = 2, **settings: Any) -> DDPOTrainer:
    ddpo = trainer(str(folder), **settings)
    for epoch in range(epochs):
        ddpo.step(epoch, ddpo.global_step)
    return ddpo


def assert_equal(one: DDPOTrainer, other: DDPOTrainer) -> None:
    mine, yours = weights(one), weights(other)
    assert all(torch.equal(weight, yours[name]) for name, weight in mine.items())


def moved(ddpo: DDPOTrainer, pipeline: Any) -> bool:
    """Whether a trainer's weights differ from the pipeline's, which has the same seed."""
    stock = dict(pipeline.unet.named_parameters())
    return any(not torch.equal(weight, stock[name]) for name, weight in weights(ddpo).items())


class Rows:
    """Counts the rows that a denoiser computes with gradients, and records their timesteps."""

    def __init__(self, ddpo: DDPOTrainer):
        self.times: list[float] = []
        ddpo.sd_pipeline.denoiser.register_forward_hook(self._see, with_kwargs=True)

    def _see(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if torch.is_grad_enabled():
            self.times += kwargs["timestep"].tolist()


# ------------------------------------------------------------- the self-check


@pytest.mark.parametrize(("use_lora", "dtype"), [(False, None), (True, None), (False, "float16"), (True, "bfloat16")])
@pytest.mark.parametrize("kind", KINDS)
def test_ratios_start_from_one(tmp_path: Path, kind: str, use_lora: bool, dtype: str | None):
    """Holds with guidance, for micro-batches of three pairs from images drawn in pairs, and for any latent dtype."""
    pipeline = KINDS[kind]()
    ddpo = trainer(
        str(tmp_path),
        pipeline,
        use_lora=use_lora,
        trajectory_dtype=dtype,
        sample_num_batches_per_epoch=3,
        train_batch_size=3,
        train_gradient_accumulation_steps=2,
        sample_eta=0.7,
    )
    if use_lora:
        with torch.no_grad():
            for name, weight in ddpo.sd_pipeline.denoiser.named_parameters():
                if "lora_B" in name:
                    weight.normal_(generator=tiny.generator(3), std=0.3)
    ddpo.step(0, 0)
    assert 0 <= ddpo.last_stats["selfcheck/nats"] / DIMENSIONS < 1e-6
    assert ddpo.last_stats["ratio"] == pytest.approx(1, abs=1e-6)
    assert ddpo.last_stats["policy/nats"] / DIMENSIONS < 1e-6
    ddpo.step(1, ddpo.global_step)
    assert "selfcheck/nats" not in ddpo.last_stats  # once per run


def test_dropout_that_stays_on_is_caught(tmp_path: Path):
    pipeline = tiny.stable_diffusion()
    pipeline.unet.mid_block.register_forward_hook(lambda module, args, output: F.dropout(output, 0.1))
    ddpo = trainer(str(tmp_path), pipeline)
    with pytest.raises(ReplayError, match="dropout"):
        ddpo.step(0, 0)


def test_dropout_layers_are_off_while_training(tmp_path: Path):
    """With dropout in the denoiser, the policy that trains would differ from the one that sampled."""
    pipeline = tiny.stable_diffusion()
    pipeline.unet.mid_block.resnets[0].dropout.p = 0.5
    pipeline.unet.train()
    ddpo = trained(tmp_path, 1, pipeline=pipeline)
    assert ddpo.last_stats["ratio"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_weights_changed_between_drawing_and_learning_are_caught(tmp_path: Path, kind: str):
    def reward(images: Tensor, prompts: Any, metadata: Any) -> Tensor:
        with torch.no_grad():
            for weight in ddpo.sd_pipeline.denoiser.parameters():
                weight *= 1.02
        return brightness(images, prompts, metadata)

    ddpo = trainer(str(tmp_path), reward=reward, kind=kind)
    before = ddpo.global_step
    with pytest.raises(ReplayError, match="weights changed"):
        ddpo.step(0, 0)
    assert ddpo.global_step == before


# -------------------------------------------------------- groups, regression


def test_groups_are_of_one_prompt(tmp_path: Path):
    seen: list[Any] = []
    trained(tmp_path, 1, group_size=2, image_samples_hook=lambda batches, *_: seen.extend(batches))
    assert [tuple(batch[1]) for batch in seen] == [
        ("a cat",) * 2,
        ("two dogs",) * 2,
        ("a red ant",) * 2,
        ("an owl",) * 2,
    ]
    assert not torch.equal(seen[0][0][0], seen[0][0][1])


@pytest.mark.parametrize("estimator", slow_but(["rwr", "rwr_sparse"], "rwr"))
@pytest.mark.parametrize("kind", slow_but(["sd", "sd3"], "sd"))
def test_regression_learns_its_samples(tmp_path: Path, monkeypatch, estimator: str, kind: str):
    """The loss falls when the same samples repeat; the self-check of ratios does not apply."""
    ddpo = trainer(
        str(tmp_path),
        kind=kind,
        estimator=estimator,
        rwr_beta=100.0,
        rwr_top=0.5,
        train_num_inner_epochs=12,
        train_learning_rate=1e-2 if kind == "sd3" else 5e-3,
    )
    losses: list[float] = []
    usual = ddpo.accelerator.backward

    def watched(loss: Tensor) -> None:
        losses.append(float(loss))
        usual(loss)

    monkeypatch.setattr(ddpo.accelerator, "backward", watched)
    ddpo.step(0, 0)
    assert "selfcheck/nats" not in ddpo.last_stats
    third = len(losses) // 3
    assert sum(losses[-third:]) < 0.95 * sum(losses[:third])


@pytest.mark.parametrize(
    ("settings", "warns"),
    [({}, True), ({"group_size": 2}, False), ({"rwr_beta": 0}, False), ({"estimator": "rwr_sparse"}, False)],
)
def test_regression_on_one_sample_per_prompt_warns_in_the_first_epoch(
    tmp_path: Path, settings: dict[str, Any], warns: bool
):
    prompts = Turns([f"cat {number}" for number in range(16)])
    ddpo = trainer(str(tmp_path), prompt_function=prompts, **{"estimator": "rwr"} | settings)
    said = []
    for epoch in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddpo.step(epoch, ddpo.global_step)
        said.append([str(each.message) for each in caught if "occur once" in str(each.message)])
    assert [len(each) for each in said] == [int(warns), 0]
    assert not warns or re.search("^8 of 8 prompts occur once.*Set group_size", said[0][0])


# ------------------------------------------------------------------ rewards


def test_async_rewards_train_the_same(tmp_path: Path):
    """The first batch's reward waits until the second's begins: they overlap, and keep their order."""
    second, overlapped = threading.Event(), []

    def slow(images: Tensor, prompts: Any, metadata: tuple[Any, ...]) -> Tensor:
        if metadata[0]["number"] == 0:
            overlapped.append(second.wait(30))
        elif metadata[0]["number"] == 2:
            second.set()
        return brightness(images, prompts, metadata)

    straight = trained(tmp_path, reward=brightness)
    threaded = trained(tmp_path, reward=slow, async_reward_computation=True, max_workers=2)
    assert overlapped == [True]
    assert_equal(straight, threaded)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.bfloat16])
def test_rewards_of_any_dtype(tmp_path: Path, dtype: torch.dtype):
    """The rewards also have the shape [B, 1]."""

    def ranks(images: Tensor, prompts: Any, metadata: tuple[Any, ...]) -> Tensor:
        return torch.tensor([each["number"] % 4 for each in metadata], dtype=torch.float32) > 1

    plain = trained(tmp_path, 1, reward=lambda *arguments: ranks(*arguments).float())
    assert moved(plain, tiny.stable_diffusion())
    assert_equal(trained(tmp_path, 1, reward=lambda *arguments: ranks(*arguments).to(dtype)[:, None]), plain)


def test_other_rewards_are_logged_and_not_trained_on(tmp_path: Path):
    seen: list[Any] = []
    ddpo = trained(
        tmp_path,
        1,
        other_rewards={"red": lambda images, *_: images[:, 0].mean((1, 2))},
        image_samples_hook=lambda batches, *_: seen.extend(batches),
    )
    pictures = torch.cat([batch[0] for batch in seen])
    assert ddpo.last_stats["other/red"] == pytest.approx(float(pictures[:, 0].mean()), rel=1e-5)
    assert ddpo.last_stats["reward_mean"] == pytest.approx(float(pictures.mean()), rel=1e-5)
    plain = trained(tmp_path, 1)
    assert 0.1 < plain.last_stats["other/jpeg_kb"] < 2
    assert_equal(ddpo, plain)


# --------------------------------------------------------- trained steps


def test_each_epoch_and_each_process_draws_by_itself_and_the_same_again(tmp_path: Path, monkeypatch):
    ddpo = trainer(tmp_path, prompt_function=simple_animals())
    first, again, later = ddpo.draw(0), ddpo.draw(0), ddpo.draw(1)
    monkeypatch.setattr(type(ddpo.accelerator), "process_index", 1)
    elsewhere = ddpo.draw(0)
    assert torch.equal(first.trajectories.latents, again.trajectories.latents)
    assert first.prompts == again.prompts
    for other in (later, elsewhere):
        assert not torch.isclose(first.trajectories.first, other.trajectories.first).any(1).all()
        assert first.prompts != other.prompts
    state = random.getstate()
    ddpo.draw(2)
    assert random.getstate() == state


def test_a_fraction_of_the_steps_is_trained_on(tmp_path: Path):
    """Trains on half of four steps of eight images, with two rows each under guidance; every step gets its turn."""
    ddpo = trainer(str(tmp_path), sample_num_steps=4, train_timestep_fraction=0.5, **ONE_UPDATE)
    rows = Rows(ddpo)
    ddpo.step(0, 0)
    assert len(rows.times) == 8 * 2 * 2
    assert len(set(rows.times)) == 4
    assert ddpo.global_step == 1


def test_steps_without_noise_are_left_out_and_said_once(tmp_path: Path):
    """The last step has no noise if the schedule ends on noise-free images."""
    pipeline = tiny.stable_diffusion(scheduler=tiny.ddim(set_alpha_to_one=True))
    ddpo = trainer(str(tmp_path), pipeline, **ONE_UPDATE, train_num_inner_epochs=2)
    rows = Rows(ddpo)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            ddpo.step(epoch, ddpo.global_step)
    assert [str(each.message)[:7] for each in caught if "have no noise" in str(each.message)] == ["1 of 3 "]
    assert sorted(set(rows.times)) == [334, 667]
    assert len(rows.times) == 4 * 8 * 2 * 2


def test_the_clip_range_in_nats_is_the_one_per_dimension(tmp_path: Path):
    settings = {"train_batch_size": 2, "train_gradient_accumulation_steps": 1}
    narrow = trained(tmp_path, 1, train_clip_range=2.0**-9, **settings)
    nats = trained(tmp_path, 1, train_clip_range_nats=DIMENSIONS * 2.0**-9, **settings)
    assert_equal(narrow, nats)
    assert 0 < nats.last_stats["clipfrac"] < 1
    assert nats.last_stats["clip_range"] == 2.0**-9
    assert nats.last_stats["clip_range_nats"] == narrow.last_stats["clip_range_nats"] == DIMENSIONS * 2.0**-9


@pytest.mark.slow
def test_updates_are_counted(tmp_path: Path):
    """Eight images, two per update, two passes."""
    ddpo = trainer(
        str(tmp_path), train_batch_size=1, train_gradient_accumulation_steps=2, train_num_inner_epochs=2, save_freq=9
    )
    assert ddpo.step(0, 0) == 8
    assert ddpo.last_stats["queries"] == 8
    history = ddpo.train(3)
    assert ddpo.global_step == 24
    assert [each["epoch"] for each in history] == [1.0, 2.0]
    assert ddpo.train(epochs=0) == []


# ------------------------------------------------------- memory and precision


def test_half_precision_trajectories_take_half_the_memory(tmp_path: Path):
    full, half = (trained(tmp_path, 1, trajectory_dtype=dtype, sample_num_steps=6) for dtype in (None, "bfloat16"))
    latents = 8 * 6 * DIMENSIONS * 4 / 1e6
    sizes = [ddpo.last_stats["memory/trajectories_mb"] for ddpo in (full, half)]
    assert sizes[0] - sizes[1] == pytest.approx(latents / 2)
    assert sizes[0] > latents


def test_trajectories_on_the_cpu_train_the_same(tmp_path: Path):
    assert_equal(trained(tmp_path, 1), trained(tmp_path, 1, trajectory_on_cpu=True))


@pytest.mark.parametrize("use_lora", [False, True])
def test_gradient_checkpointing_makes_the_same_update(tmp_path: Path, use_lora: bool):
    calls: list[int] = []

    def run(checkpointing: bool) -> DDPOTrainer:
        settings = {"train_gradient_checkpointing": checkpointing}
        ddpo = trainer(str(tmp_path), use_lora=use_lora, **settings, **ONE_UPDATE)
        count: list[int] = []
        ddpo.sd_pipeline.unet.up_blocks[1].resnets[1].register_forward_pre_hook(lambda *_: count.append(1))
        ddpo.step(0, 0)
        calls.append(len(count))
        return ddpo

    plain, checkpointed = run(False), run(True)
    assert calls[1] == calls[0] + 3  # recomputed in each of the update's three micro-batches
    mine, yours = weights(plain), weights(checkpointed)
    for name, weight in mine.items():
        torch.testing.assert_close(weight, yours[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Resets accelerate, which allows one precision per program."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(("kind", "use_lora", "kl"), [("sd", False, 0.1), ("sdxl", True, 0.1), ("sd3", False, 0)])
def test_bf16_trains(tmp_path: Path, kind: str, use_lora: bool, kl: float):
    """Frozen parts are bf16, trainable ones float32; replaying in the sampled batches adds no rounding."""
    ddpo = trainer(
        str(tmp_path),
        kind=kind,
        use_lora=use_lora,
        mixed_precision="bf16",
        init_kl_coef=kl,
        train_batch_size=2,
        train_gradient_accumulation_steps=4,
        train_clip_range_nats=1.0,
    )
    before = weights(ddpo)
    ddpo.step(0, 0)
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    assert ddpo.sd_pipeline.vae.dtype == torch.bfloat16
    assert ddpo.last_stats["selfcheck/nats"] < 0.1
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(ddpo).items())
    assert ddpo.last_stats.get("objective/kl", 0.0) == pytest.approx(0, abs=1e-6)  # the reference computes the same


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_a_half_precision_pipeline_trains_without_mixed_precision(tmp_path: Path, kind: str, use_lora: bool):
    pipeline = KINDS[kind](dtype=torch.bfloat16)
    ddpo = trainer(str(tmp_path), pipeline, use_lora=use_lora, train_clip_range=1.0)
    before = weights(ddpo)
    ddpo.step(0, 0)
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(ddpo).items())
    assert {weight.dtype for weight in before.values()} == {torch.float32}
    assert pipeline.vae.dtype is pipeline.text_encoder.dtype is (torch.bfloat16 if use_lora else torch.float32)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(("variable", "precision"), [("bf16", "bf16"), ("no", "no"), (None, "no")])
def test_no_mixed_precision_of_the_config_means_that_of_the_launcher(tmp_path, monkeypatch, variable, precision):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if variable is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    ddpo = trainer(str(tmp_path), mixed_precision=None)
    assert ddpo.accelerator.mixed_precision == precision
    assert ddpo.sd_pipeline.vae.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)


@pytest.mark.usefixtures("fresh_accelerate")
def test_fp16_of_the_launcher_needs_a_gpu_too(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.warns(UserWarning, match="fp16.*float32"):
        ddpo = trainer(str(tmp_path), mixed_precision=None, accelerator_kwargs={"cpu": True})
    assert ddpo.accelerator.mixed_precision == "no"


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_precision_of_the_launcher_that_ddpo_does_not_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ValueError, match=r"ACCELERATE_MIXED_PRECISION='fp8' is none of no, fp16, bf16.*Set mixed"):
        trainer(str(tmp_path), mixed_precision=None)


# ------------------------------------------------------------ learning


@pytest.mark.slow
def test_the_reward_rises_and_falls_with_its_sign_turned(tmp_path: Path):
    """All runs share prompts and noise, so images differ only by training. Their brightness deviates by 0.005."""

    def last(sign: float, rate: float) -> float:
        ddpo = trained(
            tmp_path,
            8,
            kind="sd3",
            reward=lambda *arguments: sign * brightness(*arguments),
            train_learning_rate=rate,
            other_rewards={"brightness": brightness},
            sample_batch_size=32,
            sample_num_batches_per_epoch=1,
            train_batch_size=32,
            train_gradient_accumulation_steps=1,
            sample_guidance_scale=1.0,
            train_clip_range_nats=20.0,
            train_num_inner_epochs=2,
            train_warmup_steps=5,
        )
        return ddpo.last_stats["other/brightness"]

    untrained = last(1, 1e-12)
    assert last(1, 1e-2) > untrained + 0.01
    assert last(-1, 1e-2) < untrained - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("use_lora", [False, True])
def test_the_penalty_keeps_the_policy_near(tmp_path: Path, use_lora: bool):
    """Adapters use the frozen weights as reference, full policies a copy; both begin at a KL of 0."""
    settings = {
        **ONE_UPDATE,
        "use_lora": use_lora,
        "train_learning_rate": 1e-2 if use_lora else 1e-3,
        "train_num_inner_epochs": 4,
    }
    free, held = (
        trained(tmp_path, 2, init_kl_coef=coef, **settings).last_stats["objective/kl"] for coef in (1e-9, 50.0)
    )
    assert 0 < held < 0.5 * free
    start = trained(tmp_path, 1, init_kl_coef=1.0, use_lora=use_lora, **ONE_UPDATE)
    assert start.last_stats["objective/kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.filterwarnings("error:.*the reference is not the policy")
def test_the_reference_of_trained_adapters_has_them_as_they_were(tmp_path: Path):
    pipeline = tiny.with_trained_adapters(tiny.stable_diffusion())
    ddpo = trained(tmp_path, 1, pipeline=pipeline, use_lora=True, init_kl_coef=0.1, **ONE_UPDATE)
    assert ddpo.last_stats["objective/kl"] == pytest.approx(0, abs=1e-6)


def test_a_trainer_made_again_on_its_pipeline_keeps_the_reference(tmp_path: Path):
    ddpo = trained(tmp_path, 1, use_lora=True, init_kl_coef=0.1)
    again = DDPOTrainer(ddpo.config, ddpo.reward_fn, ddpo.prompt_fn, ddpo.sd_pipeline)
    assert again.reference == ddpo.reference == ddpo.sd_pipeline.reference  # the denoiser without its adapters


def test_the_adaptive_controller_moves(tmp_path: Path):
    """It moves by at most 20 % of 8 images over a horizon of 16; the KL of the first update is 0."""
    ddpo = trainer(
        str(tmp_path),
        init_kl_coef=0.5,
        adap_kl_ctrl=True,
        target=1e-3,
        horizon=16,
        train_learning_rate=1e-3,
        **ONE_UPDATE,
    )
    coefficients = []
    for epoch in range(3):
        ddpo.step(epoch, ddpo.global_step)
        coefficients.append(ddpo.last_stats["objective/kl_coef"])
    assert coefficients == pytest.approx([0.5, 0.5 * 0.9, 0.5 * 0.9 * 1.1])


# ------------------------------------------------------------------ the hook


def test_the_hook_gets_what_is_documented(tmp_path: Path):
    """Also holds without a tracker; its calls then do nothing."""
    calls: list[Any] = []

    def reward(images: Tensor, prompts: Any, metadata: Any) -> tuple[Tensor, dict[str, Any]]:
        return brightness(images, prompts, metadata), {"judge": len(images)}

    def hook(batches: Any, global_step: int, tracker: Any) -> None:
        tracker.log_images({"caption": batches[0][0]}, step=global_step)
        tracker.log({"number": 1.0}, step=global_step)
        calls.append((batches, global_step))

    trained(tmp_path, 2, reward=reward, image_samples_hook=hook, **ONE_UPDATE)
    assert [step for _, step in calls] == [0, 1]
    assert [len(batches) for batches, _ in calls] == [4, 4]
    for number, (images, prompts, metadata, rewards, reward_metadata) in enumerate(calls[0][0]):
        assert images.shape == (2, 3, 2 * tiny.SIZE, 2 * tiny.SIZE)
        assert 0 <= float(images.min()) < float(images.max()) <= 1
        assert prompts == (("a cat", "two dogs"), ("a red ant", "an owl"))[number % 2]
        assert [each["number"] for each in metadata] == [2 * number, 2 * number + 1]
        torch.testing.assert_close(rewards, images.mean((1, 2, 3)))
        assert reward_metadata == {"judge": 2}


@pytest.mark.parametrize(
    ("kind", "preview"),
    [("sd", {"guidance_scale": 9.0}), ("sd", {"num_inference_steps": 4}), ("sd3", {"eta": 0.2})],
)
def test_a_preview_in_the_hook_changes_no_update(tmp_path: Path, kind: str, preview: dict[str, Any]):
    def hook(*_: Any) -> None:
        ddpo.sd_pipeline(["a cat"], **{"num_inference_steps": 3, "guidance_scale": 3.0, "output_type": "pt"} | preview)

    settings: dict[str, Any] = {"kind": kind, "sample_eta": 0.7, "init_kl_coef": 0.1}
    ddpo = trainer(str(tmp_path), image_samples_hook=hook, **settings)
    ddpo.step(0, 0)
    assert_equal(ddpo, trained(tmp_path, 1, **settings))


@pytest.mark.usefixtures("offline_wandb")
def test_the_hook_of_the_2024_example_logs_its_pictures(tmp_path: Path):
    captions: list[str] = []

    def outputs_logger(image_data: Any, global_step: int, accelerate_logger: Any) -> None:
        result = {}
        images, prompts, _, rewards, _ = image_data[-1]
        for image, prompt, reward in zip(images, prompts, rewards, strict=True):
            result[f"{prompt:.25} | {reward:.2f}"] = image.unsqueeze(0).float()
        captions.extend(result)
        accelerate_logger.log_images(result, step=global_step)

    ddpo = trained(tmp_path, 1, image_samples_hook=outputs_logger, log_with="wandb")
    summary = dict(ddpo.tracker.accelerate.tracker.summary)
    ddpo.tracker.finish()
    assert [caption.split(" | ")[0] for caption in captions] == ["a red ant", "an owl"]
    assert summary["hook"]["captions"] == captions
    assert summary["hook"]["count"] == 2
    assert (summary["hook"]["width"], summary["hook"]["height"]) == (2 * tiny.SIZE, 2 * tiny.SIZE)
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/hook*.png"))) == 2


def test_attributes_of_2024_and_logs_through_the_accelerator(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ddpo: Any = trainer(str(tmp_path), use_lora=True, log_with="tensorboard", tracker_kwargs={"tensorboard": {}})
    assert ddpo.num_train_timesteps == ddpo.config.trained_steps
    assert {id(weight) for weight in ddpo.trainable_layers} == {
        id(w) for w in ddpo.model.parameters() if w.requires_grad
    }
    assert ddpo.config.to_dict()["train_learning_rate"] == ddpo.config.train_learning_rate
    drawn: list[str] = []
    ddpo.prompt_fn = lambda: (drawn.append("a cat") or "a cat", {})
    ddpo.reward_fn = lambda images, prompts, metadata: (torch.full((len(images),), 3.0), {})
    ddpo.accelerator.log({"eval": 0.5}, step=5)
    ddpo.step(0, 0)
    assert drawn
    assert ddpo.last_stats["reward_mean"] == ddpo.reward_fn(torch.zeros(1), None, None)[0].item()
    ddpo.accelerator.end_training()
    (file,) = tmp_path.rglob("events.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval")] == [(5, 0.5)]
    assert events.Scalars("reward_mean")[0].value == 3
