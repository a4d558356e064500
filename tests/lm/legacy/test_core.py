"""The functions of `trl.core`, `trl.trainer.utils` and `trl.models` follow their definitions."""

import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tests.lm import tiny

from trimtab_lm.legacy import core, utils
from trimtab_lm.legacy.ppo_names import RunningMoments

VALUES, MASK = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 1, 1, 0])


def test_scores_of_logits():
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0]]])  # probabilities 1/4, 3/4 and 1/2, 1/2
    labels = torch.tensor([[1, 0]])
    expected = torch.tensor([[math.log(0.75), math.log(0.5)]])
    torch.testing.assert_close(core.logprobs_from_logits(logits, labels), expected)
    every = core.logprobs_from_logits(logits, labels, gather=False)
    assert core.logprobs_from_logits(logits.bfloat16(), labels, gather=False).dtype == torch.float32
    torch.testing.assert_close(every.exp(), torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]))
    entropy = core.entropy_from_logits(logits)
    torch.testing.assert_close(entropy, torch.tensor([[-0.25 * math.log(0.25) - 0.75 * math.log(0.75), math.log(2)]]))
    logits = torch.randn(2, 3, 5, requires_grad=True)
    core.logprobs_from_logits(logits, torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    torch.testing.assert_close(logits.grad, torch.eye(5)[0] - logits.detach().softmax(-1))


def test_statistics_under_a_mask_are_those_of_the_values_that_count():
    values = torch.where(MASK.bool(), VALUES, float("nan"))
    kept = VALUES[1:3]
    assert core.masked_mean(values, MASK) == kept.mean()
    assert core.masked_var(values, MASK) == kept.var()
    assert core.masked_var(values, MASK, unbiased=False) == kept.var(correction=0)
    torch.testing.assert_close(core.masked_whiten(values, MASK)[1:3], core.whiten(kept))
    torch.testing.assert_close(core.whiten(VALUES), (VALUES - 2.5) / VALUES.std())
    torch.testing.assert_close(core.whiten(VALUES, shift_mean=False).mean(), VALUES.mean())
    assert core.masked_whiten(values, MASK)[[0, 3]].tolist() == [0, 0]
    rows = torch.stack([values, VALUES])
    assert core.masked_mean(rows, torch.stack([MASK, torch.ones(4)]), axis=1).tolist() == [2.5, 2.5]
    with pytest.raises(ValueError, match="1 positions have no sample variance"):
        core.masked_var(VALUES, torch.tensor([1, 0, 0, 0]))


def test_dicts_of_statistics():
    nested = {"a": {"b": 1, "c": {"d": torch.tensor([2.0])}}, "e": np.ones(3)}
    assert list(core.flatten_dict(nested)) == ["a/b", "a/c/d", "e"]
    assert list(core.flatten_dict(nested, sep=".")) == ["a.b", "a.c.d", "e"]
    with pytest.raises(ValueError, match="The key 'x/y' has the separator '/' in it"):
        core.flatten_dict({"a": {"x/y": 1}})
    scalars = core.convert_to_scalar(core.flatten_dict(nested))
    assert (scalars["a/b"], scalars["a/c/d"], len(scalars["e"])) == (1, 2.0, 3)
    parts = [{"x": torch.tensor([[1.0, 2.0]])}, {"x": torch.tensor([3.0])}]
    assert core.stack_dicts(parts)["x"].tolist() == [[1, 2], [3, core.WANDB_PADDING]]
    assert core.average_torch_dicts([{"x": torch.tensor(1.0)}, {"x": torch.tensor(3.0)}])["x"] == 2
    assert core.add_suffix({"x": 1}, "/y") == {"x/y": 1}
    arrays = core.stats_to_np({"half": torch.ones(2, dtype=torch.bfloat16), "number": 1, "text": [1]})
    assert (arrays["half"].dtype, type(arrays["number"]), arrays["text"]) == (np.float32, float, [1])


def test_shapes():
    row = torch.tensor([[1, 2]])
    assert core.pad_to_size(row, 4, padding=9).tolist() == [[1, 2, 9, 9]]
    assert core.pad_to_size(row, 2) is row or torch.equal(core.pad_to_size(row, 2), row)
    assert utils.pad_to_length(row, 3, -100).tolist() == [[1, 2, -100]]
    assert utils.pad_to_length(row, 2, 0, dim=0).tolist() == [[1, 2], [0, 0]]
    assert torch.equal(utils.pad_to_length(row, 1, 0), row)
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    assert utils.pad(rows, 7).tolist() == [[1, 2], [3, 7]]
    assert utils.pad(rows, 7, "left").tolist() == [[1, 2], [7, 3]]
    assert utils.pad([torch.ones(1, 2), torch.ones(2, 1)]).tolist() == [[[1, 1], [0, 0]], [[1, 0], [1, 0]]]
    assert [row.tolist() for row in core.listify_batch(torch.eye(2))] == [[1, 0], [0, 1]]
    bounds = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])
    assert core.clip_by_value(torch.tensor([5.0, 0.0]), *bounds).tolist() == [1, 1]
    assert core.clip_by_value(torch.tensor([5.0]), 0.0, 1.0).item() == 1
    tokenizer = tiny.tokenizer()
    ids, mask = core.build_bert_batch_from_txt(["ab", "c"], tokenizer, "cpu")
    assert mask.tolist() == [[1, 1], [1, 0]]
    assert utils.decode_and_strip_padding(ids, tokenizer) == ["ab", "c"]  # its pad token is 0


