"""Reward functions for images: `(images, prompts, metadata) -> rewards [B]`, float32, on the CPU.

All reward functions take:

    images: [B, 3, H, W], float within [0, 1], or B images, each as `trimtab_common.images.to_pil` takes it. Other
        shapes and values raise a ValueError; `mean_over_frames` takes videos. The reward is that of the 8-bit image,
        as it would be in a file.
    prompts: B texts.
    metadata: B dictionaries.

Models are loaded from a folder or a hub id. They run in eval mode and without gradients, on `batch_size` images at a
time. They run on `device`; if that is None, on the device of the images; and if the images are not a tensor, where the
model is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from PIL import Image
from torch import Tensor, nn

from trimtab_common.images import Picture, to_pil

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, CLIPModel, PreTrainedModel

JPEG_QUALITY = 95
CLIP = "openai/clip-vit-large-patch14"
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
MAX_NAMED_LABELS = 20

Images: TypeAlias = Tensor | Sequence[Picture]
"""A batch of images: see the module."""

Metadata: TypeAlias = Sequence[Any]
"""What the prompt function returned with each prompt."""

Reward: TypeAlias = Callable[[Images, Sequence[str], Metadata], Tensor]
"""See the module."""


def jpeg_incompressibility(images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
    """Returns the size of each image as a JPEG of quality 95 (Black et al. 2023, arXiv:2305.13301, section 5.1).

    Args:
        images: see the module; should have one size.
        prompts, metadata: not used.

    Returns:
        [B], in kB of 1000 bytes.
    """
    return torch.tensor([_jpeg_bytes(picture) / 1000 for _, pictures in _chunks(images, 1) for picture in pictures])


def mean_over_frames(reward: Reward) -> Reward:
    """Returns a reward of videos [B, F, 3, H, W]: the mean of a reward of images over the frames.

    Args:
        reward: `(images [n, 3, H, W], prompts, metadata) -> rewards [n]`. It gets images as they are.
    """

    def score(images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        if not (isinstance(images, Tensor) and images.dim() == 5):
            return reward(images, prompts, metadata)
        count, frames = images.shape[:2]
        texts = [prompt for prompt in prompts for _ in range(frames)]
        facts = [fact for fact in metadata for _ in range(frames)]
        return torch.as_tensor(reward(images.flatten(0, 1), texts, facts)).reshape(count, frames).float().mean(1)

    return score


def jpeg_compressibility(images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
    """Returns minus `jpeg_incompressibility` [B], in kB."""
    return -jpeg_incompressibility(images, prompts, metadata)


class AestheticHead(nn.Module):
    """The multilayer perceptron of LAION's aesthetic predictor."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        # There are no nonlinearities. The dropout layers give the others the names of the published weights.
        self.layers = nn.Sequential(
            nn.Linear(width, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, embeddings: Tensor) -> Tensor:
        """Returns scores [B] of unit embeddings [B, width]."""
        return self.layers(embeddings).squeeze(1)


class AestheticScore:
    """LAION's aesthetic predictor, from about 1 (ugly) to 10 (Black et al. 2023, arXiv:2305.13301, section 5.2).

    Args:
        checkpoint: the weights `sac+logos+ava1-l14-linearMSE`: a file, or a folder or hub id with this file alone.
        clip: the model on whose embeddings these weights were trained.
        batch_size, device: see the module.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        clip: str | Path = CLIP,
        batch_size: int = 32,
        device: str | torch.device | None = None,
    ) -> None:
        from transformers import CLIPModel

        # By default transformers takes the dtype of the file, and scores differ in half precision.
        self._clip = CLIPModel.from_pretrained(clip, dtype=torch.float32).eval()
        del self._clip.text_model  # saves half a gigabyte
        self._processor = _image_processor(clip)
        self._head = _aesthetic_head(checkpoint, self._clip.config.projection_dim)
        self._batch_size, self._device = batch_size, device

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Returns aesthetic scores [B]."""
        _settle(self._clip, images, self._device)
        _settle(self._head, images, self._device)
        scores = [
            self._head(_embed_pictures(self._clip, self._processor, pictures))
            for _, pictures in _chunks(images, self._batch_size)
        ]
        return torch.cat(scores).cpu()


class ClipAlignment:
    """The cosine of CLIP's embeddings of image and prompt, within [-1, 1].

    CLIPScore (Hessel et al. 2021, arXiv:2104.08718) is 2.5 max(cosine, 0). The cosine varies little: the published CLIP
    models multiply it by 100 for their logits. Prompts are truncated to the model's longest text, 77 tokens.

    Args:
        checkpoint: folder or hub id of a CLIP model.
        batch_size, device: see the module.
    """

    def __init__(
        self,
        checkpoint: str | Path = CLIP,
        *,
        batch_size: int = 32,
        device: str | torch.device | None = None,
    ) -> None:
        from transformers import AutoTokenizer, CLIPModel

        self._clip = CLIPModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._processor = _image_processor(checkpoint)
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._batch_size, self._device = batch_size, device

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Returns cosines [B]."""
        _check_count("prompts", prompts, images)
        _settle(self._clip, images, self._device)
        rows = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        texts = self._embed_texts(list(rows))
        cosines = []
        for place, pictures in _chunks(images, self._batch_size):
            embeddings = _embed_pictures(self._clip, self._processor, pictures)
            cosines.append((embeddings * texts[[rows[prompt] for prompt in prompts[place]]]).sum(1))
        return torch.cat(cosines).cpu()

    def _embed_texts(self, texts: list[str]) -> Tensor:
        """Returns unit embeddings [len(texts), width]."""
        longest = self._clip.config.text_config.max_position_embeddings
        parts = []
        for start in range(0, len(texts), self._batch_size):
            part = texts[start : start + self._batch_size]
            tokens = self._tokenizer(part, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            tokens = tokens.to(self._clip.device)
            features = self._clip.get_text_features(tokens["input_ids"], attention_mask=tokens["attention_mask"])
            parts.append(_unit(features.pooler_output))
        return torch.cat(parts)


class ClassifierReward:
    """The log-probability of a class under an image classifier, in nats.

    Args:
        model: a folder or hub id for `AutoModelForImageClassification`, or such a model, which is put into eval mode
            and moved (see the module).
        label: the class of all images: a name in the model's `config.label2id`, or an index.
        label_key: instead of label, the key of an image's metadata that has its class, as a name or an index.
        processor: the image processor of a model in memory. Default: that of the checkpoint.
        log_probability: False for the probability itself, in [0, 1].
        batch_size, device: see the module.

    Raises:
        ValueError: label and label_key came together or not at all, a model came without a processor, or the class is
            unknown.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        label: str | int | None = None,
        label_key: str | None = None,
        processor: BaseImageProcessor | None = None,
        log_probability: bool = True,
        batch_size: int = 32,
        device: str | torch.device | None = None,
    ) -> None:
        from transformers import AutoModelForImageClassification

        if (label is None) == (label_key is None):
            raise ValueError(
                f"label={label!r} and label_key={label_key!r} came. Pass exactly one of them: label if all images have "
                "the same class, label_key for the key of the metadata that has each image's class."
            )
        self._model: Any = model
        if isinstance(model, str | Path):
            processor = processor or _image_processor(model)
            self._model = AutoModelForImageClassification.from_pretrained(model, dtype=torch.float32)
        if processor is None:
            raise ValueError("A model came without its image processor. Pass processor=, or the model's checkpoint.")
        self._model.eval()
        self._processor = processor
        self._label_key, self._log_probability = label_key, log_probability
        self._label = None if label is None else self._class_index(label, "label")
        self._batch_size, self._device = batch_size, device

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Returns log-probabilities or probabilities [B]."""
        classes = torch.tensor(self._classes(images, metadata))
        _settle(self._model, images, self._device)
        logits = [
            self._model(_pixels(self._processor, pictures, self._model)).logits.float().cpu()
            for _, pictures in _chunks(images, self._batch_size)
        ]
        logprobs = torch.cat(logits).log_softmax(1).gather(1, classes[:, None]).squeeze(1)
        return logprobs if self._log_probability else logprobs.exp()

    def _classes(self, images: Images, metadata: Metadata) -> list[int]:
        if self._label is not None:
            return [self._label] * len(images)
        _check_count("metadata", metadata, images)
        for index, entry in enumerate(metadata):
            if not isinstance(entry, Mapping) or self._label_key not in entry:
                raise ValueError(
                    f"The metadata of image {index} is {entry!r}, without the key {self._label_key!r}. "
                    f"Let the prompt function return it: (prompt, {{{self._label_key!r}: class}})."
                )
        return [
            self._class_index(entry[self._label_key], f"{self._label_key!r} of image {index}")
            for index, entry in enumerate(metadata)
        ]

    def _class_index(self, label: str | int, where: str) -> int:
        names = self._model.config.label2id
        if isinstance(label, str) and label in names:
            return names[label]
        if isinstance(label, int) and 0 <= label < self._model.config.num_labels:
            return label
        some = ", ".join(repr(name) for name in list(names)[:MAX_NAMED_LABELS])
        more = f" and {len(names) - MAX_NAMED_LABELS} more" if len(names) > MAX_NAMED_LABELS else ""
        raise ValueError(
            f"{where} is {label!r}, which is not a class of this model. It has {some}{more}; an index from 0 to "
            f"{self._model.config.num_labels - 1} does as well."
        )


def _jpeg_bytes(picture: Image.Image) -> int:
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=JPEG_QUALITY)
    return buffer.tell()


def _chunks(images: Images, size: int) -> Iterator[tuple[slice, list[Image.Image]]]:
    """Yields the images, `size` at a time, with their place in the batch."""
    if isinstance(images, Tensor) and images.dim() != 4:
        raise ValueError(f"images of shape {tuple(images.shape)} came in; [B, 3, H, W] is needed.")
    for start in range(0, len(images), size):
        place = slice(start, start + size)
        yield place, [to_pil(image) for image in images[place]]


def _check_count(name: str, values: Sequence[object], images: Images) -> None:
    if len(values) != len(images):
        raise ValueError(f"{len(values)} {name} came with {len(images)} images. Pass one for each image.")


def _image_processor(checkpoint: str | Path) -> BaseImageProcessor:
    """Loads the image processor of a model."""
    from transformers import AutoImageProcessor

    # The published scores use PIL's resizing. torchvision's differs, and may not be installed.
    return AutoImageProcessor.from_pretrained(checkpoint, backend="pil")


def _pixels(processor: BaseImageProcessor, pictures: list[Image.Image], model: PreTrainedModel) -> Tensor:
    return processor(images=pictures, return_tensors="pt")["pixel_values"].to(model.device, model.dtype)


def _embed_pictures(clip: CLIPModel, processor: BaseImageProcessor, pictures: list[Image.Image]) -> Tensor:
    """Returns unit embeddings [len(pictures), width]."""
    return _unit(clip.get_image_features(_pixels(processor, pictures, clip)).pooler_output)


def _settle(model: nn.Module, images: Images, device: str | torch.device | None) -> None:
    """Moves the model to its device, or without one to that of the images."""
    if device is None and isinstance(images, Tensor):
        device = images.device
    if device is not None:
        model.to(device)


def _unit(embeddings: Tensor) -> Tensor:
    return nn.functional.normalize(embeddings, dim=1)


def _aesthetic_head(checkpoint: str | Path, width: int) -> AestheticHead:
    head = AestheticHead(width)
    path = _weights_file(checkpoint)
    try:
        head.load_state_dict(_read_weights(path))
    except RuntimeError as error:
        raise ValueError(
            f"{path} is not an aesthetic predictor for CLIP embeddings of {width} numbers. The weights "
            f"sac+logos+ava1-l14-linearMSE belong to {CLIP}. {error}"
        ) from error
    return head.eval()


def _weights_file(checkpoint: str | Path) -> Path:
    path = Path(checkpoint)
    if path.is_file():
        return path
    if not path.is_dir():
        if path.suffix in WEIGHT_SUFFIXES:
            raise FileNotFoundError(f"There is no file {path}. Pass one, or a folder or hub id that has one.")
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(str(checkpoint), allow_patterns=[f"*{suffix}" for suffix in WEIGHT_SUFFIXES]))
    files = sorted(file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    if len(files) != 1:
        raise ValueError(
            f"{checkpoint} has {len(files)} files of weights ({', '.join(file.name for file in files) or 'none'}), and "
            "one is needed. Pass the path of the right one."
        )
    return files[0]


def _read_weights(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)
