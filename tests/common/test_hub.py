"""The README page of a saved model."""

import re

import pytest
import yaml

from trimtab_common.hub import write_model_card


def test_a_model_card_is_valid_and_loads_what_it_says(tmp_path):
    file = write_model_card(
        tmp_path / "mine",
        name="My model",
        trainer="PPOTrainer",
        paper="arXiv:1909.08593",
        library="transformers",
        usage='AutoModel.from_pretrained("{repo_id}")',
        base_model="gpt2",
        settings={"batch_size": 8},
        tags=["a tag"],
    )
    _, header, page = file.read_text().split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "transformers",
        "tags": ["trimtab", "ppo", "reinforcement-learning", "a tag"],
        "base_model": "gpt2",
    }
    assert "# My model" in page
    assert 'AutoModel.from_pretrained("mine")' in page
    assert "| batch_size | 8 |" in page


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
        name=odd,
        trainer="PPOTrainer",
        paper="arXiv:1909.08593",
        library="transformers",
        usage='names = ["{repo_id}", "{base}"]',
        base_model=odd,
        settings={"exp_name": odd, odd: 1},
        tags=[odd],
        repo_id=odd,
    )
    _, header, page = re.split(r"^---\n", file.read_text(), maxsplit=2, flags=re.MULTILINE)
    assert yaml.safe_load(header)["tags"][-1] == yaml.safe_load(header)["base_model"] == odd
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