def test_unlikely_tokens_are_filtered():
    logits = torch.tensor([[0.1, 0.2, 0.6, 0.1]]).log()
    assert core.top_k_top_p_filtering(logits, top_k=1).isfinite().tolist() == [[False, False, True, False]]
    assert core.top_k_top_p_filtering(logits, top_p=0.7).isfinite().tolist() == [[False, True, True, False]]
    assert torch.equal(core.top_k_top_p_filtering(logits), logits)
    two = core.top_k_top_p_filtering(logits, top_k=1, filter_value=-9.0, min_tokens_to_keep=2)
    assert (two == -9).sum() == 2


def test_a_decorator_gives_memory_back_only_where_it_is_asked_to(monkeypatch):
    emptied = []
    monkeypatch.setattr(core, "clear_device_cache", lambda **_: emptied.append(1))
    add = core.PPODecorators.empty_device_cache()(lambda a, b: a + b)
    assert (add(1, b=2), emptied) == (3, [])
    monkeypatch.setattr(core.PPODecorators, "optimize_device_cache", True)
    assert (add(1, 2), emptied) == (3, [1])


def test_statistics_of_trainers():
    scores = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 1.0], [5.0, 4.0]])
    assert utils.compute_accuracy((scores, np.zeros(4))) == {"accuracy": 0.5}  # a tie is not a win
    assert utils.compute_accuracy((scores, np.array([0, 1, 0, 1]))) == {"accuracy": 0.5}
    mean, variance, count = utils.get_global_statistics(Accelerator(cpu=True), VALUES, MASK)
    assert (float(mean), float(variance), float(count)) == (2.5, 0.25, 2)
    moments = RunningMoments(Accelerator(cpu=True))
    assert moments.update(VALUES[:2]) == pytest.approx((1.5, 0.5**0.5))
    moments.update(VALUES[2:])
    assert (moments.mean, moments.std, moments.count) == pytest.approx((2.5, float(VALUES.std()), 4))
    assert utils.exact_div(6, 3, "`a`", "`b`", "a must be a multiple of b") == 2
    with pytest.raises(ValueError, match="a must be a multiple of b: 7 / 3"):
        utils.exact_div(7, 3, custom_error_message="a must be a multiple of b")


def test_neftune_adds_noise_of_its_scale_in_training_alone():
    embedding = torch.nn.Embedding(3, 8)
    embedding.neftune_noise_alpha = 4.0
    embedding.register_forward_hook(utils.neftune_post_forward_hook)
    ids = torch.zeros(50, 2, dtype=torch.long)
    noise = (embedding(ids) - embedding.weight[0]).detach()
    assert 0.9 < noise.abs().max() <= 4 / (2 * 8) ** 0.5
    assert torch.equal(embedding.eval()(ids)[0, 0], embedding.weight[0])


def test_models_in_place():
    model = get_peft_model(tiny.llama(), LoraConfig(target_modules=["q_proj"]))
    utils.peft_module_casting_to_bf16(model)
    kinds = {name: weight.dtype for name, weight in model.named_parameters()}
    assert all(kind == torch.bfloat16 for name, kind in kinds.items() if "lora_" in name or "embed_tokens" in name)
    assert all(kind == torch.float32 for name, kind in kinds.items() if "norm" in name or "mlp" in name)
    gpt2 = tiny.gpt2().train()
    utils.disable_dropout_in_model(gpt2)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(gpt2(ids).logits, gpt2(ids).logits)


def test_a_model_to_sample_from_has_no_adapters_where_it_is_the_reference():
    config = LoraConfig(target_modules=["c_attn"], init_lora_weights=False)
    policy = tiny.with_value_head(get_peft_model(tiny.gpt2(), config)).eval()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), utils.unwrap_model_for_generation(policy, Accelerator(cpu=True)) as model:
        assert model is policy
        own = model(ids)[0]
    with torch.no_grad(), utils.unwrap_model_for_generation(policy, Accelerator(cpu=True), is_peft_model=True) as model:
        base = model(ids)[0]
    torch.testing.assert_close(base, tiny.gpt2().eval()(ids).logits.detach())
    assert not torch.equal(own, base)


def test_the_format_of_a_dataset_is_found():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = utils.ChatMlSpecialTokens().chat_template
    asked, answered = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"))]
    written = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    for column in ("messages", "conversations"):
        rows = Dataset.from_dict({column: [[asked, answered]], "other": [1]})
        write = utils.get_formatting_func_from_dataset(rows, tokenizer)
        assert write(rows[0]) == written
        assert write(rows[:1]) == [written]
    rows = Dataset.from_dict({"prompt": ["a"], "completion": ["b"]})
    write = utils.get_formatting_func_from_dataset(rows, tokenizer)
    assert (write(rows[0]), write(rows[:1])) == (written, [written])
    for other in (Dataset.from_dict({"text": ["a"]}), Dataset.from_dict({"messages": [["a"]]}), [asked]):
        assert utils.get_formatting_func_from_dataset(other, tokenizer) is None
    special = utils.ChatMlSpecialTokens(bos_token="<s>")
    assert (special.system, special.user, special.assistant) == ("<s>system", "<s>user", "<s>assistant")
    assert "<s>" in special.chat_template
    assert utils.is_conversational({"prompt": [asked]})
    assert not utils.is_conversational({"prompt": "a"})
    assert not utils.is_transformers_greater_than("999.0")
