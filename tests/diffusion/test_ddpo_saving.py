"""A trained pipeline is saved as files that stock diffusers loads, and that draw the same images to the bit."""

import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import DiffusionPipeline, PNDMScheduler, StableDiffusionPipeline
from packaging.version import Version
from peft import LoraConfig
from safetensors.torch import load_file
from tests.diffusion import tiny
from torch import nn
from transformers.integrations.peft import MIN_PEFT_VERSION

from trimtab_common import hub
from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer, DefaultDDPOStableDiffusionPipeline

KINDS = ("stable_diffusion", "stable_diffusion_xl", "stable_diffusion_3")


def trainer_of(pipeline: Any, **settings: Any) -> DDPOTrainer:
    config = DDPOConfig(
        **{
            "mixed_precision": "no",
            "sample_num_steps": 2,
            "sample_guidance_scale": 3.0,
            "sample_batch_size": 2,
            "sample_num_batches_per_epoch": 1,
            "train_batch_size": 2,
            "train_learning_rate": 3e-2,
        }
        | settings
    )
    return DDPOTrainer(config, lambda images, *_: images[:, 0].mean((1, 2)), lambda: ("a cat", {}), pipeline)


def trained(pipeline: Any, **settings: Any) -> DDPOTrainer:
    trainer = trainer_of(pipeline, **settings)
    trainer.step(0, 0)
    trainer.step(1, 1)
    return trainer


def pictures(pipeline: Any) -> torch.Tensor:
    """Returns images drawn with all weights frozen, because torch's convolutions round otherwise for trainable ones."""
    modules = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
    trains = [weight for module in modules for weight in module.parameters() if weight.requires_grad]
    for weight in trains:
        weight.requires_grad_(False)
    try:
        return drawn(pipeline)
    finally:
        for weight in trains:
            weight.requires_grad_(True)


def drawn(pipeline: Any) -> torch.Tensor:
    pipeline.set_progress_bar_config(disable=True)
    call = {"prompt": ["a cat", "two owls"], "num_inference_steps": 3, "guidance_scale": 3.0, "output_type": "pt"}
    return pipeline(**call, generator=tiny.generator(7)).images


@pytest.mark.parametrize(("kind", "rank"), [*((kind, 4) for kind in KINDS), *((kind, 2) for kind in KINDS)])
def test_stock_diffusers_loads_the_adapters(tmp_path, kind, rank):
    build = getattr(tiny, kind)
    wrapped = DDPOStableDiffusionPipeline(build(), use_lora=True, lora_rank=rank)
    trainer = trained(wrapped)
    trainer.save_pretrained(tmp_path)
    fresh = build()
    untrained = pictures(fresh)
    fresh.load_lora_weights(tmp_path)
    assert not torch.equal(pictures(fresh), untrained)
    assert torch.equal(pictures(fresh), pictures(wrapped.sd_pipeline))
    assert {path.name for path in tmp_path.iterdir()} == {"pytorch_lora_weights.safetensors", "README.md"}
    weights = load_file(tmp_path / "pytorch_lora_weights.safetensors")
    assert {len(weight) for name, weight in weights.items() if name.endswith("lora.down.weight")} == {rank}


def adapters(folder: Path) -> torch.Tensor:
    """Saves trained adapters to a folder; returns the images that they draw."""
    wrapped = DDPOStableDiffusionPipeline(tiny.stable_diffusion(), use_lora=True, lora_rank=3)
    trained(wrapped).save_pretrained(folder)
    return pictures(wrapped.sd_pipeline)


def test_training_goes_on_from_loaded_adapters(tmp_path):
    before = adapters(tmp_path / "first")
    stock = tiny.stable_diffusion()
    stock.load_lora_weights(tmp_path / "first")
    wrapped = DDPOStableDiffusionPipeline(stock, use_lora=True, lora_rank=8)
    assert torch.equal(pictures(stock), before)
    trains = {name: weight.detach().clone() for name, weight in stock.unet.named_parameters() if weight.requires_grad}
    assert {len(weight) for name, weight in trains.items() if "lora_A" in name} == {3}
    trainer = trained(wrapped)
    moved = {
        name for name, weight in stock.unet.named_parameters() if not torch.equal(weight, trains.get(name, weight))
    }
    assert moved == set(trains)
    after = pictures(stock)
    assert not torch.equal(after, before)
    trainer.save_pretrained(tmp_path / "second")
    fresh = tiny.stable_diffusion()
    fresh.load_lora_weights(tmp_path / "second")
    assert torch.equal(pictures(fresh), after)


