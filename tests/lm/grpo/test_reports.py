"""What GRPOTrainer logs, evaluates, warns about and saves."""

import warnings
from functools import partial

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from tests.lm import tiny
from tests.lm.grpo.run_distributed import Fixed, Scripted, prompts, trainer, vowels
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, TrainingArguments

from trimtab_lm.grpo import GRPOTrainer

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], lora_dropout=0.0)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture
def make(tmp_path):
    return partial(trainer, str(tmp_path))


def test_the_logs_say_what_happened(make):
    grpo = make(eval_dataset=prompts(5), per_device_eval_batch_size=2, max_steps=2)
    grpo.train()
    metrics = grpo.evaluate()
    log = grpo.state.log_history[0]
    for name in (
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "rewards/vowels/mean",
        "rewards/vowels/std",
        "entropy",
        "completions/mean_length",
        "completions/min_length",
        "completions/max_length",
        "completions/clipped_ratio",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "clip_ratio/region_mean",
        "ratio",
        "loss",
        "health/alerts",
    ):
        assert name in log
        if not name.startswith("health"):
            assert f"eval_{name}" in metrics
    sampled = Scripted()
    sampled.sync(None, 0)
    rollout = sampled.generate(
        [torch.tensor(ids) for ids in grpo.eval_dataset["prompt_ids"]], num_generations=3, version=0, seed=0
    )
    lengths = [len(ids) for ids in rollout.completions]
    assert metrics["eval_completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert metrics["eval_completions/max_length"] == max(lengths)
    assert metrics["eval_completions/clipped_ratio"] == pytest.approx(1 - sum(rollout.ended) / len(lengths))
    at_once = make(grpo.model, eval_dataset=prompts(5), per_device_eval_batch_size=5).evaluate()
    assert metrics["eval_loss"] == pytest.approx(at_once["eval_loss"], rel=1e-4)  # not a mean over unequal batches
    assert abs(metrics["eval_loss"]) > 1e-3


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "cispo", "dr_grpo"])
def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(loss_type, make):
    grpo = make(max_steps=2, learning_rate=1e-2, loss_type=loss_type, beta=0.1, eval_dataset=prompts(5))
    grpo.train()
    losses = []
    for grpo.args.per_device_eval_batch_size in (1, 5):
        losses.append(grpo.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert abs(losses[0]) > 1e-4


def test_a_second_training_logs_nothing_of_the_first(make):
    first_run = [True]
    grpo = make(reward=lambda completions, **_: [float(not first_run)] * len(completions), max_steps=3, logging_steps=2)
    grpo.train()
    first_run.clear()
    grpo.train()
    assert [entry["reward"] for entry in grpo.state.log_history if "reward" in entry] == [1.0]


def test_tokens_are_counted_over_prompts_and_completions(make):
    grpo = make(rollout=Fixed([True] * 3), max_steps=2)
    grpo.train()
    read = [len(grpo.tokenizer(text)["input_ids"]) for text in grpo.train_dataset["prompt"]]
    logs = [entry["num_tokens"] for entry in grpo.state.log_history if "loss" in entry]
    assert logs[0] < logs[1] <= 4 * (3 * max(read) + 6)
    assert logs[1] - logs[0] >= 2 * (3 * min(read) + 6)


def test_evaluation_repeats_itself_and_counts_every_prompt_once(make):
    grpo = make(rollout=None, eval_dataset={"a": prompts(3), "b": prompts(5)}, per_device_eval_batch_size=2)
    first, second = grpo.evaluate(), grpo.evaluate()
    names = [name for name in first if "reward" in name or "loss" in name]
    assert "eval_a_reward" in names
    assert [first[name] for name in names] == [second[name] for name in names]
    assert grpo.evaluate(prompts(1), metric_key_prefix="new")["new_frac_reward_zero_std"] in (0.0, 1.0)


def test_the_table_of_an_evaluation_has_no_completion_of_one_that_failed(make, monkeypatch):
    grpo, tables = make(eval_dataset=prompts(4), per_device_eval_batch_size=2), []
    monkeypatch.setattr(grpo.tables, "add", lambda trainer, name, columns, rows: tables.append(len(rows)))
    with monkeypatch.context() as patched:
        patched.setattr(grpo, "lay_out", lambda groups: 1 / 0)  # after the rollout
        with pytest.raises(ZeroDivisionError):
            grpo.evaluate()
    grpo.evaluate()
    assert tables == [4 * grpo.args.num_generations]


def test_predict_is_an_evaluation_of_other_prompts(make):
    grpo = make(rollout=None)
    output = grpo.predict(prompts(3))
    assert output.predictions is None
    assert "test_reward" in output.metrics


def test_prompts_come_in_order_if_asked(make):
    grpo = make(train_sampling_strategy="sequential")
    assert [row["prompt"] for row in next(iter(grpo.get_train_dataloader()))] == prompts(2)["prompt"][:]


@pytest.mark.filterwarnings("ignore:.*ratios do not start from 1")
def test_neftune_is_noise_in_training_alone(make):
    runs = []
    for alpha in (None, 50.0):
        model = tiny.gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        grpo = make(model, neftune_noise_alpha=alpha, max_steps=1, disable_dropout=False, num_iterations=2)
        runs.append(tiny.logprobs_by_gradient(model))
        grpo.train()
    plain, noisy = runs  # without a gradient: those that ratios start from
    torch.testing.assert_close(noisy[False], plain[False])
    assert float((noisy[True] - plain[True]).abs().max()) > 1e-2


def test_samples_reach_the_tables_and_the_screen(make, monkeypatch, capsys):
    tables = []
    monkeypatch.setattr(
        "trimtab_lm.grpo.statistics.Tables.add",
        lambda self, trainer, name, columns, rows: tables.append((name, columns, [list(row) for row in rows])),
    )
    grpo = make(max_steps=2, log_completions=True, num_completions_to_print=1, eval_dataset=prompts(2))
    grpo.train()
    grpo.evaluate()
    assert [name for name, _, _ in tables] == ["completions", "completions", "eval_completions"]
    _, columns, rows = tables[0]
    assert columns == ["prompt", "completion", "vowels", "reward", "advantage"]
    assert len(rows) == 6
    assert [row[2] for row in rows] == pytest.approx(vowels([row[1] for row in rows]))
    assert sum(row[4] for row in rows[:3]) == pytest.approx(0, abs=1e-5)
    assert rows[0][0] == rows[1][0] == rows[2][0] != rows[3][0] == rows[4][0] == rows[5][0]
    printed = [line for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert len(printed) == 3
    assert all(line.startswith("step ") for line in printed)
    assert "advantage" in printed[0]


def test_constant_rewards_are_reported(make):
    grpo = make(reward=lambda completions, **_: [1.0] * len(completions), max_steps=10)
    with pytest.warns(UserWarning, match="health/constant_rewards"):
        grpo.train()
    assert grpo.state.log_history[0]["frac_reward_zero_std"] == 1


def test_a_start_that_is_not_where_the_rollout_was_is_reported(make):
    dropout = {"resid_pdrop": 0.5, "embd_pdrop": 0.5}
    with pytest.warns(UserWarning, match="ratios do not start from 1. Is disable_dropout off"):
        make(tiny.gpt2(**dropout), disable_dropout=False, num_iterations=2, max_steps=1).train()
    grpo = make(beta=0.1, max_steps=1)
    grpo.model.transformer.wte.weight.data *= 1.2
    with pytest.warns(UserWarning, match="policy and reference differ"):
        grpo.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(tiny.gpt2(**dropout), num_iterations=2, beta=0.1, max_steps=1).train()


# Everything around


def test_a_trained_model_is_saved_as_what_it_is(make, tmp_path):
    make(save_strategy="steps", save_steps=1, max_steps=1).train()
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1"), GPT2LMHeadModel)
    tiny.gpt2().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    grpo = make(
        str(tmp_path / "base"),
        peft_config=LORA,
        processing_class=None,
        save_strategy="steps",
        save_steps=2,
        overwrite_output_dir=True,
        max_steps=2,
        beta=0.1,
        model_init_kwargs={"torch_dtype": "float32"},
    )
    grpo.train()
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, grpo.model.eval()(input_ids=ids).logits)


def test_lora_on_a_model_with_resized_embeddings(make, tmp_path):
    model = tiny.gpt2()
    model.resize_token_embeddings(len(tiny.VOCABULARY) + 8)
    make(model, rollout=None, peft_config=LORA, save_strategy="steps", save_steps=1, max_steps=1).train()
    assert (tmp_path / "checkpoint-1" / "adapter_config.json").exists()


def test_model_init_makes_the_model_and_its_reference(make):
    grpo = make(model_init=lambda: tiny.gpt2(3), beta=0.1, max_steps=1)
    first = grpo.reference
    grpo.train()
    assert grpo.reference is not first
    assert tiny.moved(tiny.weights(grpo.reference.model), grpo.model)


def test_plain_arguments_and_the_tokenizer_of_2024_are_taken(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    with pytest.warns(FutureWarning, match="processing_class"):
        grpo = GRPOTrainer(tiny.gpt2(), vowels, args, prompts(4), tokenizer=tiny.tokenizer(), rollout=Scripted(limit=5))
    grpo.train()
    assert grpo.backend.calls == [2]
    assert args.remove_unused_columns
