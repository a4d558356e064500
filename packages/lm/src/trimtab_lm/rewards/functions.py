"""Scores of completions: weighted reward functions, plain or async, and reward models, under one call convention."""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trimtab_common.reward_checks import RewardError, checked_scores
from trimtab_common.stats import Deviation, Mean, Summary
from trimtab_common.time_limit import reward_limit
from trimtab_lm.data.formats import Text
from trimtab_lm.interface import Model
from trimtab_lm.rewards.calls import EventLoop, accepted, is_async
from trimtab_lm.rewards.model import RewardModel

Scores: TypeAlias = Sequence[float | None] | Tensor | npt.NDArray[np.float64]
"""What a reward function returns: one number per completion, None where it has nothing to say."""
RewardFunction: TypeAlias = Callable[..., Scores | Awaitable[Scores]]
"""A reward function, plain or async."""
Reward: TypeAlias = RewardFunction | RewardModel | Model | str
"""A reward function, or a reward model: a `RewardModel`, a module or the name of one."""
Rewards: TypeAlias = Reward | list[Reward] | tuple[Reward, ...]
"""One reward, or several in a list or tuple."""
Tokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None
"""The tokenizer of all reward models, or one per reward."""
CALL_ARGUMENTS = {"prompts", "completions", "completion_ids", "environment_rewards"}
"""Arguments of a reward function besides the dataset's columns."""


class Scored(NamedTuple):
    """The scores that a `RewardSet` gives B completions.

    Attributes:
        scores: [B, F] of F functions, float32, on the CPU; NaN where a function abstains.
        rewards: [B], the weighted sum of the scores, without NaNs.
    """

    scores: Tensor
    rewards: Tensor


