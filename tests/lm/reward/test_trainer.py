"""Reward models: the loss, independence of layouts, learning, logs and saved files."""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from tests.lm import tiny
from tests.lm.reward.run_distributed import SETTINGS, D, config, good_and_bad, pairs, scorer, trainer
from tests.marks import slow_but
from torch import Tensor

from trimtab_lm.hf.config import checkpointing_of
from trimtab_lm.reward import RewardTrainer
from trimtab_lm.reward import algorithm as module
from trimtab_lm.reward.collator import PairCollator, RewardDataCollatorWithPadding

LAYOUTS: dict[str, Any] = {
    "tree": lambda: PairCollator(tiny.PAD, "tree"),
    "packed": lambda: PairCollator(tiny.PAD, "packed"),
    "padded": lambda: PairCollator(tiny.PAD, "padded"),
    "documented": lambda: RewardDataCollatorWithPadding(tiny.tokenizer()),
    "documented, left": lambda: RewardDataCollatorWithPadding(tiny.tokenizer(padding_side="left")),
}


def plain_scores(model: Any, dataset: Dataset) -> Tensor:
    """Returns [B, 2] scores; each text runs alone through the model's own forward."""
    rows = [[row["input_ids_chosen"], row["input_ids_rejected"]] for row in dataset]
    return torch.stack(
        [torch.stack([model(input_ids=torch.tensor([ids])).logits[0, 0] for ids in row]) for row in rows]
    )


