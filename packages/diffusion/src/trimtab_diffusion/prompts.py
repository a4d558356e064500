"""Prompt functions, `() -> (prompt, metadata)`: those of Black et al. 2023 (arXiv:2305.13301) and files.

Each function here makes a `Prompts`, to be handed to the trainer as its prompt function: `simple_animals()`, with the
brackets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

ACTIVITIES = ("riding a bike", "playing chess", "washing dishes")

# Vowel letters spoken as a consonant (a unicorn, a European hare, a one-eyed cat), and an h that is not spoken.
_SPOKEN_CONSONANT = re.compile(
    r"uni(?!n|de|m[ap])|u(?:s[aeu]|r[aio]|t[eio]|k)|ubiq|eu|ew|on(?:e|ce)(?![a-z])|ouija", re.IGNORECASE
)
_SILENT_H = re.compile(r"h(?:our|onest|onou?r|eir)", re.IGNORECASE)
_SPELLED_OUT = re.compile(r"[A-Za-z](?![A-Za-z])")  # x-ray fish, U-boat
_LETTERS_WITH_AN = "aefhilmnorsx"


@dataclass(frozen=True)
class Prompts:
    """A prompt function that draws uniformly from a list.

    prompts: all that can be drawn. metadata: a dictionary for each of them; calls hand out copies.

    Draws come from Python's global `random`, as those of most hand-written prompt functions do: the trainer seeds it,
    anew for every process and epoch, and puts it back.
    """

    prompts: tuple[str, ...]
    metadata: tuple[Mapping[str, Any], ...]

    def __call__(self) -> tuple[str, dict[str, Any]]:
        index = random.randrange(len(self.prompts))
        return self.prompts[index], dict(self.metadata[index])


def simple_animals() -> Prompts:
    """The 45 common animals on which the paper trains for aesthetic quality: "cat", "dog", ...

    Metadata: noun, the animal.
    """
    names = _shipped("simple_animals")
    return Prompts(names, tuple({"noun": name} for name in names))


def imagenet_animals() -> Prompts:
    """The 398 animals of ImageNet, spelled as by torchvision; the paper trains on them for file size: "tench", ...

    Metadata: noun, the animal; class_index, its class of ILSVRC 2012 (the animals are 0 to 397), by which
    `ClassifierReward(..., label_key="class_index")` finds it in an ImageNet classifier however that spells its labels.
    """
    names = _shipped("imagenet_animals")
    return Prompts(names, tuple({"noun": name, "class_index": index} for index, name in enumerate(names)))


def nouns_activities(nouns: Sequence[str] | None = None, activities: Sequence[str] = ACTIVITIES) -> Prompts:
    """Every noun with every activity, "a cat riding a bike": the paper's prompts for prompt-image alignment.

    nouns: singular, without an article; default: the 45 of `simple_animals`. Metadata: noun and activity.
    """
    chosen = _shipped("simple_animals") if nouns is None else _words("nouns", nouns)
    doing = _words("activities", activities)
    pairs = [(noun, activity) for noun in chosen for activity in doing]
    return Prompts(
        tuple(f"{with_article(noun)} {activity}" for noun, activity in pairs),
        tuple({"noun": noun, "activity": activity} for noun, activity in pairs),
    )


def from_file(path: str | Path) -> Prompts:
    """The lines of a text file (UTF-8), stripped; empty ones are skipped, and a repeated one is drawn more often.

    Metadata: empty. FileNotFoundError without such a file, ValueError if it holds no prompt.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file. Give a text file that holds a prompt on each line.")
    prompts = _lines(path.read_text(encoding="utf-8-sig"))
    if not prompts:
        raise ValueError(f"{path} holds no prompt: every line of it is empty. Write a prompt on each line.")
    return Prompts(prompts, ({},) * len(prompts))


def with_article(noun: str) -> str:
    """The noun behind "a" or "an", as it is spoken: an ant, a unicorn, an hourglass, an x-ray fish.

    A rule of spelling, right for common words; abbreviations of several letters are taken for words (a NASA rocket).
    """
    if _SPELLED_OUT.match(noun):
        takes_an = noun[0].lower() in _LETTERS_WITH_AN
    elif noun[:1].lower() in ("a", "e", "i", "o", "u"):
        takes_an = not _SPOKEN_CONSONANT.match(noun)
    else:
        takes_an = bool(_SILENT_H.match(noun))
    return f"{'an' if takes_an else 'a'} {noun}"


def _shipped(name: str) -> tuple[str, ...]:
    text = resources.files("trimtab_diffusion").joinpath("prompt_lists", f"{name}.txt").read_text(encoding="utf-8")
    return _lines(text)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _words(name: str, words: Sequence[str]) -> tuple[str, ...]:
    if isinstance(words, str):
        raise ValueError(f"{name}={words!r} is one string; a list is needed. For the lines of a file, split its text.")
    if not words:
        raise ValueError(f"{name} is empty; at least one is needed.")
    return tuple(words)