@pytest.mark.parametrize("kind", ["adapters alone", "pipeline and adapters"])
def test_a_folder_of_adapters_is_a_pipeline_that_goes_on_from_them(tmp_path, kind):
    base, folder = tmp_path / "base", tmp_path / "trained"
    tiny.stable_diffusion().save_pretrained(base)
    trainer = trained(DefaultDDPOStableDiffusionPipeline(str(base), lora_rank=3))
    if kind == "pipeline and adapters":  # as TRL saved them
        DiffusionPipeline.from_pretrained(base).save_pretrained(folder)
    trainer.save_pretrained(folder)
    again = DefaultDDPOStableDiffusionPipeline(str(folder), use_lora=False)
    assert again.use_lora
    assert again.pretrained_model == str(folder)
    assert torch.equal(pictures(again.sd_pipeline), pictures(trainer.sd_pipeline.sd_pipeline))
    trains = {name: weight for name, weight in again.unet.named_parameters() if weight.requires_grad}
    assert {len(weight) for name, weight in trains.items() if "lora_A" in name} == {3}


def test_adapters_without_a_known_base_are_refused(tmp_path):
    adapters(tmp_path)  # the pipeline is built in code
    with pytest.raises(ValueError, match="names no base model"):
        DefaultDDPOStableDiffusionPipeline(str(tmp_path))
    (tmp_path / "README.md").write_text(f"---\nbase_model: {tmp_path / 'base'}\n---\n")
    tiny.stable_diffusion().save_pretrained(tmp_path / "base")
    assert DefaultDDPOStableDiffusionPipeline(str(tmp_path)).use_lora


def test_training_continues_adapters_of_another_name_and_scale(tmp_path):
    """Others train adapters with an alpha that differs from the rank."""
    stock = tiny.stable_diffusion()
    with tiny.from_seed(4):
        stock.unet.add_adapter(style("to_q", "to_v"), adapter_name="style")
    before = pictures(stock)
    trainer = trained(DDPOStableDiffusionPipeline(stock, use_lora=True))
    assert not torch.equal(pictures(stock), before)
    trainer.save_pretrained(tmp_path)
    fresh = tiny.stable_diffusion()
    fresh.load_lora_weights(tmp_path)
    torch.testing.assert_close(pictures(fresh), pictures(stock), rtol=0, atol=1e-5)  # PEFT rounds its own way


def style(*targets: str) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, target_modules=list(targets))


@pytest.mark.skipif(
    Version(version("peft")) < Version(MIN_PEFT_VERSION),
    reason=f"transformers adds adapters to a text encoder only with PEFT {MIN_PEFT_VERSION} or later",
)
def test_adapters_of_the_text_encoder_stay_as_they_are_and_are_saved(tmp_path):
    stock = tiny.stable_diffusion()
    with tiny.from_seed(4):
        stock.unet.add_adapter(style("to_q", "to_v"))
        stock.text_encoder.add_adapter(style("q_proj", "v_proj"))
    before = {name: weight.clone() for name, weight in stock.text_encoder.named_parameters()}
    trained(DDPOStableDiffusionPipeline(stock, use_lora=True)).save_pretrained(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in stock.text_encoder.named_parameters())
    fresh = tiny.stable_diffusion()
    fresh.load_lora_weights(tmp_path)
    torch.testing.assert_close(pictures(fresh), pictures(stock), rtol=0, atol=1e-5)  # PEFT rounds its own way


def test_one_of_several_adapters_trains(tmp_path):
    stock = tiny.stable_diffusion()
    with tiny.from_seed(4):
        for name in ("first", "second"):
            stock.unet.add_adapter(style("to_q"), adapter_name=name)
    stock.set_adapters(["first", "second"])
    with pytest.raises(ValueError, match=r"first, second are active: only one can be trained.*set_adapters"):
        DDPOStableDiffusionPipeline(stock, use_lora=True)
    stock.set_adapters("first")
    before = {name: weight.detach().clone() for name, weight in stock.unet.named_parameters()}
    trained(DDPOStableDiffusionPipeline(stock, use_lora=True)).save_pretrained(tmp_path)
    moved = {name for name, weight in stock.unet.named_parameters() if not torch.equal(weight, before[name])}
    trains = {name for name, weight in stock.unet.named_parameters() if weight.requires_grad}
    assert moved == trains == {name for name in before if ".first." in name}
    fresh = tiny.stable_diffusion()
    fresh.load_lora_weights(tmp_path)
    torch.testing.assert_close(pictures(fresh), pictures(stock), rtol=0, atol=1e-5)  # PEFT rounds its own way


@pytest.mark.parametrize("kind", KINDS)
def test_stock_diffusers_loads_a_fully_trained_pipeline(tmp_path, kind):
    stock = getattr(tiny, kind)()
    untrained = pictures(stock)
    trained(stock).save_pretrained(tmp_path)
    absent = {"text_encoder_3": None, "tokenizer_3": None} if "3" in kind else {}
    loaded = DiffusionPipeline.from_pretrained(tmp_path, **absent)
    assert type(loaded) is type(stock)
    assert not torch.equal(pictures(stock), untrained)
    assert torch.equal(pictures(loaded), pictures(stock))


def test_a_replaced_scheduler_is_saved_too(tmp_path):
    stock = tiny.stable_diffusion(scheduler=PNDMScheduler(skip_prk_steps=True))
    with pytest.warns(UserWarning, match="takes its place"):
        trained(stock).save_pretrained(tmp_path)
    assert torch.equal(pictures(StableDiffusionPipeline.from_pretrained(tmp_path)), pictures(stock))


