"""Diffusion-DPO: its formula, its noised pairs, the trainer, and its refusals."""

import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline
from PIL import Image
from tests.diffusion import test_modern_pipelines as modern
from tests.diffusion import tiny
from tests.diffusion.run_diffusion_dpo_distributed import KINDS, rows_of, run, same_noise
from tests.marks import slow_but
from tests.processes import results_of_two

from trimtab_common.sealing import CheckpointError
from trimtab_diffusion import DDPOStableDiffusionPipeline, DiffusionDPOConfig, DiffusionDPOTrainer
from trimtab_diffusion.diffusion_dpo.algorithm import errors, noised
from trimtab_diffusion.diffusion_dpo.data import encoded
from trimtab_diffusion.diffusion_dpo.loss import diffusion_dpo_loss
from trimtab_diffusion.training import setup

BUILD = {"sd": tiny.stable_diffusion, "sdxl": tiny.stable_diffusion_xl, "sd3": tiny.stable_diffusion_3}


def trainer(folder: Path, pipeline: Any = None, rows: Any = None, *, use_lora: bool = False, **settings: Any):
    defaults: dict[str, Any] = {"logdir": str(folder), "mixed_precision": "no", "train_batch_size": 2}
    with tiny.from_seed(1):
        wrapped = DDPOStableDiffusionPipeline(pipeline or tiny.stable_diffusion(), use_lora=use_lora)
    return DiffusionDPOTrainer(DiffusionDPOConfig(**defaults | settings), wrapped, rows or rows_of(8))


# The formula


def test_the_loss_of_worked_numbers():
    """Errors fell by 0.1 on the chosen picture and rose by 0.2 on the rejected one; beta / 2 is 10."""
    loss, chosen, rejected = diffusion_dpo_loss(
        torch.tensor([0.4, 0.5]), torch.tensor([0.7, 0.5]), torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]), beta=20
    )
    assert chosen.tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    assert rejected.tolist() == pytest.approx([-2.0, 0.0], abs=1e-6)
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-3)), math.log(2)], abs=1e-6)


def test_the_gradient_lowers_the_chosen_error_and_raises_the_rejected_one():
    chosen, rejected = (torch.tensor([0.5, 0.3], dtype=torch.float64, requires_grad=True) for _ in range(2))
    reference = torch.tensor([0.5, 0.4], dtype=torch.float64)
    diffusion_dpo_loss(chosen, rejected, reference, reference, beta=4)[0].sum().backward()
    assert chosen.grad.tolist() == pytest.approx([1.0, 1.0])  # beta / 2 times sigmoid(0)
    assert rejected.grad.tolist() == pytest.approx([-1.0, -1.0])


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_errors_are_those_of_the_noised_latents(kind: str, tmp_path: Path):
    trained = trainer(tmp_path, tiny.stable_diffusion(kind))
    pictures, scheduler, unet = trained.pictures, trained.sd_pipeline.scheduler, trained.model
    rows = torch.tensor([5, 0, 3])
    batch = noised(pictures, torch.device("cpu"), rows, tiny.generator(4))
    found = torch.cat(errors(pictures, unet, batch))

    draws = tiny.generator(4)
    times = scheduler.config.num_train_timesteps - 1 - torch.randint(1000, (3,), generator=draws)
    noise = torch.randn(3, *pictures.first.shape[1:], generator=draws)
    prompts = [f"a cat {row}" for row in rows.tolist()]
    text = trained.sd_pipeline.sd_pipeline.encode_prompt(prompts, "cpu", 1, do_classifier_free_guidance=False)[0]
    for half, side in ((found[:3], 0), (found[3:], 1)):
        clean = pictures.latents[rows, side]
        latents = scheduler.add_noise(clean, noise, times)
        target = {"epsilon": noise, "sample": clean, "v_prediction": scheduler.get_velocity(clean, noise, times)}[kind]
        with torch.no_grad():
            prediction = unet(latents, times, text).sample
        torch.testing.assert_close(half, ((prediction - target) ** 2).mean((1, 2, 3)), rtol=1e-4, atol=1e-6)


