"""Reward functions are called by keyword and weighted; an error names those that return no valid rewards."""

import asyncio
import functools
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from tests.lm import tiny

from trimtab_common.stats import gather_stats
from trimtab_lm.rewards.functions import RewardSet, Scored, as_completions, reward_stats
from trimtab_lm.rewards.model import RewardModel

PROMPTS, COMPLETIONS = ["a", "bb"], ["x", "xx", "y", "yyy"]
IDS = [[5], [5, 5], [6], [6, 6, 6]]


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def starts_with_y(completions: list[str]) -> list[bool | None]:
    return [completion[0] == "y" if len(completion) < 3 else None for completion in completions]


def score(functions: Any, columns: Any = None, **options: Any) -> Scored:
    return RewardSet(functions, **options)(PROMPTS, COMPLETIONS, IDS, columns)


def test_a_reward_is_the_weighted_sum_of_those_that_apply():
    scored = score([length, starts_with_y], weights=[0.5, 10.0])
    expected = [[1.0, 0.0], [2.0, 0.0], [1.0, 1.0], [3.0, float("nan")]]
    torch.testing.assert_close(scored.scores, torch.tensor(expected), equal_nan=True)
    torch.testing.assert_close(scored.rewards, torch.tensor([0.5, 1.0, 10.5, 1.5]))


def test_a_function_is_given_the_keywords_it_takes_repeated_per_completion():
    seen: dict[str, Any] = {}

    def everything(**keywords: Any) -> list[int]:
        seen["everything"] = keywords
        return [0] * 4

    def few(answer: list[int], *, completion_ids: list[list[int]], prompts: list[str], absent: int = 7) -> list[int]:
        seen["few"] = (answer, completion_ids, prompts, absent)
        return [0] * 4

    class Judge:
        async def __call__(self, completions: list[str], scale: int) -> list[int]:
            seen["judge"] = (completions, scale)
            return [0] * 4

    score([everything, few, functools.partial(Judge(), scale=3)], {"answer": [1, 2], "other": ["u", "v"]})
    prompts, answer = ["a", "a", "bb", "bb"], [1, 1, 2, 2]
    assert seen["few"] == (answer, IDS, prompts, 7)
    assert seen["judge"] == (COMPLETIONS, 3)
    assert seen["everything"] == {
        "prompts": prompts,
        "completions": COMPLETIONS,
        "completion_ids": IDS,
        "answer": answer,
        "other": ["u", "u", "v", "v"],
    }


def test_what_a_function_needs_and_the_dataset_lacks_is_named():
    def graded(completions: list[str], solution: list[str]) -> list[float]:
        return []

    with pytest.raises(TypeError, match=r"'graded' needs \['solution'\]; there are \['answer', 'completion_ids'"):
        score(graded, {"answer": [1, 2]})


def test_no_function_runs_before_all_have_what_they_need():
    called = []

    def paid(completions: list[str]) -> list[float]:
        called.append(None)
        return [0.0] * len(completions)

    def graded(completions: list[str], solution: list[str]) -> list[float]:
        return []

    with pytest.raises(TypeError, match=r"'graded' needs \['solution'\]"):
        score([paid, graded])
    assert called == []


def meeting(count: int) -> list[Any]:
    """Returns async functions, none of which returns before all of them run."""
    waiting: list[asyncio.Future] = []

    async def arrive(completions: list[str], value: float) -> list[float]:
        mine = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        if len(waiting) == count:
            for other in waiting:
                other.set_result(None)
        await asyncio.wait_for(mine, timeout=5)
        return [value] * len(completions)

    return [functools.partial(arrive, value=float(i)) for i in range(count)]


def test_async_functions_run_together_and_beside_plain_ones():
    started, done = threading.Event(), threading.Event()

    async def request(completions: list[str]) -> list[float]:
        started.set()
        while not done.is_set():
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    def plain(completions: list[str]) -> list[float]:
        assert started.wait(5)
        done.set()
        return [2.0] * len(completions)

    names = ["plain", "first", "second", "third", "request"]
    scored = score([plain, *meeting(3), request], names=names)
    assert scored.scores[0].tolist() == [2.0, 0.0, 1.0, 2.0, 1.0]


