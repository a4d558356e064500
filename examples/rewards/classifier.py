"""The reward of an image classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab_diffusion.rewards.batches import Images, Metadata, check_count, chunks
from trimtab_diffusion.rewards.loading import image_processor, pixels, settle

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel

MAX_NAMED_LABELS = 20


class ClassifierReward:
    """The log-probability of a class under an image classifier, in nats.

    Args:
        model: a folder or hub id for `AutoModelForImageClassification`, or such a model, which is put into eval mode
            and moved (see `trimtab_diffusion.rewards`).
        label: the class of all images: a name in the model's `config.label2id`, or an index.
        label_key: instead of label, the key of an image's metadata that holds its class, as a name or an index.
        processor: the image processor, for a model in memory. Default: the checkpoint's.
        log_probability: False for the probability itself, in [0, 1].
        batch_size: images per call of the model.
        device: the model's device. None: the images' device (see `trimtab_diffusion.rewards`).
        dtype: of a model that is loaded here.

    Raises:
        ValueError: label and label_key came together or not at all, or a model came without a processor. The first call
            raises it for an unknown class.
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
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if (label is None) == (label_key is None):
            raise ValueError(
                f"label={label!r} and label_key={label_key!r} came. Pass exactly one of them: label if all images have "
                "the same class, label_key for the key of the metadata that has each image's class."
            )
        if processor is None and not isinstance(model, str | Path):
            raise ValueError("A model came without its image processor. Pass processor=, or the model's checkpoint.")
        self._source, self._given_processor = model, processor
        self._label, self._label_key, self._log_probability = label, label_key, log_probability
        self._batch_size, self._device, self._dtype = batch_size, device, dtype

    @cached_property
    def model(self) -> Any:
        """The classifier, in eval mode."""
        from transformers import AutoModelForImageClassification

        if not isinstance(self._source, str | Path):
            return self._source.eval()
        return AutoModelForImageClassification.from_pretrained(self._source, dtype=self._dtype).eval()

    @cached_property
    def processor(self) -> BaseImageProcessor:
        """The image processor."""
        return self._given_processor or image_processor(str(self._source))

    @torch.no_grad()
    def __call__(self, images: Images, prompts: Sequence[str], metadata: Metadata) -> Tensor:
        """Returns log-probabilities or probabilities [B]."""
        classes = torch.tensor(self._classes(images, metadata))
        settle(self.model, images, self._device)
        logits = [
            self.model(pixels(self.processor, pictures, self.model)).logits.float().cpu()
            for pictures in chunks(images, self._batch_size)
        ]
        logprobs = torch.cat(logits).log_softmax(1).gather(1, classes[:, None]).squeeze(1)
        return logprobs if self._log_probability else logprobs.exp()

    def _classes(self, images: Images, metadata: Metadata) -> list[int]:
        if self._label is not None:
            return [self._class_index(self._label, "label")] * len(images)
        check_count("metadata", metadata, images)
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
        names = self.model.config.label2id
        if isinstance(label, str) and label in names:
            return names[label]
        if isinstance(label, int) and 0 <= label < self.model.config.num_labels:
            return label
        some = ", ".join(repr(name) for name in list(names)[:MAX_NAMED_LABELS])
        more = f" and {len(names) - MAX_NAMED_LABELS} more" if len(names) > MAX_NAMED_LABELS else ""
        raise ValueError(
            f"{where} is {label!r}, which is not a class of this model. It has {some}{more}; an index from 0 to "
            f"{self.model.config.num_labels - 1} does as well."
        )
