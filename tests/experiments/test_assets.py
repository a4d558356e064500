import hashlib
import io
import itertools
import json
import math
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from experiments import assets
from experiments.assets import AssetError, Package, data, registry

DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, CONTEXT = 24, 40, 2, 4, 2, 300, 32
HEAD = DIM // HEADS
WORDS = [" t", "he", " the", "re", "er", " there", "ab", "abc", "bc", "  ", "   ", " the the"]


def tensors(*, shared: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "embedding": (VOCAB, DIM),
        "attention_norm": (LAYERS, DIM),
        "wq": (LAYERS, DIM, DIM),
        "wk": (LAYERS, KV_HEADS * HEAD, DIM),
        "wv": (LAYERS, KV_HEADS * HEAD, DIM),
        "wo": (LAYERS, DIM, DIM),
        "mlp_norm": (LAYERS, DIM),
        "w1": (LAYERS, HIDDEN, DIM),
        "w2": (LAYERS, DIM, HIDDEN),
        "w3": (LAYERS, HIDDEN, DIM),
        "norm": (DIM,),
        "rope_tables": (2, CONTEXT, HEAD // 2),
    }
    if not shared:
        shapes["classifier"] = (VOCAB, DIM)
    return {name: rng.normal(size=shape, scale=0.3).astype("<f4") for name, shape in shapes.items()}


def checkpoint(weights: dict[str, np.ndarray]) -> bytes:
    vocab = -VOCAB if "classifier" in weights else VOCAB
    header = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, vocab, CONTEXT)
    return header + b"".join(weight.tobytes() for weight in weights.values())


def pieces() -> list[tuple[bytes, float]]:
    characters = [" ", "t", "h", "e", "r", "a", "b", "c"]
    learned = [(word.encode(), -1e9 if word.isspace() else -float(i)) for i, word in enumerate(WORDS)]
    special = [(name, 0.0) for name in (b"<unk>", b"\n<s>\n", b"\n</s>\n")]
    rest = [*learned, *((c.encode(), -1000.0 - i) for i, c in enumerate(characters))]
    table = [*special, *((bytes([i]), 0.0) for i in range(256)), *rest]
    return table + [(f"#{i}".encode(), -2000.0 - i) for i in range(VOCAB - len(table))]


