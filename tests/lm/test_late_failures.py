"""Datasets and rows that no trainer can use give one clear line from each trainer, before any work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from tests.lm import tiny

from trimtab_lm import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trimtab_lm.dpo.evaluation import sample_answers
from trimtab_lm.sampling.rollout import Rollout

COLUMNS = {
    "sft": ["text"],
    "reward": ["prompt", "chosen", "rejected"],
    "dpo": ["prompt", "chosen", "rejected"],
    "kto": ["prompt", "completion", "label"],
    "grpo": ["prompt"],
    "iterative_sft": ["prompt", "completion"],
}
KINDS = {
    "sft": (SFTTrainer, SFTConfig, tiny.gpt2),
    "reward": (RewardTrainer, RewardConfig, tiny.scorer),
    "dpo": (DPOTrainer, DPOConfig, tiny.gpt2),
    "kto": (KTOTrainer, KTOConfig, tiny.gpt2),
    "grpo": (GRPOTrainer, GRPOConfig, tiny.gpt2),
    "iterative_sft": (IterativeSFTTrainer, IterativeSFTConfig, tiny.gpt2),
}


OPTIONS = ("processing_class", "peft_config", "data_collator", "eval_dataset")
"""Arguments of a trainer; all others are settings of its config."""


def make(kind: str, folder: Path, dataset: Any, model: Any = None, **settings: Any) -> Any:
    make, config, build = KINDS[kind]
    options = {name: settings.pop(name) for name in OPTIONS if name in settings}
    args = config(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        max_steps=1,
        disable_tqdm=True,
        per_device_train_batch_size=2,
        **settings,
    )
    if kind == "grpo":
        options |= {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    model = build() if model is None else model
    return make(model, args=args, train_dataset=dataset, **{"processing_class": tiny.tokenizer(), **options})


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_dataset_is_refused_in_one_line(kind, tmp_path):
    no_rows = {name: [] for name in COLUMNS[kind]}
    for dataset in (Dataset.from_list([]), Dataset.from_dict(no_rows)):
        with pytest.raises(ValueError, match="The dataset is empty"):
            make(kind, tmp_path, dataset)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grpo"])
def test_an_empty_stream_is_refused_in_one_line(kind, tmp_path):
    with pytest.raises(ValueError, match="The dataset is empty"):
        make(kind, tmp_path, IterableDataset.from_generator(lambda: iter([])))


SHORT, LONG = "ab", "ab" * 40
ROWS = {
    "sft": {"text": [SHORT, LONG]},
    "reward": {"prompt": ["a", "a"], "chosen": ["b", "b"], "rejected": ["c", LONG]},
    "dpo": {"prompt": ["a", "a"], "chosen": ["b", "b"], "rejected": ["c", LONG]},
    "kto": {"prompt": ["a", "a"], "completion": ["b", LONG], "label": [True, False]},
    "grpo": {"prompt": [SHORT, LONG]},
    "iterative_sft": {"prompt": ["a", "a"], "completion": ["b", LONG]},
}
SETTINGS = {"grpo": {"max_completion_length": 8, "num_generations": 2}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_longer_than_the_positions_of_the_model_is_refused_by_number(kind, tmp_path):
    settings = SETTINGS.get(kind, {})
    with pytest.raises(ValueError, match=r"Row 1: .*GPT2\w+ has 64 positions\. .*max_"):
        make(kind, tmp_path, Dataset.from_dict(ROWS[kind]), **settings)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reward"])
def test_rotary_positions_set_no_limit(kind, tmp_path):
    settings = SETTINGS.get(kind, {})
    model = tiny.llama(max_position_embeddings=16)
    trainer = make(kind, tmp_path, Dataset.from_dict(ROWS[kind]), model, **settings)
    if kind == "iterative_sft":
        assert trainer.step(texts=[LONG])["global_step"] == 1
    else:
        trainer.train()
        assert trainer.state.global_step == 1


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward"])
def test_rows_that_are_cut_to_the_positions_are_taken(kind, tmp_path):
    settings = {"reward": {"max_length": 64, "truncation_mode": "keep_end"}}.get(kind, {"max_length": 64})
    with pytest.warns(UserWarning, match="max_length=64"):
        trainer = make(kind, tmp_path, Dataset.from_dict(ROWS[kind]), **settings)
    trainer.train()
    assert trainer.state.global_step == 1


def test_rows_of_a_step_are_measured_after_they_are_cut(tmp_path):
    with pytest.raises(ValueError, match=r"Row 1 .*GPT2LMHeadModel has 64 positions"):
        make("iterative_sft", tmp_path, None).step(texts=[SHORT, LONG])
    trainer = make("iterative_sft", tmp_path, None, max_length=64)
    with pytest.warns(UserWarning, match="max_length=64"):
        assert trainer.step(texts=[SHORT, LONG])["global_step"] == 1


def test_a_tokenized_dataset_of_pairs_is_measured_too(tmp_path):
    trainer = make("dpo", tmp_path, Dataset.from_dict(ROWS["dpo"]), tiny.llama())
    with pytest.raises(ValueError, match=r"Row 1: The rejected answer .*64 positions"):
        make("dpo", tmp_path, trainer.train_dataset)


class Fixed:
    """A caller's sampler; no setting of the trainer gives the length of its completions."""

    def __init__(self, length: int):
        self.length = length

    def sync(self, model, version):
        pass

    def generate(self, prompts, *, num_generations, version, seed):
        rows = [torch.full((self.length,), 9)] * (len(prompts) * num_generations)
        return Rollout(rows, [False] * len(rows))


