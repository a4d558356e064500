"""DPO's reference is fixed at the start for every dataset, precomputed once, and found again by its content."""

import copy
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.dpo import run_training as dpo
from tests.lm.dpo.test_trainer import LORA, adapted, assert_equal_weights

from trimtab_lm.dpo import DPOTrainer
from trimtab_lm.dpo.collator import REFERENCE_COLUMNS, DPODataCollatorWithPadding
from trimtab_lm.dpo.evaluation import runnable
from trimtab_lm.dpo.precompute import fingerprint
from trimtab_lm.models.reference import Reference

SETS = {"one": dpo.dataset(5), "two": dpo.dataset(6).select([5, 0, 3])}


class Counting(DPOTrainer):
    """Counts forward passes on pairs during construction."""

    forwards = 0

    def concatenated_forward(self, model, batch):
        self.forwards += 1
        return super().concatenated_forward(model, batch)


def files(folder) -> list[Path]:
    return sorted(Path(folder).rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "lora", "given"])
@pytest.mark.parametrize("collator", [None, "padded"])
def test_precomputed_is_not_precomputed(name, collator, tmp_path):
    def run(folder, **config):
        model = adapted() if name == "lora" else tiny.exact(dpo.BUILDERS.get(name, tiny.gpt2)())
        arguments = {"ref_model": tiny.exact(tiny.gpt2(seed=1)) if name == "given" else None, "eval_dataset": SETS}
        if collator:
            arguments["data_collator"] = DPODataCollatorWithPadding(is_encoder_decoder=name == "t5")
        trainer, weights = dpo.trained(
            model, tmp_path / folder, arguments=arguments, max_steps=3, learning_rate=0.1, **config
        )
        return trainer, weights, trainer.evaluate()

    _, expected, metrics = run("online")
    trainer, trained_weights, cached = run("precomputed", precompute_ref_log_probs=True, per_device_eval_batch_size=3)
    assert_equal_weights(expected, trained_weights)
    for key in ("eval_one_loss", "eval_two_rewards/margins", "eval_two_rewards/accuracies"):
        assert cached[key] == pytest.approx(metrics[key], rel=1e-9), key
    assert cached["eval_two_rewards/margins"] != 0  # the current weights would give 0
    assert len(files(trainer.args.cache_folder)) == 3


def test_numbers_are_found_again_by_the_content_of_reference_and_data(tmp_path):
    def computes(model=None, rows=None, **config):
        trainer = dpo.trainer(
            model or tiny.gpt2(),
            tmp_path / "run",
            kind=Counting,
            arguments={"train_dataset": rows or dpo.dataset()},
            precompute_ref_log_probs=True,
            ref_log_probs_cache=str(tmp_path / "cache"),
            **config,
        )
        return trainer.forwards > 0

    assert computes()
    assert not computes()
    assert not computes(per_device_eval_batch_size=2, beta=0.5)  # does not change log-probabilities
    assert not computes(rows=Dataset.from_list(dpo.pairs()).add_column("note", ["x"] * 8))
    assert not computes(get_peft_model(tiny.gpt2(), LoraConfig(**LORA)))  # its base is the same model
    assert computes(tiny.gpt2(seed=1))
    assert computes(tiny.gpt2(attn_pdrop=0.0, layer_norm_epsilon=1e-3))
    assert computes(rows=Dataset.from_list(dpo.pairs()[::-1]))
    assert computes(max_length=8)
    assert computes(bf16=True)
    assert computes(tiny.gpt2(dtype=torch.bfloat16))
    assert not computes(tiny.gpt2(dtype=torch.bfloat16))


def test_adapters_count_where_they_are_the_reference():
    def named(seed):
        model = adapted()
        torch.manual_seed(seed)
        model.add_adapter("old", LoraConfig(**LORA, init_lora_weights=False))
        return model

    assert fingerprint(Reference.of_adapter(named(1), "old")) != fingerprint(Reference.of_adapter(named(2), "old"))
    assert (
        fingerprint(Reference.of(named(1)))
        == fingerprint(Reference.of(named(2)))
        == fingerprint(Reference.of(adapted(5)))
    )
    moved = adapted()
    with torch.no_grad():
        next(p for n, p in moved.named_parameters() if "ln_f" in n).add_(1e-3)
    assert fingerprint(Reference.of(moved)) != fingerprint(Reference.of(adapted()))