def loss_and_gradients(model: Any, loss: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", SETTINGS)
def test_layouts_give_the_loss_and_gradients_of_texts_by_themselves(kind: str, tmp_path):
    data = pairs(5, with_margin=True)
    model = scorer(kind, dtype=D)
    scores = plain_scores(model, data)
    margins = torch.tensor(data["margin"], dtype=D)
    expected, gradients = loss_and_gradients(model, -F.logsigmoid(scores[:, 0] - scores[:, 1] - margins).mean())
    assert len(gradients) > 10
    reward_trainer = trainer(model, tmp_path)
    for layout in ["documented"] if kind in ("bert", "t5") else LAYOUTS:
        collate = LAYOUTS[layout]()
        reward_trainer.tokenizer.padding_side = getattr(collate, "tokenizer", reward_trainer.tokenizer).padding_side
        computed, slopes = loss_and_gradients(model, reward_trainer.compute_loss(model, collate(list(data))))
        torch.testing.assert_close(computed, expected, rtol=1e-9, atol=1e-12, check_dtype=False)
        for one, other in zip(slopes, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * float(other.abs().max()) + 1e-15)


def test_decoders_read_a_prompt_once_and_classifiers_padded_rows(tmp_path):
    data = pairs(1)
    batch = trainer(scorer("llama"), tmp_path).data_collator(list(data))
    texts = [data[0][f"input_ids_{side}"] for side in ("chosen", "rejected")]
    prompt = next(i for i in range(9) if texts[0][i] != texts[1][i])
    assert batch["input_ids"].numel() == len(texts[0]) + len(texts[1]) - prompt
    assert isinstance(trainer(scorer("bert"), tmp_path).data_collator, RewardDataCollatorWithPadding)


def fixed_scores(reward_trainer: RewardTrainer, monkeypatch: pytest.MonkeyPatch, scores: list[list[float]]) -> Any:
    """Returns a model that gives these scores."""
    monkeypatch.setattr(reward_trainer, "scores_in_forward", True)
    return Fixed(scores)


class Fixed(torch.nn.Module):
    def __init__(self, scores: list[list[float]]):
        super().__init__()
        self.scores = torch.nn.Parameter(torch.tensor(scores, dtype=D))

    def forward(self, tokens: dict[str, Tensor]) -> tuple[Tensor, float]:
        return self.scores.reshape(-1, 1), 0.0


def test_a_margin_meets_its_own_pair_alone(tmp_path, monkeypatch):
    reward_trainer = trainer(scorer(), tmp_path)
    model = fixed_scores(reward_trainer, monkeypatch, [[2.0, 1.0], [0.5, 1.0], [3.0, 3.0]])
    batch = reward_trainer.data_collator(
        [row | {"margin": m} for row, m in zip(pairs(3), (1.0, -0.5, 0.0), strict=True)]
    )
    _, outputs = reward_trainer.compute_loss(model, batch, return_outputs=True)
    # Every difference equals its margin: each loss is log 2. The margins of other pairs would give other losses.
    torch.testing.assert_close(outputs["losses"], torch.full((3,), math.log(2), dtype=D))
    batch["margin"] = batch["margin"][:, None]  # [B, 1], as from a user's collator
    torch.testing.assert_close(float(reward_trainer.compute_loss(model, batch).detach()), math.log(2))


def test_centering_adds_the_square_of_the_sum(tmp_path, monkeypatch):
    scores = [[1.0, 0.5], [-2.0, 0.0]]
    losses = []
    for weight in (None, 0.1):
        reward_trainer = trainer(scorer(), tmp_path, center_rewards_coefficient=weight)
        batch = reward_trainer.data_collator(list(pairs(2)))
        losses.append(
            float(reward_trainer.compute_loss(fixed_scores(reward_trainer, monkeypatch, scores), batch).detach())
        )
    assert losses[1] - losses[0] == pytest.approx(0.1 * (1.5**2 + 2.0**2) / 2)


def test_the_score_is_read_at_eos_where_padding_is_eos(tmp_path):
    tokenizer = tiny.tokenizer(pad_token="</s>")
    with pytest.warns(UserWarning, match="EOS is also the padding token"):
        reward_trainer = trainer(scorer(), tmp_path, {"processing_class": tokenizer})
    data = pairs(4)
    predictions = reward_trainer.predict(data).predictions
    scores = []
    for row in data:
        hidden = [
            reward_trainer.model.transformer(input_ids=torch.tensor([row[f"input_ids_{s}"]]))
            for s in ("chosen", "rejected")
        ]
        scores.append([reward_trainer.model.score(one.last_hidden_state[0, -1]).item() for one in hidden])
    torch.testing.assert_close(torch.tensor(predictions), torch.tensor(scores), rtol=1e-5, atol=1e-6)
    padded = trainer(
        reward_trainer.model,
        tmp_path,
        {
            "processing_class": tokenizer,
            "data_collator": RewardDataCollatorWithPadding(tokenizer),
        },
    )
    torch.testing.assert_close(
        torch.tensor(padded.predict(data).predictions), torch.tensor(scores), rtol=1e-5, atol=1e-6
    )


# Learning --------------------------------------------------------------------------------------------------------


def learnt_accuracy(folder: Any) -> float:
    reward_trainer = trainer(
        scorer(),
        folder,
        {"train_dataset": good_and_bad(200, 0), "eval_dataset": good_and_bad(100, 1)},
        max_steps=30,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
    )
    reward_trainer.train()
    return reward_trainer.evaluate()["eval_accuracy"]


def test_it_learns(tmp_path):
    assert learnt_accuracy(tmp_path) > 0.95


def test_a_broken_loss_does_not_learn(tmp_path, monkeypatch):
    right = module.pair_loss
    monkeypatch.setattr(module, "pair_loss", lambda chosen, rejected, margin: right(rejected, chosen, margin=margin))
    assert learnt_accuracy(tmp_path) < 0.5


def test_accumulation_does_not_matter(tmp_path):
    weights = []
    for size, accumulation in ((8, 1), (2, 4)):
        reward_trainer = trainer(
            scorer(dtype=D),
            tmp_path,
            {"train_dataset": pairs(16, with_margin=True)},
            max_steps=2,
            learning_rate=0.1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            optim="sgd",
        )
        reward_trainer.train()
        weights.append(tiny.weights(reward_trainer.model))
    assert tiny.moved(weights[0], scorer(dtype=D))
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-9, atol=1e-12, msg=name)


