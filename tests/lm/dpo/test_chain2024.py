"""DPOTrainer's methods as documented in TRL 0.7 to 0.11: replaced, assigned, and equal to the trainer's own path."""

import math
from contextlib import contextmanager
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from tests.lm import tiny
from tests.lm.dpo import run_training as dpo
from tests.lm.dpo.test_trainer import adapted, assert_equal_weights

from trimtab_lm.dpo import DPOTrainer, evaluation
from trimtab_lm.dpo.chain2024 import CHAIN

pytestmark = pytest.mark.filterwarnings("ignore")


def passes_through(name, seen):
    def method(self, *args, **kwargs):
        seen.append(name)
        inherited = getattr(super(Replaced, self), name)
        return inherited(*args, **kwargs)

    return method


class Replaced(DPOTrainer):
    """Overrides every method of the chain and calls the original."""

    seen: list[str] = []


for each in CHAIN:
    setattr(Replaced, each, passes_through(each, Replaced.seen))

# Equality -------------------------------------------------------------------------------------------------------------

CASES = {
    "gpt2": ("gpt2", {}, {"ref_model": lambda: tiny.exact(tiny.gpt2(seed=1))}),
    "accumulation": ("llama", {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}, {}),
    "encoder-decoder": ("t5", {"loss_type": ["ipo", "sft"], "loss_weights": [0.1, 1.0]}, {}),
    "adapters": ("lora", {}, {}),
    "precomputed": (
        "gpt2",
        {"precompute_ref_log_probs": True, "max_length": 8, "max_prompt_length": 3},
        {"ref_model": lambda: tiny.exact(tiny.gpt2(seed=1))},  # a copy's answers tie, and rounding would decide
    ),
    "reference-free": ("gpt2", {"reference_free": True, "loss_type": "ipo"}, {}),
}


def trained(kind, case, folder):
    model, config, arguments = CASES[case]
    arguments = {name: make() for name, make in arguments.items()} | {"eval_dataset": dpo.dataset(5)}
    policy = adapted() if model == "lora" else tiny.exact(dpo.BUILDERS[model]())
    config = {"max_steps": 3, "learning_rate": 0.1, "per_device_eval_batch_size": 3, "logging_steps": 3} | config
    trainer, weights = dpo.trained(policy, folder, kind=kind, arguments=arguments, **config)
    return trainer, weights, trainer.evaluate()


@pytest.mark.parametrize("case", CASES)
def test_methods_that_hand_on_change_nothing(case, tmp_path):
    expected, weights, metrics = trained(DPOTrainer, case, tmp_path / "a")
    Replaced.seen.clear()
    replaced, own, documented = trained(Replaced, case, tmp_path / "b")
    assert_equal_weights(weights, own)
    names = [f"{kind}/{x}" for kind in ("rewards", "logps") for x in ("chosen", "rejected")] + ["rewards/accuracies"]
    for name in ["loss", *names]:
        assert documented[f"eval_{name}"] == pytest.approx(metrics[f"eval_{name}"], rel=1e-9), name
        assert dpo.logged(replaced, name) == pytest.approx(dpo.logged(expected, name), rel=1e-9), name
    absent = {"build_tokenized_answer"} if case == "encoder-decoder" else set()
    absent |= set() if case == "adapters" else {"null_ref_context"}
    assert set(Replaced.seen) == set(CHAIN) - absent


def test_predictions_of_the_chain_are_the_own_paths(tmp_path):
    def predicted(kind):
        arguments = {"ref_model": tiny.exact(tiny.gpt2(seed=1)), "compute_metrics": lambda p: {"n": len(p.predictions)}}
        trainer = dpo.trainer(tiny.exact(tiny.gpt2()), tmp_path, kind=kind, arguments=arguments)
        assert trainer.evaluate(dpo.dataset(5))["eval_n"] == 5
        return torch.tensor(trainer.predict(dpo.dataset(5)).predictions)

    torch.testing.assert_close(predicted(Replaced), predicted(DPOTrainer))