def tokenizer_bin() -> bytes:
    return struct.pack("<i", 9) + b"".join(struct.pack("<fi", s, len(p)) + p for p, s in pieces())


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt(np.mean(x * x) + 1e-5)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def llama2c_logits(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Runs one position after the other, as the C program does: loops over heads, rotates neighbouring pairs."""
    w = {name: weight.astype(np.float64) for name, weight in weights.items()}
    keys = [[] for _ in range(LAYERS)]
    values = [[] for _ in range(LAYERS)]
    logits = []
    for position, token in enumerate(tokens):
        x = w["embedding"][token].copy()
        for layer in range(LAYERS):
            h = rms_norm(x, w["attention_norm"][layer])
            q, k, v = (w[name][layer] @ h for name in ("wq", "wk", "wv"))
            for vector in (q, k):
                for i in range(0, len(vector), 2):
                    angle = position / 10000.0 ** ((i % HEAD) / HEAD)
                    a, b = vector[i], vector[i + 1]
                    vector[i] = a * math.cos(angle) - b * math.sin(angle)
                    vector[i + 1] = a * math.sin(angle) + b * math.cos(angle)
            keys[layer].append(k)
            values[layer].append(v)
            mixed = np.zeros(DIM)
            for head in range(HEADS):
                columns = slice(head * HEAD, (head + 1) * HEAD)
                group = head // (HEADS // KV_HEADS)
                its = slice(group * HEAD, (group + 1) * HEAD)
                weight = softmax(np.array([q[columns] @ past[its] for past in keys[layer]]) / math.sqrt(HEAD))
                mixed[columns] = sum(p * past[its] for p, past in zip(weight, values[layer], strict=True))
            x = x + w["wo"][layer] @ mixed
            h = rms_norm(x, w["mlp_norm"][layer])
            gate = w["w1"][layer] @ h
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ h))
        logits.append(w.get("classifier", w["embedding"]) @ rms_norm(x, w["norm"]))
    return np.stack(logits)


def llama2c_ids(text: str) -> list[int]:
    """Merges the best-scored neighbours greedily, on a tie the leftmost, as the C program does."""
    table = pieces()
    ids_of = {piece: i for i, (piece, _) in enumerate(table) if i >= 259}
    ids = []
    for character in " " + text:
        number = ids_of.get(character.encode())
        ids += [number] if number is not None else [byte + 3 for byte in character.encode()]
    while True:
        merges = [
            (-table[merged][1], i, merged)
            for i, (left, right) in enumerate(pairwise(ids))
            if min(left, right) >= 259 and (merged := ids_of.get(table[left][0] + table[right][0])) is not None
        ]
        if not merges:
            return ids
        _, i, merged = min(merges)
        ids[i : i + 2] = [merged]


@pytest.mark.parametrize("shared", [True, False])
def test_converted_model_computes_what_llama2c_computes(shared: bool, tmp_path: Path):
    weights = tensors(shared=shared)
    model, _ = assets.convert_llama2c(checkpoint(weights) + tokenizer_bin())
    model.save_pretrained(tmp_path)
    model = type(model).from_pretrained(tmp_path).double().eval()
    tokens = [1, 260, 7, 299, 130, 260, 3]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
    np.testing.assert_allclose(logits.numpy(), llama2c_logits(weights, tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "there the there",
        "abc ab c",
        "the the the",
        "a" + " " * 7 + "b",
        " t",
        "née 日本\n\tok \x00",
        "thethere  abcabc ",
    ],
)
def test_tokenizer_gives_the_ids_of_llama2c_and_the_text_back(text: str, tmp_path: Path):
    _, tokenizer = assets.convert_llama2c(checkpoint(tensors(shared=True)) + tokenizer_bin())
    tokenizer.save_pretrained(tmp_path)
    tokenizer = type(tokenizer).from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert ids == [1, *llama2c_ids(text)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_generation_ends_at_the_separator_of_stories_and_pads_with_another_token():
    model, tokenizer = assets.convert_llama2c(checkpoint(tensors(shared=True)) + tokenizer_bin())
    assert model.generation_config.eos_token_id == [1, 2]
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.bos_token_id == 1


def test_a_checkpoint_that_was_cut_short_is_refused():
    with pytest.raises(AssetError, match="cut short"):
        assets.convert_llama2c(checkpoint(tensors(shared=True))[:-5000])


def tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def publish(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Package]]:
    """Replaces every download by an archive with these files, and lists what was downloaded."""

    def publish(files: dict[str, bytes], make: Callable[[Path, dict[str, bytes]], Path] = tar) -> list[Package]:
        calls: list[Package] = []
        for kind in ("npm", "pypi"):
            monkeypatch.setitem(
                registry.DOWNLOADERS,
                kind,
                lambda package, folder: calls.append(package) or make(folder / "archive", files),
            )
        return calls

    return publish


def package(sha256: str, kind: str = "npm") -> Package:
    return Package(kind, "some-package", "1.2.3", {"package/data.bin": sha256})


@pytest.mark.parametrize("make", [tar, wheel])
def test_a_package_is_downloaded_once_and_only_its_members_are_kept(make, cache: Path, publish):
    calls = publish({"package/data.bin": b"text", "package/other.bin": b"other"}, make)
    wanted = package(hashlib.sha256(b"text").hexdigest())
    assert registry.unpacked(wanted) == registry.unpacked(wanted)
    assert calls == [wanted]
    files = [path for path in cache.rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in files] == [b"text"]


@pytest.mark.parametrize("make", [tar, wheel])
def test_wildcards_keep_every_file_that_matches_and_no_other(make, publish):
    publish({"package/data/b.json": b"2", "package/data/a.json": b"1", "package/data/a.txt": b"3"}, make)
    wanted = Package("npm", "@some/package", "1.2.3", {"package/data/*.json": hashlib.sha256(b"12").hexdigest()})
    folder = registry.unpacked(wanted) / "package" / "data"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a.json": b"1", "b.json": b"2"}


def test_other_content_than_reviewed_is_refused_and_not_kept(cache: Path, publish):
    publish({"package/data.bin": b"something else"})
    with pytest.raises(AssetError, match=r"package/data\.bin of some-package 1\.2\.3 \(npm\) has SHA-256"):
        registry.unpacked(package("0" * 64))
    assert not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize("make", [tar, wheel])
def test_a_member_that_the_archive_lacks_is_named(make, publish):
    publish({"package/data.bin": b""}, make)
    with pytest.raises(AssetError, match="no file elsewhere"):
        registry.unpacked(Package("npm", "some-package", "1.2.3", {"elsewhere": "0" * 64}))


@pytest.mark.parametrize("kind", ["npm", "pypi"])
def test_offline_the_error_says_what_happened_and_what_to_do(kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch):
    offline = [sys.executable, "-c", "import sys; sys.exit('no route to host')"]
    monkeypatch.setattr(registry, "npm_command", lambda: offline)
    monkeypatch.setattr(registry.sys, "executable", "false")
    with pytest.raises(AssetError) as caught:
        registry.unpacked(package("0" * 64, kind))
    said = str(caught.value)
    assert "some-package 1.2.3" in said
    assert str(cache) in said
    assert "--model" in said
    assert ("no route to host" in said) == (kind == "npm")


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path: Path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry.build_once(tmp_path / "model", fail, "building")
    assert list(tmp_path.iterdir()) == []
    registry.build_once(tmp_path / "model", lambda folder: (folder / "whole").touch(), "building")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["whole"]


def test_of_two_processes_that_build_at_once_the_first_wins(tmp_path: Path):
    def build(folder: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "first").touch()
        (folder / "second").touch()

    registry.build_once(tmp_path / "model", build, "building")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "first"]


TEXT = """THE KING

The old king was very happy with the bread. I was happy. "Come," said he to the king, "and eat!" The old king was sad
about Rumpelstiltskin that day (he said so). He gave you the bread of the king.

The king was very old.
"""
FREQUENT = data.frequent_words([TEXT], min_count=1)


def test_openings_are_cut_out_of_plain_narration():
    openings = assets.sentence_openings([TEXT], FREQUENT, min_words=3, max_words=5, seed=0)
    two_sentences = {"The old king", "The old king was", "The old king was very", "The old king was sad"}
    assert set(openings) == two_sentences | {"The king was", "The king was very"}
    assert openings["The old king was"] == " very happy with the bread."  # the first of its sentences
    again = assets.sentence_openings([TEXT], FREQUENT, min_words=3, max_words=5, seed=0)
    assert [*openings.items()] == [*again.items()]


def test_openings_have_no_rare_words():
    frequent = data.frequent_words([TEXT[:80], TEXT[80:]], min_count=3)
    openings = assets.sentence_openings([TEXT], frequent, min_words=3, max_words=5, seed=0)
    assert set(openings) == {"The old king", "The old king was", "The king was"}


REVIEWS = [
    {"t": "Dull. <br /><br />Very dull.", "s": 0},
    {"t": "Superb!", "s": 1},
    {"t": "Superb! ", "s": 1},
    *({"t": f"{i}", "s": int(i < 5)} for i in range(10)),
]


def test_reviews_are_distinct_and_keep_their_labels_in_an_order_of_their_own():
    reviews = data.review_dataset(REVIEWS)
    expected = {"Dull.\n\nVery dull.": 0, "Superb!": 1, **{f"{i}": int(i < 5) for i in range(10)}}
    assert dict(zip(reviews["text"], reviews["label"], strict=True)) == expected
    assert len(reviews) == 12
    assert reviews[:] == data.review_dataset(REVIEWS[::-1])[:]


def judged(instruction: str, preference: int, *answers: str | None, **more: str) -> dict:
    keys = ("output_1", "output_2")
    return {"instruction": instruction, "preference": preference, **dict(zip(keys, answers, strict=True)), **more}


def test_the_preferred_answer_is_chosen_and_the_input_follows_the_instruction():
    annotations = [
        judged("Add.", 1, "2", "3", input="1 + 1"),
        judged("Greet.", 2, "Go.", " Hello! ", input=""),
        judged("Sing.", 2, "a", "b"),
        judged("Tie.", 0, "a", "b"),
        judged("Failed.", -1, "a", "b"),
        judged("Empty.", 1, "a", " "),
        judged("None.", 2, None, "b"),
    ]
    rows = data.preference_dataset(annotations, test_fraction=0)["train"]
    expected = [("Add.\n\n1 + 1", "2", "3"), ("Greet.", "Hello!", "Go."), ("Sing.", "b", "a")]
    assert sorted(zip(rows["prompt"], rows["chosen"], rows["rejected"], strict=True)) == expected


def test_no_instruction_is_in_training_and_test_set():
    annotations = [judged(f"{i % 10}", 1, f"{i}", "x", input="same" if i % 3 else "") for i in range(60)]
    splits = data.preference_dataset(annotations, test_fraction=0.3)
    train, test = ({prompt[0] for prompt in splits[name]["prompt"]} for name in ("train", "test"))
    assert (len(train), len(test)) == (7, 3)
    assert not train & test
    assert sorted(int(answer) for split in splits.values() for answer in split["chosen"]) == list(range(60))
    again = data.preference_dataset(annotations, test_fraction=0.3)
    assert {name: split[:] for name, split in splits.items()} == {name: split[:] for name, split in again.items()}


@pytest.mark.parametrize("annotator", ["gpt4", "claude"])
def test_each_annotator_has_a_file_and_a_dataset(annotator: str, publish, monkeypatch: pytest.MonkeyPatch):
    files = {
        data.ALPACA_EVAL_FILE.format(name): json.dumps([judged(f"{i}?", 1, name, "x") for i in range(10)]).encode()
        for name in ("gpt4", "claude")
    }
    members = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    monkeypatch.setattr(data, "ALPACA_EVAL", Package("pypi", "some-package", "1", members))
    publish(files, wheel)
    assert assets.preferences("gpt4")["train"]["chosen"] == ["gpt4"] * 9
    assert assets.preferences(annotator)["test"]["chosen"] == [annotator]


def test_addresses_come_by_year(publish, monkeypatch: pytest.MonkeyPatch):
    rows = [(1790, "Fellow-Citizens:"), (1801, "Friends:")]
    files = {
        f"package/data/{year}_x.json": json.dumps({"year": year, "name": f"P{year}", "text": text}).encode()
        for year, text in rows
    }
    members = {"package/data/*.json": hashlib.sha256(b"".join(files.values())).hexdigest()}
    monkeypatch.setattr(data, "SOTU", Package("npm", "@some/package", "1", members))
    publish(dict(reversed(files.items())))
    addresses = assets.state_of_the_union()
    assert list(zip(addresses["year"], addresses["text"], strict=True)) == rows
    assert addresses["president"][:] == ["P1790", "P1801"]


def test_a_dataset_is_prepared_once(cache: Path):
    calls = []

    def prepare() -> Dataset:
        calls.append(1)
        return Dataset.from_dict({"text": ["a"]})

    for _ in range(2):
        assert data.cached(prepare, "some-1")[:] == {"text": ["a"]}
    assert calls == [1]


@pytest.mark.downloads
def test_the_published_texts_are_what_the_docstrings_say():
    reviews = assets.imdb_reviews()
    assert len(reviews) == len(set(reviews["text"])) == 49580
    assert abs(sum(reviews["label"]) / len(reviews) - 0.5) < 0.01
    assert {name: len(split) for name, split in assets.preferences().items()} == {"train": 4931, "test": 543}
    assert sum(map(len, assets.preferences("claude").values())) == 41927
    addresses = assets.state_of_the_union()
    assert (addresses[0]["year"], addresses[-1]["year"], len(addresses)) == (1790, 2021, 233)


@pytest.mark.downloads
def test_no_text_of_one_split_begins_as_one_of_another():
    splits = {name: [data.start_of(text, 99) for text in assets.openings(name)] for name in ("train", "tune", "test")}
    assert {name: len(texts) for name, texts in splits.items()} == {"train": 1708, "tune": 483, "test": 320}
    for one, other in itertools.permutations(splits, 2):
        overlaps = [(a, b) for a in splits[one] for b in splits[other] if f"{b} ".startswith(f"{a} ")]
        assert overlaps == []
    for held_out in ("tune", "test"):
        assert len({data.start_of(text, 3) for text in splits[held_out]}) == len(splits[held_out])
