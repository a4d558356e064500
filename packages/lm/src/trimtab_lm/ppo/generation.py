"""Where PPOTrainer gets its batches from: prompts, and the responses that the policy or a backend samples."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from trimtab_common.accelerators import WeighingAccelerator
from trimtab_common.run import Run
from trimtab_lm.data.formats import Row
from trimtab_lm.data.prompts import ShuffledBatches, collate_columns, open_prompts, upcoming_queries, used_columns
from trimtab_lm.models.interface import base_of
from trimtab_lm.models.reference import Reference
from trimtab_lm.sampling.asynchronous import AsynchronousRollout, Pending
from trimtab_lm.sampling.backends import make_backend
from trimtab_lm.sampling.batches import AS_MANY_AS_FIT
from trimtab_lm.sampling.generate import sampling_config
from trimtab_lm.sampling.rollout import Rollout as Sampled
from trimtab_lm.sampling.rollout import RolloutBackend, SamplingSettings
from trimtab_lm.tokens.dropout import without_dropout

from .checks import check_generate
from .passes import ForwardPasses
from .sampler import rows_of
from .selfcheck import check_sampler
from .statistics import ended


class Generation(ForwardPasses):
    """The methods of PPOTrainer that read prompts and sample. PPOTrainer's constructor sets the attributes."""

    reference: Reference
    tokenizer: PreTrainedTokenizerBase
    is_encoder_decoder: bool
    accelerator: WeighingAccelerator
    rollout: RolloutBackend | None
    pending: Pending
    dataloader: DataLoader[Any] | None
    rounding: float
    run: Run
    steps_done: int

    @property
    def current_device(self) -> torch.device:
        """Where batches and rewards are: accelerate's device, until another one is assigned."""
        return self._device

    @current_device.setter
    def current_device(self, device: torch.device | str | int) -> None:
        self._device = torch.device(device)

    def _open_data(
        self, dataset: Any, data_collator: Callable[[Sequence[Any]], Any] | None
    ) -> tuple[Any, DataLoader[Any] | None, ShuffledBatches | None]:
        """The prompts, their batches, and the position in them, of which checkpoints hold the state."""
        dataset = open_prompts(
            dataset,
            self.config.query_dataset,
            self.tokenizer,
            is_encoder_decoder=self.is_encoder_decoder,
            is_collated=data_collator is not None,
            num_proc=self.config.dataset_num_proc,
        )
        if dataset is None:
            return None, None, None
        dataloader = self.prepare_dataloader(dataset, data_collator)
        batches = dataloader.batch_sampler
        return dataset, dataloader, batches if isinstance(batches, ShuffledBatches) else None

    def prepare_dataloader(
        self,
        dataset: Dataset | torch.utils.data.Dataset[Any] | Sequence[Any],
        data_collator: Callable[[Sequence[Any]], Any] | None = None,
    ) -> DataLoader[Any]:
        """Shuffled batches of `config.batch_size` rows for this process, on its device, without a remainder.

        The order of the batches comes from `config.seed`; that of `trainer.dataloader` is part of a checkpoint.

        Args:
            dataset: rows by number.
            data_collator: from rows to a batch; by default a batch is a dict of lists, its `input_ids` 1-D tensors.
        """
        if self.config.remove_unused_columns and isinstance(dataset, Dataset):
            # A PeftModel's forward names no columns.
            dataset = used_columns(dataset, base_of(self.model.pretrained_model))
        collate = data_collator or collate_columns
        batches = ShuffledBatches(
            len(dataset),  # type: ignore[arg-type]
            self.config.batch_size,
            seed=self.config.seed,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
        )
        return DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=lambda rows: send_to_device(collate(rows), self.current_device),
            generator=torch.Generator(),  # else each epoch's start, and each resume, draws from torch's global one
        )

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = AS_MANY_AS_FIT,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Responses to queries, from the policy and, if asked, from the reference too.

        The temperature is remembered: `step` takes the log-probabilities at it.

        Args:
            query_tensor: a query [T], or a list of queries.
            length_sampler: draws `max_new_tokens`, once per call.
            batch_size: queries at a time, as many as fit by default; a rollout has a size of its own.
            return_prompt: whether a response begins with its query (causal models).
            generate_ref_response: whether the reference responds as well.
            generation_kwargs: settings of transformers' GenerationConfig; see `Sampler`. A rollout has settings of its
                own and takes none.

        Returns:
            A [1, T] tensor for one query, a list of 1-D tensors for several; a pair of these with
            `generate_ref_response`.
        """
        self.run.interruption.end_if_saved()
        is_single = isinstance(query_tensor, Tensor)
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else query_tensor
        if length_sampler is not None:
            generation_kwargs["max_new_tokens"] = length_sampler()
        if self.rollout is not None:
            check_generate(self.rollout, generation_kwargs, generate_ref_response=generate_ref_response)
            responses = [self._roll_out(self.rollout, queries, return_prompt=return_prompt)]
        else:
            models: list[AbstractContextManager[Any]] = [nullcontext(self.model.pretrained_model)]
            if generate_ref_response:
                models.append(self.reference.active())
            options = {"batch_size": batch_size, "return_prompt": return_prompt, **generation_kwargs}
            whole = self.scorer.whole(has_reference=generate_ref_response)
            with torch.no_grad(), without_dropout(self.model), whole:
                is_first = self.sampler.calls == 0
                responses = self.sampler(models, queries, **options)  # refuses bad queries by name
                if is_first:
                    self._check_sampler(queries, generation_kwargs)
        answers = [rows[0][None] if is_single else rows for rows in responses]
        return tuple(answers) if generate_ref_response else answers[0]

    def _roll_out(self, rollout: RolloutBackend, queries: list[Tensor], *, return_prompt: bool) -> list[Tensor]:
        responses = self._from_backend(rollout, queries, rows_of({"input_ids": queries})).completions
        if self.is_encoder_decoder or not return_prompt:
            return responses
        return [torch.cat(pair) for pair in zip(queries, responses, strict=True)]

    def _sample(self, batch: dict[str, Any], options: Mapping[str, Any]) -> Sampled:
        """Responses to a batch, with what a backend says of them; environments get the columns of the batch."""
        queries = batch["input_ids"]
        if self.rollout is None or options:  # which `generate` refuses beside a rollout
            responses = self.generate(queries, return_prompt=False, **options)
            return Sampled(responses, ended(responses, self.sampler.eos_ids).tolist())
        return self._from_backend(self.rollout, queries, rows_of(batch))

    def _ahead_if_asked(self, backend: RolloutBackend) -> RolloutBackend:
        return AsynchronousRollout(backend, self.pending) if self.config.asynchronous_rollouts else backend

    def _begin_step(self, *, is_last: bool) -> None:
        self.run.begin_step(self.config.output_dir)
        if isinstance(self.rollout, AsynchronousRollout) and self.dataloader is not None:
            upcoming = None if is_last else upcoming_queries(self.dataloader)
            self.sampler.begin_step(self.rollout, self.steps_done, upcoming)

    def _from_backend(self, rollout: RolloutBackend, queries: list[Tensor], rows: Sequence[Row]) -> Sampled:
        with self.scorer.whole(has_reference=False):
            return self.sampler.from_backend(rollout, self.model.pretrained_model, queries, rows)

    def _check_sampler(self, queries: list[Tensor], generation_kwargs: dict[str, Any]) -> None:
        model = self.model.pretrained_model
        config, _ = sampling_config(model, **{"pad_token_id": self.tokenizer.pad_token_id, **generation_kwargs})
        check_sampler(model, partial(self.scorer.policy_alone, temperature=1.0), queries, config, most=self.rounding)

    def _sampling_options(self, generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `generate` for whole batches; makes the sampler where the config names one."""
        config = self.config
        if config.asynchronous_rollouts and self.rollout is None and config.rollout_backend == "transformers":
            raise ValueError("asynchronous_rollouts needs a sampler in another process: rollout_backend='vllm_server'.")
        if config.rollout_backend != "transformers":
            at = {} if config.temperature is None else {"temperature": config.temperature}
            settings = SamplingSettings.of({**at, **generation_kwargs})
            if self.rollout is None or self.rollout.settings != settings:
                backend = make_backend(config.rollout_backend, settings, self.tokenizer, config.rollout_backend_kwargs)
                self.rollout = self._ahead_if_asked(backend)
            return {}
        if self.rollout is not None:
            return dict(generation_kwargs)  # which `generate` refuses
        options = {"do_sample": True, **generation_kwargs}
        return {name: value for name, value in options.items() if name != "return_prompt"}