def test_latents_are_those_of_the_autoencoder(tmp_path: Path):
    rows = rows_of(8)
    trained = trainer(tmp_path, tiny.stable_diffusion_3(), rows, encode_batch_size=3)
    vae = trained.sd_pipeline.vae
    for place, picture in (((2, 0), rows[2]["chosen"]), ((5, 1), rows[5]["rejected"])):
        pixels = (picture * 255).round()[None] / 127.5 - 1
        with torch.no_grad():
            mode = vae.encode(pixels).latent_dist.mode()
        expected = (mode - vae.config.shift_factor) * vae.config.scaling_factor
        torch.testing.assert_close(trained.pictures.latents[place], expected[0], rtol=1e-4, atol=1e-5)


def test_latents_of_an_autoencoder_with_statistics_are_those_of_image_to_image(tmp_path: Path):
    rows, pipeline = rows_of(8), tiny.stable_diffusion_xl()
    mean, std = [0.3, -0.2, 0.1, 0.5], [1.5, 0.5, 2.0, 1.2]
    pipeline.vae.register_to_config(latents_mean=mean, latents_std=std)
    trained = trainer(tmp_path, pipeline, rows)
    image = (rows[3]["chosen"] * 255).round()[None] / 127.5 - 1
    stock = StableDiffusionXLImg2ImgPipeline(**pipeline.components, add_watermarker=False)
    pipeline.vae.encode = without_draws(pipeline.vae.encode)
    with torch.no_grad():
        expected = stock.prepare_latents(image, None, 1, 1, torch.float32, "cpu", tiny.generator(), add_noise=False)
    torch.testing.assert_close(trained.pictures.latents[3, 0], expected[0], rtol=1e-4, atol=1e-5)


def without_draws(encode: Any) -> Any:
    """Returns an encoder whose distribution gives its mode where img2img would draw from it."""

    def mode_alone(pixels: torch.Tensor) -> Any:
        output = encode(pixels)
        output.latent_dist.sample = lambda generator=None: output.latent_dist.mode()
        return output

    return mode_alone


