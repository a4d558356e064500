"""`PPOTrainer.train` accepts GRPO's kinds of rewards, and functions of queries and responses."""

import asyncio

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny

ROWS = Dataset.from_dict({"query": [letter * 3 for letter in "abcd"], "label": [0, 1, 2, 3]})


def train(reward, steps: int = 1, **options):
    seen = []
    trainer = tiny.ppo(arguments={"dataset": ROWS}, steps=steps)
    history = trainer.train(
        reward, generation_kwargs={"max_new_tokens": 4}, on_step=lambda _, __, batch: seen.append(batch), **options
    )
    return history[-1], seen[-1]


def test_a_function_by_keyword_gets_prompts_completions_ids_and_columns():
    seen = {}

    def reward(prompts, completions, completion_ids, label, **others):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, label=label, others=others)
        return label

    stats, batch = train(reward)
    tokenizer = tiny.tokenizer()
    assert seen["prompts"] == batch["query"]
    assert seen["completions"] == batch["response"]
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in seen["ids"]] == batch["response"]
    assert (seen["label"], seen["others"]) == (batch["label"], {})
    assert stats["env/reward_mean"] == 1.5


def test_the_first_two_arguments_of_a_documented_function_have_any_names():
    for reward in (
        lambda queries, responses, label: [x + len(q) for q, x in zip(queries, label, strict=True)],
        lambda texts, answers, label, **_: [x + len(q) for q, x in zip(texts, label, strict=True)],
        lambda *pair, **columns: [x + len(q) for q, x in zip(pair[0], columns["label"], strict=True)],
    ):
        assert train(reward)[0]["env/reward_mean"] == 1.5 + 3


def test_scores_may_be_any_iterable_of_numbers():
    for scores in (torch.tensor([0.0, 1.0, 2.0, 3.0]), (torch.tensor(float(x)) for x in range(4)), range(4)):
        assert train(lambda queries, responses, scores=scores: scores)[0]["env/reward_mean"] == 1.5


def test_several_rewards_are_weighted_and_logged_one_by_one():
    async def slow(completions):
        await asyncio.sleep(0)
        return [2.0] * len(completions)

    def named(queries, responses):
        return [1.0] * len(queries)

    stats, _ = train([slow, named], reward_weights=[0.5, -3.0])
    assert stats["env/reward_mean"] == 0.5 * 2 - 3
    assert (stats["rewards/slow/mean"], stats["rewards/named/mean"]) == (2.0, 1.0)


def test_a_reward_model_and_a_function_add_up():
    scorer = tiny.scorer()
    alone, _ = train(scorer)
    both, _ = train([scorer, lambda completions: [10.0] * 4])
    assert both["env/reward_mean"] == pytest.approx(alone["env/reward_mean"] + 10, abs=1e-5)


def test_what_is_no_score_is_refused_by_the_functions_name():
    def three(queries, responses):
        return [0.0] * 3

    with pytest.raises(ValueError, match="'three' returned has 3 scores for 4 items"):
        train(three)
    with pytest.raises(TypeError, match=r"needs \['answer'\]; there are \['label'\]"):
        train(lambda queries, responses, answer: [0.0] * 4)
