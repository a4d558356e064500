"""Prompt functions return every prompt, depend on the seed of `random`, and use correct grammar."""

import random
from pathlib import Path

import pytest

from trimtab_diffusion.prompts import (
    Prompts,
    from_file,
    imagenet_animals,
    nouns_activities,
    simple_animals,
    with_article,
)

WITH_AN = [
    "ant",
    "elephant",
    "iguana",
    "octopus",
    "umbrella",
    "urchin",
    "usher",
    "otter",
    "owl",
    "undertaker",
    "uninvited guest",
    "unimpressed cat",
    "unidentified bird",
    "hour",
    "hourglass",
    "heir",
    "honest dog",
    "x-ray fish",
    "e-bike",
    "old ewe",
    "onion",
    "eel",
    "Airedale",
    "EntleBucher",
]
WITH_A = [
    "cat",
    "bee",
    "horse",
    "hen",
    "house",
    "unicorn",
    "unicycle",
    "uniform",
    "union",
    "unit",
    "unique bird",
    "university",
    "European hare",
    "ewe",
    "eucalyptus",
    "one-eyed cat",
    "user",
    "used car",
    "usual cat",
    "utensil",
    "utility",
    "utopia",
    "ukulele",
    "urologist",
    "urial",
    "ouija board",
    "U-boat",
    "T-rex",
    "yak",
    "Hen",
]


def drawn(prompts: Prompts, count: int) -> list[tuple[str, dict]]:
    return [prompts() for _ in range(count)]


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0)


@pytest.mark.parametrize(
    ("prompts", "count"), [(simple_animals(), 45), (imagenet_animals(), 398), (nouns_activities(), 45 * 3)]
)
def test_every_prompt_of_the_paper_comes_and_the_seed_says_which(prompts: Prompts, count: int):
    calls = drawn(prompts, 12 * count)
    assert len({prompt for prompt, _ in calls}) == count == len(set(prompts.prompts))
    random.seed(0)
    assert drawn(prompts, 12 * count) == calls
    assert drawn(prompts, 12 * count) != calls


def test_draws_are_uniform():
    calls = drawn(nouns_activities(["cat", "dog"], ["sleeping", "eating"]), 4000)
    counts = [sum(prompt == one for prompt, _ in calls) for one in {prompt for prompt, _ in calls}]
    assert len(counts) == 4
    assert all(abs(count - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5 for count in counts)


def test_metadata_names_what_the_prompt_is_made_of():
    for prompt, metadata in drawn(nouns_activities(), 50):
        assert prompt == f"{with_article(metadata['noun'])} {metadata['activity']}"
        assert metadata["activity"] in {"riding a bike", "playing chess", "washing dishes"}
    assert all(metadata == {"noun": prompt} for prompt, metadata in drawn(simple_animals(), 50))


def test_imagenet_animals_know_their_class():
    classes = {prompt: metadata["class_index"] for prompt, metadata in drawn(imagenet_animals(), 12 * 398)}
    assert sorted(classes.values()) == list(range(398))
    known = {"tench": 0, "ostrich": 9, "Chihuahua": 151, "timber wolf": 269, "tabby": 281, "tiger": 292, "zebra": 340}
    assert known.items() <= classes.items()
    assert classes["puffer"] == 397


def test_what_a_caller_does_to_metadata_does_not_come_back():
    prompts = nouns_activities(["cat"], ["sleeping"])
    prompts()[1]["noun"] = "dog"
    assert prompts() == ("a cat sleeping", {"noun": "cat", "activity": "sleeping"})


@pytest.mark.parametrize("noun", WITH_AN)
def test_nouns_with_an(noun: str):
    assert with_article(noun) == f"an {noun}"


@pytest.mark.parametrize("noun", WITH_A)
def test_nouns_with_a(noun: str):
    assert with_article(noun) == f"a {noun}"


def test_lines_of_a_file_are_prompts(tmp_path: Path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n  a café at night \r\n\na cat\n   \n", encoding="utf-8-sig")
    for source in (path, str(path)):
        assert {prompt for prompt, _ in drawn(from_file(source), 50)} == {"a café at night", "a cat"}
    assert from_file(path)()[1] == {}


def test_files_and_lists_without_prompts_are_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"absent.txt is not a file. Pass a text file"):
        from_file(tmp_path / "absent.txt")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        from_file(tmp_path)
    (tmp_path / "empty.txt").write_text("\n  \n")
    with pytest.raises(ValueError, match=r"empty.txt has no prompt: all its lines are empty"):
        from_file(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match=r"nouns is empty. Pass at least one"):
        nouns_activities([])
    with pytest.raises(ValueError, match=r"activities='riding a bike' is one string. Pass a list"):
        nouns_activities(["cat"], "riding a bike")
