"""The small pipelines that DDPO trains here: their captions, and the measures of their images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.black_2023_ddpo import shapes
from experiments.emoji import drawings, rewards
from experiments.emoji.judging import IN_TURN
from trimtab_diffusion.rewards import Reward


@dataclass(frozen=True)
class Base:
    """A pipeline that is shipped.

    Attributes:
        captions: All captions, in the order in which they are measured; the first are those of the pictures.
        trained: Those to train on, where the others are held out.
        measures: Rewards that know the captions, and measures of whether an image is what its caption says.
        watched: Those that are logged beside any reward.
    """

    captions: tuple[str, ...]
    trained: tuple[str, ...]
    measures: Mapping[str, Reward]
    watched: tuple[str, ...]


OF_SHAPES = (shapes.rgb_alignment, shapes.colour_match, shapes.shape_match)
OF_EMOJI = (
    rewards.warmth,
    rewards.colour_alignment,
    rewards.agreement,
    rewards.match_probability,
    rewards.recognised,
    rewards.name_match,
    rewards.colour_match,
)
BASES = {
    "shapes": Base(
        shapes.CAPTIONS,
        shapes.TRAINED,
        {measure.__name__: measure for measure in OF_SHAPES},
        ("rgb_alignment", "colour_match", "shape_match"),
    ),
    "emoji": Base(
        IN_TURN,
        drawings.TRAINED,
        {measure.__name__: measure for measure in OF_EMOJI},
        ("recognised", "name_match", "colour_match"),
    ),
}