@pytest.mark.parametrize(("half", "read"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_an_autoencoder_that_overflows_in_float16_encodes_in_float32(half: torch.dtype, read: torch.dtype):
    pipeline, dtypes = tiny.stable_diffusion_xl(), set[torch.dtype]()
    pipeline.vae.to(half).register_to_config(force_upcast=True)
    pipeline.vae.encoder.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    with tiny.from_seed(1):
        wrapped = DDPOStableDiffusionPipeline(pipeline)
    encoded(wrapped, rows_of(2), batch_size=2)
    assert dtypes == {read}
    assert pipeline.vae.dtype == half


def test_latents_that_are_not_finite_are_named(tmp_path: Path):
    pipeline = tiny.stable_diffusion()
    encode, calls = pipeline.vae.encode, list[int]()

    def broken(pixels: torch.Tensor) -> Any:
        calls.append(1)
        if len(calls) == 2:
            pixels = pixels.clone()
            pixels[3] = torch.nan  # the second rejected picture of two pairs
        return encode(pixels)

    pipeline.vae.encode = broken
    with pytest.raises(ValueError, match=r"pictures in rows 2 to 3 are not finite in torch\.float32"):
        trainer(tmp_path, pipeline, encode_batch_size=2)


def test_what_the_denoiser_reads_of_a_caption_is_kept_once(tmp_path: Path):
    pictures = trainer(tmp_path).pictures
    assert len(pictures) == len(pictures.conditions["encoder_hidden_states"]) == 8


def test_a_caption_is_encoded_and_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows, asked, call = rows_of(6), list[str](), DDPOStableDiffusionPipeline.__call__
    for i, caption in enumerate(["a dog", "a cat", "a dog", "a cow", "a cat", "a dog"]):
        rows[i]["prompt"] = caption

    def recorded(pipeline: DDPOStableDiffusionPipeline, **options: Any) -> Any:
        asked.extend(options["prompt"])
        return call(pipeline, **options)

    monkeypatch.setattr(DDPOStableDiffusionPipeline, "__call__", recorded)
    trained = trainer(tmp_path, rows=rows, encode_batch_size=2)
    assert asked == ["a dog", "a cat", "a cow"]
    assert len(trained.pictures.conditions["encoder_hidden_states"]) == 3
    stock, order = trained.sd_pipeline.sd_pipeline, torch.tensor([5, 0, 3])
    read = noised(trained.pictures, torch.device("cpu"), order, tiny.generator()).conditions["encoder_hidden_states"]
    texts = [rows[i]["prompt"] for i in order.tolist()] * 2
    torch.testing.assert_close(read, stock.encode_prompt(texts, "cpu", 1, do_classifier_free_guidance=False)[0])


def test_both_pictures_of_a_pair_get_the_same_noise(tmp_path: Path):
    rows = [row | {"rejected": row["chosen"]} for row in rows_of(8)]
    trained = trainer(tmp_path, rows=rows)
    batch = noised(trained.pictures, torch.device("cpu"), torch.arange(8), tiny.generator())
    assert torch.equal(*batch.latents.chunk(2))
    assert torch.equal(*batch.levels.chunk(2))
    assert len(batch.levels.unique()) > 4


# The trainer


@pytest.mark.parametrize("use_lora", slow_but([False, True], True), ids=["full", "lora"])
@pytest.mark.parametrize(
    "kind", ["sd", *(pytest.param(kind, marks=pytest.mark.slow) for kind in BUILD if kind != "sd")]
)
def test_chosen_pictures_win(kind: str, use_lora: bool, tmp_path: Path):
    """With the same noise in each epoch, which these untrained models need."""
    sizes = {"train_batch_size": 8, "train_gradient_accumulation_steps": 1, "num_epochs": 20, "save_freq": 100}
    trained = trainer(
        tmp_path, BUILD[kind](), use_lora=use_lora, train_learning_rate=3e-3 if use_lora else 3e-4, beta=1000, **sizes
    )
    with same_noise():
        history = trained.train()
    assert history[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)  # policy and reference are one
    assert history[-1]["loss"] < 0.6
    assert history[-1]["rewards/accuracies"] > 0.8
    assert history[-1]["rewards/margins"] > 0.2


def test_a_reference_that_predicts_first_changes_no_bit(tmp_path: Path):
    ends = []
    for ahead in (False, True):
        trained = trainer(tmp_path / str(ahead), tiny.stable_diffusion(), num_epochs=2, precompute_ref_errors=ahead)
        with trained.reference() as frozen:
            calls = recorded_calls(frozen, trained.model)
        history = [{name: value for name, value in row.items() if name != "time/epoch"} for row in trained.train()]
        ends.append((history, [weight.detach().clone() for weight in trained.model.parameters()]))
        alternating, first = ["reference", "policy"] * 8, ["reference"] * 4 + ["policy"] * 4
        assert calls == (first * 2 if ahead else alternating)
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(*pair) for pair in zip(ends[0][1], ends[1][1], strict=True))


def recorded_calls(frozen: torch.nn.Module, policy: torch.nn.Module) -> list[str]:
    """A list to which each call of one of the two denoisers adds a name."""
    calls: list[str] = []
    for name, denoiser in (("reference", frozen), ("policy", policy)):
        denoiser.register_forward_hook(lambda *_, name=name: calls.append(name))
    return calls


def test_adapters_leave_no_copy_to_take_from_the_device(tmp_path: Path):
    with pytest.raises(ValueError, match=r"precompute_ref_errors=True.*Adapters need none"):
        trainer(tmp_path, use_lora=True, precompute_ref_errors=True)


def test_a_second_trainer_on_adapters_that_have_trained_names_its_reference(tmp_path: Path):
    first = trainer(tmp_path, use_lora=True, train_batch_size=8, train_learning_rate=1e-2)
    first.step(0, 0)
    with pytest.warns(UserWarning, match="adapters have trained already, and the reference is the denoiser without"):
        second = DiffusionDPOTrainer(first.config, first.sd_pipeline, rows_of(8))
    second.step(0, 0)
    assert abs(second.last_stats["loss"] - math.log(2)) > 1e-3
    wrapped_again = DDPOStableDiffusionPipeline(first.sd_pipeline.sd_pipeline, use_lora=True)
    third = DiffusionDPOTrainer(first.config, wrapped_again, rows_of(8))
    third.step(0, 0)
    assert third.last_stats["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_the_reference_of_trained_adapters_has_them_as_they_were(tmp_path: Path):
    pipeline = tiny.with_trained_adapters(tiny.stable_diffusion())
    before = {name: weight.detach().clone() for name, weight in pipeline.unet.named_parameters()}
    trained = trainer(tmp_path, pipeline, use_lora=True, train_batch_size=8, train_learning_rate=1e-2)
    trained.step(0, 0)
    assert trained.last_stats["loss"] == pytest.approx(math.log(2), abs=1e-6)
    with trained.reference() as frozen:
        assert all(torch.equal(weight, before[name]) for name, weight in frozen.named_parameters())
        shared = {weight.data_ptr() for weight in frozen.parameters()} & {
            weight.data_ptr() for weight in trained.model.parameters()
        }
    assert len(shared) == sum("lora_" not in name for name in before)
    assert any(not torch.equal(weight, before[name]) for name, weight in pipeline.unet.named_parameters())


def test_an_epoch_takes_each_pair_once_in_a_new_order(tmp_path: Path):
    with pytest.warns(UserWarning, match="leaves out 2 of 8 pairs"):
        trained = trainer(tmp_path, train_batch_size=3)
    orders = [torch.cat(trained.batches(epoch)).tolist() for epoch in range(4)]
    assert all(len(set(order)) == 6 for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert len({tuple(sorted(order)) for order in orders}) > 1
    assert torch.cat(trained.batches(0)).tolist() == orders[0]


def test_a_dataset_of_picture_files_is_read(tmp_path: Path):
    rows = {"prompt": ["a cat", "a dog"], "chosen": [], "rejected": []}
    for name in ("chosen", "rejected"):
        for number in range(2):
            path = tmp_path / f"{name}{number}.png"
            Image.fromarray(np.full((16, 16, 3), 40 * number, dtype=np.uint8)).save(path)
            rows[name].append(str(path))
    table = datasets.Dataset.from_dict(rows)
    for name in ("chosen", "rejected"):
        table = table.cast_column(name, datasets.Image())
    trained = trainer(tmp_path / "run", rows=table)
    assert trained.step(0, 0) == 1


def test_what_is_saved_loads_in_diffusers(tmp_path: Path):
    trained = trainer(tmp_path / "run", use_lora=True)
    trained.train()
    trained.save_pretrained(tmp_path / "model")
    tiny.stable_diffusion().load_lora_weights(tmp_path / "model")
    assert "Wallace et al. 2023" in (tmp_path / "model" / "README.md").read_text()


# Refusals


def changed(**columns: Any) -> list[dict[str, Any]]:
    rows = rows_of(8)
    rows[3] = {name: value for name, value in (rows[3] | columns).items() if value != "left out"}
    return rows


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (changed(prompt="left out"), "Row 3 has no prompt; it has chosen, rejected"),
        (changed(prompt=""), "Row 3 has the prompt ''"),
        (changed(rejected="left out"), "Row 3 has no rejected"),
        (changed(chosen=None), "Row 3 has no chosen"),
        (changed(rejected=torch.rand(3, 16, 24)), "rejected picture of row 3 has 24 x 16 pixels.*16 x 16"),
        (changed(chosen=torch.full((3, 16, 16), float("nan"))), "chosen of row 3 is no picture.*nan"),
        (changed(chosen=torch.rand(3, 16, 16) * 255), "chosen of row 3 is no picture.*in \\[0, 1\\]"),
        (changed(chosen="cat.png"), "chosen of row 3 is no picture"),
        (rows_of(1), "1 pairs came, and an update takes 2"),
    ],
)
def test_a_faulty_row_is_refused_before_any_work(rows: Any, words: str, tmp_path: Path):
    pipeline = tiny.stable_diffusion()
    pipeline.vae.register_forward_hook(lambda *_: pytest.fail("pictures were encoded"))
    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, pipeline, rows)