def test_a_short_last_window_counts_its_own_pairs(tmp_path):
    """Five pairs in micro-batches of two, two of which make a step: the second step has one pair."""
    reward_trainer = trainer(
        scorer(dtype=D),
        tmp_path,
        {"train_dataset": pairs(5)},
        num_train_epochs=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.0,
        logging_strategy="steps",
        logging_steps=1,
    )
    reward_trainer.train()
    losses = [log["loss"] for log in reward_trainer.state.log_history if "loss" in log]
    whole = reward_trainer.evaluate(pairs(5))["eval_loss"]
    assert (4 * losses[0] + losses[1]) / 5 == pytest.approx(whole, rel=1e-6)


# Settings --------------------------------------------------------------------------------------------------------


def test_the_head_is_drawn_with_a_deviation_of_one_over_the_root_of_its_inputs(tmp_path):
    wide = {"n_embd": 512, "n_layer": 1, "n_head": 1}
    before = scorer(**wide)
    trunk = tiny.weights(before.transformer)
    reward_trainer = trainer(scorer(**wide), tmp_path, init_reward_head=True)
    weight = reward_trainer.model.score.weight.detach()
    assert float(weight.std()) * math.sqrt(513) == pytest.approx(1, abs=0.12)  # 4 standard errors
    assert abs(float(weight.mean())) * math.sqrt(513) < 4 / math.sqrt(512)
    assert not tiny.moved(trunk, reward_trainer.model.transformer)
    again = trainer(scorer(**wide), tmp_path, init_reward_head=True).model.score.weight
    other = trainer(scorer(**wide), tmp_path, init_reward_head=True, seed=1).model.score.weight
    assert torch.equal(again, weight)
    assert not torch.equal(other, weight)
    kept = trainer(scorer(**wide), tmp_path).model.score.weight
    assert torch.equal(kept, before.score.weight)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_heads_of_classifiers_lose_their_bias(kind: str, tmp_path):
    model = scorer(kind)
    head = model.classifier if kind == "bert" else model.classification_head.out_proj
    torch.nn.init.ones_(head.bias)
    trainer(model, tmp_path, init_reward_head=True)
    assert float(head.bias) == 0
    assert 0.5 < float(head.weight.std()) * math.sqrt(tiny.WIDTH + 1) < 2


@pytest.mark.parametrize("kind", slow_but(SETTINGS, "gpt2"))
@pytest.mark.parametrize("checkpointing", [True, False])
def test_dropout_is_off_where_it_is_asked_for(kind: str, checkpointing: bool, tmp_path):
    rates = {
        "gpt2": ("resid_pdrop", "attn_pdrop"),
        "llama": ("attention_dropout",),
        "t5": ("dropout_rate",),
        "bert": ("hidden_dropout_prob",),
    }
    weights = []
    for rate, disable_dropout in ((0.0, False), (0.5, True), (0.5, False)):
        reward_trainer = trainer(
            scorer(kind, **dict.fromkeys(rates[kind], rate)),
            tmp_path,
            {"train_dataset": pairs(8)},
            max_steps=2,
            disable_dropout=disable_dropout,
            gradient_checkpointing=checkpointing,
            learning_rate=1e-2,
            optim="sgd",
        )
        before = [vars(module).get("p") for module in reward_trainer.model.modules()]
        reward_trainer.train()
        weights.append(tiny.weights(reward_trainer.model))
        assert [vars(module).get("p") for module in reward_trainer.model.modules()] == before
    without, off, on = weights
    for name, weight in without.items():
        torch.testing.assert_close(off[name], weight, rtol=1e-5, atol=1e-6, msg=name)
    assert any(not torch.allclose(on[name], without[name], rtol=1e-5, atol=1e-6) for name in without)