class RewardSet:
    """Weighted rewards of completions.

    A reward is a function or a model:

    - a callable, plain or `async def`, `f(prompts, completions, completion_ids, **columns) -> list of numbers`, all by
      keyword and one entry per completion. It receives only what its signature takes; `**kwargs` takes everything. An
      entry of None means that the function does not apply to that completion. Prompts and completions have the
      dataset's format: strings, or lists of messages.
    - a sequence classifier, as a hub id, a folder, a module or a `RewardModel`. It reads prompt + completion, by its
      own chat template where they are conversations.

    Async functions run together, on one event loop that lives as long as this object, so that a client of one call may
    be used in the next. Plain functions run meanwhile, in order, in the caller's thread.

    Args:
        functions: one reward, or several.
        weights: one per function; None: 1.
        processing_classes: tokenizers of reward models: one, or one per function with None for callables. Models that
            are given by name bring their own.
        names: what the logs call the functions; None: their own names.
        device: for reward models; None leaves modules where they are.
        timeout: seconds that a batch may take where several processes train; see `reward_limit`.

    Raises:
        ValueError: there is no function, a list has another length, a weight is not finite, or two functions have one
            name.
        TypeError: a function is neither callable nor a model.
    """

    def __init__(
        self,
        functions: Rewards | None,
        weights: Sequence[float] | None = None,
        processing_classes: Tokenizers = None,
        *,
        names: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        timeout: float | None = None,
    ):
        rewards = list(functions) if isinstance(functions, list | tuple) else [functions]
        if not rewards:
            raise ValueError("There is no reward function. Give a callable, a reward model, or a list of them.")
        tokenizers = processing_classes if isinstance(processing_classes, list | tuple) else None
        if tokenizers is None:
            tokenizers = [processing_classes] * len(rewards)
        for what, values in (("weights", weights), ("processing_classes", tokenizers), ("names", names)):
            if values is not None and len(values) != len(rewards):
                raise ValueError(
                    f"{len(rewards)} reward functions, but {len(values)} {what}: give one for each, or None."
                )
        self.names = [name_of(function) for function in rewards] if names is None else list(names)
        if repeated := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(
                f"Several reward functions are called {repeated} and would be logged as one: rename them or give names."
            )
        self.weights = torch.tensor([1.0] * len(rewards) if weights is None else list(weights), dtype=torch.float32)
        if not bool(self.weights.isfinite().all()):
            raise ValueError(f"The weights of the rewards are {self.weights.tolist()}. Give a finite number for each.")
        self.functions: list[RewardFunction] = [
            as_function(function, tokenizer, device=device)
            for function, tokenizer in zip(rewards, tokenizers, strict=True)
        ]
        self._order = sorted(range(len(rewards)), key=lambda i: not is_async(self.functions[i]))  # async ones first
        self._loop: EventLoop | None = None
        self._timeout = timeout

    def __call__(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[object]] | None = None,
        *,
        environment_rewards: Sequence[float] | None = None,
    ) -> Scored:
        """Score B completions of P prompts, in the order of the prompts, those of a prompt side by side.

        Args:
            prompts: P texts or conversations.
            completions: B of them, B a multiple of P; see `as_completions`.
            completion_ids: the token ids of the B completions.
            columns: the dataset's other columns, P entries each.
            environment_rewards: the sum of an environment's rewards in each of the B completions, for functions that
                take it; None where there is no environment.

        Raises:
            TypeError, ValueError: a function returns something else than one finite number or None per completion, or
                all functions return None for a completion; the text names the function.
        """
        if not completions:
            return Scored(torch.zeros(0, len(self.functions)), torch.zeros(0))
        columns = columns or {}
        if taken := sorted(CALL_ARGUMENTS & columns.keys()):
            raise ValueError(
                f"The dataset has columns {taken}, names under which rewards get something else: rename them."
            )
        group = len(completions) // max(len(prompts), 1)
        arguments: dict[str, Sequence[object]] = {}
        for name, values in {"prompts": prompts, **columns}.items():
            if len(values) * group != len(completions):
                raise ValueError(
                    f"{len(completions)} completions of {len(prompts)} prompts, but {len(values)} {name}: prompts and "
                    "columns have one entry per prompt, and each prompt as many completions."
                )
            arguments[name] = values if group == 1 else [value for value in values for _ in range(group)]
        if len(completion_ids) != len(completions):
            raise ValueError(f"{len(completions)} completions, but the ids of {len(completion_ids)}.")
        arguments |= {"completions": list(completions), "completion_ids": list(completion_ids)}
        if environment_rewards is not None:
            arguments["environment_rewards"] = list(environment_rewards)
        calls = [
            accepted(function, f"The reward function {function_name!r}", arguments)
            for function, function_name in zip(self.functions, self.names, strict=True)
        ]
        with reward_limit(self._timeout):
            results = self._run(calls)
        items = [f"completion {i}" for i in range(len(completions))]
        columns_of_scores = [
            checked_scores(result, items, source=f"What the reward function {name!r} returned", may_abstain=True)
            for result, name in zip(results, self.names, strict=True)
        ]
        scores = torch.tensor(columns_of_scores, dtype=torch.float32).T.contiguous()
        silent = scores.isnan().all(dim=1)
        if silent.any():
            i = int(silent.nonzero()[0])
            raise RewardError(
                f"No reward function of {self.names} applies to completion {i}, {str(completions[i])[:200]!r} of the "
                f"prompt {str(arguments['prompts'][i])[:200]!r}: all returned None. Let one of them return a "
                "number, or leave such prompts out of the dataset."
            )
        return Scored(scores, (scores.nan_to_num(0.0) * self.weights).sum(dim=1))

    def _run(self, calls: Sequence[Mapping[str, object]]) -> list[object]:
        waiting: dict[int, Future[object]] = {}
        results: list[object] = [None] * len(self.functions)
        i = self._order[0]
        try:
            for i in self._order:
                results[i] = result = self.functions[i](**calls[i])
                if inspect.isawaitable(result):
                    self._loop = self._loop or EventLoop()
                    waiting[i] = self._loop.submit(result)
            for i, future in waiting.items():
                results[i] = future.result()
        except Exception as error:
            error.add_note(f"Raised in the reward function {self.names[i]!r}.")
            raise
        finally:
            for future in waiting.values():
                future.cancel()  # does nothing to those that are done
        return results


