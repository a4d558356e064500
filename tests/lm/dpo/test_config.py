"""DPO's settings are checked when they are created, and can be read from a command line."""

import dataclasses

import pytest
from transformers import HfArgumentParser

from trimtab_common.config import parse_config
from trimtab_lm.dpo import DPOConfig
from trimtab_lm.dpo.loss import LOSSES


def config(**settings):
    return DPOConfig("out", report_to="none", use_cpu=True, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"loss_type": ["sigmoid", "nothing"]}, r"Unknown losses \['nothing'\]"),
        ({"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0]}, "one weight each"),
        ({"loss_weights": [1.0, 2.0]}, "one weight each"),
        ({"loss_weights": [-1.0]}, "none negative"),
        ({"label_smoothing": 0.6}, "between 0 and 0.5"),
        ({"label_smoothing": -0.1}, "between 0 and 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "hinge"}, "has no meaning for hinge"),
        ({"beta": 0.0}, "positive beta"),
        ({"truncation_mode": "keep_middle"}, "Use 'keep_start' or 'keep_end'"),
        ({"max_length": 1}, "max_length=1 leaves no room"),
        ({"max_prompt_length": 0}, "max_prompt_length=0 must be a whole number of at least 1"),
        ({"max_target_length": 0}, "max_target_length=0 must be a whole number of at least 1"),
        ({"max_length": 8, "max_prompt_length": 8}, "leaves nothing of max_length=8"),
        ({"label_pad_token_id": 0}, "Use a negative number"),
        ({"padding_value": -1}, "padding_value=-1 must be a whole number, 0 or above"),
        ({"dataset_num_proc": 0}, "dataset_num_proc=0 must be a whole number of at least 1"),
        ({"reference_free": True, "precompute_ref_log_probs": True}, "has no reference"),
        ({"reference_free": True, "ref_adapter_name": "a"}, "has no reference"),
        ({"reference_free": True, "ref_model_init_kwargs": {"a": 1}}, "has no reference"),
        ({"loss_type": "orpo", "precompute_ref_log_probs": True}, "loss_type='orpo' .* has no reference"),
        ({"loss_type": ["ipo", "sft"], "simpo_gamma": 1.0}, "simpo_gamma=1.0 is of loss_type='simpo'"),
        ({"loss_type": "simpo", "simpo_gamma": -1.0}, "simpo_gamma=-1.0"),
        ({"model_adapter_name": "a", "ref_adapter_name": "a"}, "are both 'a'"),
        ({"ref_log_probs_cache": "folder"}, "set precompute_ref_log_probs=True"),
        ({"generation_kwargs": {"top_k": 1}}, "set generate_during_eval=True"),
        ({"include_for_metrics": ["inputs"]}, "several pairs share a row"),
        ({"label_smoothing_factor": 0.1}, "smooths token labels"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number of at least 1"),
        ({"num_eval_samples": 0}, "num_eval_samples=0 must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_refused_when_the_config_is_made(settings, says):
    with pytest.raises(ValueError, match=says):
        config(**settings)


@pytest.mark.parametrize(
    ("names", "has_none"),
    [("simpo", True), (["cpo", "sft"], True), (["orpo", "sigmoid"], False), ("sft", False), ("sigmoid", False)],
)
def test_a_loss_without_a_reference_loads_none(names, has_none):
    assert config(loss_type=names).reference_free == has_none


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_taken(name):
    assert config(loss_type=name).loss_type == name


def test_every_own_field_says_what_it_is():
    inherited = {field.name for field in dataclasses.fields(DPOConfig.__mro__[1])}
    added = [field for field in dataclasses.fields(DPOConfig) if field.name not in inherited]
    assert all(len(field.metadata["help"]) > 10 for field in added)


def test_both_parsers_read_it():
    words = [
        "--output_dir",
        "out",
        "--beta",
        "0.2",
        "--loss_type",
        "hinge",
        "--max_length",
        "64",
        "--report_to",
        "none",
    ]
    [ours] = parse_config(DPOConfig, argv=words)
    [theirs] = HfArgumentParser(DPOConfig).parse_args_into_dataclasses(words)
    for config in (ours, theirs):
        assert (config.beta, config.loss_type, config.max_length) == (0.2, "hinge", 64)
    mix = [
        "--output_dir",
        "out",
        "--loss_type",
        "sigmoid",
        "ipo",
        "--loss_weights",
        "1.0",
        "0.5",
        "--report_to",
        "none",
    ]
    [ours] = parse_config(DPOConfig, argv=mix)
    [theirs] = HfArgumentParser(DPOConfig).parse_args_into_dataclasses(mix)
    assert ours.loss_type == theirs.loss_type == ["sigmoid", "ipo"]
    assert ours.loss_weights == theirs.loss_weights == [1.0, 0.5]


def test_dictionaries_on_the_command_line():
    words = ["--output_dir", "out", "--report_to", "none", "--model_init_kwargs", '{"dtype": "bfloat16"}']
    assert parse_config(DPOConfig, argv=words)[0].model_init_kwargs == {"dtype": "bfloat16"}


def test_a_folder_of_its_own_is_not_pushed_to_the_hub():
    assert config().cache_folder.name.startswith("_")
    assert str(config(ref_log_probs_cache="here", precompute_ref_log_probs=True).cache_folder) == "here"