def test_a_wrong_checkpoint_is_reported_before_pictures_are_encoded(tmp_path: Path):
    pipeline = tiny.stable_diffusion()
    pipeline.vae.encoder.register_forward_hook(lambda *_: pytest.fail("pictures were encoded"))
    with pytest.raises(CheckpointError, match="no checkpoint to resume from: nope does not exist"):
        trainer(tmp_path, pipeline, resume_from="nope")


@pytest.mark.parametrize("is_dataset", [True, False], ids=["dataset", "list"])
def test_a_broken_picture_is_named_before_any_work(is_dataset: bool, tmp_path: Path):
    whole, broken = tmp_path / "whole.png", tmp_path / "broken.png"
    Image.effect_noise((64, 64), 50).save(whole)
    broken.write_bytes(whole.read_bytes()[:600])
    rows: Any = [{"prompt": "a cat", "chosen": whole, "rejected": file} for file in (whole, broken)]
    if is_dataset:
        columns = {name: [str(row[name]) for row in rows] for name in rows[0]}
        pictures = {name: datasets.Image() for name in ("chosen", "rejected")}
        rows = datasets.Dataset.from_dict(columns, datasets.Features(prompt=datasets.Value("string"), **pictures))
    else:
        rows = [row | {name: Image.open(row[name]) for name in ("chosen", "rejected")} for row in rows]
    with pytest.raises(ValueError, match=r"(?s)row 1 .*truncated"):
        trainer(tmp_path, rows=rows)