def test_activation_checkpointing_is_on_and_engages(tmp_path):
    counts = []
    for checkpointing in (None, False):
        settings = {} if checkpointing is None else {"gradient_checkpointing": checkpointing}
        reward_trainer = trainer(scorer(), tmp_path, {"train_dataset": pairs(2)}, max_steps=1, **settings)
        calls = []
        reward_trainer.model.transformer.h[0].ln_1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        reward_trainer.train()
        counts.append(len(calls))
    assert counts == [2, 1]  # the second in backward


def test_a_model_without_activation_checkpointing_warns_and_trains(tmp_path, monkeypatch):
    model = scorer()
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    monkeypatch.setattr(type(model.transformer), "supports_gradient_checkpointing", False)
    args = config(tmp_path, max_steps=1)
    with pytest.warns(UserWarning, match="does not support activation checkpointing"):
        reward_trainer = RewardTrainer(model, args, train_dataset=pairs(2), processing_class=tiny.tokenizer())
    reward_trainer.train()
    assert checkpointing_of(args)[0]  # the caller's object is unchanged
    assert args.remove_unused_columns


# Logs --------------------------------------------------------------------------------------------------------------


def test_ties_are_not_wins(tmp_path):
    model = scorer()
    torch.nn.init.zeros_(model.score.weight)
    metrics = trainer(model, tmp_path, {"eval_dataset": pairs(5)}).evaluate()
    assert metrics["eval_accuracy"] == 0
    assert metrics["eval_scores/margin"] == 0
    assert metrics["eval_loss"] == pytest.approx(math.log(2))
    assert metrics["eval_calibration_error"] == pytest.approx(0)


