"""The tracker that `image_samples_hook` gets."""

from collections.abc import Mapping
from typing import Any

from trimtab_common.tracking import Tracker


class HookTracker:
    """The tracker as `image_samples_hook` knows it from accelerate."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def log(self, values: Mapping[str, Any], step: int, **_: Any) -> None:
        """Logs numbers."""
        self.tracker.log(values, step)

    def log_images(self, values: Mapping[str, Any], step: int, **_: Any) -> None:
        """Logs images by caption: one [3, H, W], or a batch [n, 3, H, W] or a list, which share the caption."""
        images = [(image, caption) for caption, value in values.items() for image in _images(value)]
        self.tracker.images("hook", [image for image, _ in images], [caption for _, caption in images], step)


def _images(value: Any) -> list[Any]:
    return list(value) if getattr(value, "ndim", None) == 4 or isinstance(value, list | tuple) else [value]
