"""Writes the models that both sides load from disk, and builds their tokenizer.

`python -m tools.bench.models SIZE FOLDER` writes the models."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tools.bench.sizes import SIZES, Size
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

PAD, BOS, EOS = range(3)
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TRAINED = {"shapes": EXPERIMENTS / "black_2023_ddpo/shapes", "emoji": EXPERIMENTS / "emoji/pipeline"}
"""The Stable Diffusion pipelines that the experiments trained."""
CAPTIONS = "captions.json"  # of these: caption -> the reward from which ddpo_to_reward counts gains
EMOJI_STEPS, EMOJI_GUIDANCE = 5, 3.0  # where a work does not say otherwise
CLASSIFIER = "recognised.pt2"  # of the emoji: images of these captions -> 1 where name and colour are recognised
SHAPES = [f"a {color} {shape}" for color in ("red", "green", "blue") for shape in ("circle", "square", "cross")]
SPECIAL = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}


def write_language_models(size: Size, folder: Path) -> None:
    """Writes a policy, a reference with different weights and a reward model, all with random weights."""
    # Such large weights make the loss depend on attention: it changes by 0.4% if documents of a row see each other.
    config = LlamaConfig(**size.llama, **SPECIAL, num_labels=1, initializer_range=0.1)  # type: ignore[arg-type]
    for name, kind, seed in (
        ("policy", LlamaForCausalLM, 0),
        ("reference", LlamaForCausalLM, 1),
        ("reward", LlamaForSequenceClassification, 2),
    ):
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder / name)


def write_stable_diffusion(size: Size, folder: Path) -> None:
    """Writes a Stable Diffusion pipeline with random weights."""
    pipeline = stable_diffusion(size)
    pipeline.save_pretrained(folder)
    _write_words(folder, pipeline.tokenizer.get_vocab(), merges=[])
    _name_text_encoder(folder)


def write_trained(name: str, folder: Path, samples: int) -> None:
    """Writes one of the pipelines in TRAINED, and its captions.

    Args:
        name: of the pipeline.
        folder: where to.
        samples: see Size.
    """
    shutil.copytree(TRAINED[name], folder, dirs_exist_ok=True)
    core = json.loads((folder / "tokenizer/tokenizer.json").read_text())["model"]
    _write_words(folder, core["vocab"], core["merges"])
    _name_text_encoder(folder)
    if name == "emoji":
        _write_emoji(folder, samples)
    else:
        (folder / CAPTIONS).write_text(json.dumps(dict.fromkeys(SHAPES, 0.0)))


def _write_emoji(folder: Path, samples: int) -> None:
    """Writes the mean warmth of the base model's samples of each caption, and the classifier for torch.export."""
    from experiments.emoji.classifier import shipped_classifier
    from experiments.emoji.drawings import TRAINED as EMOJI
    from experiments.emoji.measure import sampled, shipped
    from experiments.emoji.rewards import wanted, warmth

    images = sampled(shipped("unet"), EMOJI * samples, steps=EMOJI_STEPS, guidance=EMOJI_GUIDANCE)
    means = warmth(images, ()).unflatten(0, (samples, -1)).mean(0)
    (folder / CAPTIONS).write_text(json.dumps(dict(zip(EMOJI, means.tolist(), strict=True))))
    judge = Recognised(shipped_classifier(), *wanted(EMOJI, torch.device("cpu")))
    torch.export.save(torch.export.export(judge, (images[: len(EMOJI)],)), folder / CLASSIFIER)


class Recognised(nn.Module):
    """A classifier that says of images of certain captions whether name and colour are the caption's.

    Args:
        classifier: images [B, 3, H, W] -> log-probabilities of names and of colours.
        names: the captions' names, [B].
        colours: their colours, [B].
    """

    def __init__(self, classifier: nn.Module, names: Tensor, colours: Tensor) -> None:
        super().__init__()
        self.classifier = classifier
        self.register_buffer("names", names)
        self.register_buffer("colours", colours)

    def forward(self, images: Tensor) -> Tensor:
        """Returns 1 where both are recognised, else 0; [B]."""
        by_name, by_colour = self.classifier(images)
        return ((by_name.argmax(1) == self.names) & (by_colour.argmax(1) == self.colours)).float()


def _write_words(folder: Path, vocabulary: dict[str, int], merges: list[list[str]]) -> None:
    """Writes the two files from which transformers 4 reads CLIP's tokenizer; transformers 5 does not write them."""
    (folder / "tokenizer/vocab.json").write_text(json.dumps(vocabulary))
    lines = ["#version: 0.2", *map(" ".join, merges)]
    (folder / "tokenizer/merges.txt").write_text("\n".join(lines) + "\n")


def _name_text_encoder(folder: Path) -> None:
    """Renames the text encoder's weights to transformers 4's names, which transformers 5 can also read.

    With transformers 5's names, transformers 4 warns, ignores the weights and draws random ones.
    """
    file = folder / "text_encoder/model.safetensors"
    weights = load_file(file)
    prefix = "text_model."
    named = {prefix + name.removeprefix(prefix): weight for name, weight in weights.items()}
    save_file(named, file, metadata={"format": "pt"})


def text_encoder_norm(pipeline: Any) -> float:
    """Returns the norm of the text encoder's weights, which shows whether both sides loaded the same ones."""
    norms = [weight.detach().double().norm() for weight in pipeline.text_encoder.parameters()]
    return torch.stack(norms).norm().item()


def stable_diffusion(size: Size) -> Any:
    """Returns the Stable Diffusion of tools.gpu, with the size's U-Net widths and Stable Diffusion 1.5's schedule.

    Every step of that schedule adds noise, and so has a log-probability.
    """
    from diffusers import DDIMScheduler, UNet2DConditionModel
    from tools.gpu.models import UNET_SMALL, stable_diffusion
    from tools.gpu.models import Size as PipelineSize

    pipeline = stable_diffusion(PipelineSize(size.device, is_small=bool(size.unet_widths)))
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, set_alpha_to_one=False)
    if size.unet_widths:
        torch.manual_seed(0)
        widths = {"block_out_channels": size.unet_widths, "sample_size": size.latent, "layers_per_block": 2}
        pipeline.unet = UNet2DConditionModel(**UNET_SMALL | widths)
    return pipeline


def load(kind: Any, folder: str, name: str, size: Size) -> Any:
    """Loads a language model from the folder, in float32 on the size's device."""
    return kind.from_pretrained(f"{folder}/{name}").to(size.device)


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each word `w<number>` that adds no special tokens."""
    special = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    words = special | {f"w{i}": i for i in range(len(special), vocab_size)}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def text(ids: list[int]) -> str:
    """Returns the text that the tokenizer turns into these ids."""
    return " ".join("</s>" if token == EOS else f"w{token}" for token in ids)


def set_value_head(head: nn.Linear) -> None:
    """Gives the value head the same weights on both sides."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.02)
        head.bias.zero_()


def main(name: str, folder: Path) -> None:
    """Writes all models of a size into a folder, unless they are there already."""
    mark, wanted = folder / "size.txt", repr(SIZES[name])
    if mark.exists() and mark.read_text() == wanted:
        return
    mark.unlink(missing_ok=True)
    write_language_models(SIZES[name], folder)
    write_stable_diffusion(SIZES[name], folder / "diffusion")
    for pipeline in TRAINED:
        write_trained(pipeline, folder / pipeline, SIZES[name].samples)
    mark.write_text(wanted)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
