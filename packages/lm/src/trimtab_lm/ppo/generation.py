"""Samples the responses of PPO, from the policy itself or from any backend, and remembers at which temperature."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from trimtab_common.seeding import private_rng, sampling_seed
from trimtab_lm.data.formats import Row
from trimtab_lm.data.prompts import upcoming_queries
from trimtab_lm.interface import Model
from trimtab_lm.sampling.asynchronous import AsynchronousRollout, Pending
from trimtab_lm.sampling.backends import make_backend
from trimtab_lm.sampling.generate import eos_token_ids, generate, response_texts
from trimtab_lm.sampling.rollout import Notes, RolloutBackend, SamplingSettings, roll_out, sampling_config
from trimtab_lm.sampling.rollout import Rollout as Sampled
from trimtab_lm.tokens.dropout import without_dropout

from .checks import check_generate, check_sampler
from .config import PPOConfig
from .passes import Padding, padded_inputs, score
from .policy import ActorCritic, ReferencePolicy, whole_models
from .statistics import ended


class Trainer(Protocol):
    """What a PPOTrainer has for its generation."""

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    accelerator: Accelerator
    bare: ActorCritic
    reference_policy: ReferencePolicy
    padding: Padding
    rounding: float
    rollout: RolloutBackend | None


class Generation:
    """What samples for a trainer.

    Args:
        trainer: a PPOTrainer, with its models. Its `rollout` is what samples; None: the policy.

    Attributes:
        sampler: remembers the temperature, and how many calls there were.
        pending: what is sampled ahead.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.config, self.tokenizer = trainer, trainer.config, trainer.tokenizer
        self.policy, self.reference, self.padding = trainer.bare, trainer.reference_policy, trainer.padding
        self.rounding = trainer.rounding
        self.sampler = Sampler.of(self.config, self.tokenizer, trainer.accelerator.process_index)
        self.sampler.eos_ids = eos_token_ids(self.policy.pretrained_model, self.tokenizer.eos_token_id)
        self.pending = Pending()

    def __call__(
        self, query_tensor: Tensor | list[Tensor], length_sampler: Callable[[], int] | None, **options: Any
    ) -> Any:
        """See `PPOTrainer.generate`, whose arguments these are."""
        if length_sampler is not None:
            options["max_new_tokens"] = length_sampler()
        is_single = isinstance(query_tensor, Tensor)
        responses = self._responses([query_tensor] if isinstance(query_tensor, Tensor) else query_tensor, **options)
        answers = [rows[0][None] if is_single else rows for rows in responses]
        return tuple(answers) if len(answers) > 1 else answers[0]

    def _responses(
        self,
        queries: list[Tensor],
        *,
        batch_size: int,
        return_prompt: bool,
        generate_ref_response: bool,
        **generation_kwargs: Any,
    ) -> list[list[Tensor]]:
        """Responses of the policy, and if asked of the reference."""
        if self.trainer.rollout is not None:
            check_generate(self.trainer.rollout, generation_kwargs, generate_ref_response=generate_ref_response)
            responses = self._from_backend(self.trainer.rollout, queries, rows_of({"input_ids": queries})).completions
            if self.padding.decoder_start is None and return_prompt:
                responses = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
            return [responses]
        models: list[AbstractContextManager[Any]] = [nullcontext(self.policy.pretrained_model)]
        if generate_ref_response:
            models.append(self.reference.reference.active())
        options = {"batch_size": batch_size, "return_prompt": return_prompt, **generation_kwargs}
        whole = whole_models(self.policy, self.reference if generate_ref_response else None)
        with torch.no_grad(), without_dropout(self.policy.policy), whole:
            is_first = self.sampler.calls == 0
            both = self.sampler(models, queries, **options)  # refuses bad queries by name
            if is_first:
                self._check_sampler(queries, generation_kwargs)
        return both

    def sample(
        self, batch: dict[str, Any], options: Mapping[str, Any], generate: Callable[..., list[Tensor]]
    ) -> Sampled:
        """Responses to a batch, with what a backend says of them; environments get the columns of the batch.

        Args:
            batch: columns, `input_ids` among them.
            options: arguments of `generate`.
            generate: the trainer's method.
        """
        queries = batch["input_ids"]
        if self.trainer.rollout is None or options:  # which `generate` refuses beside a rollout
            responses = generate(queries, return_prompt=False, **options)
            return Sampled(responses, ended(responses, self.sampler.eos_ids).tolist())
        return self._from_backend(self.trainer.rollout, queries, rows_of(batch))

    def begin_step(self, step: int, loader: DataLoader[Any] | None) -> None:
        """Tells a sampler that works ahead of the step.

        Args:
            step: PPO steps of the policy so far.
            loader: has the queries to sample ahead; None: there are none.
        """
        if isinstance(self.trainer.rollout, AsynchronousRollout):
            self.sampler.begin_step(self.trainer.rollout, step, None if loader is None else upcoming_queries(loader))

    def options(self, generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` for whole batches; makes the backend where the config names one."""
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
            return dict(generation_kwargs)  # which `generate` refuses
        options = {"do_sample": True, **generation_kwargs}
        return {name: value for name, value in options.items() if name != "return_prompt"}

    def ahead_if_asked(self, backend: RolloutBackend | None) -> RolloutBackend | None:
        """The backend, which samples ahead if the config says so."""
        is_ahead = backend is not None and self.config.asynchronous_rollouts
        return AsynchronousRollout(backend, self.pending) if backend is not None and is_ahead else backend

    def _from_backend(self, rollout: RolloutBackend, queries: list[Tensor], rows: Sequence[Row]) -> Sampled:
        with whole_models(self.policy):
            return self.sampler.from_backend(rollout, self.policy.pretrained_model, queries, rows)

    def _check_sampler(self, queries: list[Tensor], generation_kwargs: dict[str, Any]) -> None:
        def logprobs_of(queries: list[Tensor], responses: list[Tensor]) -> Tensor:
            rows = (queries, responses, padded_inputs(queries, responses, self.padding))
            return score(self.policy, self.policy, *rows, padding=self.padding, temperature=1.0).logprobs

        model = self.policy.pretrained_model
        config, _ = sampling_config(model, **{"pad_token_id": self.tokenizer.pad_token_id, **generation_kwargs})
        check_sampler(model, logprobs_of, queries, config, most=self.rounding)


class Sampler:
    """Samples responses at a temperature that it remembers, with random numbers of its own.

    Every call has a stream made from (seed, rank, number of the call): sampling neither moves nor depends on the global
    generators, and goes on where it was after `load_state_dict`. Settings that make the sampler another policy than the
    model are reported once each, with what they do to the KL.

    Args:
        pad_token_id: the id at padding.
        eos_token_id: what ends a response, where the model's generation config does not say it.
        seed: seeds the sampling.
        rank: this process's rank.
        temperature: the one that calls must sample at; None lets each call choose.

    Attributes:
        temperature: the temperature of the last call that sampled.
        eos_ids: the tokens that end a response, of the last call, and before the first those of the model.
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
    ) -> Sampled:
        """One response to each 1-D query from a backend, by the model's weights as they are; see `roll_out`.

        Each call passes new weights to the backend: the sampler cannot know whether the caller has changed them.
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
        rollout.begin_step(step, upcoming, num_generations=1, seed=seed)

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

    def state_dict(self) -> dict[str, float]:
        return {"calls": self.calls, "temperature": self.temperature}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.calls, self.temperature = int(state["calls"]), state["temperature"]


def rows_of(batch: Mapping[str, Sequence[object]]) -> list[Row]:
    """The rows of a batch, as an environment gets them: without `input_ids`, and with the `query` as `prompt`.

    Args:
        batch: columns, `input_ids` among them.
    """
    columns = {"prompt" if name == "query" else name: batch[name] for name in batch if name != "input_ids"}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(batch["input_ids"]))]


def completions_of(
    batch: dict[str, Any], sampled: Sampled, tokenizer: PreTrainedTokenizerBase, is_encoder_decoder: bool
) -> tuple[list[str], list[str], list[list[int]], dict[str, Any]]:
    """Prompts, completions, their ids and the batch's other columns, as a `RewardSet` takes them.

    The batch gets the texts too, as `query` and `response`.

    Args:
        batch: columns, `input_ids` among them.
        sampled: a response to each query.
        tokenizer: the policy's tokenizer.
        is_encoder_decoder: whether the policy is one.
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
