from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from matplotlib import pyplot as plt

from experiments.black_2023_ddpo import pretrain, train
from experiments.black_2023_ddpo.report import contact_sheet, curve, judge
from experiments.black_2023_ddpo.shapes import (
    CAPTIONS,
    COLOURS,
    SIZE,
    colour_match,
    draw,
    rgb_alignment,
    shape_match,
)
from experiments.black_2023_ddpo.vae import patch_autoencoder, patches, principal_components
from experiments.runs import Run, finished_runs

ROOT = Path(train.__file__).parents[2]


def drawn(count: int, seed: int = 0) -> tuple[torch.Tensor, tuple[str, ...]]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.arange(count) % len(CAPTIONS)
    return draw(chosen, generator), tuple(CAPTIONS[i] for i in chosen)


def caption(colour: str, shape: str) -> tuple[str]:
    return (f"a {colour} {shape}",)


def wrong(prompts: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Captions `by` places further: by 1 another shape of the same colour, by 4 another colour."""
    return tuple(
        CAPTIONS[CAPTIONS.index(prompt) // 4 * 4 + (CAPTIONS.index(prompt) + by) % 4]
        if by < 4
        else CAPTIONS[(CAPTIONS.index(prompt) + by) % 16]
        for prompt in prompts
    )


# Pictures and what is measured on them ---------------------------------------------------------------------------


def test_drawn_pictures_are_in_range_and_fit_their_captions():
    images, prompts = drawn(320)
    assert images.shape == (320, 3, SIZE, SIZE)
    assert images.min() >= 0
    assert images.max() <= 1
    assert colour_match(images, prompts).mean() == 1
    assert shape_match(images, prompts).mean() > 0.98


def test_wrong_captions_are_noticed_by_the_measure_of_what_is_wrong():
    images, prompts = drawn(320)
    other_shape, other_colour = wrong(prompts, 1), wrong(prompts, 4)
    assert shape_match(images, other_shape).mean() < 0.02
    assert colour_match(images, other_shape).mean() == 1
    assert colour_match(images, other_colour).mean() == 0
    assert rgb_alignment(images, prompts).min() > -0.2
    assert torch.equal(rgb_alignment(images, prompts), rgb_alignment(images, other_shape))
    assert rgb_alignment(images, other_colour).max() < -0.5


def test_rgb_alignment_is_zero_on_the_colour_itself_and_else_minus_the_distance():
    red = torch.tensor(COLOURS["red"])
    canvas = red.view(1, 3, 1, 1).expand(1, 3, SIZE, SIZE)
    assert float(rgb_alignment(canvas, caption("red", "circle"))) == pytest.approx(0, abs=1e-6)
    away = float((red - torch.tensor(COLOURS["blue"])).norm())
    assert float(rgb_alignment(canvas, caption("blue", "cross"))) == pytest.approx(-away, rel=1e-5)
    assert float(rgb_alignment(canvas + 0.05, caption("red", "square"))) == pytest.approx(-0.05 * 3**0.5, rel=1e-4)


def test_rgb_alignment_looks_at_the_shape_alone():
    images, prompts = drawn(16)
    framed = images.clone()
    framed[:, :, [0, -1], :] = 0
    assert torch.equal(rgb_alignment(images, prompts), rgb_alignment(framed, prompts))


def test_a_prompt_without_colour_and_shape_is_refused():
    with pytest.raises(ValueError, match="a purple cow"):
        rgb_alignment(torch.zeros(1, 3, SIZE, SIZE), ("a purple cow",))


# The VAE ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted() -> tuple[AutoencoderKL, torch.Tensor, torch.Tensor]:
    mean, basis = principal_components(2 * drawn(256)[0] - 1, 6)
    return patch_autoencoder(mean, basis), mean, basis


def put_together(cut: torch.Tensor) -> torch.Tensor:
    """What `patches` cut, pixel by pixel."""
    images = torch.empty(len(cut), 3, 2 * cut.shape[1], 2 * cut.shape[2])
    for place in range(4):
        images[:, :, place // 2 :: 2, place % 2 :: 2] = cut[..., 3 * place : 3 * place + 3].permute(0, 3, 1, 2)
    return images


def test_patches_put_together_are_the_picture():
    images, _ = drawn(4)
    assert torch.equal(put_together(patches(images)), images)


def test_encoder_gives_principal_components_of_variance_one(fitted):
    vae, _, _ = fitted
    with torch.no_grad():
        latents = vae.encode(2 * drawn(256)[0] - 1).latent_dist
    rows = latents.mode().permute(0, 2, 3, 1).flatten(0, 2).double()
    torch.testing.assert_close(rows.T @ rows / len(rows), torch.eye(6).double(), atol=1e-3, rtol=0)
    assert latents.std.max() < 1e-6


def test_decoder_is_the_mean_and_the_basis(fitted):
    vae, mean, basis = fitted
    latents = torch.randn(8, 6, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = put_together(latents.permute(0, 2, 3, 1) @ basis.T + mean)
    is_inside = (expected.abs() < 1.5).all(1, keepdim=True).expand_as(expected)
    with torch.no_grad():
        torch.testing.assert_close(vae.decode(latents).sample[is_inside], expected[is_inside], atol=3e-3, rtol=0)


def test_six_of_twelve_components_keep_most_of_a_picture(fitted):
    vae, _, _ = fitted
    images = 2 * drawn(64, seed=1)[0] - 1
    with torch.no_grad():
        again = vae.decode(vae.encode(images).latent_dist.mode()).sample
    assert 10 * torch.log10(4 / (again - images).square().mean()) > 25  # dB


# The pipeline ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a pipeline of two steps of pretraining."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMTAB_CACHE", str(folder))
        patch.setattr(pretrain, "BATCH", 4)
        pretrain.shapes_pipeline(2)
    return folder


def test_plain_diffusers_loads_the_pipeline_and_draws(cache: Path):
    pipeline = StableDiffusionPipeline.from_pretrained(cache / "models" / "shapes-2-2")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(["a red circle", "a blue cross"], num_inference_steps=2, eta=1.0, output_type="pt").images
    assert images.shape == (2, 3, SIZE, SIZE)
    assert pipeline.vae_scale_factor == 2
    assert sum(weight.numel() for weight in pipeline.unet.parameters()) < 1e6
    # All ten steps are random, the last one too.
    scheduler = pipeline.scheduler
    scheduler.set_timesteps(10)
    assert all(scheduler._get_variance(t, t - 100) > 0 for t in scheduler.timesteps)


def test_the_same_seed_pretrains_the_same_pipeline(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretrain, "BATCH", 4)
    kept = StableDiffusionPipeline.from_pretrained(cache / "models" / "shapes-2-2")
    pipeline = pretrain.pretrained_pipeline(2)
    for part in ("unet", "text_encoder", "vae"):
        for name, weight in getattr(kept, part).state_dict().items():
            assert torch.equal(weight, getattr(pipeline, part).state_dict()[name]), f"{part}.{name}"
    captions = [pipeline.tokenizer(prompt)["input_ids"] for prompt in CAPTIONS]
    assert [kept.tokenizer(prompt)["input_ids"] for prompt in CAPTIONS] == captions


def test_pretraining_lowers_the_loss_on_unseen_pictures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretrain, "BATCH", 16)

    def loss(pipeline: StableDiffusionPipeline) -> float:
        generator = torch.Generator().manual_seed(5)
        images, prompts = drawn(64, seed=5)
        ids = pipeline.tokenizer(list(prompts), padding="max_length", return_tensors="pt").input_ids
        times = torch.randint(1000, (64,), generator=generator)
        with torch.no_grad():
            latents = pipeline.vae.encode(2 * images - 1).latent_dist.mode()
            noise = torch.randn(latents.shape, generator=generator)
            noisy = pipeline.scheduler.add_noise(latents, noise, times)
            predicted = pipeline.unet(noisy, times, pipeline.text_encoder(ids)[0]).sample
        return float((predicted - noise).square().mean())

    assert loss(pretrain.pretrained_pipeline(25)) < 0.8 * loss(pretrain.pretrained_pipeline(1))


def test_the_shipped_weights_draw_the_prompted_colours():
    assert sum(file.stat().st_size for file in pretrain.SHIPPED.rglob("*") if file.is_file()) < 5e6
    pipeline = StableDiffusionPipeline.from_pretrained(pretrain.shapes_pipeline())
    pipeline.set_progress_bar_config(disable=True)
    asked, generator = list(CAPTIONS) * 2, torch.Generator().manual_seed(0)
    images = pipeline(
        asked, num_inference_steps=10, eta=1.0, guidance_scale=1.0, generator=generator, output_type="pt"
    ).images
    assert colour_match(images, asked).mean() > 0.6
    assert pipeline.unet.dtype == torch.float32


def test_each_caption_word_is_one_token():
    tokenizer = pretrain.word_tokenizer()
    assert {len(tokenizer(prompt)["input_ids"]) for prompt in CAPTIONS} == {5}
    assert len({tuple(tokenizer(prompt)["input_ids"]) for prompt in CAPTIONS}) == 16
    assert tokenizer.unk_token_id not in tokenizer("any other words")["input_ids"][1:-1]


# The experiment --------------------------------------------------------------------------------------------------


def test_two_epochs_leave_history_pictures_pipeline_and_figure(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TRIMTAB_CACHE", str(cache))
    run = train.RunConfig(reward=["rgb_alignment", "jpeg_compressibility"], pretrain_steps=2, eval_pictures=6)
    sizes = {"num_epochs": 2, "sample_num_steps": 2, "sample_batch_size": 4, "train_batch_size": 2}
    sizes["sample_num_batches_per_epoch"] = 1
    train.main(run, train.settings([], **sizes, log_with=None, logdir=str(tmp_path))[1])
    for finished in finished_runs(tmp_path):
        reward = finished.config["reward"]
        assert finished.folder == tmp_path / reward
        assert finished.curve("step", "queries") == ([2, 4], [4, 8])
        assert "other/shape_match" in finished.history[0]
        assert f"other/{reward}" not in finished.history[0]
        assert set(finished.summary) >= {reward, f"{reward}_before", "shape_match", "shape_match_before"}
        before, after = ((finished.folder / sheet).read_bytes() for sheet in ("before.png", "after.png"))
        assert before != after
        trained = StableDiffusionPipeline.from_pretrained(finished.folder / "pipeline")
        base = StableDiffusionPipeline.from_pretrained(cache / "models" / "shapes-2-2")
        assert not torch.equal(trained.unet.conv_out.weight, base.unet.conv_out.weight)
        assert torch.equal(
            trained.text_encoder.state_dict()["embeddings.token_embedding.weight"],
            base.text_encoder.state_dict()["embeddings.token_embedding.weight"],
        )
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("IS raises it") == 2


def made_up(folder: Path, after: float, *, epochs: int = 4, reward: str = "colour", **config: object) -> Run:
    """A finished run, from 0.2 to `after`, with epochs of 128 pictures whose mean rewards are 0, 1, 2, ..."""
    known = {"reward": reward, "estimator": "is", "seed": 0, "rwr_beta": 0.2} | config
    place = folder / "-".join(map(str, known.values()))
    place.mkdir(parents=True)
    for sheet in ("before.png", "after.png"):
        contact_sheet(torch.rand(5, 3, 8, 8)).save(place / sheet)
    rows = [{"step": i, "queries": 128.0 * (i + 1), "reward_mean": float(i), "other/x": 1.0} for i in range(epochs)]
    return Run(place, known, rows, {f"{reward}_before": 0.2, reward: after, "x_before": 1.0, "x": 1.0})


def of_all(folder: Path, rewards: dict[str, list[float]]) -> list[Run]:
    """Runs of each estimator, one for each reward of its list, with the seeds from 0 on."""
    return [
        made_up(folder, after, estimator=name, seed=seed, rwr_beta=10.0)
        for name, values in rewards.items()
        for seed, after in enumerate(values)
    ]


def verdicts(runs: list[Run]) -> dict[str, bool]:
    judged = judge(runs).verdicts
    plt.close("all")
    return {verdict.claim.removeprefix("colour: "): verdict.passed for verdict in judged}


def test_estimators_that_rank_as_in_the_paper_pass(tmp_path: Path):
    runs = of_all(tmp_path, {"rwr": [0.25, 0.1, 0.3], "sf": [0.3, 0.3, 0.4], "is": [0.35, 0.25, 0.4]})
    report = judge(runs)
    assert [verdict.passed for verdict in report.verdicts] == [True] * 3
    assert report.verdicts[1].obtained == "IS 0.350 (0.250 to 0.400), SF 0.300 (0.300 to 0.400)"
    assert list(report.figures) == ["figure", "pictures", "others"]
    (panel,) = report.figures["figure"].axes
    assert [line.get_label() for line in panel.lines] == ["IS (3 seeds)", "SF (3 seeds)", "RWR, beta 10 (3 seeds)"]
    titles = [axis.get_title() for axis in report.figures["pictures"].axes]
    assert titles == ["colour: before", "colour: IS", "colour: SF", "colour: RWR, beta 10"]


def test_each_way_to_miss_the_claim_fails(tmp_path: Path):
    is_falls, is_behind, regression_ahead = "IS raises it", "IS is at least SF", "SF beats RWR"
    high = {"is": [0.5, 0.5, 0.5], "sf": [0.4, 0.4, 0.4], "rwr": [0.3, 0.3, 0.3]}
    assert all(verdicts(of_all(tmp_path / "a", high)).values())
    for number, (name, values, failed) in enumerate(
        [
            ("is", [0.5, 0.5, 0.2], {is_falls}),  # one seed that did not rise
            ("is", [0.5, 0.3, 0.3], {is_behind}),  # the median seed is behind
            ("rwr", [0.3, 0.3, 0.4], {regression_ahead}),  # one seed that is not behind
        ]
    ):
        judged = verdicts(of_all(tmp_path / str(number), high | {name: values}))
        assert {claim for claim, passed in judged.items() if not passed} == failed


def test_the_better_regression_is_the_one_to_beat_and_the_control_is_none(tmp_path: Path):
    runs = of_all(tmp_path, {"sf": [0.5]})
    runs += [made_up(tmp_path, after, estimator="rwr", rwr_beta=beta) for beta, after in ((10, 0.3), (100, 0.4))]
    runs += [made_up(tmp_path, 0.9, estimator="rwr", rwr_beta=0), made_up(tmp_path, 0.1, estimator="rwr_sparse")]
    (verdict,) = judge(runs).verdicts
    assert verdict.passed
    assert verdict.obtained == "SF 0.500, RWR beta 100 0.400, no reward 0.900"


def test_only_what_is_there_is_judged(tmp_path: Path):
    assert verdicts([made_up(tmp_path, 0.3, estimator="sf")]) == {"SF raises it": True}
    assert verdicts([made_up(tmp_path, 0.1, estimator="rwr", rwr_beta=1)]) == {"RWR, beta 1 raises it": False}
    assert verdicts([made_up(tmp_path, 0.3, estimator="rwr", rwr_beta=0)]) == {}
    runs = [made_up(tmp_path, 0.3, seed=1), made_up(tmp_path, 0.4, estimator="sf", seed=2)]
    assert verdicts(runs) == {"IS raises it": True}  # no seed in common
    runs.append(made_up(tmp_path, 0.2, estimator="rwr_sparse", seed=1))
    assert verdicts([run for run in runs if run.config["estimator"] != "sf"])["IS beats RWR"]


def test_rewards_are_judged_apart(tmp_path: Path):
    runs = [made_up(tmp_path, after, reward=name) for name, after in (("a", 0.3), ("b", 0.1))]
    assert [(verdict.claim, verdict.passed) for verdict in judge(runs).verdicts] == [
        ("a: IS raises it", True),
        ("b: IS raises it", False),
    ]


def test_runs_that_do_not_compare_are_refused(tmp_path: Path):
    short = made_up(tmp_path, 0.3, epochs=2, estimator="sf")
    with pytest.raises(ValueError, match="256 by SF, 512 by IS"):
        judge([made_up(tmp_path, 0.3), short])
    with pytest.raises(ValueError, match="2 runs of IS on colour with seed 0"):
        judge([made_up(tmp_path / "a", 0.3), made_up(tmp_path / "b", 0.3)])


def test_a_curve_goes_from_before_to_after_by_means_of_256_pictures(tmp_path: Path):
    xs, ys = curve(made_up(tmp_path, 0.9), "reward_mean", "colour")
    assert xs == [0, 128, 384, 512]
    assert ys == [0.2, 0.5, 2.5, 0.9]


def test_contact_sheet_has_four_in_a_row():
    images = torch.zeros(6, 3, 8, 10)
    images[5] = 1
    sheet = contact_sheet(images)
    assert sheet.size == (4 * 11 - 1, 2 * 9 - 1)
    assert sheet.getpixel((5, 5)) == (0, 0, 0)
    assert sheet.getpixel((11 + 5, 9 + 4)) == (255, 255, 255)


@pytest.mark.parametrize("reward", ["beauty", "aesthetic"])
def test_a_reward_that_cannot_be_had_is_refused(reward: str):
    with pytest.raises(SystemExit, match=reward):
        train.measures(reward, train.RunConfig())


def test_rewards_of_shapes_are_not_for_other_models():
    with pytest.raises(SystemExit, match="rgb_alignment"):
        train.measures("rgb_alignment", train.RunConfig(model="somebody/something"))


def test_gpu_settings_are_valid():
    argv = ["--config", str(ROOT / "experiments" / "black_2023_ddpo" / "gpu.yaml")]
    run, ddpo = train.settings(argv)
    assert run.model == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    assert run.use_lora
    assert ddpo.samples_per_epoch == 256
    assert ddpo.updates_per_epoch == 4


def test_help_names_the_rewards(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        train.settings(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "rgb_alignment" in shown
    assert "default 'black_2023_ddpo'" in shown
