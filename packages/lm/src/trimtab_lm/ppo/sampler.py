"""Samples responses, from the policy itself or from any backend, and remembers at which temperature."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab_common.seeding import private_rng, sampling_seed
from trimtab_lm.data.formats import Row
from trimtab_lm.environments.rollout import roll_out
from trimtab_lm.models.interface import Model
from trimtab_lm.sampling.asynchronous import AsynchronousRollout, Request
from trimtab_lm.sampling.generate import eos_token_ids, generate, response_texts, sampling_config
from trimtab_lm.sampling.rollout import Notes, Rollout, RolloutBackend

from .config import PPOConfig


class Sampler:
    """Samples responses at a temperature that it remembers, with random numbers of its own.

    Every call has a stream made from (seed, rank, number of the call): sampling neither moves nor depends on the global
    generators, and goes on where it was after `load_state_dict`. Settings that make the sampler another policy than the
    model are reported once each, with what they do to the KL.

    Args:
        pad_token_id: the id at padding.
        eos_token_id: what ends a response, where the model's generation config does not say it.
        seed: of the sampling.
        rank: of this process.
        temperature: the one that calls must sample at; None lets each call choose.

    Attributes:
        temperature: of the last call that sampled.
        eos_ids: the tokens that end a response, of the last call.
        calls: calls so far.
    """

    def __init__(
        self, pad_token_id: int, eos_token_id: int | None, *, seed: int, rank: int, temperature: float | None = None
    ):
        self.pad_token_id, self.eos_token_id, self.seed, self.rank = pad_token_id, eos_token_id, seed, rank
        self.fixed_temperature = temperature
        self.temperature = temperature or 1.0
        self.eos_ids: list[int] = []
        self.calls = 0
        self._note = Notes()

    @classmethod
    def of(cls, config: PPOConfig, tokenizer: PreTrainedTokenizerBase, rank: int) -> "Sampler":
        """The sampler that the config asks for, on one process."""
        return cls(
            tokenizer.pad_token_id, tokenizer.eos_token_id, seed=config.seed, rank=rank, temperature=config.temperature
        )

    def __call__(
        self,
        models: Sequence[AbstractContextManager[Any]],
        queries: Sequence[Tensor],
        *,
        batch_size: int,
        return_prompt: bool,
        **generation_kwargs: Any,
    ) -> list[list[Tensor]]:
        """The responses of each model, in eval mode, to 1-D queries; see `generate`.

        Args:
            models: contexts that give a model each.
            queries: rows of token ids.
            batch_size: queries at a time.
            return_prompt: whether a response begins with its query.
            generation_kwargs: settings of GenerationConfig.
        """
        _check(queries)
        if self.fixed_temperature is not None:
            generation_kwargs.setdefault("temperature", self.fixed_temperature)
        answers = []
        for context in models:
            with context as model, private_rng(self._next_seed(), model.device):
                config, rest = sampling_config(model, **{"pad_token_id": self.pad_token_id, **generation_kwargs})
                if config.do_sample:
                    self._take_temperature(config.temperature)
                self._note(config)
                self.eos_ids = eos_token_ids(model, self.eos_token_id, config)
                rest |= {"batch_size": batch_size, "return_prompt": return_prompt}
                answers.append(generate(model, queries, config, eos_ids=self.eos_ids, **rest))
        return answers

    def from_backend(
        self, backend: RolloutBackend, model: Model, queries: Sequence[Tensor], rows: Sequence[Row]
    ) -> Rollout:
        """One response to each 1-D query from a backend, by the model's weights as they are; see `roll_out`.

        Every call counts as a change of the weights, because nobody tells whether there was one.
        """
        _check(queries)
        self._take_temperature(backend.settings.temperature)
        self.eos_ids = eos_token_ids(model, self.eos_token_id)
        seed = self._next_seed()
        backend.sync(model, self.calls)
        return roll_out(backend, queries, rows, num_generations=1, version=self.calls, seed=seed)

    def begin_step(self, rollout: AsynchronousRollout, step: int, upcoming: Sequence[Tensor] | None) -> None:
        """Begin a step whose rollout the next call takes; the call after it takes what is sampled ahead.

        Args:
            rollout: samples ahead.
            step: PPO steps of the policy so far.
            upcoming: queries to sample ahead, rows of token ids; None: nothing.
        """
        seed = self._seed_of(self.calls + 2)
        rollout.begin_step(step, None if upcoming is None else Request.of(upcoming, num_generations=1, seed=seed))

    def ends(self, model: Any) -> list[int]:
        """The tokens that end a response of a model: those of the last call, or before the first the model's."""
        return self.eos_ids or eos_token_ids(model, self.eos_token_id)

    def _next_seed(self) -> int:
        self.calls += 1
        return self._seed_of(self.calls)

    def _seed_of(self, call: int) -> int:
        return sampling_seed(self.seed, rank=self.rank, draw=call)

    def _take_temperature(self, temperature: float) -> None:
        if self.fixed_temperature not in (None, temperature):
            raise ValueError(
                f"Asked to sample at temperature {temperature}, but the config says that log-probabilities are "
                f"taken at {self.fixed_temperature}. Make them equal, or leave the config's temperature at None."
            )
        self.temperature = temperature

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "temperature": self.temperature}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls, self.temperature = state["calls"], state["temperature"]


def rows_of(batch: Mapping[str, Sequence[object]]) -> list[Row]:
    """The rows of a batch, as an environment gets them: without `input_ids`, and with the `query` as `prompt`.

    Args:
        batch: columns, `input_ids` among them.
    """
    columns = {"prompt" if name == "query" else name: batch[name] for name in batch if name != "input_ids"}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(batch["input_ids"]))]


def completions_of(
    batch: dict[str, Any],
    responses: Sequence[Tensor],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_encoder_decoder: bool,
) -> tuple[list[str], list[str], list[list[int]], dict[str, Any]]:
    """Prompts, completions, their ids and the batch's other columns, as a `RewardSet` takes them.

    The batch gets the texts too, as `query` and `response`.

    Args:
        batch: columns, `input_ids` among them.
        responses: token ids, 1-D, one per query.
        tokenizer: of the policy.
        is_encoder_decoder: whether the policy is one.
    """
    queries = batch["input_ids"]
    texts = response_texts(tokenizer, queries, responses, is_encoder_decoder=is_encoder_decoder)
    batch["response"] = texts
    if "query" not in batch:
        batch["query"] = tokenizer.batch_decode(queries, skip_special_tokens=True)
    columns = {name: column for name, column in batch.items() if name not in ("query", "response", "input_ids")}
    return batch["query"], texts, [row.tolist() for row in responses], columns


def told_by(sampled: Rollout) -> dict[str, list[Tensor]]:
    """What a rollout tells of its responses, as arguments of `step`."""
    told = {} if sampled.logprobs is None else {"sampler_logprobs": sampled.logprobs}
    if sampled.episodes is not None:
        told |= {"response_masks": sampled.episodes.masks, "response_rewards": sampled.episodes.rewards}
    return told


def _check(queries: Sequence[Tensor]) -> None:
    for i, query in enumerate(queries):
        if not isinstance(query, Tensor):
            raise TypeError(
                f"Query {i} is a {type(query).__name__}; a 1-D tensor of token ids is needed. Tokenize a text: "
                "tokenizer(text, return_tensors='pt').input_ids[0]."
            )
        if query.dim() != 1 or len(query) == 0:
            raise ValueError(
                f"Query {i} has shape {list(query.shape)}: give one 1-D tensor of token ids, or a list of them."
            )
