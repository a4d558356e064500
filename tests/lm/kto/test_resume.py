"""A KTO run that stops in mid-epoch and resumes equals an uninterrupted run, bit for bit."""

import copy

import pytest
import torch
from peft import get_peft_model
from tests.lm import tiny
from tests.lm.dpo.test_resume import LORA, RATES, StopAfter
from tests.lm.kto import run_training as kto

CASES = {"dropout": {"disable_dropout": False}, "no dropout": {}, "lora dropout": {"disable_dropout": False}}


@pytest.mark.parametrize("name", CASES)
def test_stopped_and_resumed_is_uninterrupted(name, tmp_path):
    """16 rows make 4 steps of 2 x 2 per epoch; the run stops after 3 of 7 steps."""

    def run(folder, *, stops=False, resumes=False):
        model = tiny.gpt2(**RATES)
        if name == "lora dropout":
            torch.manual_seed(5)
            model = get_peft_model(model, copy.deepcopy(LORA))
        arguments = {"train_dataset": kto.dataset(16), "eval_dataset": kto.dataset(4)}
        arguments["callbacks"] = [StopAfter(3)] if stops else []
        trainer = kto.trainer(
            model,
            tmp_path / folder,
            arguments,
            max_steps=7,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            optim="adamw_torch",
            lr_scheduler_type="linear",
            save_strategy="steps",
            save_steps=3,
            eval_strategy="steps",
            eval_steps=2,
            max_grad_norm=0.1,
            **CASES[name],
        )
        trainer.train(resume_from_checkpoint=resumes)
        return trainer

    whole = run("whole")
    run("parts", stops=True)
    rest = run("parts", resumes=True)
    assert rest.state.global_step == 7
    for key, value in tiny.weights(whole.model).items():
        assert torch.equal(value, rest.model.state_dict()[key]), key
    for key in ("loss", "kl", "rewards/rejected", "eval_loss", "eval_rewards/chosen"):
        assert kto.logged(whole, key) == kto.logged(rest, key)
    assert len(set(kto.logged(whole, "loss"))) > 4