def test_completions_of_a_sampler_of_the_callers_are_measured_as_they_come(tmp_path):
    def sampling(length):
        args = GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            max_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            disable_tqdm=True,
        )
        return GRPOTrainer(
            tiny.gpt2(),
            lambda completions, **_: [0.0, 1.0] * (len(completions) // 2),
            args,
            Dataset.from_dict({"prompt": ["ab", "cd"]}),
            processing_class=tiny.tokenizer(),
            rollout=Fixed(length),
        )

    sampling(62).train()
    with pytest.raises(ValueError, match=r"A prompt of 2 tokens with 63 new ones is too long.*64 positions"):
        sampling(63).train()


def test_a_table_of_samples_is_as_long_as_the_positions_allow(tmp_path):
    rows = Dataset.from_dict({"prompt": ["ab" * 25], "chosen": ["b"], "rejected": ["c"]})
    trainer = make("dpo", tmp_path, rows, max_new_tokens=100)
    policy, reference = sample_answers(trainer, trainer.model, [torch.full((50,), 9)])
    assert len(policy) == len(reference) == 1
    with pytest.raises(ValueError, match="64 positions"):
        sample_answers(trainer, trainer.model, [torch.full((65,), 9)])


def test_a_text_in_rows_of_constant_length_is_measured(tmp_path):
    rows = {"text": ["ab" * 50, SHORT]}
    settings = {"packing": True, "packing_strategy": "constant_length", "max_length": 96}
    with pytest.raises(ValueError, match="64 positions"):
        make("sft", tmp_path, Dataset.from_dict(rows), **settings).train()
    trainer = make("sft", tmp_path, Dataset.from_dict({"text": [SHORT] * 60}), **settings)
    trainer.train()
    assert trainer.state.global_step == 1  # short texts, each with its own positions


def long_rows(count: int, length: int) -> list[torch.Tensor]:
    return [torch.full((length,), 9)] * count


def test_ppo_refuses_sequences_longer_than_the_positions_of_the_model():
    trainer = tiny.ppo()
    with pytest.raises(ValueError, match=r"queries\[0\] with responses\[0\]: 65 tokens.*64 positions"):
        trainer.step(long_rows(4, 60), long_rows(4, 5), [0.0] * 4)
    with pytest.raises(ValueError, match=r"60 tokens with 5 new ones.*64 positions.*max_new_tokens"):
        trainer.generate(long_rows(4, 60), max_new_tokens=5)
    for length in trainer.generate(long_rows(1, 60), max_new_tokens=4, return_prompt=False, do_sample=True):
        assert len(length) <= 4


def test_ppo_trains_past_rotary_positions():
    trainer = tiny.ppo(tiny.with_value_head(tiny.llama(max_position_embeddings=16)))
    responses = trainer.generate(long_rows(4, 60), max_new_tokens=5, return_prompt=False, do_sample=True)
    assert trainer.step(long_rows(4, 60), responses, [0.0, 1.0, 2.0, 3.0])["ppo/loss/total"]


def test_ppo_refuses_texts_in_one_line():
    trainer, (queries, responses, scores) = tiny.ppo(), tiny.batch()
    with pytest.raises(TypeError, match=r"queries\[0\] is a text.*Tokenize it"):
        trainer.generate(["abc", "abd"])
    with pytest.raises(TypeError, match=r"queries\[0\] is a text.*Tokenize it"):
        trainer.generate("abc")
    with pytest.raises(TypeError, match=r"queries\[0\] is a text.*Tokenize it"):
        trainer.step(["abc"] * 4, responses, scores)
    with pytest.raises(TypeError, match=r"responses\[0\] is a text.*Tokenize it"):
        trainer.step(queries, ["abc"] * 4, scores)


def joined(queries, responses):
    return [torch.cat(pair) for pair in zip(queries, responses, strict=True)]


def test_ppo_refuses_prompts_left_inside_their_responses():
    trainer, (queries, responses, scores) = tiny.ppo(), tiny.batch()
    with pytest.raises(ValueError, match="return_prompt=False"):
        trainer.step(queries, joined(queries, responses), scores)
    assert trainer.steps_done == 0


def test_ppo_takes_responses_that_repeat_their_query_where_that_may_be_meant():
    queries, responses, scores = tiny.batch()
    some = [*joined(queries, responses)[:3], responses[3]]
    tiny.ppo().step(queries, some, scores)
    bos = [torch.tensor([tiny.BOS])] * 4
    tiny.ppo().step(bos, joined(bos, responses), scores)
    repeated = long_rows(4, 5)
    tiny.ppo().step(repeated, joined(repeated, responses), scores)
    whole = joined(queries, responses)
    tiny.ppo().step(queries, whole, scores, [torch.ones_like(row) for row in whole])
    learnt = tiny.ppo()
    learnt.step(queries, responses, scores)
    learnt.step(queries, whole, scores)  # an echo that the policy learnt
    assert learnt.steps_done == 2
