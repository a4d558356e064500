"""A DPO run that stops in mid-epoch and resumes equals an uninterrupted run, bit for bit."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.dpo import run_training as dpo
from transformers import TrainerCallback

LORA = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.3)
RATES = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
CASES = {
    "dropout": {"disable_dropout": False},
    "no dropout": {},
    "lora dropout": {"disable_dropout": False},
    "precomputed": {"precompute_ref_log_probs": True, "disable_dropout": False},
    "samples": {"disable_dropout": False, "generate_during_eval": True, "max_new_tokens": 4},
}


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("name", CASES)
def test_stopped_and_resumed_is_uninterrupted(name, tmp_path):
    """16 pairs make 4 steps of 2 x 2 per epoch; the run stops after 3 of 7 steps."""

    def run(folder, *, stops=False, resumes=False):
        model = tiny.gpt2(**RATES)
        if name == "lora dropout":
            torch.manual_seed(5)
            model = get_peft_model(model, copy.deepcopy(LORA))
        arguments = {"train_dataset": dpo.dataset(16), "eval_dataset": dpo.dataset(4)}
        arguments["callbacks"] = [StopAfter(3)] if stops else []
        trainer = dpo.trainer(
            model,
            tmp_path / folder,
            arguments=arguments,
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
    for key in ("loss", "rewards/margins", "eval_loss", "eval_rewards/chosen"):
        assert dpo.logged(whole, key) == dpo.logged(rest, key)
    assert len(set(dpo.logged(whole, "loss"))) > 4


def test_sampling_in_an_evaluation_leaves_the_training_as_it_was(tmp_path):
    settings = {"disable_dropout": False, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1}
    arguments = {"eval_dataset": dpo.dataset(4)}
    plain, expected = dpo.trained(tiny.gpt2(**RATES), tmp_path, arguments=arguments, **settings)
    sampled, weights = dpo.trained(
        tiny.gpt2(**RATES), tmp_path, arguments=arguments, generate_during_eval=True, max_new_tokens=4, **settings
    )
    assert all(torch.equal(value, weights[key]) for key, value in expected.items())
    assert dpo.logged(plain, "loss") == dpo.logged(sampled, "loss")