def test_async_functions_work_inside_a_running_loop_and_keep_theirs():
    loops = []

    async def client(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    async def notebook() -> None:
        rewards = RewardSet([client, lambda completions: client(completions)], names=["a", "b"])
        for _ in range(2):
            assert rewards(PROMPTS, COMPLETIONS, IDS).rewards.tolist() == [2.0] * 4
        assert asyncio.get_running_loop() not in loops

    asyncio.run(notebook())
    assert len(loops) == 4
    assert len(set(loops)) == 1
    gc.collect()
    deadline = time.monotonic() + 5
    while loops[0].is_running() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not loops[0].is_running()


def test_an_error_inside_a_function_names_it():
    def broken(completions: list[str]) -> list[float]:
        raise KeyError("inside")

    async def broken_later(completions: list[str]) -> list[float]:
        raise KeyError("inside")

    for function in (broken, broken_later):
        with pytest.raises(KeyError) as caught:
            score([length, function])
        assert caught.value.__notes__ == [f"Raised in the reward function {function.__name__!r}."]


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        ([1.0] * 3, ValueError, "'bad' returned has 3 scores for 4 items"),
        ([1.0, 2.0, float("nan"), 4.0], ValueError, "'bad' returned has nan for completion 2"),
        (torch.tensor([1.0, 2.0, 3.0, float("inf")]), ValueError, "'bad' returned has inf for completion 3"),
        ([1.0, "2", 3.0, 4.0], TypeError, r"'bad' returned has '2' \(str\) for completion 1"),
        ([1.0, 1j, 3.0, 4.0], TypeError, r"'bad' returned has 1j \(complex\)"),
        (torch.zeros(4, 2), ValueError, r"'bad' returned is a Tensor of shape \[4, 2\]"),
        ([[1.0], [2.0], [3.0], [4.0]], TypeError, r"'bad' returned has \[1.0\] \(list\) for completion 0"),
        (1.0, TypeError, "'bad' returned is 1.0 \\(float\\): a list of 4 numbers"),
        (None, TypeError, "'bad' returned is None \\(NoneType\\)"),
        ({"a": 1}, TypeError, "'bad' returned is {'a': 1}"),
        (torch.tensor(1.0), ValueError, "'bad' returned is a Tensor of shape"),
    ],
)
def test_what_is_no_list_of_finite_numbers_is_refused(returned: Any, error: type[Exception], message: str):
    def bad(**_: Any) -> Any:
        return returned

    with pytest.raises(error, match=message):
        score([length, bad])


def test_numbers_of_any_library_are_taken():
    for returned in (
        (1, True, np.float32(0.5), torch.tensor(2)),
        np.array([1, 1, 0.5, 2]),
        torch.tensor([[1], [1], [0.5], [2]]),
        torch.tensor([1, 1, 0.5, 2], dtype=torch.bfloat16),
        [torch.tensor([1.0]), np.array([1.0]), np.float64(0.5), np.int64(2)],
    ):
        assert score(lambda _r=returned: _r).rewards.tolist() == [1.0, 1.0, 0.5, 2.0]


def test_a_completion_to_which_nothing_applies_is_an_error():
    def mostly(completions: list[str]) -> list[float | None]:
        return [None if completion == "y" else 1.0 for completion in completions]

    with pytest.raises(ValueError, match="applies to completion 2, 'y' of the prompt 'bb'"):
        score(mostly)


def test_functions_weights_and_columns_must_fit():
    with pytest.raises(ValueError, match="There is no reward function"):
        RewardSet([])
    with pytest.raises(ValueError, match="2 reward functions, but 1 weights"):
        RewardSet([length, starts_with_y], [1.0])
    for weight in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"weights of the rewards are \[1.0, {weight}\]"):
            RewardSet([length, starts_with_y], [1.0, weight])
    with pytest.raises(ValueError, match="2 reward functions, but 3 processing_classes"):
        RewardSet([length, starts_with_y], None, [None] * 3)
    with pytest.raises(ValueError, match=r"called \['length'\]"):
        RewardSet([length, functools.partial(length)])
    with pytest.raises(TypeError, match=r"not 3 \(int\)"):
        RewardSet([3])
    with pytest.raises(ValueError, match="but 3 answer"):
        score(length, {"answer": [1, 2, 3]})
    with pytest.raises(ValueError, match="but 3 prompts"):
        RewardSet(length)(["a"] * 3, COMPLETIONS, IDS)
    with pytest.raises(ValueError, match="ids of 1"):
        RewardSet(length)(PROMPTS, COMPLETIONS, IDS[:1])
    with pytest.raises(ValueError, match=r"columns \['completions'\]"):
        score(length, {"completions": ["p", "q"]})