# ------------------------------------------------------------------------- model card


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a pipeline on disk, as from the hub."""
    folder = tmp_path_factory.mktemp("base")
    tiny.stable_diffusion().save_pretrained(folder)
    return folder


def split(card: Path) -> tuple[dict[str, Any], str]:
    _, header, page = card.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(header), page


def run_usage(page: str) -> Any:
    """Runs the card's Python; returns the pipeline that it creates."""
    names: dict[str, Any] = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    return names["pipeline"]


@pytest.mark.parametrize("use_lora", [True, False])
def test_the_card_is_valid_and_its_python_loads_the_model(tmp_path, monkeypatch, base, use_lora):
    pipeline = DefaultDDPOStableDiffusionPipeline(str(base), use_lora=use_lora)
    trainer = trained(pipeline, negative_prompts="dull", train_learning_rate=0.02)
    trainer.save_pretrained(tmp_path / "mine")
    header, page = split(tmp_path / "mine" / "README.md")
    assert header["library_name"] == "diffusers"
    assert {"ddpo", "text-to-image"} <= set(header["tags"])
    assert ("lora" in header["tags"]) is use_lora
    assert "| train_learning_rate | 0.02 |" in page
    assert "| negative_prompts | dull |" in page
    assert "2305.13301" in page
    assert page.startswith("\n# mine\n")
    assert "| reward | " in page
    monkeypatch.chdir(tmp_path)  # the card uses the folder's name for the model
    assert torch.equal(pictures(run_usage(page)), pictures(pipeline.sd_pipeline))


def test_the_card_of_a_pipeline_without_some_of_its_parts_leaves_them_out(tmp_path, monkeypatch):
    stock = tiny.stable_diffusion_3()
    trained(stock).save_pretrained(tmp_path / "mine")
    _, page = split(tmp_path / "mine" / "README.md")
    assert 'from_pretrained("mine", text_encoder_3=None, tokenizer_3=None)' in page
    monkeypatch.chdir(tmp_path)
    assert torch.equal(pictures(run_usage(page)), pictures(stock))


def test_a_card_of_another_name(tmp_path):
    trainer_of(tiny.stable_diffusion()).create_model_card(str(tmp_path / "new"), model_name="Cats")
    assert "\n# Cats\n" in (tmp_path / "new" / "README.md").read_text()


# ------------------------------------------------------------------------------- hub


class Hub:
    """Records what is uploaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keep: Path):
        self.requests: dict[str, Any] = {}
        self.folder = keep
        monkeypatch.setattr(hub, "create_repo", self.create_repo)
        monkeypatch.setattr(hub, "upload_folder", self.upload_folder)

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.requests |= {"created": repo_id, **options}
        return type("Url", (), {"repo_id": repo_id if "/" in repo_id else f"me/{repo_id}"})

    def upload_folder(self, *, repo_id: str, folder_path: Path, **options: Any) -> str:
        shutil.copytree(folder_path, self.folder)
        self.requests |= {"repo_id": repo_id, **options}
        return "commit"


@pytest.mark.parametrize("use_lora", [True, False])
def test_what_is_pushed_is_what_is_saved(tmp_path, monkeypatch, use_lora):
    there = Hub(monkeypatch, tmp_path / "hub")
    wrapped = DDPOStableDiffusionPipeline(tiny.stable_diffusion(), use_lora=use_lora)
    trainer = trained(wrapped)
    assert trainer.push_to_hub("me/cats", private=True, commit_message="First") == "commit"
    assert there.requests["created"] == there.requests["repo_id"] == "me/cats"
    assert (there.requests["private"], there.requests["commit_message"]) == (True, "First")
    trainer.save_pretrained(tmp_path / "disk")
    names = [
        sorted(path.relative_to(tmp_path / each).as_posix() for path in (tmp_path / each).rglob("*"))
        for each in ("hub", "disk")
    ]
    assert names[0] == names[1]
    if use_lora:
        fresh = tiny.stable_diffusion()
        fresh.load_lora_weights(tmp_path / "hub")
    else:
        fresh = StableDiffusionPipeline.from_pretrained(tmp_path / "hub")
    assert torch.equal(pictures(fresh), pictures(wrapped.sd_pipeline))


def test_the_card_that_is_pushed_names_the_repository(tmp_path, monkeypatch):
    Hub(monkeypatch, tmp_path / "hub")
    trained(DDPOStableDiffusionPipeline(tiny.stable_diffusion(), use_lora=True)).push_to_hub("me/cats")
    _, page = split(tmp_path / "hub" / "README.md")
    assert 'load_lora_weights("me/cats")' in page


def test_a_base_that_is_a_folder_is_not_named_as_one_of_the_hub(tmp_path, base):
    trainer_of(DefaultDDPOStableDiffusionPipeline(str(base))).create_model_card(str(tmp_path))
    header, page = split(tmp_path / "README.md")
    assert "base_model" not in header  # the hub rejects a page if base_model is not a repository
    assert f'from_pretrained("{base}")' in page
