"""Samples the responses of PPO from the policy or a backend, and remembers the temperature."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from trimtab_common.seeding import private_rng, sampling_seed
from trimtab_lm.data.formats import Row
from trimtab_lm.data.prompts import upcoming_queries
from trimtab_lm.sampling.backends import make_backend
from trimtab_lm.sampling.generate import generate, response_texts
from trimtab_lm.sampling.rollout import (
    Notes,
    RolloutBackend,
    SamplingSettings,
    distortions,
    eos_token_ids,
    new_version,
    roll_out,
    sampling_config,
)
from trimtab_lm.sampling.rollout import Rollout as Sampled
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.ids import check_ids, vocabulary_size

from .checks import check_generate, check_sampler
from .passes import Trainer
from .policy import whole_models
from .statistics import ended


class Sampler:
    """Samples for a trainer with its own random numbers, and remembers the temperature.

    Every call has a stream made from (seed, rank, number of the call): sampling neither moves nor depends on the global
    generators, and goes on where it was after `load_state_dict`. Settings that make the sampler another policy than the
    model are reported once each, with what they do to the KL.

    Args:
        trainer: a PPOTrainer, with its models. Its `rollout` is what samples; None: the policy.

    Attributes:
        temperature: the temperature of the last call that sampled.
        eos_ids: the end tokens of the last call; before the first call, the model's.
        calls: calls so far.
        pending: what is sampled ahead, if rollouts are asynchronous.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.config, self.tokenizer = trainer, trainer.config, trainer.tokenizer
        self.policy, self.reference = trainer.bare, trainer.reference_policy
        self.temperature, self.calls = self.config.temperature or 1.0, 0
        self.eos_ids = eos_token_ids(self.policy.pretrained_model, self.tokenizer.eos_token_id)
        self._note, self.pending = Notes(), None
        if self.config.asynchronous_rollouts:
            from trimtab_lm.sampling.asynchronous import Pending

            self.pending = Pending()

    def __call__(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None,
        batch_size: int,
        return_prompt: bool,
        generate_ref_response: bool,
        **generation_kwargs: Any,
    ) -> Any:
        """See `PPOTrainer.generate`, whose arguments these are."""
        if length_sampler is not None:
            generation_kwargs["max_new_tokens"] = length_sampler()
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else query_tensor
        if (backend := self.trainer.rollout) is not None:
            check_generate(backend, generation_kwargs, generate_ref_response=generate_ref_response)
            responses = self._from_backend(backend, queries, rows_of({"input_ids": queries})).completions
            if self.trainer.padding.decoder_start is None and return_prompt:
                responses = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
            answers = [responses]
        else:
            check_ids("queries", queries, vocabulary_size(self.policy.pretrained_model))
            options, is_first = {"batch_size": batch_size, "return_prompt": return_prompt}, self.calls == 0
            whole = whole_models(self.policy, self.reference if generate_ref_response else None)
            # only the forward of policy and values as a whole is prepared for mixed precision
            mixed = self.trainer.accelerator.autocast()
            with torch.no_grad(), without_dropout(self.policy.policy), whole, mixed:
                answers = [self._from_model(self.policy.pretrained_model, queries, generation_kwargs, options)]
                if generate_ref_response:
                    with self.reference.reference.active() as model:
                        answers.append(self._from_model(model, queries, generation_kwargs, options))
                if is_first and queries:
                    settings = sampling_config(self.policy.pretrained_model, self.tokenizer, **generation_kwargs)
                    check_sampler(self.trainer, queries, settings[0])
        returned = [rows[0][None] if isinstance(query_tensor, Tensor) else rows for rows in answers]
        return tuple(returned) if generate_ref_response else returned[0]

    def _from_model(
        self, model: Any, queries: list[Tensor], generation_kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[Tensor]:
        fixed = {} if self.config.temperature is None else {"temperature": self.config.temperature}
        with private_rng(self._next_seed(), model.device):
            config, rest = sampling_config(model, self.tokenizer, **{**fixed, **generation_kwargs})
            if config.do_sample:
                self._take_temperature(config.temperature)
            self._note(distortions(config))
            self.eos_ids = rest["eos_ids"]
            return generate(model, queries, config, **rest, **options)

    def _from_backend(self, backend: RolloutBackend, queries: list[Tensor], rows: Sequence[Row]) -> Sampled:
        """One response to each query, by the policy's present weights; see `roll_out`.

        Each call passes new weights to the backend: the sampler cannot know whether the caller has changed them.
        """
        check_ids("queries", queries, vocabulary_size(self.policy.pretrained_model))
        self._take_temperature(backend.settings.temperature)
        self.eos_ids = backend.settings.end_tokens(self.policy.pretrained_model, self.tokenizer)
        seed, version = self._next_seed(), new_version()
        with whole_models(self.policy):
            backend.sync(self.policy.pretrained_model, version)
            return roll_out(backend, queries, rows, num_generations=1, version=version, seed=seed)

    def sample(
        self, batch: dict[str, Any], options: Mapping[str, Any], generate: Callable[..., list[Tensor]]
    ) -> Sampled:
        """Responses to a batch, with the backend's records; environments get the columns of the batch."""
        queries = batch["input_ids"]
        if self.trainer.rollout is None:
            responses = generate(queries, return_prompt=False, **options)
            return Sampled(responses, ended(responses, self.eos_ids).tolist())
        return self._from_backend(self.trainer.rollout, queries, rows_of(batch))

    def begin_step(self, step: int, loader: DataLoader[Any] | None) -> None:
        """Tells a rollout that works ahead of the step, whose responses the next call takes.

        Args:
            step: PPO steps of the policy so far.
            loader: has the queries to sample ahead, which the call after the next takes; None: there are none.
        """
        if self.pending is not None:
            upcoming, seed = None if loader is None else upcoming_queries(loader), self._seed_of(self.calls + 2)
            ahead: Any = self.trainer.rollout
            ahead.begin_step(step, upcoming, num_generations=1, seed=seed)

    def options(self, generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` for whole batches; makes the backend if the config names one."""
        config = self.config
        if config.asynchronous_rollouts and self.trainer.rollout is None and config.rollout_backend == "transformers":
            raise ValueError("asynchronous_rollouts needs a sampler in another process: rollout_backend='vllm_server'.")
        if config.rollout_backend != "transformers":
            at = {} if config.temperature is None else {"temperature": config.temperature}
            settings = SamplingSettings.of({**at, **generation_kwargs})
            if self.trainer.rollout is None or self.trainer.rollout.settings != settings:
                backend = make_backend(config.rollout_backend, settings, self.tokenizer, config.rollout_backend_kwargs)
                self.trainer.rollout = self.ahead_if_asked(backend)
            return {}
        if self.trainer.rollout is not None:
            if generation_kwargs:
                check_generate(self.trainer.rollout, generation_kwargs, generate_ref_response=False)
            return {}
        options = {"do_sample": True, **generation_kwargs}
        return {name: value for name, value in options.items() if name != "return_prompt"}

    def ahead_if_asked(self, backend: RolloutBackend | None) -> RolloutBackend | None:
        """The backend, which samples ahead if the config says so."""
        if backend is None or self.pending is None:
            return backend
        from trimtab_lm.sampling.asynchronous import AsynchronousRollout

        return AsynchronousRollout(backend, self.pending)

    def _next_seed(self) -> int:
        self.calls += 1
        return self._seed_of(self.calls)

    def _seed_of(self, call: int) -> int:
        return sampling_seed(self.config.seed, rank=self.trainer.accelerator.process_index, draw=call)

    def _take_temperature(self, temperature: float) -> None:
        fixed = self.config.temperature
        if fixed not in (None, temperature):
            raise ValueError(
                f"Asked to sample at temperature {temperature}, but the config says that log-probabilities are "
                f"taken at {fixed}. Make them equal, or leave the config's temperature at None."
            )
        self.temperature = temperature

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "temperature": self.temperature, "eos_ids": self.eos_ids}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.calls, self.temperature = int(state["calls"]), state["temperature"]
        self.eos_ids = state.get("eos_ids", self.eos_ids)  # of an earlier version: without them


def rows_of(batch: Mapping[str, Sequence[object]]) -> list[Row]:
    """The rows of a batch for an environment: without `input_ids`, and with the `query` as `prompt`."""
    columns = {"prompt" if name == "query" else name: batch[name] for name in batch if name != "input_ids"}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(batch["input_ids"]))]


def completions_of(
    batch: dict[str, Any], sampled: Sampled, tokenizer: PreTrainedTokenizerBase, is_encoder_decoder: bool
) -> tuple[list[str], list[str], list[list[int]], dict[str, Any]]:
    """Prompts, completions, their ids and the batch's other columns, as a `RewardSet` takes them.

    The batch gets the texts too, as `query` and `response`.
    """
    queries, responses = batch["input_ids"], sampled.completions
    texts = response_texts(tokenizer, queries, responses, is_encoder_decoder=is_encoder_decoder)
    batch["response"] = texts
    if "query" not in batch:
        batch["query"] = tokenizer.batch_decode(queries, skip_special_tokens=True)
    columns = {name: column for name, column in batch.items() if name not in ("query", "response", "input_ids")}
    return batch["query"], texts, [row.tolist() for row in responses], columns


def step_arguments(sampled: Sampled) -> dict[str, list[Tensor]]:
    """What `PPOTrainer.step` takes beside the responses: the sampler's log-probabilities, and an environment's part."""
    known = {} if sampled.logprobs is None else {"sampler_logprobs": sampled.logprobs}
    if sampled.episodes is not None:
        known |= {"response_masks": sampled.episodes.masks, "response_rewards": sampled.episodes.rewards}
    return known
