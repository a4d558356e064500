"""Compares ImageReward with a plain torch BLIP written here, on weights with the published file's names."""

import math
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.rewards.image_reward import TEXT, VISION, BlipScorer, ImageReward
from PIL import Image
from tests.diffusion import tiny
from torch import Tensor
from torch.nn import functional as F
from transformers import BertTokenizer, BlipConfig

from trimtab_diffusion.rewards import WeightedSum, jpeg_compressibility

SIZE, PATCH = 12, 4
VISION_WIDTH, VISION_HEADS, TEXT_WIDTH, TEXT_HEADS = 24, 3, 16, 2
LAYERS, MAX_TOKENS, POSITIONS = 2, 35, 40
LETTERS = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
VOCABULARY = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS])}
HEAD = {0: (TEXT_WIDTH, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PROMPTS = ("a cat", "a dog rides a bike", "an ant plays chess " * 3, "a bee", "A CAT")


def config() -> BlipConfig:
    """Returns the published architecture with smaller sizes."""
    small = {"num_hidden_layers": LAYERS, "intermediate_size": 32}
    vision = {"hidden_size": VISION_WIDTH, "num_attention_heads": VISION_HEADS}
    vision |= {"image_size": SIZE, "patch_size": PATCH}
    text = {"hidden_size": TEXT_WIDTH, "num_attention_heads": TEXT_HEADS}
    text |= {"vocab_size": len(VOCABULARY) + 2, "max_position_embeddings": POSITIONS}
    return BlipConfig(vision_config={**VISION, **vision, **small}, text_config={**TEXT, **text, **small})


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight in the published file, by name, at the smaller sizes."""
    sizes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, inputs: int, outputs: int) -> None:
        sizes.update({f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)})

    def norm(name: str, width: int) -> None:
        sizes.update({f"{name}.weight": (width,), f"{name}.bias": (width,)})

    vision, text = "blip.visual_encoder", "blip.text_encoder"
    sizes[f"{vision}.cls_token"] = (1, 1, VISION_WIDTH)
    sizes[f"{vision}.pos_embed"] = (1, 1 + (SIZE // PATCH) ** 2, VISION_WIDTH)
    sizes[f"{vision}.patch_embed.proj.weight"] = (VISION_WIDTH, 3, PATCH, PATCH)
    sizes[f"{vision}.patch_embed.proj.bias"] = (VISION_WIDTH,)
    for layer in range(LAYERS):
        block, bert = f"{vision}.blocks.{layer}", f"{text}.encoder.layer.{layer}"
        norm(f"{block}.norm1", VISION_WIDTH)
        linear(f"{block}.attn.qkv", VISION_WIDTH, 3 * VISION_WIDTH)
        linear(f"{block}.attn.proj", VISION_WIDTH, VISION_WIDTH)
        norm(f"{block}.norm2", VISION_WIDTH)
        linear(f"{block}.mlp.fc1", VISION_WIDTH, 32)
        linear(f"{block}.mlp.fc2", 32, VISION_WIDTH)
        for part, source_width in (("attention", TEXT_WIDTH), ("crossattention", VISION_WIDTH)):
            linear(f"{bert}.{part}.self.query", TEXT_WIDTH, TEXT_WIDTH)
            linear(f"{bert}.{part}.self.key", source_width, TEXT_WIDTH)
            linear(f"{bert}.{part}.self.value", source_width, TEXT_WIDTH)
            linear(f"{bert}.{part}.output.dense", TEXT_WIDTH, TEXT_WIDTH)
            norm(f"{bert}.{part}.output.LayerNorm", TEXT_WIDTH)
        linear(f"{bert}.intermediate.dense", TEXT_WIDTH, 32)
        linear(f"{bert}.output.dense", 32, TEXT_WIDTH)
        norm(f"{bert}.output.LayerNorm", TEXT_WIDTH)
    norm(f"{vision}.norm", VISION_WIDTH)
    sizes[f"{text}.embeddings.word_embeddings.weight"] = (len(VOCABULARY) + 2, TEXT_WIDTH)
    sizes[f"{text}.embeddings.position_embeddings.weight"] = (POSITIONS, TEXT_WIDTH)
    norm(f"{text}.embeddings.LayerNorm", TEXT_WIDTH)
    linear("blip.vision_proj", VISION_WIDTH, 10)
    linear("blip.text_proj", TEXT_WIDTH, 10)
    for place, (inputs, outputs) in HEAD.items():
        linear(f"mlp.layers.{place}", inputs, outputs)
    return sizes


def random_weights() -> dict[str, Tensor]:
    """Returns weights by their published names. The inputs of each norm are small, so that its epsilon matters."""
    generator, weights = tiny.generator(3), {}
    for name, shape in shapes().items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name.lower():
            weights[name] = 0.3 * noise + name.endswith("weight")
        elif name.startswith("mlp."):
            weights[name] = noise / math.sqrt(shape[-1])
        elif "embed" in name or "cls_token" in name:
            weights[name] = 0.01 * noise
        else:
            weights[name] = 0.1 * noise
    weights["blip.text_encoder.embeddings.position_ids"] = torch.arange(POSITIONS)[None]
    return weights


class Original:
    """Computes the score of arXiv:2304.05977's model from its weights."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def linear(self, name: str, states: Tensor) -> Tensor:
        return F.linear(states, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, states: Tensor, epsilon: float) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(states, weight.shape, weight, bias, epsilon)

    def vision(self, pixels: Tensor) -> Tensor:
        name = "blip.visual_encoder"
        kernel, bias = (self.weights[f"{name}.patch_embed.proj.{kind}"] for kind in ("weight", "bias"))
        patches = F.conv2d(pixels, kernel, bias, stride=PATCH).flatten(2).transpose(1, 2)
        first = self.weights[f"{name}.cls_token"].expand(len(pixels), -1, -1)
        states = torch.cat([first, patches], dim=1) + self.weights[f"{name}.pos_embed"]
        for layer in range(LAYERS):
            block = f"{name}.blocks.{layer}"
            fused = self.linear(f"{block}.attn.qkv", self.norm(f"{block}.norm1", states, 1e-6))
            mixed = attend(*fused.chunk(3, dim=-1), VISION_HEADS)
            states = states + self.linear(f"{block}.attn.proj", mixed)
            hidden = F.gelu(self.linear(f"{block}.mlp.fc1", self.norm(f"{block}.norm2", states, 1e-6)))
            states = states + self.linear(f"{block}.mlp.fc2", hidden)
        return self.norm(f"{name}.norm", states, 1e-6)

    def bert_attention(self, name: str, states: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        query = self.linear(f"{name}.self.query", states)
        key, value = (self.linear(f"{name}.self.{part}", source) for part in ("key", "value"))
        mixed = self.linear(f"{name}.output.dense", attend(query, key, value, TEXT_HEADS, mask))
        return self.norm(f"{name}.output.LayerNorm", mixed + states, 1e-12)

    def text(self, token_ids: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        name = "blip.text_encoder.embeddings"
        states = self.weights[f"{name}.word_embeddings.weight"][token_ids]
        states = states + self.weights[f"{name}.position_embeddings.weight"][: token_ids.shape[1]]
        states = self.norm(f"{name}.LayerNorm", states, 1e-12)
        for layer in range(LAYERS):
            block = f"blip.text_encoder.encoder.layer.{layer}"
            states = self.bert_attention(f"{block}.attention", states, states, mask)
            states = self.bert_attention(f"{block}.crossattention", states, image, None)
            hidden = F.gelu(self.linear(f"{block}.intermediate.dense", states))
            states = self.norm(
                f"{block}.output.LayerNorm", states + self.linear(f"{block}.output.dense", hidden), 1e-12
            )
        return states

    def score(self, pixels: Tensor, token_ids: Tensor, mask: Tensor) -> Tensor:
        states = self.text(token_ids, mask, self.vision(pixels))[:, 0]
        for place in HEAD:
            states = self.linear(f"mlp.layers.{place}", states)
        return (states[:, 0] - 0.16717362830052426) / 1.0333394966054072


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Softmax attention, [B, T, width]; the mask [B, S] is 1 where a source position counts."""
    query, key, value = (states.unflatten(-1, (heads, -1)).transpose(1, 2) for states in (query, key, value))
    logits = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if mask is not None:
        logits = logits.masked_fill(mask[:, None, None] == 0, -math.inf)
    return (logits.softmax(-1) @ value).transpose(1, 2).flatten(2)


def tokens(prompts: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Returns hand-made ids and mask, [B, 35]: lower case, one token per letter, truncated so that [SEP] is last."""
    rows = []
    for prompt in prompts:
        words = prompt.lower().split()
        letters = ["##" * (place > 0) + letter for word in words for place, letter in enumerate(word)]
        row = ["[CLS]", *letters[: MAX_TOKENS - 2], "[SEP]"]
        rows.append([VOCABULARY[token] for token in row + ["[PAD]"] * (MAX_TOKENS - len(row))])
    return torch.tensor(rows), (torch.tensor(rows) != VOCABULARY["[PAD]"]).long()


def pictures(height: int = 16, width: int = 20) -> Tensor:
    """Returns blotches of random colours, [5, 3, height, width]."""
    coarse = torch.rand(5, 3, height // 4, width // 4, generator=tiny.generator(5))
    return coarse.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)


def pixels(images: Tensor, resized: tuple[int, int], left: int, top: int) -> Tensor:
    """Returns images as the model reads them, [5, 3, 12, 12], given the resized (width, height) and a crop's corner."""
    values = []
    for image in images:
        picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
        whole = np.asarray(picture.resize(resized, Image.Resampling.BICUBIC), dtype=np.float32) / 255
        values.append((whole[top : top + SIZE, left : left + SIZE] - np.array(CLIP_MEAN)) / np.array(CLIP_STD))
    return torch.tensor(np.stack(values), dtype=torch.float32).permute(0, 3, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the published names into one file, beside files with different weights, and a tokenizer."""
    folder = tmp_path_factory.mktemp("image_reward")
    torch.save(random_weights(), folder / "ImageReward.pt")
    torch.save({}, folder / "other.pt")
    BertTokenizer(vocab=VOCABULARY).save_pretrained(folder)
    return folder


def reward(folder: Path, **options: object) -> ImageReward:
    return ImageReward(folder, tokenizer=folder, config=config(), **options)


@pytest.mark.parametrize(
    ("height", "width", "resized", "left", "top"),
    [(12, 12, (12, 12), 0, 0), (16, 20, (15, 12), 2, 0), (32, 20, (12, 19), 0, 4), (20, 28, (16, 12), 2, 0)],
)
def test_score_is_that_of_the_original_model(
    folder: Path, height: int, width: int, resized: tuple[int, int], left: int, top: int
):
    images = pictures(height, width)
    with torch.no_grad():
        expected = Original(random_weights()).score(pixels(images, resized, left, top), *tokens(PROMPTS))
    assert expected.std() > 0.01
    scores = reward(folder, batch_size=2)(images, PROMPTS, ({},) * 5)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    assert not scores.requires_grad


def test_score_depends_on_the_image_and_on_the_prompt(folder: Path):
    images, score = pictures(), reward(folder)
    of_images = score(images, PROMPTS[:1] * 5, ({},) * 5)
    of_prompts = score(images[:1].expand(5, -1, -1, -1), PROMPTS, ({},) * 5)
    assert of_images.std() > 0.01
    assert of_prompts[:4].std() > 0.01
    torch.testing.assert_close(of_prompts[4], of_prompts[0])  # the model lower-cases its text


def test_score_is_that_of_the_image_alone_in_any_batch(folder: Path):
    images = pictures()
    together = reward(folder)(images, PROMPTS, ({},) * 5)
    for size in (1, 3):
        torch.testing.assert_close(reward(folder, batch_size=size)(images, PROMPTS, ({},) * 5), together)
    backwards = reward(folder)(images.flip(0), PROMPTS[::-1], ({},) * 5)
    torch.testing.assert_close(backwards.flip(0), together)


def test_blips_two_tokens_follow_the_vocabulary(folder: Path):
    tokenizer = reward(folder).tokenizer
    ids = tokenizer("[DEC] a [ENC]")["input_ids"]
    assert len(VOCABULARY) not in tokenizer("[dec]")["input_ids"]
    assert ids == [VOCABULARY["[CLS]"], len(VOCABULARY), VOCABULARY["a"], len(VOCABULARY) + 1, VOCABULARY["[SEP]"]]


def test_file_may_lack_what_the_score_does_not_use(folder: Path, tmp_path: Path):
    unused = ("position_ids", "vision_proj.weight", "vision_proj.bias", "text_proj.weight", "text_proj.bias")
    weights = {name: weight for name, weight in random_weights().items() if not name.endswith(unused)}
    assert len(weights) == len(random_weights()) - 5
    torch.save(weights, tmp_path / "weights.pt")
    fewer = ImageReward(tmp_path / "weights.pt", tokenizer=folder, config=config())
    assert torch.equal(fewer(pictures(), PROMPTS, ({},) * 5), reward(folder)(pictures(), PROMPTS, ({},) * 5))


def test_the_published_shape_fills_the_published_file():
    with torch.device("meta"):
        model = BlipScorer(BlipConfig(vision_config=VISION, text_config=TEXT))
    projections = 1024 * 256 + 256 + 768 * 256 + 256
    stored = 4 * (sum(weight.numel() for weight in model.parameters()) + projections) + 8 * 512
    tensors = len(list(model.parameters())) + 5
    assert 0 < 1_786_880_927 - stored < 500 * tensors  # the file's bytes: a name and an offset for each tensor


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("blip.itm_head.weight", torch.zeros(2, 16), r"Unexpected key.*blip\.itm_head\.weight"),
        ("blip.text_encoder.pooler.dense.bias", torch.zeros(16), r"Unexpected key.*text\.pooler\.dense\.bias"),
        ("mlp.layers.7.weight", None, r"Missing key.*head\.layers\.7\.weight"),
        ("blip.visual_encoder.pos_embed", torch.zeros(1, 26, 24), r"size mismatch.*position_embedding.*\[1, 26, 24\]"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, name: str, weight: Tensor | None, message: str):
    weights = random_weights() | ({} if weight is None else {name: weight})
    if weight is None:
        del weights[name]
    torch.save(weights, tmp_path / "changed.pt")
    with pytest.raises(ValueError, match=rf"(?s)changed.pt is not an ImageReward of this shape.*{message}"):
        ImageReward(tmp_path / "changed.pt", tokenizer=tmp_path, config=config())(pictures(), PROMPTS, ({},) * 5)


def test_prompts_and_file_are_needed(folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="4 prompts came with 5 images"):
        reward(folder)(pictures(), PROMPTS[:4], ({},) * 5)
    with pytest.raises(FileNotFoundError, match=r"There is no file .*absent.pt"):
        ImageReward(tmp_path / "absent.pt", tokenizer=folder)(pictures(), PROMPTS, ({},) * 5)


def test_half_precision_is_for_the_encoders(folder: Path):
    exact = reward(folder)(pictures(), PROMPTS, ({},) * 5)
    half = reward(folder, dtype=torch.bfloat16)
    rounded = half(pictures(), PROMPTS, ({},) * 5)
    assert {weight.dtype for weight in half.model.head.parameters()} == {torch.float32}
    assert {weight.dtype for part in (half.model.vision, half.model.text) for weight in part.parameters()} == {
        torch.bfloat16
    }
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.1


def test_a_weighted_sum_has_it_as_a_term(folder: Path):
    terms, images = (reward(folder), jpeg_compressibility), pictures()
    preference, size = (term(images, PROMPTS, ({},) * 5) for term in terms)
    total = WeightedSum((terms[0], 2.0), (terms[1], 0.5))(images, PROMPTS, ({},) * 5)
    torch.testing.assert_close(total, 2 * preference + 0.5 * size)
