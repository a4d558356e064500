"""Prompt functions, `() -> (prompt, metadata)`: those of Black et al. 2023 (arXiv:2305.13301), and the lines of a file.

Each function returns a `Prompts`, which is a prompt function: pass `simple_animals()`, not `simple_animals`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

ACTIVITIES = ("riding a bike", "playing chess", "washing dishes")

Metadata: TypeAlias = Mapping[str, Any]
"""What a prompt function returns beside a prompt, for the reward function."""

# Vowel letters that are spoken as a consonant (a unicorn, a European hare, a one-eyed cat), and an h that is silent.
_SPOKEN_CONSONANT = re.compile(
    r"uni(?!n|de|m[ap])|u(?:s[aeu]|r[aio]|t[eio]|k)|ubiq|eu|ew|on(?:e|ce)(?![a-z])|ouija", re.IGNORECASE
)
_SILENT_H = re.compile(r"h(?:our|onest|onou?r|eir)", re.IGNORECASE)
_SPELLED_OUT = re.compile(r"[A-Za-z](?![A-Za-z])")  # x-ray fish, U-boat
_LETTERS_WITH_AN = "aefhilmnorsx"


@dataclass(frozen=True)
class Prompts:
    """A prompt function that draws uniformly from a list.

    It draws from Python's global `random`, as most prompt functions do. The trainer seeds that for each process and
    epoch, and restores it afterwards.

    Args:
        prompts: the list.
        metadata: a dictionary for each prompt, of which calls return copies.
    """

    prompts: tuple[str, ...]
    metadata: Sequence[Metadata]

    def __call__(self) -> tuple[str, dict[str, Any]]:
        index = random.randrange(len(self.prompts))
        return self.prompts[index], dict(self.metadata[index])


def simple_animals() -> Prompts:
    """Returns the 45 common animals on which the paper trains for aesthetic quality: "cat", "dog", ...

    The metadata has `noun`, the animal.
    """
    names = _shipped("simple_animals")
    return Prompts(names, tuple({"noun": name} for name in names))


def imagenet_animals() -> Prompts:
    """Returns the 398 animals of ImageNet, on which the paper trains for file size: "tench", ...

    The names are spelled as in torchvision. The metadata has `noun`, the animal, and `class_index`, its class of ILSVRC
    2012 (0 to 397), by which a classifier's labels are known however they are spelled.
    """
    names = _shipped("imagenet_animals")
    return Prompts(names, tuple({"noun": name, "class_index": index} for index, name in enumerate(names)))


def nouns_activities(nouns: Sequence[str] | None = None, activities: Sequence[str] = ACTIVITIES) -> Prompts:
    """Returns every noun with every activity, "a cat riding a bike": the paper's prompts for prompt-image alignment.

    The metadata has `noun` and `activity`.

    Args:
        nouns: singular, without an article. Default: the 45 of `simple_animals`.
        activities: what the nouns do.

    Raises:
        ValueError: a list is empty, or a string.
    """
    nouns = _shipped("simple_animals") if nouns is None else _words("nouns", nouns)
    activities = _words("activities", activities)
    pairs = [(noun, activity) for noun in nouns for activity in activities]
    return Prompts(
        tuple(f"{with_article(noun)} {activity}" for noun, activity in pairs),
        tuple({"noun": noun, "activity": activity} for noun, activity in pairs),
    )


def from_file(path: str | Path) -> Prompts:
    """Returns the lines of a text file (UTF-8), without empty ones and without spaces around them.

    A repeated line is drawn more often. The metadata is empty.

    Raises:
        FileNotFoundError: path is not a file.
        ValueError: the file has no prompt.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file. Pass a text file with a prompt on each line.")
    prompts = _lines(path.read_text(encoding="utf-8-sig"))
    if not prompts:
        raise ValueError(f"{path} has no prompt: all its lines are empty. Write a prompt on each line.")
    return Prompts(prompts, ({},) * len(prompts))


def with_article(noun: str) -> str:
    """Returns the noun after "a" or "an", as it is spoken: an ant, a unicorn, an hourglass, an x-ray fish.

    The rule uses the spelling and is right for common words. It reads abbreviations as words (a NASA rocket).
    """
    if _SPELLED_OUT.match(noun):
        takes_an = noun[0].lower() in _LETTERS_WITH_AN
    elif noun[:1].lower() in ("a", "e", "i", "o", "u"):
        takes_an = not _SPOKEN_CONSONANT.match(noun)
    else:
        takes_an = bool(_SILENT_H.match(noun))
    return f"{'an' if takes_an else 'a'} {noun}"


def _shipped(name: str) -> tuple[str, ...]:
    """Returns the lines of a list that the package contains."""
    text = resources.files("trimtab_diffusion").joinpath("prompt_lists", f"{name}.txt").read_text(encoding="utf-8")
    return _lines(text)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _words(name: str, words: Sequence[str]) -> tuple[str, ...]:
    """Checks that an argument is a list with at least one word."""
    if isinstance(words, str):
        raise ValueError(f"{name}={words!r} is one string. Pass a list; for the lines of a file, split its text.")
    if not words:
        raise ValueError(f"{name} is empty. Pass at least one.")
    return tuple(words)
