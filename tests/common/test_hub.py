"""The page of a saved model."""

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
