"""The first update of an epoch takes its gradients from the passes that sampled: they are those of a replay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diffusion import modern, tiny
from tests.diffusion.run_ddpo_distributed import Turns, config, samples_of, trainer, weights
from tests.diffusion.test_modern_pipelines import SIZES, brightness
from tests.loss_scale import with_loss_scale
from torch import Tensor

from trimtab_diffusion import DDPOStableDiffusionPipeline, DDPOTrainer
from trimtab_diffusion.adapter_gradients import AdapterGradients, has_only_adapters
from trimtab_diffusion.ddpo import setup
from trimtab_diffusion.ddpo.replay import Replay
from trimtab_diffusion.recording import Trajectories
from trimtab_diffusion.steps import gaussian_logprob

ONE_UPDATE: dict[str, Any] = {
    "sample_batch_size": 2,
    "sample_num_batches_per_epoch": 2,
    "train_batch_size": 4,
    "train_gradient_accumulation_steps": 1,
    "train_max_grad_norm": 0.5,
}
TWO_UPDATES: dict[str, Any] = ONE_UPDATE | {"sample_num_batches_per_epoch": 4}
BUILD = {
    "sd": tiny.stable_diffusion,
    "sdxl": tiny.stable_diffusion_xl,
    "sd3": tiny.stable_diffusion_3,
    "flux": modern.flux,
    "qwen_image": modern.qwen_image,
    "wan": modern.wan,
}
LOGGED = ("loss", "ratio", "approx_kl", "clipfrac", "policy/nats", "grad_norm", "reward_mean")

pytestmark = pytest.mark.filterwarnings("ignore:The steps of UniPCMultistepScheduler have no log-probability")


def ddpo(folder: Path, kind: str = "sd", **settings: Any) -> DDPOTrainer:
    """In float64. The adapters begin as another map than zero, so that both of their matrices have gradients."""
    with tiny.from_seed(1):
        wrapped = DDPOStableDiffusionPipeline(
            BUILD[kind](dtype=torch.float64), use_lora=True, call_kwargs=SIZES.get(kind, {})
        )
        wrapped.denoiser.double()
        with torch.no_grad():
            for weight in wrapped.denoiser.parameters():
                if weight.requires_grad:
                    weight.add_(0.3 * torch.randn_like(weight))
    return DDPOTrainer(config(str(folder), **ONE_UPDATE | settings), brightness, Turns(), wrapped)


def replayed(denoiser: Any, trajectories: Trajectories, rows: Tensor, row_weights: Tensor) -> list[Tensor]:
    """The gradients of the weighted sum of log-probabilities of all steps with noise, from a pass of their own."""
    steps = trajectories.steps.is_random.nonzero().flatten()
    pairs = torch.cartesian_prod(rows, steps)
    replay = Replay.of(trajectories, pairs[:, 0], pairs[:, 1], torch.device("cpu"))
    logprobs = gaussian_logprob(replay.next_latents, *replay.gaussian(denoiser))
    trainable = [weight for weight in denoiser.parameters() if weight.requires_grad]
    total = (logprobs * row_weights.repeat_interleave(len(steps))).sum()
    return list(torch.autograd.grad(total, trainable, allow_unused=True))


@pytest.mark.parametrize("kind", BUILD)
def test_gradients_of_samples_are_those_of_a_replay(kind: str, tmp_path: Path):
    trained = ddpo(tmp_path, kind, **TWO_UPDATES)
    samples = trained.draw(0)
    gradients = samples.gradients
    assert gradients is not None
    assert len(gradients) == 4  # the samples of the first update, of 8
    chosen = torch.tensor([0.5, -2.0, 0.0, 1.0])
    denoiser = trained.sd_pipeline.denoiser
    trainable = [weight for weight in denoiser.parameters() if weight.requires_grad]
    by_weight = {id(weight): value for weight, value in zip(gradients.weights, gradients.weighted(chosen), strict=True)}
    assert by_weight.keys() == {id(weight) for weight in trainable}
    for weight, value in zip(trainable, replayed(denoiser, samples.trajectories, torch.arange(4), chosen), strict=True):
        assert (value is None) == (by_weight[id(weight)] is None)
        if value is not None:
            assert float(value.abs().max()) > 0
            torch.testing.assert_close(by_weight[id(weight)], value, rtol=1e-4, atol=1e-6 * float(value.abs().max()))
    assert all(weight.grad is None for weight in trainable)


LESS_USUAL: list[dict[str, Any]] = [
    {"sample_guidance_scale": 1.0},
    {"trajectory_dtype": "bfloat16", "trajectory_on_cpu": True},
    {"group_size": 2},
]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"estimator": "sf"},
        {"train_num_inner_epochs": 2},
        {"train_gradient_checkpointing": True},
        *(pytest.param(each, marks=pytest.mark.slow, id=next(iter(each))) for each in LESS_USUAL),
    ],
    ids=lambda settings: ",".join(settings) or "defaults",
)
def test_two_epochs_are_those_without_the_shortcut(settings: dict[str, Any], tmp_path: Path):
    """With one update in an epoch, whose samples are then all drawn first, nothing but rounding differs."""
    results = []
    for shortcut in (True, False):
        trained = ddpo(tmp_path / str(shortcut), train_while_sampling=shortcut, **settings)
        assert trained.trains_while_sampling is shortcut
        before, logged = weights(trained), []
        for epoch in range(2):
            trained.step(epoch, trained.global_step)
            logged.append([trained.last_stats[name] for name in LOGGED])
        moved = {name: weight - before[name] for name, weight in weights(trained).items()}
        results.append((torch.cat([each.flatten() for each in moved.values()]), logged))
    (moved, logged), (plainly, plain_logged) = results
    for mine, theirs in zip(logged, plain_logged, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    assert float((moved - plainly).norm() / plainly.norm()) < 1e-5


def test_a_loss_scale_changes_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain, trained = ddpo(tmp_path / "plain"), ddpo(tmp_path / "scaled")
    plain.step(0, 0)
    scaler = with_loss_scale(trained, 1024.0, monkeypatch)
    samples = samples_of(trained)
    trained.step(0, 0)
    assert samples[0].gradients is not None
    assert samples[0].gradients.scale == 1024 / (4 * 3)  # images and steps
    assert trained.last_stats["grad_norm"] == pytest.approx(plain.last_stats["grad_norm"], rel=1e-6)
    for name, weight in weights(trained).items():
        torch.testing.assert_close(weight, weights(plain)[name], rtol=1e-6, atol=1e-9)
    assert scaler.get_scale() == 1024
    assert trained.last_stats["policy/overflowed"] == 0


def test_gradients_that_overflow_skip_the_update_and_lower_the_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trained = ddpo(tmp_path)
    before = weights(trained)
    scaler = with_loss_scale(trained, 1024.0, monkeypatch)
    usual = trained.draw

    def draw(epoch: int) -> Any:
        samples = usual(epoch)
        assert samples.gradients is not None
        samples.gradients._batches[0][1][0].fill_(torch.inf)  # type: ignore[union-attr]
        return samples

    monkeypatch.setattr(trained, "draw", draw)
    trained.step(0, 0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trained).items())
    assert scaler.get_scale() == 512
    assert trained.last_stats["policy/overflowed"] == 1
    assert "grad_norm" not in trained.last_stats


def test_small_gradients_survive_fp16(tmp_path: Path):
    """Unscaled, a gradient of 1e-9 is 0 in fp16."""
    with tiny.from_seed(0):
        denoiser = DDPOStableDiffusionPipeline(tiny.stable_diffusion(), use_lora=True).denoiser
        latents, text = torch.randn(2, 4, tiny.SIZE, tiny.SIZE), torch.randn(2, 7, tiny.WIDTH)
    found = {}
    for scale in (1.0, 1e6):
        gradients = AdapterGradients(denoiser, scale=scale)
        with torch.no_grad(), gradients.watching():
            with torch.autocast("cpu", torch.float16):
                output = denoiser(latents, torch.tensor(3), text)[0]
            with torch.enable_grad():
                gradients.add(1e-9 * output.float().flatten(1).sum(1), copies=1)
        found[scale] = sum(float(each.abs().sum()) for each in gradients.weighted(torch.ones(2)) if each is not None)
    assert found[1e6] > 2 * found[1.0]


def test_each_sample_trains_once_and_the_first_ones_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of two updates the first has the samples that were drawn first, the other passes for training the rest."""
    trained = ddpo(tmp_path, **TWO_UPDATES)
    rows: list[Tensor] = []
    usual = trained._update

    def update(trajectories: Any, advantages: Tensor, chosen: Tensor, generator: torch.Generator) -> Any:
        rows.append(chosen)
        return usual(trajectories, advantages, chosen, generator)

    monkeypatch.setattr(trained, "_update", update)
    assert trained.step(0, 0) == 2
    [chosen] = rows
    assert sorted(chosen.tolist()) == [4, 5, 6, 7]