def test_the_policy_itself_serves_and_no_copy_is_held(tmp_path):
    model = tiny.gpt2()
    trainer = dpo.trainer(model, tmp_path, precompute_ref_log_probs=True)
    assert trainer.reference.model is model
    assert runnable(trainer.reference, model) is None
    trainer.train()
    assert runnable(trainer.reference, model) is None


def test_a_new_set_after_training_is_refused_unless_it_is_known(tmp_path):
    known, unknown = dpo.dataset(4), dpo.dataset(3)
    trainer = dpo.trainer(
        tiny.exact(tiny.gpt2()), tmp_path, arguments={"eval_dataset": known}, precompute_ref_log_probs=True
    )
    before = trainer.evaluate(dpo.dataset(5))  # before training the policy equals the reference
    assert before["eval_rewards/margins"] == pytest.approx(0, abs=1e-12)
    trainer.train()
    with pytest.raises(ValueError, match=r"3 pairs, are not in .* trained since. Give the data set to the constructor"):
        trainer.evaluate(unknown)
    assert trainer.evaluate(dpo.dataset(4))["eval_rewards/margins"] == trainer.evaluate()["eval_rewards/margins"]
    assert trainer.evaluate(dpo.dataset(5))["eval_rewards/margins"] != 0
    assert trainer.predict(known).metrics["test_rewards/margins"] == trainer.evaluate()["eval_rewards/margins"]


@pytest.mark.parametrize("kind", ["lora", "given"])
def test_a_reference_that_is_a_model_serves_new_sets_after_training(kind, tmp_path):
    model = adapted() if kind == "lora" else tiny.exact(tiny.gpt2())
    arguments = {"ref_model": tiny.exact(tiny.gpt2())} if kind == "given" else {}
    settings = {"max_steps": 2, "learning_rate": 0.1}
    online, _ = dpo.trained(copy.deepcopy(model), tmp_path, arguments=copy.deepcopy(arguments), **settings)
    trainer, _ = dpo.trained(model, tmp_path, arguments=arguments, precompute_ref_log_probs=True, **settings)
    expected = online.evaluate(dpo.dataset(3))["eval_rewards/margins"]
    assert trainer.evaluate(dpo.dataset(3))["eval_rewards/margins"] == pytest.approx(expected, rel=1e-9)
    assert expected != 0


def test_columns_of_the_data_set_are_taken_for_the_reference(tmp_path):
    rows = dpo.dataset(4).add_column(REFERENCE_COLUMNS[0], [-1.0] * 4).add_column(REFERENCE_COLUMNS[1], [-2.0] * 4)
    trainer = dpo.trainer(tiny.exact(tiny.gpt2()), tmp_path, arguments={"eval_dataset": rows}, beta=0.5)
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/chosen"] == pytest.approx(0.5 * (metrics["eval_logps/chosen"] + 1), rel=1e-9)
    assert metrics["eval_rewards/rejected"] == pytest.approx(0.5 * (metrics["eval_logps/rejected"] + 2), rel=1e-9)


def test_an_unreadable_file_says_what_to_do(tmp_path):
    options = {"precompute_ref_log_probs": True, "ref_log_probs_cache": str(tmp_path)}
    dpo.trainer(tiny.gpt2(), tmp_path / "run", **options)
    [file] = files(tmp_path)
    file.write_bytes(b"broken")
    with pytest.raises(ValueError, match="Delete it: it will be computed again"):
        dpo.trainer(tiny.gpt2(), tmp_path / "run", **options)


