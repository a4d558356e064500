"""KTO: the loss of rows by themselves, the estimate of the KL, statistics, references, and learning."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tests.lm import tiny
from tests.lm.dpo.run_training import DROPLESS
from tests.lm.kto import run_training as kto
from torch import Tensor

from trimtab_lm.kto.collator import UnpairedCollator

D = torch.float64
LORA = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")


def logps_of(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """Returns the log-probability of a completion, from a plain forward pass, with gradient."""
    if model.config.is_encoder_decoder:
        read = torch.tensor([[model.config.decoder_start_token_id, *completion[:-1]]])
        logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=read).logits[0]
    else:
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum()


def by_the_paper(model: Any, reference: Any, rows: Any, *, beta: float, weights: tuple[float, float]) -> Any:
    """Returns the mean loss, z0 and the ratios of rows, each sequence run alone."""

    def ratio(i: int, j: int) -> Tensor:
        prompt, completion = rows[i]["prompt_input_ids"], rows[j]["completion_input_ids"]
        with torch.no_grad():
            fixed = logps_of(reference, prompt, completion)
        return logps_of(model, prompt, completion) - fixed

    others = [ratio(i, (i + 1) % len(rows)).detach() for i in range(len(rows))]
    kl = torch.stack(others).mean().clamp(min=0)
    ratios = [ratio(i, i) for i in range(len(rows))]
    losses = [
        weights[0] * (1 - torch.sigmoid(beta * (r - kl)))
        if row["label"]
        else weights[1] * (1 - torch.sigmoid(beta * (kl - r)))
        for r, row in zip(ratios, rows, strict=True)
    ]
    return torch.stack(losses).mean(), kl, torch.stack(ratios).detach()


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


LAYOUTS = [(kind, layout) for kind in ("gpt2", "llama") for layout in ("row", "packed", "padded")]


@pytest.mark.parametrize(("kind", "layout"), [*LAYOUTS, ("t5", "encoder-decoder")])
def test_the_loss_and_its_gradient_are_those_of_rows_by_themselves(kind: str, layout: str, tmp_path):
    model, reference = (tiny.exact(kto.BUILDERS[kind](seed)) for seed in kto.SEEDS[kind])
    trainer = kto.trainer(
        model, tmp_path, {"ref_model": reference}, beta=0.3, desirable_weight=2.5, undesirable_weight=1.25
    )
    trainer.data_collator.layout = layout
    rows = list(trainer.train_dataset)
    expected, kl, ratios = by_the_paper(model, reference, rows, beta=0.3, weights=(2.5, 1.25))
    assert kl > 0
    slopes = gradients(model, expected)
    model.train()
    loss, outputs = trainer.compute_loss(model, trainer.data_collator(rows), return_outputs=True)
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=1e-12, check_dtype=False)
    torch.testing.assert_close(outputs["predictions"], 0.3 * ratios, rtol=1e-9, atol=1e-9)
    for name, slope in gradients(model, loss).items():
        torch.testing.assert_close(slope, slopes[name], rtol=1e-7, atol=1e-9 * float(slopes[name].abs().max()) + 1e-15)
    assert trainer.statistics(training=True)["kl"] == pytest.approx(float(kl), rel=1e-9)


def test_the_estimate_of_the_kl_is_never_negative(tmp_path):
    models = [tiny.exact(tiny.gpt2(seed, **DROPLESS)) for seed in (1, 2)]
    estimates = []
    for model, reference in (models, models[::-1]):
        trainer = kto.trainer(model, tmp_path, {"ref_model": reference})
        trainer.compute_loss(model, trainer.data_collator(list(trainer.train_dataset)))
        estimates.append(trainer.statistics(training=model.training)["kl"])
    assert min(estimates) == 0  # one policy likes these answers less than the other does
    assert max(estimates) > 0


def test_the_evaluation_of_trl(tmp_path):
    """TRL 1.16.0, KTOTrainer.evaluate of the same models and of these rows in the opposite order: it mismatches a row
    with the row before, and the estimate here takes the row after."""
    words = ["good", "bad stuff", "ok.", "no never"]
    columns = {
        "prompt": [f"{'abcdefgh'[i]} {'xyz'[i % 3]} " for i in range(8)],
        "completion": [words[i % 4] + "ab"[i // 4] for i in range(8)],
        "label": [i in (0, 2, 5) for i in range(8)],
    }
    rows = Dataset.from_dict(columns)
    data = {"ref_model": tiny.gpt2(3), "train_dataset": rows, "eval_dataset": rows}
    for config, loss, kl in (
        ({"desirable_weight": 1.0}, 0.5053936, 0.5352581),
        ({"desirable_weight": 1.5, "beta": 0.3}, 0.6190330, 0.5352581),
        ({"desirable_weight": 1.5, "beta": 0.3, "loss_type": "apo_zero_unpaired"}, 0.6214581, 0.0),
    ):
        with pytest.warns(UserWarning, match="the paper"):
            metrics = kto.trainer(tiny.gpt2(2), tmp_path, data, **config).evaluate()
        assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["eval_kl"] == pytest.approx(kl, rel=1e-5)
    assert metrics["eval_rewards/chosen"] == pytest.approx(-0.0337635, abs=1e-5)
    assert metrics["eval_rewards/rejected"] == pytest.approx(0.1470787, abs=1e-5)
    assert metrics["eval_logps/chosen"] == pytest.approx(-30.663386, rel=1e-5)
    assert metrics["eval_logps/rejected"] == pytest.approx(-36.7157959, rel=1e-5)
    assert metrics["eval_rewards/margins"] == pytest.approx(-0.1808422, abs=1e-5)


def test_the_loss_starts_at_half_of_the_weights(tmp_path):
    trainer, _ = kto.trained(tiny.gpt2(**DROPLESS), tmp_path)
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["loss"] == pytest.approx((3 * 1.75 + 5) / 8 / 2, rel=1e-5)
    assert entry["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert entry["kl"] == pytest.approx(0, abs=1e-4)


def test_accumulated_micro_batches_are_one_batch_where_there_is_no_estimate(tmp_path):
    def weights(size: int, **config: Any) -> dict[str, Tensor]:
        steps = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        reference = tiny.exact(tiny.gpt2(2, **DROPLESS))
        model = tiny.exact(tiny.gpt2(1, **DROPLESS))
        return kto.trained(model, tmp_path, {"ref_model": reference}, **steps, **config)[1]

    for name, value in weights(8, loss_type="apo_zero_unpaired").items():
        torch.testing.assert_close(weights(2, loss_type="apo_zero_unpaired")[name], value, rtol=1e-9, atol=1e-12)
    whole, parts = weights(8), weights(2)  # each micro-batch has an estimate of its own
    assert not torch.allclose(whole["lm_head.weight"], parts["lm_head.weight"], rtol=1e-9, atol=1e-12)


def test_the_means_of_a_label_are_over_its_rows(tmp_path):
    """Micro-batches of two have none, one or two desirable rows; a log covers all eight."""
    reference = tiny.exact(tiny.gpt2(2, **DROPLESS))
    model = tiny.exact(tiny.gpt2(1, **DROPLESS))
    settings = {"gradient_accumulation_steps": 4, "loss_type": "apo_zero_unpaired", "per_device_train_batch_size": 2}
    trainer = kto.trainer(model, tmp_path, {"ref_model": reference}, **settings)
    rows = list(trainer.train_dataset)
    *_, ratios = by_the_paper(model, reference, rows, beta=0.1, weights=(1.75, 1.0))
    labels = torch.tensor([row["label"] for row in rows])
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    chosen, rejected = (0.1 * ratios[mask].mean().item() for mask in (labels, ~labels))
    assert entry["rewards/chosen"] == pytest.approx(chosen, rel=1e-6)
    assert entry["rewards/rejected"] == pytest.approx(rejected, rel=1e-6)
    assert entry["rewards/margins"] == pytest.approx(chosen - rejected, rel=1e-6)


def test_a_batch_without_a_desirable_row_has_no_means_of_them(tmp_path):
    rows = [row | {"label": False} for row in kto.rows()]
    with pytest.warns(UserWarning, match="All 8 rows are undesirable"):
        trainer, weights = kto.trained(tiny.gpt2(), tmp_path, {"train_dataset": Dataset.from_list(rows)}, max_steps=2)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all({"rewards/rejected", "logps/rejected", "kl"} <= entry.keys() for entry in entries)
    assert not any({"rewards/chosen", "entropy/chosen", "rewards/margins"} & entry.keys() for entry in entries)
    assert all(value == value for entry in entries for value in entry.values())
    assert all(value.isfinite().all() for value in weights.values())


def test_a_row_alone_in_the_last_batch_has_no_estimate(tmp_path):
    data = {"train_dataset": kto.dataset(5), "ref_model": tiny.gpt2(2)}
    sizes = {"per_device_train_batch_size": 2, "max_steps": 3, "train_sampling_strategy": "sequential"}
    trainer, _ = kto.trained(tiny.gpt2(1), tmp_path, data, desirable_weight=1.5, **sizes)
    estimates = kto.logged(trainer, "kl")
    assert estimates[-1] == 0
    assert max(estimates) > 0


def test_mismatched_answers_do_not_exceed_the_models_positions(tmp_path):
    """64 positions: 50 tokens of a prompt and 6 of its completion, then the other way round."""
    rows = [
        {"prompt": "a" * 50, "completion": "b" * 6, "label": True},
        {"prompt": "c" * 6, "completion": "d" * 50, "label": False},
    ]
    data = {"train_dataset": Dataset.from_list(rows)}
    config = {"desirable_weight": 1.0, "per_device_train_batch_size": 2}
    trainer, _ = kto.trained(tiny.gpt2(), tmp_path, data, **config)
    lengths = trainer.data_collator(list(trainer.train_dataset))["mismatched"]["lengths"]
    assert lengths.tolist() == [14, 7]  # 64 - 50, and six letters with EOS
    limited = kto.trainer(tiny.llama(), tmp_path / "llama", data, max_length=60, **config)
    lengths = limited.data_collator(list(limited.train_dataset))["mismatched"]["lengths"]
    assert lengths.tolist() == [10, 7]


def test_the_mismatched_answer_is_that_of_the_next_row():
    rows = [{"prompt_input_ids": [i], "completion_input_ids": [10 + i, 20 + i], "label": True} for i in range(3)]
    batch = UnpairedCollator(tiny.PAD)(rows)
    assert batch["input_ids"].tolist() == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert batch["mismatched"]["input_ids"].tolist() == [[0, 11, 21], [1, 12, 22], [2, 10, 20]]
    assert "mismatched" not in UnpairedCollator(tiny.PAD, is_mismatched=False)(rows)


def test_adapters_off_are_the_reference(tmp_path):
    """The same run with the base model as ref_model has the same losses and weights."""

    def run(folder: str, **arguments: Any) -> tuple[Any, dict[str, Tensor]]:
        torch.manual_seed(3)
        return kto.trained(
            tiny.gpt2(**DROPLESS), tmp_path / folder, {"peft_config": LORA, **arguments}, max_steps=4, learning_rate=1.0
        )

    (own, weights), (given, others) = run("own"), run("given", ref_model=tiny.gpt2(**DROPLESS))
    assert own.reference.is_policy
    assert not given.reference.is_policy
    assert abs(kto.logged(own, "rewards/margins")[-1]) > 1e-3
    assert kto.logged(own, "loss") == pytest.approx(kto.logged(given, "loss"), rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-6)


def test_a_frozen_copy_is_the_reference_of_a_model_without_adapters(tmp_path):
    model = tiny.gpt2(**DROPLESS)
    before = tiny.weights(model)
    trainer, _ = kto.trained(model, tmp_path, max_steps=2)
    assert tiny.moved(before, trainer.model)
    assert not tiny.moved(before, trainer.reference.model)


def test_models_by_name_and_model_init(tmp_path):
    tiny.gpt2().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    name = str(tmp_path / "base")
    data = {"ref_model": name, "processing_class": None}
    trainer = kto.trainer(name, tmp_path, data, model_init_kwargs={"dtype": torch.float64})
    assert trainer.model.dtype == trainer.reference.model.dtype == D
    trainer = kto.trainer(tiny.gpt2(), tmp_path, {"ref_model": name}, model_init_kwargs={"dtype": torch.float64})
    assert (trainer.model.dtype, trainer.reference.model.dtype) == (torch.float32, D)
    apart = {"model_init_kwargs": {"dtype": D}, "ref_model_init_kwargs": {"dtype": torch.float16}}
    trainer = kto.trainer(name, tmp_path, data, **apart)
    assert (trainer.model.dtype, trainer.reference.model.dtype) == (D, torch.float16)
    with pytest.raises(ValueError, match="ref_model is no name"):
        kto.trainer(name, tmp_path, {"processing_class": None}, **apart)
    with pytest.raises(ValueError, match="the model is loaded already"):
        kto.trainer(tiny.gpt2(), tmp_path, {"ref_model": tiny.gpt2()}, model_init_kwargs={"dtype": torch.float64})
    made, _ = kto.trained(None, tmp_path / "init", {"model_init": lambda: tiny.gpt2(**DROPLESS), "peft_config": LORA})
    assert made.reference.model is made.model


def test_margins_rise_also_on_rows_that_were_held_out(tmp_path):
    """Desirable completions are of the first half of the alphabet."""
    generator = torch.Generator().manual_seed(0)

    def row(i: int) -> dict[str, Any]:
        first = 0 if i % 2 else 13
        letters = torch.randint(first, first + 13, (4,), generator=generator).tolist()
        prompt = torch.randint(26, (3,), generator=generator).tolist()
        words = ("".join(tiny.CHARACTERS[k] for k in ids) for ids in (prompt, letters))
        return dict(zip(("prompt", "completion"), words, strict=True)) | {"label": bool(i % 2)}

    rows = [row(i) for i in range(128)]
    data = {"train_dataset": Dataset.from_list(rows[:96]), "eval_dataset": Dataset.from_list(rows[96:])}
    config = {"max_steps": 40, "per_device_train_batch_size": 16, "optim": "adamw_torch", "desirable_weight": 1.0}
    trainer, _ = kto.trained(tiny.gpt2(**DROPLESS), tmp_path, data, **config)
    assert kto.logged(trainer, "rewards/margins")[-1] > 0.5
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/margins"] > 0.5
    assert metrics["eval_loss"] < 0.45


def test_metrics_of_the_caller_get_rewards_and_labels(tmp_path):
    def auc(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == prediction.label_ids.shape == (8,)
        assert prediction.label_ids.tolist() == [int(row["label"]) for row in kto.rows()]
        return {"mean": float(prediction.predictions.mean())}

    trainer = kto.trainer(
        tiny.gpt2(1), tmp_path, {"eval_dataset": kto.dataset(), "compute_metrics": auc, "ref_model": tiny.gpt2(2)}
    )
    metrics = trainer.evaluate()
    mean = (3 * metrics["eval_rewards/chosen"] + 5 * metrics["eval_rewards/rejected"]) / 8
    assert metrics["eval_mean"] == pytest.approx(mean, rel=1e-5)
