"""Policy, value head and reward model as adapters on one base model, as in the multi-adapter script of 2024."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tests.lm import tiny
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOTrainer
from trimtab_lm.models.adapters import adapters_off

TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])


def lora(name: str, task: str) -> LoraConfig:
    return LoraConfig(
        r=2,
        target_modules=TARGETS[name],
        task_type=task,
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
        lora_dropout=0.1,
    )


def saved(folder, name: str = "gpt2", *, labels: int = 2, bias: bool = False):
    """Saves a base model and a reward model's adapter; returns their folders and the reward model itself."""
    base, adapter = folder / "base", folder / "reward"
    getattr(tiny, name)().save_pretrained(base)
    torch.manual_seed(1)
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)
    classifier.score = torch.nn.Linear(tiny.WIDTH, labels, bias=bias)
    reward_model = get_peft_model(classifier, lora(name, "SEQ_CLS")).eval()
    reward_model.save_pretrained(adapter)
    return base, adapter, reward_model


def policy_on(base, adapter, name: str = "gpt2", **options):
    torch.manual_seed(2)
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        base, peft_config=lora(name, "CAUSAL_LM"), reward_adapter=adapter, **options
    )


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("labels", "bias"), [(1, False), (2, False), (2, True)])
def test_scores_are_those_of_the_sequence_classifier(name, labels, bias, tmp_path):
    base, adapter, reward_model = saved(tmp_path, name, labels=labels, bias=bias)
    scores = policy_on(base, adapter, name).compute_reward_score(IDS)
    assert scores.shape == (2, 5, labels)
    assert not scores.requires_grad
    for length in (1, 3, 5):
        expected = reward_model(IDS[:, :length]).logits
        torch.testing.assert_close(scores[:, length - 1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_score(side, tmp_path):
    base, adapter, reward_model = saved(tmp_path)
    row, padding = IDS[:1], torch.zeros(1, 3, dtype=torch.long)
    parts = [(padding, torch.zeros_like(padding)), (row, torch.ones_like(row))]
    ids, mask = (torch.cat(column, 1) for column in zip(*(parts if side == "left" else parts[::-1]), strict=True))
    scores = policy_on(base, adapter).compute_reward_score(input_ids=ids, attention_mask=mask)
    last = -1 if side == "left" else row.shape[1] - 1
    torch.testing.assert_close(scores[:, last], reward_model(row).logits, rtol=1e-5, atol=1e-5)


def test_everything_is_as_before_afterwards_and_after_an_error(tmp_path):
    base, adapter, _ = saved(tmp_path)
    model = policy_on(base, adapter).train()
    model.v_head.eval()

    def state():
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        return model.pretrained_model.active_adapter, trained, [module.training for module in model.modules()]

    before = state()
    assert before[0] == "default"
    assert len(before[1]) == 6  # two LoRA matrices in two layers, and the value head's weight and bias
    model.compute_reward_score(IDS)
    assert state() == before
    with pytest.raises(IndexError):
        model.compute_reward_score(IDS + tiny.TOKENS["vocab_size"])
    assert state() == before
    assert model(IDS)[0].shape == (2, 5, tiny.TOKENS["vocab_size"])


def test_the_adapter_that_is_active_afterwards_can_be_named(tmp_path):
    base, adapter, _ = saved(tmp_path)
    model = policy_on(base, adapter)
    model.pretrained_model.add_adapter("second", lora("gpt2", "CAUSAL_LM"))
    model.compute_reward_score(IDS, ppo_adapter_name="second")
    assert model.pretrained_model.active_adapter == "second"
    with pytest.raises(ValueError, match=r"ppo_adapter_name='third'.*second"):
        model.compute_reward_score(IDS, ppo_adapter_name="third")


def test_the_multi_adapter_script_of_2024_runs(tmp_path):
    base, adapter, reward_model = saved(tmp_path)
    model = policy_on(base, adapter)
    start = tiny.weights(model)
    tokenizer = tiny.tokenizer()
    texts = ["abc", "hello", "a cat", "dogs"]
    rows = [{"query": text, "input_ids": tokenizer(text)["input_ids"]} for text in texts]
    dataset = Dataset.from_list(rows).with_format("torch")

    def collator(data):
        return {key: [d[key] for d in data] for key in data[0]}

    arguments = {"ref_model": None, "tokenizer": tokenizer, "dataset": dataset, "data_collator": collator}
    trainer: PPOTrainer = tiny.ppo(model, arguments=arguments, learning_rate=0.1)
    for batch in trainer.dataloader:
        responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=5, do_sample=True, top_k=0)
        batch["response"] = tokenizer.batch_decode(responses, skip_special_tokens=True)
        both = [query + response for query, response in zip(batch["query"], batch["response"], strict=True)]
        inputs = tokenizer(both, padding=True, return_tensors="pt", return_token_type_ids=False)
        raw = trainer.accelerator.unwrap_model(trainer.model).compute_reward_score(**inputs)
        rewards = [raw[i, -1, 1] for i in range(len(raw))]
        stats = trainer.step(batch["input_ids"], responses, rewards)
        trainer.log_stats(stats, batch, rewards)
    moved = tiny.moved(start, model)
    assert moved
    assert all(".default." in name or name.startswith("v_head.") for name in moved)
    expected = reward_model(IDS).logits
    torch.testing.assert_close(model.compute_reward_score(IDS)[:, -1], expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad(), adapters_off(model.pretrained_model):
        logits = model.eval().pretrained_model(IDS).logits
    torch.testing.assert_close(logits, AutoModelForCausalLM.from_pretrained(base).eval()(IDS).logits)


@pytest.mark.parametrize("gathered", [False, True])
def test_the_policy_is_saved_without_its_reward_model(gathered, tmp_path):
    base, adapter, _ = saved(tmp_path)
    model = policy_on(base, adapter).eval()
    folder = tmp_path / "policy"
    model.save_pretrained(folder, state_dict=model.state_dict() if gathered else None)
    assert not [path for path in folder.rglob("*") if "reward" in path.name]
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    assert list(loaded.pretrained_model.peft_config) == ["default"]
    again = AutoModelForCausalLMWithValueHead.from_pretrained(folder, reward_adapter=str(adapter)).eval()
    again = copy.deepcopy(again)  # weights of a mapped file are unaligned, and products round differently
    for one, other in zip(model(IDS)[::2], again(IDS)[::2], strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(model.compute_reward_score(IDS), again.compute_reward_score(IDS))


def test_the_score_head_keeps_float32_over_a_bfloat16_model(tmp_path):
    base, adapter, reward_model = saved(tmp_path)
    scores = policy_on(base, adapter, dtype=torch.bfloat16).compute_reward_score(IDS)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores[:, -1], reward_model(IDS).logits, rtol=0.1, atol=0.1)


def test_reward_adapters_that_do_not_fit_are_refused(tmp_path):
    base, adapter, _ = saved(tmp_path)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel has none.*peft_config"):
        AutoModelForCausalLMWithValueHead.from_pretrained(base, reward_adapter=adapter)
    with pytest.raises(ValueError, match=r"already has an adapter 'default'.*reward_adapter_name"):
        policy_on(base, adapter, reward_adapter_name="default")
    with pytest.raises(ValueError, match=r"no reward adapter.*reward_adapter=folder"):
        tiny.policy().compute_reward_score(IDS)
    headless = tmp_path / "headless"
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora("gpt2", "CAUSAL_LM")).save_pretrained(headless)
    with pytest.raises(ValueError, match=r"score head of shape \[labels, 16\], and has none"):
        policy_on(base, headless)
    deeper = tmp_path / "deeper"
    tiny.gpt2(n_layer=1).save_pretrained(deeper)
    with (
        pytest.warns(UserWarning, match=r"trained on .*base, and the policy's base model is .*deeper"),
        pytest.raises(ValueError, match=r"does not fit GPT2LMHeadModel.*h\.1\.attn"),
    ):
        policy_on(deeper, adapter)


def test_a_model_in_memory_takes_a_reward_adapter(tmp_path):
    base, adapter, reward_model = saved(tmp_path)
    peft_model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora("gpt2", "CAUSAL_LM"))
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        peft_model, reward_adapter=str(adapter), reward_adapter_name="judge"
    )
    assert isinstance(model.pretrained_model, PeftModel)
    assert set(peft_model.peft_config) == {"default", "judge"}
    torch.testing.assert_close(model.compute_reward_score(IDS)[:, -1], reward_model(IDS).logits, rtol=1e-5, atol=1e-5)