@pytest.mark.parametrize("kind", [DPOTrainer, Replaced])
@pytest.mark.parametrize("loss_type", ["aot", "aot_pair", "kto_pair"])
def test_pairs_that_fill_up_a_batch_are_not_compared_with_the_real_ones(kind, loss_type, tmp_path):
    arguments = {"ref_model": tiny.exact(tiny.gpt2(seed=1)), "eval_dataset": dpo.dataset(4)}
    trainer = dpo.trainer(tiny.exact(tiny.gpt2()), tmp_path, kind=kind, arguments=arguments, loss_type=loss_type)
    rows, items = list(trainer.eval_dataset), torch.tensor(4)

    def evaluated(rows, **real):
        trainer.model.eval()
        with torch.no_grad():
            return trainer.batch_loss(trainer.model, {**trainer.data_collator(rows), **real}, items)

    alone, filled, empty = evaluated(rows[:2]), evaluated(rows, real_rows=2), evaluated(rows, real_rows=0)
    assert filled.stats["loss"].value == pytest.approx(alone.stats["loss"].value, rel=1e-9)
    torch.testing.assert_close(filled.outputs["predictions"][:2], alone.outputs["predictions"])
    assert (float(empty.stats["loss"].total), float(empty.stats["loss"].weight)) == (0.0, 0.0)
    for batch in (filled, empty):  # processes gather their predictions, and need one shape
        assert (batch.outputs["predictions"].shape, batch.outputs["labels"].shape) == ((4, 4), (4,))


