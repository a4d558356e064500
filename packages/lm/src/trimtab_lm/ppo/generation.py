"""Samples the responses of PPO, from the policy or from a backend."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import Row
from trimtab_lm.sampling.asynchronous import AsynchronousRollout, Pending
from trimtab_lm.sampling.backends import make_backend
from trimtab_lm.sampling.generate import sampling_config
from trimtab_lm.sampling.rollout import Rollout as Sampled
from trimtab_lm.sampling.rollout import RolloutBackend, SamplingSettings
from trimtab_lm.tokens.dropout import without_dropout

from .checks import check_generate
from .config import PPOConfig
from .policy import ActorCritic, ReferencePolicy, whole_models
from .sampler import Sampler, rows_of
from .score import Padding, padded_inputs, score
from .selfcheck import check_sampler
from .statistics import ended


class Generation:
    """What samples for a trainer.

    Args:
        trainer: a PPOTrainer, with its models. Its `rollout` is what samples; None: the policy.

    Attributes:
        sampler: remembers the temperature, and how many calls there were.
        pending: what is sampled ahead.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.config: PPOConfig = trainer.config
        self.tokenizer: PreTrainedTokenizerBase = trainer.tokenizer
        self.policy: ActorCritic = trainer.bare
        self.reference: ReferencePolicy = trainer.reference_policy
        self.padding: Padding = trainer.padding
        self.device, self.rounding = trainer.accelerator.device, trainer.rounding
        self.sampler = Sampler.of(self.config, self.tokenizer, trainer.accelerator.process_index)
        self.pending = Pending()

    def __call__(self, query_tensor: Tensor | list[Tensor], **options: Any) -> Any:
        """See `PPOTrainer.generate`, whose arguments these are."""
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
            options: of `generate`.
            generate: the trainer's method.
        """
        queries = batch["input_ids"]
        if self.trainer.rollout is None or options:  # which `generate` refuses beside a rollout
            responses = generate(queries, return_prompt=False, **options)
            return Sampled(responses, ended(responses, self.sampler.eos_ids).tolist())
        return self._from_backend(self.trainer.rollout, queries, rows_of(batch))

    def begin_step(self, step: int, upcoming: Callable[[], Sequence[Tensor]] | None) -> None:
        """Tells a sampler that works ahead of the step.

        Args:
            step: PPO steps of the policy so far.
            upcoming: returns the queries to sample ahead; None: nothing.
        """
        if isinstance(self.trainer.rollout, AsynchronousRollout):
            self.sampler.begin_step(self.trainer.rollout, step, None if upcoming is None else upcoming())

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
            padding, device = self.padding, self.device
            return score(self.policy, self.policy, *rows, padding=padding, device=device, temperature=1.0).logprobs

        model = self.policy.pretrained_model
        config, _ = sampling_config(model, **{"pad_token_id": self.tokenizer.pad_token_id, **generation_kwargs})
        check_sampler(model, logprobs_of, queries, config, most=self.rounding)