def model_reward(model: RewardModel) -> RewardFunction:
    """Adapt a reward model to the call convention of reward functions.

    It reads each prompt with its completion: texts, or conversations by its chat template.
    """

    def reward(prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        if isinstance(prompts[0], str):
            return model(prompts, completions)
        return model.score([[*prompt, *answer] for prompt, answer in zip(prompts, completions, strict=True)])

    return reward


def as_function(
    function: object, tokenizer: PreTrainedTokenizerBase | None, *, device: torch.device | str | None
) -> RewardFunction:
    """Converts a reward function or model to a function with keywords.

    Args:
        tokenizer: the reward model's tokenizer; None for a model that is given by name.
        device: for a reward model; None leaves a module where it is.

    Raises:
        TypeError: it is neither callable nor a model.
    """
    if isinstance(function, RewardModel):
        return model_reward(function)
    if isinstance(function, str | PreTrainedModel | PeftModel):
        if device is None:
            device = "cpu" if isinstance(function, str) else function.device
        return model_reward(RewardModel(function, tokenizer, device=device))
    if not callable(function):
        raise TypeError(
            f"A reward function is a callable, a model or a model's name, not {function!r} ({type(function).__name__})."
        )
    return function


def rewards_of(
    reward: Rewards | nn.Module,
    weights: Sequence[float] | None,
    *,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | str,
    timeout: float | None = None,
) -> RewardSet:
    """The rewards of PPO: reward models share the policy's tokenizer, and functions may have PPO's documented form.

    Args:
        reward: one function or model, or a list: what `RewardSet` takes, any module as reward model, and functions of
            `takes_queries`.
        weights: one per function; None: 1.
        tokenizer: the tokenizer of reward models that are given as modules.
    """
    functions = [
        RewardModel(one, tokenizer, device=device) if isinstance(one, nn.Module) else one
        for one in (reward if isinstance(reward, list | tuple) else [reward])
    ]
    taking = [by_keyword(one) if takes_queries(one) else one for one in functions]
    return RewardSet(taking, weights, device=device, timeout=timeout)


def takes_queries(function: object) -> TypeGuard[RewardFunction]:
    """Whether a reward is a function of PPO's documented form, `reward(queries, responses, **columns)`.

    Its first two arguments may have any names. So it is one if it can be called with two arguments and none of its
    parameters is called `prompts`, `completions` or `completion_ids`.
    """
    if isinstance(function, str | RewardModel) or not callable(function):
        return False
    signature = inspect.signature(function)
    try:
        signature.bind_partial([], [])
    except TypeError:
        return False
    return signature.parameters.keys().isdisjoint(CALL_ARGUMENTS)


def by_keyword(function: RewardFunction) -> RewardFunction:
    """Adapt a function of PPO's documented form (see `takes_queries`) to the form that `RewardSet` calls."""

    def reward(
        prompts: Sequence[str], completions: Sequence[str], completion_ids: object, **columns: object
    ) -> Scores | Awaitable[Scores]:
        call = functools.partial(function, prompts, completions)
        return call(**accepted(call, f"The reward function {name_of(function)!r}", columns))

    reward.__name__ = name_of(function)
    return reward


def name_of(function: object) -> str:
    """The name of a reward function in the logs: its own, or the last part of its model's."""
    if isinstance(function, str):
        return PurePath(function).name
    if isinstance(function, RewardModel):
        return name_of(function.model)
    if isinstance(function, PeftModel):
        return name_of(function.get_base_model())
    if isinstance(function, PreTrainedModel):
        return PurePath(function.name_or_path or "").name or type(function).__name__
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


def as_completions(prompts: Sequence[Text], texts: Sequence[str]) -> list[Text]:
    """Sampled texts in the format of their prompts.

    Args:
        prompts: P texts or conversations.
        texts: P * G completions.

    Returns:
        P * G strings, or conversations of one assistant message.
    """
    if prompts and not isinstance(prompts[0], str):
        return [[{"role": "assistant", "content": text}] for text in texts]
    return list(texts)


def function_stats(names: Sequence[str], scored: Scored) -> dict[str, Summary]:
    """Mean and deviation of the scores of each function, over the completions that it applies to.

    Returns:
        `rewards/{name}/mean` and `rewards/{name}/std` (of the population) of each function.
    """
    stats: dict[str, Summary] = {}
    for name, column in zip(names, scored.scores.T, strict=True):
        applies = ~column.isnan()
        stats[f"rewards/{name}/mean"] = Mean.of(column, applies)
        stats[f"rewards/{name}/std"] = Deviation.of(column, applies)
    return stats


def reward_stats(names: Sequence[str], scored: Scored, *, num_generations: int) -> dict[str, Summary]:
    """Statistics of scored completions, for `gather_stats`.

    Args:
        names: the names of the F functions.
        scored: B = P * num_generations completions, groups side by side.
        num_generations: completions of a group.

    Returns:
        Those of `function_stats`; `reward`; `reward_std`, the mean over groups of the deviation inside a group (the
        sample's, n - 1), which advantages are divided by; and `frac_reward_zero_std`, the share of groups whose rewards
        are all equal, from which nothing is learnt.
    """
    groups = scored.rewards.view(-1, num_generations)
    return {
        **function_stats(names, scored),
        "reward": Mean.of(scored.rewards),
        "reward_std": Mean.of(groups.std(dim=1, correction=min(1, num_generations - 1))),
        "frac_reward_zero_std": Mean.of((groups.amax(dim=1) == groups.amin(dim=1)).float()),
    }
