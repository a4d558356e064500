"""What PPOTrainer rejects before training; each error names the row or setting, and the remedy."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import PromptTuningConfig, get_peft_model
from tests.lm import tiny
from transformers import AutoModelForSequenceClassification

from trimtab_common.health import TrainingDivergedError
from trimtab_common.sealing import CheckpointError
from trimtab_lm import PPOConfig, PPOTrainer
from trimtab_lm.ppo.setup import check_engine


def ones(responses):
    return [torch.ones(len(row), dtype=torch.long) for row in responses]


def changed(**columns):
    """Returns a good batch of four in which a function changes some columns."""
    queries, responses, scores = tiny.batch()
    good = {"queries": queries, "responses": responses, "scores": scores, "response_masks": ones(responses)}
    return {name: columns[name](column) if name in columns else column for name, column in good.items()}


def with_row(index, value):
    return lambda column: [*column[:index], value, *column[index + 1 :]]


EMPTY = torch.tensor([], dtype=torch.long)
BAD = {
    "scores too few": ({"scores": lambda c: c[:3]}, ValueError, "scores has 3 entries, but batch_size is 4"),
    "responses too many": ({"responses": lambda c: [*c, c[0]]}, ValueError, "responses has 5 entries"),
    "queries none": ({"queries": lambda c: []}, ValueError, "queries has 0 entries"),
    "masks too few": ({"response_masks": lambda c: c[:1]}, ValueError, "response_masks has 1 entries"),
    "queries as a tensor": (
        {"queries": lambda c: torch.ones(4, 3, dtype=torch.long)},
        TypeError,
        "queries must be a list of tensors",
    ),
    "scores as a tensor": ({"scores": torch.stack}, TypeError, "scores must be a list"),
    "response in two dimensions": (
        {"responses": with_row(1, torch.ones(1, 3, dtype=torch.long))},
        TypeError,
        r"responses\[1\] must be a 1-D tensor of token ids, got a torch.int64 tensor of shape \[1, 3\].*squeeze",
    ),
    "response of floats": ({"responses": with_row(2, torch.ones(3))}, TypeError, r"responses\[2\] .*torch.float32"),
    "response of truth values": (
        {"responses": with_row(2, torch.ones(3) > 0)},
        TypeError,
        r"responses\[2\] .*torch.bool",
    ),
    "query as a list": ({"queries": with_row(0, [5, 6])}, TypeError, r"queries\[0\] must be .* got list"),
    "empty response": ({"responses": with_row(3, EMPTY)}, ValueError, r"responses\[3\] is empty"),
    "empty query": ({"queries": with_row(2, EMPTY)}, ValueError, r"queries\[2\] is empty"),
    "NaN score": (
        {"scores": with_row(1, torch.tensor(float("nan")))},
        ValueError,
        r"scores has nan for response 1: a score must be a finite",
    ),
    "infinite scores": (
        {"scores": lambda c: [c[0], float("inf"), c[2], torch.tensor(float("-inf"))]},
        ValueError,
        "scores has inf for response 1, -inf for response 3: ",
    ),
    "two numbers as a score": (
        {"scores": with_row(2, torch.ones(2))},
        TypeError,
        r"scores has a Tensor of shape \[2\] .* for response 2: a list of 4 numbers",
    ),
    "mask too long": (
        {"response_masks": with_row(1, torch.ones(99, dtype=torch.long))},
        ValueError,
        r"response_masks\[1\] has shape \[99\], its response has \[\d\]",
    ),
    "mask of zeros": ({"response_masks": lambda c: [c[0] * 0, *c[1:]]}, ValueError, r"response_masks\[0\] must hold"),
    "mask of weights": ({"response_masks": lambda c: [*c[:3], c[3] * 2]}, ValueError, r"response_masks\[3\] must hold"),
    "token beyond the vocabulary": (
        {"responses": with_row(1, torch.tensor([5, 32]))},
        ValueError,
        r"responses\[1\] .*32.*vocabulary",
    ),
    "negative token": ({"queries": with_row(1, torch.tensor([5, -100]))}, ValueError, r"queries\[1\] .*-100"),
}


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
@pytest.mark.parametrize("what", BAD)
def test_step_refuses(what, kind):
    columns, error, message = BAD[what]
    trainer = tiny.ppo(tiny.with_value_head(getattr(tiny, kind)()))
    before = tiny.weights(trainer.model)
    with pytest.raises(error, match=message):
        trainer.step(**changed(**columns))
    assert tiny.moved(before, trainer.model) == {}
    assert trainer.steps_done == 0
    trainer.step(**changed())


def test_two_rows_of_bad_scores_spoil_no_running_statistics():
    trainer = tiny.ppo(use_score_scaling=True)
    with pytest.raises(ValueError, match="finite"):
        trainer.step(**changed(scores=with_row(0, float("nan"))))
    assert trainer.running.state_dict()["count"] == 0


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_batch_of_one_token_is_refused(is_masked):
    trainer = tiny.ppo(batch_size=1, mini_batch_size=1)
    response = torch.tensor([5, 6]) if is_masked else torch.tensor([5])
    masks = [torch.tensor([0, 1])] if is_masked else None
    with pytest.raises(ValueError, match="The whole batch has one response token"):
        trainer.step([torch.tensor([5, 6])], [response], [1.0], masks)


def test_rows_of_one_token_are_fine():
    trainer = tiny.ppo()
    one_each = [torch.tensor([5 + i]) for i in range(4)]
    stats = trainer.step(one_each, one_each, [0.0, 1.0, 2.0, 3.0])
    assert stats["tokens/responses_len_mean"] == 1.0
    assert all(bool(weight.isfinite().all()) for weight in trainer.model.state_dict().values())


def test_equal_scores_and_values_train_nothing_to_nan():
    trainer = tiny.ppo(tiny.with_value_head(tiny.gpt2(), v_head_init_strategy="zero"))
    queries, responses, _ = tiny.batch()
    trainer.step(queries, responses, [0.0] * 4)
    assert all(bool(weight.isfinite().all()) for weight in trainer.model.state_dict().values())


@pytest.mark.parametrize("score", [1, 1.0, True, torch.tensor(1), torch.tensor([1.0]), torch.tensor([[1.0]])])
def test_a_score_may_be_any_single_number(score):
    queries, responses, _ = tiny.batch()
    assert tiny.ppo().step(queries, responses, [score] * 4)["ppo/mean_scores"] == 1.0


@pytest.mark.parametrize(
    ("query", "error", "message"),
    [
        (torch.ones(1, 3, dtype=torch.long), TypeError, r"queries\[0\] must be a 1-D tensor .*squeeze"),
        (EMPTY, ValueError, r"queries\[0\] is empty. Leave the row out"),
        (torch.tensor([5, 999]), ValueError, r"queries\[0\] holds token ids from 5 to 999, the model's vocabulary has"),
    ],
)
@pytest.mark.parametrize("is_list", [True, False])
def test_generate_refuses_a_query_that_is_not_a_row_of_tokens(query, error, message, is_list):
    with pytest.raises(error, match=message):
        tiny.ppo().generate([query] if is_list else query, max_new_tokens=2)


def test_a_process_may_have_no_query_left():
    trainer = tiny.ppo()
    assert len(trainer.generate(tiny.batch()[0], max_new_tokens=2)) == 4
    assert trainer.generate([], max_new_tokens=2) == []


@pytest.mark.parametrize("setting", ["num_beams", "num_return_sequences"])
def test_generate_refuses_more_than_one_response_per_query(setting):
    with pytest.raises(ValueError, match=f"{setting}=2"):
        tiny.ppo().generate(tiny.batch()[0], max_new_tokens=2, do_sample=True, **{setting: 2})


def test_a_tokenizer_without_pad_token_is_refused():
    with pytest.raises(ValueError, match=r"no pad token. Set tokenizer.pad_token = tokenizer.eos_token"):
        tiny.ppo(arguments={"tokenizer": tiny.tokenizer(pad_token=None)})


def test_a_pad_token_that_is_the_end_token_changes_nothing():
    def weights(**special):
        trainer = tiny.ppo(arguments={"tokenizer": tiny.tokenizer(**special)})
        queries, responses, scores = tiny.batch()
        trainer.step(queries, [torch.cat([row, torch.tensor([tiny.EOS])]) for row in responses], scores)
        return tiny.weights(trainer.model)

    apart, shared = weights(), weights(pad_token="</s>")
    assert all(torch.equal(apart[name], shared[name]) for name in apart)


def test_a_model_without_value_head_is_refused():
    with pytest.raises(TypeError, match=r"got GPT2LMHeadModel. Wrap it: AutoModelForCausalLMWithValueHead"):
        PPOTrainer(PPOConfig(), tiny.gpt2(), tokenizer=tiny.tokenizer())


def test_the_policy_as_its_own_reference_is_refused():
    model = tiny.policy()
    with pytest.raises(ValueError, match="ref_model is the policy itself"):
        tiny.ppo(model, arguments={"ref_model": model})


def test_an_optimizer_that_misses_parameters_is_refused():
    model = tiny.policy()
    optimizer = torch.optim.Adam(model.v_head.parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"\d+ of \d+ trainable tensors are not in the optimizer"):
        tiny.ppo(model, arguments={"optimizer": optimizer})
    model.pretrained_model.requires_grad_(False)
    tiny.ppo(model, arguments={"optimizer": optimizer})


def test_a_policy_with_nothing_to_train_is_refused():
    model = tiny.policy().requires_grad_(False)
    with pytest.raises(ValueError, match=r"Nothing to train"):
        tiny.ppo(model)


def test_a_policy_with_virtual_tokens_before_its_rows_is_refused():
    tuned = get_peft_model(tiny.gpt2(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match=r"cannot train PromptTuningConfig.*Use LoRA or prefix tuning"):
        tiny.ppo(tiny.with_value_head(tuned))


def test_a_critic_with_a_trunk_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"value_model must be a transformers model.* got Linear"):
        tiny.ppo(arguments={"value_model": torch.nn.Linear(3, 1)})


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="The dataset has no rows"):
        tiny.ppo(arguments={"dataset": Dataset.from_dict({"input_ids": [[5]]}).select([])})


def test_a_query_dataset_without_prompts_is_refused(tmp_path):
    Dataset.from_dict({"text": ["a"] * 4}).save_to_disk(tmp_path)
    with pytest.raises(ValueError, match=r"columns \['text'\], and none of input_ids, query or prompt"):
        tiny.ppo(query_dataset=str(tmp_path))


def test_train_names_the_columns_of_a_dataset_without_known_ones():
    trainer = tiny.ppo(arguments={"dataset": [{"text": "abc"}] * 4})
    with pytest.raises(ValueError, match=r"has the columns \['text'\], .* Give rows with texts in 'query' or 'prompt'"):
        trainer.train(lambda queries, responses: [0.0] * 4)
    tuples = tiny.ppo(arguments={"dataset": [(1, 2)] * 4})
    with pytest.raises(ValueError, match=r"has no columns \(list\)"):
        tuples.train(lambda queries, responses: [0.0] * 4)


def test_the_number_of_steps_may_be_0_and_not_negative():
    trainer = tiny.ppo(arguments={"dataset": [{"query": "abc"}] * 4})
    assert trainer.train(lambda queries, responses: [0.0] * 4, steps=0) == []
    assert trainer.steps_done == 0
    with pytest.raises(ValueError, match=r"steps=-1\): the number of steps in all is 0 or more"):
        trainer.train(lambda queries, responses: [0.0] * 4, steps=-1)


def test_train_needs_a_dataset_and_a_reward():
    data = Dataset.from_dict({"input_ids": [[5]] * 4})
    with pytest.raises(ValueError, match=r"train.. needs prompts"):
        tiny.ppo().train(lambda queries, responses: [0.0] * 4)
    with pytest.raises(ValueError, match=r"train.. needs a reward"):
        tiny.ppo(arguments={"dataset": data}).train()
    config = copy.deepcopy(tiny.scorer().config)
    config.num_labels = 2
    classifier = AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ValueError, match=r"2 labels .*label=1"):
        tiny.ppo(arguments={"dataset": data}).train(classifier)


def test_a_reward_of_the_wrong_length_is_refused():
    trainer = tiny.ppo(arguments={"dataset": Dataset.from_dict({"input_ids": [[5]] * 4})})
    with pytest.raises(ValueError, match="returned has 3 scores for 4 items"):
        trainer.train(lambda queries, responses: [0.0] * 3, steps=1, generation_kwargs={"max_new_tokens": 2})


def test_log_stats_names_the_columns_it_misses():
    trainer = tiny.ppo()
    with pytest.raises(ValueError, match="columns_to_log names response, the batch has query"):
        trainer.log_stats({}, {"query": ["a"]}, [1.0])
    with pytest.raises(ValueError, match="2 rewards, but 1 rows in 'query'"):
        trainer.log_stats({}, {"query": ["a"], "response": ["b"]}, [1.0, 2.0])


def test_batched_forward_pass_takes_the_trainers_models_alone():
    trainer = tiny.ppo()
    queries, responses, _ = tiny.batch()
    with pytest.raises(ValueError, match="it was given another model"):
        trainer.batched_forward_pass(
            tiny.policy(), queries, responses, trainer.prepare_model_inputs(queries, responses)
        )


# -------------------------------------------------------------- losses that are not finite


@pytest.mark.parametrize("broken", ["vpreds", "logprobs"])
def test_a_loss_that_is_not_finite_stops_before_the_update(broken):
    trainer = tiny.ppo(vf_coef=1.0)
    trainer.step(*tiny.batch())
    before = tiny.weights(trainer.model)
    reach = trainer.model.v_head.summary.bias.sum()
    column = {name: torch.zeros(1, 2) for name in ("old_logprobs", "values", "advantages", "returns")}
    outputs = {
        name: torch.zeros(1, 2) + reach * (float("nan") if name == broken else 0) for name in ("vpreds", "logprobs")
    }
    with pytest.raises(TrainingDivergedError, match=r"loss of step 1 is nan. No update was made. Lower learning_rate"):
        trainer.train_minibatch(**column, **outputs, logits=None, mask=torch.ones(1, 2))
    assert tiny.moved(before, trainer.model) == {}
    assert trainer.model.v_head.summary.bias.grad is None


# -------------------------------------------------------------- checkpoints


def saved(folder, **config):
    trainer = tiny.ppo(**config)
    trainer.step(*tiny.batch())
    return trainer.save_checkpoint(folder)


def test_a_checkpoint_needs_a_folder():
    with pytest.raises(ValueError, match="save_checkpoint needs a folder"):
        tiny.ppo().save_checkpoint()
    data = Dataset.from_dict({"input_ids": [[5]] * 4})
    with pytest.raises(ValueError, match=r'resume_from="latest" looks into PPOConfig\(output_dir'):
        tiny.ppo(arguments={"dataset": data}).train(lambda **_: [], resume_from="latest")


def damage_nothing_there(folder):
    for file in folder.iterdir():
        file.unlink()


def damage_truncated(folder):
    file = folder / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def damage_flipped(folder):
    file = folder / "state.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage_missing(folder):
    (folder / "rank-00000.pt").unlink()


def damage_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"step": 99}))


@pytest.mark.parametrize(
    "damage", [damage_nothing_there, damage_truncated, damage_flipped, damage_missing, damage_manifest]
)
def test_an_unreadable_checkpoint_is_refused_and_nothing_is_loaded(damage, tmp_path):
    folder = saved(tmp_path)
    damage(folder)
    trainer = tiny.ppo(tiny.policy(seed=3))
    before = tiny.weights(trainer.model)
    with pytest.raises(CheckpointError, match="checkpoint-1"):
        trainer.load_checkpoint(folder)
    assert tiny.moved(before, trainer.model) == {}
    assert trainer.steps_done == 0


def test_a_checkpoint_of_other_weights_or_parts_is_refused(tmp_path):
    folder = saved(tmp_path)
    deeper = tiny.ppo(tiny.policy(n_layer=3))
    with pytest.raises(CheckpointError, match=r"holds other weights than this trainer: .*h\.2\."):
        deeper.load_checkpoint(folder)
    data = Dataset.from_dict({"input_ids": [[5]] * 4})
    with_data = tiny.ppo(arguments={"dataset": data}, resume_with_changes=True)
    with pytest.raises(CheckpointError, match="holds other parts than this trainer: batches"):
        with_data.load_checkpoint(folder)


def test_a_checkpoint_of_another_width_is_refused_by_name(tmp_path):
    folder = saved(tmp_path)
    wider = tiny.ppo(tiny.policy(n_embd=32))
    before = copy.deepcopy(wider.model.state_dict())
    with pytest.raises(
        CheckpointError, match=r"has shape \[.*\], this trainer's has \[.*\]. Make the trainer with the model"
    ):
        wider.load_checkpoint(folder)
    assert tiny.moved(before, wider.model) == {}


def test_early_stopping_within_an_update_is_refused_under_deepspeed():
    config = PPOConfig(batch_size=4, gradient_accumulation_steps=2, early_stopping=True)
    check_engine(config, DistributedType.FSDP)
    check_engine(replace(config, gradient_accumulation_steps=1), DistributedType.DEEPSPEED)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2 DeepSpeed's engine keeps"):
        check_engine(config, DistributedType.DEEPSPEED)


def test_checkpoints_are_refused_under_deepspeed_before_training(tmp_path):
    config = PPOConfig(output_dir=str(tmp_path), save_steps=2)
    check_engine(config, DistributedType.FSDP)
    with pytest.raises(ValueError, match="save_steps=2: DeepSpeed's engine holds"):
        check_engine(config, DistributedType.DEEPSPEED)