def test_evaluation_is_over_pairs_and_not_over_batches(tmp_path):
    data, seen = pairs(5, with_margin=True), []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {"margins": float((prediction.predictions[:, 0] - prediction.predictions[:, 1]).mean())}

    model = scorer(dtype=D)
    reward_trainer = trainer(
        model, tmp_path, {"eval_dataset": data, "compute_metrics": compute_metrics}, per_device_eval_batch_size=4
    )
    metrics = reward_trainer.evaluate()
    with torch.no_grad():
        scores = plain_scores(model.eval(), data)
    chosen, rejected = scores.unbind(1)
    losses = -F.logsigmoid(chosen - rejected - torch.tensor(data["margin"], dtype=D))
    torch.testing.assert_close(torch.tensor(seen[0].predictions), scores, rtol=1e-6, atol=1e-7, check_dtype=False)
    assert seen[0].label_ids.tolist() == [0] * 5
    assert metrics["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    assert metrics["eval_accuracy"] == pytest.approx(float((chosen > rejected).double().mean()))
    assert metrics["eval_scores/margin"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-5)
    assert metrics["eval_margins"] == pytest.approx(metrics["eval_scores/margin"], rel=1e-5)
    assert metrics["eval_scores/chosen"] == pytest.approx(float(chosen.mean()), rel=1e-5)
    assert metrics["eval_scores/rejected"] == pytest.approx(float(rejected.mean()), rel=1e-5)


def test_training_logs_the_statistics_of_its_steps(tmp_path):
    reward_trainer = trainer(
        scorer(dtype=D),
        tmp_path,
        {"train_dataset": pairs(8)},
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.0,
        logging_strategy="steps",
        logging_steps=2,
    )
    reward_trainer.train()
    log = next(log for log in reward_trainer.state.log_history if "loss" in log)
    whole = reward_trainer.evaluate(pairs(8))
    for name in ("loss", "accuracy", "scores/margin", "scores/chosen", "scores/rejected", "calibration_error"):
        assert log[name] == pytest.approx(whole[f"eval_{name}"], rel=1e-5, abs=1e-7), name


def test_samples_are_shown_with_their_scores(tmp_path, monkeypatch):
    shown: list[Any] = []
    data = Dataset.from_list([{"prompt": "ab ", "chosen": f"c{x}", "rejected": f"dd{x}"} for x in "efg"])
    for collator in (None, RewardDataCollatorWithPadding(tiny.tokenizer())):
        reward_trainer = trainer(
            scorer(),
            tmp_path,
            {"eval_dataset": data, "data_collator": collator},
            num_eval_samples=2,
            per_device_eval_batch_size=1,
        )
        monkeypatch.setattr(
            reward_trainer.tables, "add", lambda _, name, columns, rows: shown.append((name, columns, rows))
        )
        reward_trainer.samples.rows = [["left", "by a failed evaluation", 0.0, 0.0]]
        reward_trainer.evaluate()
        scores = reward_trainer.predict(data).predictions
        name, columns, rows = shown[0]
        assert (name, len(columns)) == ("eval_pairs", 4)
        assert [row[:2] for row in rows] == [["ab ce</s>", "ab dde</s>"], ["ab cf</s>", "ab ddf</s>"]]
        torch.testing.assert_close(torch.tensor([row[2:] for row in rows]), torch.tensor(scores[:2]))
        shown.clear()
    reward_trainer = trainer(scorer(), tmp_path, {"eval_dataset": data}, num_eval_samples=0)
    monkeypatch.setattr(reward_trainer.tables, "add", lambda *args: shown.append(args))
    reward_trainer.evaluate()
    assert not shown


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_tokens_are_counted_with_either_collator(kind: str, tmp_path):
    for collator in (None, RewardDataCollatorWithPadding(tiny.tokenizer())):
        reward_trainer = trainer(
            scorer(kind),
            tmp_path,
            {"train_dataset": pairs(2), "data_collator": collator},
            max_steps=1,
            include_num_input_tokens_seen=True,
            per_device_train_batch_size=2,
        )
        reward_trainer.train()
        assert reward_trainer.state.num_input_tokens_seen > 30
        assert reward_trainer.state.total_flos > 0


# Datasets ----------------------------------------------------------------------------------------------------------


def test_sets_given_to_evaluate_and_predict_are_tokenized(tmp_path):
    texts = good_and_bad(3, 0)
    reward_trainer = trainer(scorer(), tmp_path, {"eval_dataset": {"one": texts, "two": pairs(2)}}, max_length=40)
    metrics = reward_trainer.evaluate()
    assert {"eval_one_accuracy", "eval_two_accuracy", "eval_one_loss"} <= metrics.keys()
    again = reward_trainer.evaluate(good_and_bad(3, 0))
    assert again["eval_loss"] == metrics["eval_one_loss"]
    prediction = reward_trainer.predict(texts)
    assert prediction.predictions.shape == (3, 2)
    assert prediction.metrics["test_loss"] == metrics["eval_one_loss"]


def test_predictions_pass_through_the_users_function(tmp_path):
    arguments = {"preprocess_logits_for_metrics": lambda scores, labels: scores[:, :1] - scores[:, 1:]}
    assert trainer(scorer(), tmp_path, arguments).predict(pairs(3)).predictions.shape == (3, 1)


def test_streams_train(tmp_path):
    stream = good_and_bad(8, 0).to_iterable_dataset()
    reward_trainer = trainer(scorer(), tmp_path, {"train_dataset": stream}, max_steps=2, per_device_train_batch_size=2)
    reward_trainer.train()
    assert reward_trainer.state.global_step == 2


def test_batches_by_length(tmp_path):
    data = Dataset.from_list([{"chosen": "a" * n, "rejected": "b" * n} for n in (9, 1, 9, 1)])
    reward_trainer = trainer(
        scorer(),
        tmp_path,
        {"train_dataset": data},
        train_sampling_strategy="group_by_length",
        max_steps=1,
        per_device_train_batch_size=2,
    )
    lengths = [sorted(batch["lengths"].shape) for batch in reward_trainer.get_train_dataloader()]
    assert len(lengths) == 2
    assert reward_trainer.train_dataset["length"] == [20, 4, 20, 4]
    reward_trainer.train()


def test_nothing_warns_that_should_not(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        trainer(scorer(), tmp_path, {"train_dataset": good_and_bad(4, 0)}, max_steps=1).train()
