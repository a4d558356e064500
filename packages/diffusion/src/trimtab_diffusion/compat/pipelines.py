"""What diffusers' pipelines keep under private names."""

from typing import Any


def absent_parts(pipeline: Any) -> list[str]:
    """The parts that a pipeline lacks and that `from_pretrained` would ask for: give it None for each of them."""
    optional = set(pipeline._optional_components)
    return [name for name, part in pipeline.components.items() if part is None and name not in optional]
