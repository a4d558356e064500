"""Old names of TrainingArguments that a script assigns to a config after its construction."""

import copy
import dataclasses
import pickle
import warnings

import pytest
from datasets import Dataset
from tests.lm import tiny
from transformers import TrainingArguments

from trimtab_lm import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

PAIRS = Dataset.from_dict({"prompt": ["a", "b"], "chosen": ["good", "well"], "rejected": ["bad", "ill"]})


def config(**settings) -> RewardConfig:
    return RewardConfig(
        "out", use_cpu=True, disable_tqdm=True, max_steps=2, logging_steps=1, save_strategy="no", **settings
    )


def test_an_evaluation_strategy_assigned_later_evaluates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = config()
    with pytest.warns(FutureWarning, match="evaluation_strategy is deprecated: write eval_strategy"):
        args.evaluation_strategy = "steps"
    assert (args.eval_strategy, args.eval_steps, args.evaluation_strategy) == ("steps", 1, "no")
    trainer = RewardTrainer(
        tiny.scorer(), args, train_dataset=PAIRS, eval_dataset=PAIRS, processing_class=tiny.tokenizer()
    )
    trainer.train()
    assert sum("eval_loss" in line for line in trainer.state.log_history) == 2


@pytest.mark.parametrize(
    "change", [copy.copy, copy.deepcopy, dataclasses.replace, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_keeps_what_was_assigned(change):
    args = config(eval_steps=7)
    with pytest.warns(FutureWarning):
        args.evaluation_strategy = "steps"
    with pytest.warns(FutureWarning):
        args.warmup_ratio = 0.25
    with warnings.catch_warnings(action="error", category=FutureWarning):
        changed = change(args)
    assert (changed.eval_strategy, changed.eval_steps, changed.warmup_steps) == ("steps", 7, 0.25)


def test_an_assignment_that_contradicts_or_has_no_meaning_or_comes_too_late_is_refused():
    with pytest.raises(ValueError, match="evaluation_strategy and eval_strategy are both given and differ"):
        config(eval_strategy="epoch", eval_steps=3).evaluation_strategy = "steps"
    with pytest.raises(ValueError, match="save_safetensors=False is not supported: "):
        config().save_safetensors = False
    with pytest.raises(
        ValueError, match=r"split_batches=True was set on a RewardConfig .*Pass the setting to the constructor"
    ):
        config().split_batches = True


def test_an_old_name_assigned_to_a_plain_training_arguments_is_translated(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, max_steps=1, report_to="none")
    args.evaluation_strategy = "steps"
    text = Dataset.from_dict({"text": ["hello", "there"]})
    with pytest.warns(FutureWarning, match="evaluation_strategy is deprecated"):
        trainer = SFTTrainer(
            tiny.gpt2(), args, train_dataset=text, eval_dataset=text, processing_class=tiny.tokenizer()
        )
    assert isinstance(trainer.args, SFTConfig)
    assert trainer.args.eval_strategy == "steps"