def test_no_completions_have_no_scores():
    assert RewardSet([length, starts_with_y])([], [], []).scores.shape == (0, 2)


def alone(model: Any, text: str) -> float:
    ids = torch.tensor([tiny.tokenizer()(text)["input_ids"]])
    return model.score(model.base_model(ids).last_hidden_state[0, -1])[0].item()


def test_a_reward_model_reads_prompt_and_completion(tmp_path: Any):
    model, tokenizer = tiny.scorer().eval(), tiny.tokenizer()
    folder = tmp_path / "scorer"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    expected = [alone(model, f"{text}</s>") for text in ("ax", "axx", "bby", "bbyyy")]
    by_module = RewardSet([length, model], [0.0, 1.0], [None, tokenizer])
    by_name = RewardSet([length, str(folder)], [0.0, 1.0])
    ready = RewardSet([length, RewardModel(model, tokenizer)], [0.0, 1.0])
    for rewards in (by_module, by_name, ready):
        assert rewards(PROMPTS, COMPLETIONS, IDS).rewards.tolist() == pytest.approx(expected, rel=1e-5)
    assert by_name.names == ["length", "scorer"]
    assert by_module.names == ["length", "GPT2ForSequenceClassification"]
    with pytest.raises(ValueError, match="needs its tokenizer"):
        RewardSet([model])


def test_an_adapted_reward_model_is_one_too():
    model = get_peft_model(tiny.scorer(), LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["c_attn"])).eval()
    rewards = RewardSet(model, processing_classes=tiny.tokenizer())
    assert rewards.names == ["GPT2ForSequenceClassification"]
    ids = torch.tensor([tiny.tokenizer()("bbyyy</s>")["input_ids"]])
    assert float(rewards(PROMPTS, COMPLETIONS, IDS).rewards[3]) == pytest.approx(float(model(ids).logits), rel=1e-4)


def test_a_reward_model_reads_a_conversation_with_one_bos():
    model, tokenizer = tiny.scorer().eval(), tiny.tokenizer()
    template = "{{ bos_token }}{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
    tokenizer.chat_template = template
    prompts = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "bb"}]]
    completions = as_completions(prompts, COMPLETIONS)
    assert completions[1] == [{"role": "assistant", "content": "xx"}]
    assert as_completions(PROMPTS, COMPLETIONS) == COMPLETIONS
    expected = [alone(model, f"<s>{text}</s>") for text in ("uaax", "uaaxx", "ubbay", "ubbayyy")]
    rewards = RewardSet(model, processing_classes=tokenizer)
    assert rewards(prompts, completions, IDS).rewards.tolist() == pytest.approx(expected, rel=1e-5)

    from tokenizers.processors import TemplateProcessing

    special = [("<s>", tiny.BOS)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    assert tokenizer("a")["input_ids"][0] == tiny.BOS
    assert rewards(prompts, completions, IDS).rewards.tolist() == pytest.approx(expected, rel=1e-5)


def test_statistics_by_hand():
    nan = float("nan")
    scored = Scored(torch.tensor([[1.0, nan], [3.0, 1.0], [2.0, 3.0], [2.0, nan]]), torch.tensor([1.0, 3.0, 2.0, 2.0]))
    stats = gather_stats(reward_stats(["a", "b"], scored, num_generations=2))
    assert stats == pytest.approx(
        {
            "rewards/a/mean": 2.0,
            "rewards/a/std": 0.5**0.5,
            "rewards/b/mean": 2.0,
            "rewards/b/std": 1.0,
            "reward": 2.0,
            "reward_std": 2**0.5 / 2,
            "frac_reward_zero_std": 0.5,
        }
    )
    single = gather_stats(reward_stats(["a", "b"], scored, num_generations=1))
    assert (single["reward_std"], single["frac_reward_zero_std"]) == (0.0, 1.0)
