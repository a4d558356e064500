"""The README page of a saved model."""

import re
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from trimtab_common import cards
from trimtab_common.cards import commit, facts_of, versions, write_model_card

PPO = {
    "trainer": "PPOTrainer",
    "method": "PPO",
    "paper": "Ziegler et al. 2019, arXiv:1909.08593",
    "library": "transformers",
    "usage": 'AutoModel.from_pretrained("{repo_id}")',
    "base_model": "gpt2",
    "settings": {"batch_size": 8, "target": None},
}


def test_a_model_card_is_valid_and_loads_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts = {"dataset": "trl-lib/prompts", "reward": "length"}
    file = write_model_card("runs/mine", **PPO, facts=facts, tags=["a tag"], license="mit")
    card = ModelCard.load(file)
    assert card.data.to_dict() == {
        "base_model": "gpt2",
        "datasets": ["trl-lib/prompts"],
        "library_name": "transformers",
        "license": "mit",
        "tags": ["trimtab", "ppo", "arxiv:1909.08593", "a tag"],
    }
    page = card.text
    assert page.startswith("\n# mine\n\n[gpt2](https://huggingface.co/gpt2), trained with PPO (Ziegler et al. 2019,")
    assert "[arXiv:1909.08593](https://arxiv.org/abs/1909.08593)" in page
    assert 'AutoModel.from_pretrained("runs/mine")' in page
    for row in ("base model | gpt2", "dataset | trl-lib/prompts", "reward | length", "batch_size | 8"):
        assert f"| {row} |" in page
    assert "target" not in page
    assert "TRL" not in page
    assert "Needed" not in page


@pytest.mark.parametrize("name", [None, "TRL Model", "TRL DDPO Model"])
def test_a_card_without_a_name_has_that_of_its_folder(tmp_path, name):
    page = write_model_card(tmp_path / "runs" / "mine", **PPO, name=name).read_text()
    assert "\n# mine\n" in page
    assert 'from_pretrained("mine")' in page  # others do not have the absolute path
    assert str(tmp_path) not in page


@pytest.mark.parametrize("folder", [".", "data"])
def test_files_are_not_named_as_repositories(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    Path(folder).mkdir(exist_ok=True)
    Path(folder, "rows.jsonl").touch()
    facts = facts_of({"dataset": str(tmp_path / folder / "rows.jsonl"), "seed": 3}, data="2 rows")
    assert facts == {"data": "2 rows", "local dataset": "rows.jsonl"}
    card = ModelCard.load(write_model_card("mine", **PPO | {"base_model": "base"}, facts=facts))
    assert {"base_model", "datasets"}.isdisjoint(card.data.to_dict())
    assert "| local dataset | rows.jsonl |" in card.text


def test_a_card_has_the_versions_and_the_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commit.cache_clear()
    assert commit() is None
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    commit.cache_clear()
    page = write_model_card(tmp_path / "mine", **PPO).read_text()
    commit.cache_clear()
    assert f"| commit of the working directory | {head} |" in page
    assert {"python", "trimtab_common", "torch"} <= set(versions())
    assert all(f"| {name} | {number} |" in page for name, number in versions().items())
    assert cards.LIBRARIES[0] == "trimtab_common"


USAGE = 'names = ["{repo_id}", "{base}"]'
ODD = [
    'a "quoted" \\ name',
    "two\nlines\n---\n# of it",
    "```\nprint(1)\n```",
    "| a | b | <script>x</script> [link](http://a) **b** _c_ `d` my_model ~~e~~ &amp; C#",
    "{repo_id} {base} {0}",
    "- tag: [1, 2]",
]


@pytest.mark.parametrize("odd", ODD)
def test_names_appear_in_a_card_as_they_are(tmp_path, odd):
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    file = write_model_card(
        tmp_path,
        **PPO
        | {"paper": "Ziegler et al. 2019", "usage": USAGE, "base_model": odd, "settings": {"exp_name": odd, odd: 1}},
        name=odd,
        facts={"reward": odd},
        tags=[odd],
        repo_id=odd,
    )
    _, _, page = re.split(r"^---\n", file.read_text(), maxsplit=2, flags=re.MULTILINE)
    assert ModelCard.load(file).data.tags[-1] == odd
    tokens = parser.parse(page)
    names: dict[str, list[str]] = {}
    (fence,) = [token.content for token in tokens if token.type == "fence"]
    exec(fence, names)
    assert names["names"] == [odd, odd]
    shown = [token.children for token in tokens if token.type == "inline"]
    texts = ["".join(child.content for child in children) for children in shown]
    assert {child.type for children in shown for child in children} <= {"text", "text_special"}
    one_line = " ".join(odd.split())
    assert texts[0] == one_line
    assert texts[-4:] == ["exp_name", one_line, one_line, "1"]