def test_a_size_that_the_pipeline_cannot_divide_is_refused_before_any_work(tmp_path: Path):
    rows = [row | {name: torch.rand(3, 18, 16) for name in ("chosen", "rejected")} for row in rows_of(8)]
    pipeline = tiny.stable_diffusion_3()
    pipeline.vae.encoder.register_forward_hook(lambda *_: pytest.fail("pictures were encoded"))
    with pytest.raises(ValueError, match=r"16 x 18 pixels, and StableDiffusion3Pipeline takes sides .* multiples of 4"):
        trainer(tmp_path, pipeline, rows)


def test_a_picture_that_is_chosen_and_rejected_is_said(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    trainer(tmp_path)
    assert not [warning for warning in recwarn if "same picture" in str(warning.message)]
    picture = torch.rand(3, 16, 16)
    with pytest.warns(UserWarning, match=r"1 of 8 rows have the same picture as chosen and as rejected, .* row 3"):
        trainer(tmp_path, rows=changed(chosen=picture, rejected=picture.clone()))


def test_a_size_far_from_the_pipelines_own_is_said(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    trainer(tmp_path)
    assert not [warning for warning in recwarn if "own size" in str(warning.message)]
    rows = [row | {name: torch.rand(3, 48, 32) for name in ("chosen", "rejected")} for row in rows_of(8)]
    with pytest.warns(UserWarning, match="32 x 48 pixels, and the pipeline's own size is 16 x 16"):
        trainer(tmp_path, rows=rows)


@pytest.mark.parametrize("name", ["height", "num_inference_steps", "guidance_scale", "num_images_per_prompt"])
def test_arguments_of_the_trainer_are_refused_in_call_kwargs(name: str, tmp_path: Path):
    wrapped = DDPOStableDiffusionPipeline(tiny.stable_diffusion(), call_kwargs={name: 8})
    with pytest.raises(ValueError, match=f"call_kwargs has {name}, which the trainer passes itself"):
        DiffusionDPOTrainer(DiffusionDPOConfig(mixed_precision="no", logdir=str(tmp_path)), wrapped, rows_of(2))


def test_no_rows_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no pairs"):
        DiffusionDPOTrainer(DiffusionDPOConfig(mixed_precision="no"), tiny.stable_diffusion(), [])


def test_a_pipeline_that_packs_its_latents_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="latents are the autoencoder's own"):
        trainer(tmp_path, modern.BUILD["flux"]())


@pytest.mark.parametrize(
    ("kind", "vae", "words"),
    [
        ("qwen_image", {}, "has an AutoencoderKLQwenImage"),
        ("wan", {}, "has an AutoencoderKLWan"),
        ("flux", {"vae": None}, "has no autoencoder"),
    ],
)
def test_a_pipeline_without_the_usual_autoencoder_is_refused_before_any_work(
    kind: str, vae: dict[str, None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pipeline = modern.BUILD[kind]()
    for name, part in vae.items():
        setattr(pipeline, name, part)
    wrapped = DDPOStableDiffusionPipeline(pipeline)
    monkeypatch.setattr(setup, "place", lambda *_: pytest.fail("the pipeline was placed"))
    for each in (pipeline, wrapped):
        with pytest.raises(ValueError, match=f"{words}.*latents of an AutoencoderKL: use"):
            DiffusionDPOTrainer(DiffusionDPOConfig(mixed_precision="no", logdir=str(tmp_path)), each, rows_of(2))


# Two processes


@pytest.mark.distributed
def test_two_processes_are_one(tmp_path: Path):
    first, second = results_of_two("tests.diffusion.run_diffusion_dpo_distributed", tmp_path)
    for kind in KINDS:
        alone = run(kind)
        for name, weight in first[kind]["weights"].items():
            assert torch.equal(weight, second[kind]["weights"][name])
            torch.testing.assert_close(weight, alone["weights"][name], rtol=1e-8, atol=1e-10)
        for mine, its in zip(first[kind]["history"], alone["history"], strict=True):
            assert mine == pytest.approx(its, rel=1e-5, abs=1e-6)
