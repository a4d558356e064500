"""DPO with a peft_config on a model that already has adapters: the old ones are merged, and are the reference."""

import math

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tests.lm import tiny
from tests.lm.dpo import run_training as dpo

LORA = {"r": 2, "target_modules": ["c_attn"]}


def fine_tuned() -> PeftModel:
    """Returns a GPT-2 that its adapter has changed, as after supervised fine-tuning."""
    torch.manual_seed(0)
    model = get_peft_model(tiny.exact(tiny.gpt2()), LoraConfig(**LORA))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape))
    return model  # each call leaves the global generator alike, for equal new adapters


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[5, 6, 7, 8]])).logits


def test_the_adapter_of_the_model_is_merged_and_is_the_reference(tmp_path):
    before, plain = logits(fine_tuned()), logits(tiny.exact(tiny.gpt2()))
    assert not torch.allclose(before, plain)
    with pytest.warns(UserWarning, match=r"\['default'\] is merged into the weights"):
        trainer = dpo.trainer(fine_tuned(), tmp_path, arguments={"peft_config": LoraConfig(**LORA)}, max_steps=2)
    torch.testing.assert_close(logits(trainer.model), before)
    with trainer.reference.active() as reference:
        torch.testing.assert_close(logits(reference), before)
    trainer.train()
    assert dpo.logged(trainer, "loss")[0] == pytest.approx(math.log(2), rel=1e-6)
    assert not torch.allclose(logits(trainer.model), before)
    with trainer.reference.active() as reference:  # only the new adapter trains
        torch.testing.assert_close(logits(reference), before)


def test_it_trains_as_the_merged_model_does(tmp_path):
    config = {"peft_config": LoraConfig(**LORA)}
    with pytest.warns(UserWarning, match="merged"):
        _, weights = dpo.trained(fine_tuned(), tmp_path, arguments=config, max_steps=2)
    _, expected = dpo.trained(fine_tuned().merge_and_unload(), tmp_path, arguments=config, max_steps=2)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value)


def test_adapters_that_are_not_active_are_named_before_they_are_dropped(tmp_path):
    model = fine_tuned()
    model.add_adapter("other", LoraConfig(**LORA))
    with pytest.warns(UserWarning, match=r"\['other'\] are not active and are dropped"):
        dpo.trainer(model, tmp_path, arguments={"peft_config": LoraConfig(**LORA)})


@pytest.mark.parametrize("name", ["model_adapter_name", "ref_adapter_name"])
def test_names_of_merged_adapters_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="name adapters of the model, and peft_config"):
        dpo.trainer(fine_tuned(), tmp_path, arguments={"peft_config": LoraConfig(**LORA)}, **{name: "default"})


def test_a_learned_prompt_cannot_be_merged(tmp_path):
    model = get_peft_model(tiny.gpt2(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="learned prompt"):
        dpo.trainer(model, tmp_path, arguments={"peft_config": LoraConfig(**LORA)})