def test_a_crash_while_writing_leaves_no_file_with_its_name(tmp_path, monkeypatch):
    def crash(tensors, file):
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab_lm.models.head.save_file", crash)
    options = {"precompute_ref_log_probs": True, "ref_log_probs_cache": str(tmp_path / "cache")}
    with pytest.raises(KeyboardInterrupt):
        dpo.trainer(tiny.gpt2(), tmp_path / "run", **options)
    assert files(tmp_path) == []
    monkeypatch.undo()
    dpo.trainer(tiny.gpt2(), tmp_path / "run", **options)
    assert len(files(tmp_path)) == 1


def test_reference_free_holds_no_model_and_rewards_are_log_probabilities(tmp_path):
    trainer = dpo.trainer(
        tiny.exact(tiny.gpt2()), tmp_path, arguments={"eval_dataset": dpo.dataset(3)}, reference_free=True
    )
    assert trainer.reference is None
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/chosen"] == pytest.approx(0.1 * metrics["eval_logps/chosen"], rel=1e-12)


def test_null_ref_context_puts_the_adapters_back_after_an_error(tmp_path):
    model = get_peft_model(tiny.exact(tiny.gpt2(**dpo.DROPLESS)), LoraConfig(**LORA)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    trainer = dpo.trainer(model, tmp_path)
    batch = trainer.data_collator(list(trainer.train_dataset))

    def logps():
        with torch.no_grad():
            return trainer.concatenated_forward(model, batch).chosen_logps

    def fail_inside():
        with trainer.null_ref_context():
            torch.testing.assert_close(logps(), trainer.compute_reference_log_probs(batch)[0])
            assert float((logps() - trained).abs().max()) > 1e-3
            raise KeyError

    trained = logps()
    with pytest.raises(KeyError):
        fail_inside()
    torch.testing.assert_close(logps(), trained, rtol=0, atol=0)
    assert model.training
    assert all(p.requires_grad == ("lora" in n) for n, p in model.named_parameters())


def test_models_by_name(tmp_path):
    tiny.gpt2(seed=1).save_pretrained(tmp_path / "reference")
    tiny.gpt2().save_pretrained(tmp_path / "policy")
    tiny.tokenizer().save_pretrained(tmp_path / "policy")
    trainer = dpo.trainer(
        str(tmp_path / "policy"),
        tmp_path / "run",
        model_init_kwargs={"torch_dtype": "bfloat16"},
        ref_model_init_kwargs={"dtype": "float64"},
        arguments={"ref_model": str(tmp_path / "reference"), "processing_class": None},
    )
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.reference.model.dtype == torch.float64
    wte = trainer.reference.model.transformer.wte.weight
    torch.testing.assert_close(wte, tiny.gpt2(seed=1).double().transformer.wte.weight)
    assert trainer.train().training_loss > 0


@pytest.mark.parametrize(
    ("arguments", "config", "says"),
    [
        ({"ref_model": "gpt2"}, {"reference_free": True}, "two references"),
        ({"ref_model": "gpt2"}, {"ref_adapter_name": "old"}, "two references"),
        ({}, {"ref_adapter_name": "old"}, r"has the adapters \[\]"),
        ({}, {"model_adapter_name": "new"}, r"has the adapters \[\]"),
        ({}, {"ref_model_init_kwargs": {"dtype": "float32"}}, "ref_model is no name"),
        ({}, {"model_init_kwargs": {"dtype": "float32"}}, "the model is loaded already"),
    ],
)
def test_references_that_contradict_each_other(arguments, config, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        dpo.trainer(tiny.gpt2(), tmp_path, arguments=arguments, **config)


def test_the_policy_is_no_reference_of_its_own(tmp_path):
    model = tiny.gpt2()
    with pytest.raises(ValueError, match="would move with the policy"):
        dpo.trainer(model, tmp_path, arguments={"ref_model": model})
    with pytest.raises(ValueError, match="is the adapter that trains"):
        dpo.trainer(adapted(), tmp_path, ref_adapter_name="default")


def test_a_stream_cannot_be_precomputed(tmp_path):
    arguments = {"train_dataset": dpo.dataset().to_iterable_dataset()}
    with pytest.raises(ValueError, match="this one is a stream"):
        dpo.trainer(tiny.gpt2(), tmp_path, arguments=arguments, precompute_ref_log_probs=True)