def test_the_denoiser_reads_each_sample_of_the_first_update_once(tmp_path: Path):
    counts = []
    for shortcut in (True, False):
        trained = ddpo(tmp_path / str(shortcut), train_while_sampling=shortcut)
        trained.step(0, 0)  # its check reads samples again
        read: list[int] = []
        trained.sd_pipeline.denoiser.register_forward_pre_hook(
            lambda module, args, kwargs, read=read: read.append(len(args[0] if args else kwargs["sample"])),
            with_kwargs=True,
        )
        trained.step(1, trained.global_step)
        counts.append(sum(read))
    assert counts == [4 * 3 * 2, 2 * 4 * 3 * 2]  # images, steps, guidance


def test_the_samples_are_those_without_the_shortcut(tmp_path: Path):
    firsts = []
    for shortcut in (True, False):
        trained = ddpo(tmp_path / str(shortcut), train_while_sampling=shortcut, **TWO_UPDATES)
        samples = samples_of(trained)
        trained.step(0, 0)
        firsts.append(samples[0])
    torch.testing.assert_close(firsts[0].trajectories.latents, firsts[1].trajectories.latents)
    torch.testing.assert_close(firsts[0].rewards, firsts[1].rewards)


@pytest.mark.parametrize(
    "settings",
    [
        {"train_while_sampling": False},
        {"train_timestep_fraction": 0.5},
        {"init_kl_coef": 0.1},
        {"estimator": "rwr"},
        {"train_batch_size": 1, "train_gradient_accumulation_steps": 4},
        {"train_batch_size": 2, "sample_batch_size": 4, "sample_num_batches_per_epoch": 1},
        {"train_compile": "aot_eager"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_runs_compute_gradients_in_training(settings: dict[str, Any], tmp_path: Path):
    trained = ddpo(tmp_path, **settings)
    assert not trained.trains_while_sampling
    assert trained.draw(0).gradients is None


def test_gradients_of_samples_that_have_no_room_are_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    needed = 4 * sum(weight.nbytes for weight in weights(ddpo(tmp_path)).values())
    monkeypatch.setattr(setup, "MOST_GRADIENTS", needed)
    assert ddpo(tmp_path).trains_while_sampling
    monkeypatch.setattr(setup, "MOST_GRADIENTS", needed - 1)
    assert not ddpo(tmp_path).trains_while_sampling


def test_a_loss_of_a_subclass_is_called(tmp_path: Path):
    class Own(DDPOTrainer):
        def calculate_loss(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            return super().calculate_loss(*args)

    plain = ddpo(tmp_path)
    trained = Own(plain.config, brightness, lambda: ("a cat", {}), plain.sd_pipeline)
    assert plain.trains_while_sampling
    assert not trained.trains_while_sampling


def test_adapters_of_another_precision_than_the_weights_have_no_gradients_of_samples(tmp_path: Path):
    """PEFT computes them. Autocast would bring both to one precision."""
    assert trainer(str(tmp_path), use_lora=True, **ONE_UPDATE).trains_while_sampling
    rounded = trainer(str(tmp_path), tiny.stable_diffusion(dtype=torch.bfloat16), use_lora=True, **ONE_UPDATE)
    assert not rounded.trains_while_sampling


def test_a_hook_that_comes_later_leaves_the_gradients_to_training(tmp_path: Path):
    """PEFT computes a layer whose parts have hooks, and all gradients of it would be added up."""
    trained = ddpo(tmp_path)
    assert trained.trains_while_sampling
    block = trained.sd_pipeline.denoiser.mid_block.attentions[0].transformer_blocks[0]
    block.attn1.to_q.base_layer.register_forward_hook(lambda *_: None)
    assert not trained.trains_while_sampling
    assert trained.draw(0).gradients is None


def test_only_adapters_have_gradients_of_samples(tmp_path: Path):
    denoiser = ddpo(tmp_path).sd_pipeline.denoiser
    assert has_only_adapters(denoiser)
    denoiser.conv_in.requires_grad_(True)
    assert not has_only_adapters(denoiser)
    assert not has_only_adapters(tiny.stable_diffusion().unet)


def test_what_fails_while_sampling_leaves_no_hooks_and_no_gradients(tmp_path: Path):
    def refuse(*_: object) -> Tensor:
        raise ConnectionError("the reward's server is gone")

    trained = ddpo(tmp_path)
    denoiser = trained.sd_pipeline.denoiser
    hooks = len(denoiser._forward_hooks), len(denoiser._forward_pre_hooks)
    handle = denoiser.mid_block.register_forward_hook(refuse)
    with pytest.raises(ConnectionError):
        trained.draw(0)
    handle.remove()
    assert torch.is_grad_enabled()
    assert (len(denoiser._forward_hooks), len(denoiser._forward_pre_hooks)) == hooks
    assert not any("collect" in vars(module) for module in denoiser.modules())
    trained.step(0, 0)