def test_the_chain_resumes(tmp_path):
    def run(folder, steps, **resume):
        model, settings = tiny.exact(tiny.gpt2()), {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        trainer = dpo.trainer(
            model, tmp_path / folder, kind=Replaced, per_device_train_batch_size=2, learning_rate=0.1, **settings
        )
        trainer.args.max_steps = steps
        trainer.train(**resume)
        return tiny.weights(trainer.model)

    expected = run("whole", 4)
    run("parts", 2)
    assert_equal_weights(
        expected,
        run(
            "parts",
            4,
            resume_from_checkpoint=True,
        ),
    )


# 2024's signatures ----------------------------------------------------------------------------------------------------


class LossOf2024(DPOTrainer):
    def dpo_loss(
        self,
        policy_chosen_logps,
        policy_rejected_logps,
        reference_chosen_logps,
        reference_rejected_logps,
        reference_free=False,
    ):
        margin = policy_chosen_logps - policy_rejected_logps - reference_chosen_logps + reference_rejected_logps
        chosen = self.beta * (policy_chosen_logps - reference_chosen_logps).detach()
        rejected = self.beta * (policy_rejected_logps - reference_rejected_logps).detach()
        return -F.logsigmoid(self.beta * margin), chosen, rejected


class LossOf09(LossOf2024):
    def dpo_loss(self, policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps):
        logps = (policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps)
        return super().dpo_loss(*logps)


class ForwardOf2024(DPOTrainer):
    """Returns four tensors, computed from padded rows and the model's own logits."""

    def concatenated_forward(self, model, batch):
        concatenated = self.concatenated_inputs(
            batch,
            is_encoder_decoder=self.is_encoder_decoder,
            label_pad_token_id=self.label_pad_token_id,
            padding_value=self.padding_value,
            device=self.accelerator.device,
        )
        count = batch["chosen_labels"].shape[0]
        mask = concatenated["concatenated_attention_mask"]
        logits = model(concatenated["concatenated_input_ids"], attention_mask=mask).logits
        labels = concatenated["concatenated_labels"]
        logps = self.get_batch_logps(
            logits,
            labels,
            average_log_prob=False,
            is_encoder_decoder=self.is_encoder_decoder,
            label_pad_token_id=self.label_pad_token_id,
        )
        return logps[:count], logps[count:], logits[:count], logits[count:]


class MetricsOf2024(ForwardOf2024):
    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        chosen, rejected, _, _ = self.concatenated_forward(model, batch)
        with torch.no_grad():
            if self.ref_model is None:
                with self.null_ref_context():
                    reference = self.concatenated_forward(self.model, batch)
            else:
                reference = self.concatenated_forward(self.ref_model, batch)
        losses, *rewards = self.dpo_loss(chosen, rejected, reference[0], reference[1])
        prefix = "eval_" if train_eval == "eval" else ""
        margins = (rewards[0] - rewards[1]).mean().cpu()
        return losses.mean(), {f"{prefix}rewards/margins": margins, f"{prefix}pairs": len(batch["prompt"])}


class LogpsOf09(DPOTrainer):
    @staticmethod
    def get_batch_logps(logits, labels, label_pad_token_id=-100, is_encoder_decoder=False):
        labels, logits = labels[:, 1:].clone(), logits[:, :-1]
        mask = labels != label_pad_token_id
        labels[~mask] = 0
        taken = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
        return (taken * mask).sum(-1), mask.sum(-1)


class InputsOf070(DPOTrainer):
    def concatenated_inputs(self, batch):
        return super().concatenated_inputs(batch, self.is_encoder_decoder, self.label_pad_token_id, self.padding_value)


class ComputeLossOf2024(DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        loss, metrics = self.get_batch_loss_metrics(model, inputs, train_eval="train")
        self.store_metrics({**metrics, "mine": 2.0}, train_eval="train")
        return (loss, metrics) if return_outputs else loss

    def log(self, logs):
        logs["own"] = 1.0
        return super().log(logs)

    def training_step(self, model, inputs):
        return super().training_step(model, inputs)


class Delegating(DPOTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        loss, metrics = super().compute_loss(model, inputs, return_outputs=True)
        assert "rewards/margins" in {name.removeprefix("eval_") for name in metrics}
        return (loss, metrics) if return_outputs else loss


@pytest.mark.parametrize(
    "kind",
    [
        *(LossOf2024, LossOf09, ForwardOf2024, MetricsOf2024, LogpsOf09, InputsOf070, ComputeLossOf2024, Delegating),
    ],
)
def test_methods_with_the_signatures_of_2024_train_alike(kind, tmp_path):
    config = {"max_steps": 2, "learning_rate": 0.1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    arguments = {"ref_model": tiny.exact(tiny.gpt2(seed=1))}
    _, expected = dpo.trained(tiny.exact(tiny.gpt2()), tmp_path / "a", arguments=arguments, **config)
    arguments = {"ref_model": tiny.exact(tiny.gpt2(seed=1)), "eval_dataset": dpo.dataset(3)}
    trainer, weights = dpo.trained(tiny.exact(tiny.gpt2()), tmp_path / "b", kind=kind, arguments=arguments, **config)
    assert_equal_weights(expected, weights)
    assert math.isfinite(trainer.evaluate()["eval_loss"])
    if kind is MetricsOf2024:
        assert dpo.logged(trainer, "pairs") == [4.0, 4.0]
    if kind is ComputeLossOf2024:
        assert dpo.logged(trainer, "mine") == [2.0, 2.0]
        assert 1.0 in dpo.logged(trainer, "own")


def test_a_row_by_a_replaced_method_reaches_the_model(tmp_path):
    class Shouts(DPOTrainer):
        def tokenize_row(self, feature, model=None):
            row = super().tokenize_row({**feature, "chosen": "zz"}, model)
            assert feature["prompt"]
            return row

        def build_tokenized_answer(self, prompt, answer):
            return super().build_tokenized_answer(prompt, answer + ".")

    trainer, _ = dpo.trained(tiny.gpt2(), tmp_path, kind=Shouts)
    row = trainer.train_dataset[0]
    assert trainer.tokenizer.decode(row["chosen_input_ids"]).endswith("zz.</s>")
    assert row["chosen"] == dpo.pairs()[0]["chosen"]  # for methods that read the batch's texts


def test_columns_of_the_dataset_reach_the_replaced_loss(tmp_path):
    class Weighted(DPOTrainer):
        def get_batch_loss_metrics(self, model, batch, train_eval="train"):
            loss, metrics = super().get_batch_loss_metrics(model, batch, train_eval)
            return loss * torch.tensor(batch["weight"]).mean(), metrics | {"weight": sum(batch["weight"])}

    rows = dpo.dataset(4).add_column("weight", [1.0, 2.0, 3.0, 4.0])
    trainer, _ = dpo.trained(tiny.gpt2(), tmp_path, kind=Weighted, arguments={"train_dataset": rows})
    assert dpo.logged(trainer, "weight") == [10.0]


def test_a_loss_of_ones_own_needs_a_method_that_knows_it(tmp_path):
    trainer, _ = dpo.trained(tiny.gpt2(), tmp_path, kind=LossOf2024, loss_type="mine")
    assert trainer.loss_type == "mine"
    with pytest.raises(ValueError, match=r"Unknown losses \['mine'\].*replaces dpo_loss"):
        dpo.trainer(tiny.gpt2(), tmp_path, loss_type="mine")
    plain = dpo.trainer(tiny.gpt2(), tmp_path)
    with pytest.raises(ValueError, match="Unknown losses"):
        plain.loss_type = "mine"
    plain.dpo_loss = MethodType(LossOf2024.dpo_loss, plain)
    plain.loss_type = "mine"
    plain.train()


def test_samples_of_an_evaluation_come_from_the_replaced_method(tmp_path):
    class Samples(DPOTrainer):
        def get_batch_samples(self, model, batch):
            return [f"policy {len(batch['prompt'])}"] * len(batch["prompt"]), ["reference"] * len(batch["prompt"])

    arguments, rows = {"eval_dataset": dpo.dataset(3)}, []
    trainer = dpo.trainer(tiny.gpt2(), tmp_path, kind=Samples, arguments=arguments, generate_during_eval=True)
    trainer.tables.add = lambda trainer, name, columns, added: rows.extend(added)
    trainer.train()
    trainer.evaluate()
    assert [row[1:] for row in rows] == [("policy 3", "reference")] * 3


def test_a_process_without_a_prompt_samples_all_the_same(tmp_path, monkeypatch):
    class Samples(DPOTrainer):
        def get_batch_samples(self, model, batch):
            asked.append(len(batch["prompt"]))
            return ["policy"] * asked[-1], ["reference"] * asked[-1]

    asked, rows = [], []
    settings = {"generate_during_eval": True, "num_eval_samples": 1}
    trainer = dpo.trainer(tiny.gpt2(), tmp_path, kind=Samples, **settings)
    trainer.tables.add = lambda trainer, name, columns, added: rows.extend(added)
    monkeypatch.setattr(evaluation, "world_size", lambda: 2)
    monkeypatch.setattr(type(trainer.config), "process_index", 1)
    evaluation.log_answers(trainer, trainer.train_dataset, "eval_samples")
    assert (asked, rows) == ([1], [])


# Attributes -----------------------------------------------------------------------------------------------------------


def test_attributes_of_the_loss_have_effect_at_once(tmp_path):
    trainer = dpo.trainer(tiny.exact(tiny.gpt2()), tmp_path, arguments={"ref_model": tiny.exact(tiny.gpt2(seed=1))})
    batch = trainer.data_collator(list(trainer.train_dataset))

    def loss():
        return float(trainer.compute_loss(trainer.model, batch).detach())

    assert (trainer.beta, trainer.loss_type, trainer.label_smoothing) == (0.1, "sigmoid", 0.0)
    seen = [loss()]
    for name, value in {"beta": 0.5, "label_smoothing": 0.2, "ref_model": tiny.exact(tiny.gpt2(seed=2))}.items():
        setattr(trainer, name, value)
        seen.append(loss())
    trainer.label_smoothing, trainer.loss_type = 0.0, "hinge"
    seen.append(loss())
    assert len({round(each, 9) for each in seen}) == 5
    assert trainer.ref_model is trainer.reference.model
    assert trainer.args.beta == 0.5
    with pytest.raises(ValueError, match="positive beta"):
        trainer.beta = -1.0
    assert trainer.beta == 0.5


def test_an_assigned_loss_that_needs_a_reference_is_refused_where_there_is_none(tmp_path):
    trainer = dpo.trainer(tiny.gpt2(), tmp_path, loss_type="simpo")
    with pytest.raises(ValueError, match=r"loss_type='sigmoid' needs a reference.*loss_type='simpo'"):
        trainer.loss_type = "sigmoid"
    with pytest.warns(FutureWarning):
        rebuilt = dpo.trainer(tiny.gpt2(), tmp_path, arguments={"max_length": 64}, loss_type="simpo")
    with pytest.raises(ValueError, match=r"loss_type='sigmoid' needs a reference"):
        rebuilt.loss_type = "sigmoid"
    trainer.reference_free, trainer.beta = False, 0.5
    assert (trainer.loss_type, trainer.reference_free, trainer.beta) == ("simpo", True, 0.5)
    trainer.loss_type = "orpo"
    free = dpo.trainer(tiny.gpt2(), tmp_path, reference_free=True)
    free.loss_type = "hinge"
    with pytest.raises(ValueError, match="reference_free=False needs a reference"):
        free.reference_free = False
    assert free.reference_free
    with_reference = dpo.trainer(tiny.gpt2(), tmp_path)
    states = []
    for name, value in [("loss_type", "simpo"), ("loss_type", "ipo"), ("reference_free", True)]:
        setattr(with_reference, name, value)
        states.append(with_reference.reference_free)
    assert states == [True, False, True]


@pytest.mark.parametrize(
    ("name", "value"),
    [("precompute_ref_log_probs", True), ("model_adapter_name", "own"), ("ref_adapter_name", "other")],
)
def test_an_attribute_that_comes_too_late_for_the_models_is_refused(name, value, tmp_path):
    trainer = dpo.trainer(tiny.gpt2(), tmp_path)
    before = getattr(trainer, name)
    setattr(trainer, name, before)
    with pytest.raises(ValueError, match=rf"Make a trainer with DPOConfig\({name}={value!r}\)"):
        setattr(trainer, name, value)
    assert getattr(trainer, name) == before


def test_attributes_of_the_rows_have_effect_on_data_already_given(tmp_path):
    trainer = dpo.trainer(tiny.gpt2(), tmp_path, arguments={"eval_dataset": dpo.dataset(4)})
    trainer.max_length, trainer.max_prompt_length, trainer.truncation_mode = 8, 2, "keep_start"
    trainer.label_pad_token_id, trainer.padding_value = -7, 9
    trainer.evaluate()
    trainer.train()
    for rows in (trainer.train_dataset, trainer.eval_dataset):
        assert max(len(row["prompt_input_ids"]) for row in rows) == 2
        assert max(len(row["chosen_input_ids"]) for row in rows) <= 8
        assert rows[0]["chosen_labels"][0] == -7
    assert trainer.tokenizer.decode(trainer.train_dataset[3]["prompt_input_ids"]) == dpo.pairs()[3]["prompt"][:2]
    trainer.data_collator.layout = "tree"
    batch = trainer.data_collator([trainer.train_dataset[0], trainer.train_dataset[3]])
    assert 9 in batch["input_ids"]
    assert trainer.is_encoder_decoder is False
    trainer.is_encoder_decoder = False


def test_an_own_reference_context_runs_the_policy_without_dropout(tmp_path):
    class Context(DPOTrainer):
        @contextmanager
        def null_ref_context(self):
            assert self.is_peft_model
            assert self.ref_adapter_name is None
            with self.accelerator.unwrap_model(self.model).disable_adapter():
                yield

    rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    arguments = {"peft_config": LoraConfig(target_modules=["c_attn"], lora_dropout=0.5)}
    trainer, _ = dpo.trained(tiny.exact(tiny.gpt2(**rates)), tmp_path, kind=Context, arguments=arguments)
    assert dpo.logged(trainer, "loss") == [pytest.approx(math.log(2))]
