"""What PPOTrainer offers besides the algorithm: batches, samples, statistics and files."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from trimtab_common.accelerators import WeighingAccelerator
from trimtab_common.config import to_flat_dict
from trimtab_common.hub import write_model_card
from trimtab_common.kl import FixedKLController
from trimtab_common.ranks import begin, phase
from trimtab_common.run import Run
from trimtab_common.sharding import divides_weights
from trimtab_common.stats import RunningMoments, gather_over_ranks, gather_stats
from trimtab_common.tracking import Tracker
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

from .checks import check_generate, check_logged
from .passes import ForwardPasses
from .sampler import rows_of
from .selfcheck import check_sampler
from .statistics import Clock, Rollout, as_numbers, ended, one_dimensional, rollout_stats, token_stats

USAGE = """from transformers import AutoTokenizer
from trimtab_lm import {model}

model = {model}.from_pretrained("{repo_id}")  # transformers' own Auto classes load the language model alone
tokenizer = AutoTokenizer.from_pretrained("{repo_id}")"""


class PolicyServices(ForwardPasses):
    """The methods of PPOTrainer that are no part of the algorithm. PPOTrainer's constructor sets the attributes."""

    reference: Reference
    tokenizer: PreTrainedTokenizerBase
    is_encoder_decoder: bool
    accelerator: WeighingAccelerator
    optimizer: torch.optim.Optimizer
    kl_ctl: FixedKLController
    running: RunningMoments
    rollout: RolloutBackend | None
    pending: Pending
    dataloader: DataLoader[Any] | None
    rounding: float
    run: Run
    steps_done: int
    best_score: float

    @property
    def model_params(self) -> list[nn.Parameter]:
        """The parameters that train: of the policy, and of the critic where there is one."""
        return [parameter for parameter in self.actor_critic.parameters() if parameter.requires_grad]

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

    @phase("generation")
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
        begin(f"step {self.steps_done + 1}")
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
        begin(f"step {self.steps_done + 1}")
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

    # ---------------------------------------------------------------- scores and statistics

    def _shaped(self, scores: Tensor, responses: list[Tensor]) -> Tensor:
        """Scores less the penalty for a missing end token, then scaled, normed and clipped as the config says."""
        config = self.config
        if config.missing_eos_penalty is not None:
            unended = ~ended(responses, self.sampler.ends(self.model))
            scores = scores - config.missing_eos_penalty * unended
        if config.use_score_scaling:
            self.running.update(scores)
            scores = (scores - (self.running.mean if config.use_score_norm else 0.0)) / self.running.std
        return scores if config.score_clip is None else scores.clamp(-config.score_clip, config.score_clip)

    def _step_stats(self, rollout: Rollout, train_stats: Mapping[str, Tensor], clock: Clock) -> dict[str, Any]:
        """The statistics of a step, over all processes."""
        stats = self.record_step_stats(kl_coef=self.kl_ctl.value, **rollout.step_data(), train_stats=train_stats)
        clock.lap("calc_stats")
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        stats |= token_stats(rollout.samples, self.tokenizer, ends=self.sampler.ends(self.model))
        stats = one_dimensional({**stats, "ppo/learning_rate": learning_rate, **clock.stats()})
        return as_numbers(self.gather_stats(stats))

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """This process's statistics of a step, under their documented names.

        Args:
            kl_coef: the coefficient of the KL penalty in this step.
            data: `queries`, `responses` and `scores` of the batch; `masks`, `logprobs`, `ref_logprobs`, `kls`,
                `non_score_reward`, `values`, `advantages`, `returns` and `entropy` [B, R], 0 where the mask is 0; and
                `train_stats`, of the updates: tensors whose mean over the first axis is the statistic.
        """
        train_stats = data.pop("train_stats")
        return {
            **rollout_stats(kl_coef=kl_coef, **data),
            **{f"ppo/{name}": value.mean(0) for name, value in train_stats.items()},
        }

    def gather_stats(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """The statistics of all processes: floats and 1-D tensors, equal on each of them."""
        return gather_stats(stats)

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: Mapping[str, Sequence[Any]],
        rewards: Sequence[Any],
        columns_to_log: Sequence[str] = ("query", "response"),
    ) -> dict[str, Any]:
        """Send a step's statistics to the tracker, with the rewards; every `log_table_every` steps a table of samples.

        Args:
            stats: of `step`.
            batch: columns of this process's batch.
            rewards: one number per response of this process.
            columns_to_log: columns of `batch` for the table.

        Returns:
            The statistics that were sent.
        """
        check_logged(batch, rewards, columns_to_log)
        rows = list(zip(*(batch[name] for name in columns_to_log), map(float, rewards), strict=True))
        gathered = [row for part in gather_over_ranks(rows) for row in part]
        distribution = torch.tensor([row[-1] for row in gathered])
        logs = {
            **stats,
            "env/reward_mean": float(distribution.mean()),
            "env/reward_std": float(distribution.std(correction=0)),
            "env/reward_dist": distribution,
        }
        self.tracker.log(logs, self.steps_done)
        if (self.steps_done - 1) % self.config.log_table_every == 0:
            self.tracker.table("game_log", [*columns_to_log, "reward"], gathered, self.steps_done)
        return logs

    @property
    def tracker(self) -> Tracker:
        """Where statistics go; started at its first use, so that a resumed run goes on under its id."""
        return self.run.tracker

    # ---------------------------------------------------------------- files

    def save_checkpoint(self, output_dir: str | Path | None = None) -> Path:
        """Write everything that the next step depends on, atomically, as `checkpoint-<steps>` into `output_dir`.

        Args:
            output_dir: the folder of checkpoints; default: the config's.
        """
        root = output_dir or self.config.output_dir
        if root is None:
            raise ValueError("save_checkpoint needs a folder: give it one, or PPOConfig(output_dir=...).")
        return self.run.save(root, self.steps_done, keep=self.config.save_total_limit)

    def load_checkpoint(self, path: str | Path) -> None:
        """Go on from a checkpoint, in a trainer with the models, config and data of the one that saved it."""
        self.run.load(path)

    def _resume(self, where: str | Path | None) -> None:
        """Go on from a checkpoint, or begin a run in the config's `output_dir`.

        Args:
            where: a checkpoint's folder, or "latest" for the newest in `output_dir`, if there is one; None: begin.

        Raises:
            CheckpointError: a new run would save beside the checkpoints of another.
        """
        root = self.config.output_dir
        if where == "latest" and root is None:
            raise ValueError('resume_from="latest" looks into PPOConfig(output_dir=...), which is None.')
        if where is not None:
            self.run.resume(where, root or where)
        elif root is not None and self.config.save_steps:
            self.run.record.claim(root)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the policy with its value head, the tokenizer and a model card into one folder.

        Collective where the processes share the weights (FSDP, DeepSpeed): call it on each of them.

        Args:
            save_directory: the folder, which is created if need be.
            kwargs: of the model's `save_pretrained`.
        """
        self._write_policy(str(save_directory), self._full_weights(), **kwargs)

    @phase("saving")
    def _full_weights(self) -> dict[str, Tensor] | None:
        """The policy's weights, gathered on the main process; None where each process has them. Collective."""
        if not divides_weights(self.accelerator):
            return None
        weights = self.accelerator.get_state_dict(self.actor_critic) or {}
        policy = {name: weight for name, weight in weights.items() if name.startswith("policy.")}
        return {name.removeprefix("policy."): weight for name, weight in policy.items()}

    def _write_policy(
        self, folder: str, weights: Mapping[str, Tensor] | None, repo_id: str | None = None, **kwargs: Any
    ) -> None:
        if self.accelerator.is_main_process:
            self.model.save_pretrained(folder, **{"state_dict": weights, **kwargs})
            self.tokenizer.save_pretrained(folder)
            self.create_model_card(folder, repo_id=repo_id)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> CommitInfo | None:
        """Upload what `save_pretrained` writes; arguments as of the model's `push_to_hub`. Collective likewise."""
        weights = self._full_weights()
        return self.run.push(lambda folder: self._write_policy(folder, weights, repo_id), repo_id, **kwargs)

    def _push_if_best(self, mean_score: float) -> None:
        options = self.config.push_to_hub_if_best_kwargs
        if options and self.steps_done % self.config.compare_steps == 0 and mean_score > self.best_score:
            self.best_score = mean_score
            self.push_to_hub(**options)

    def create_model_card(self, path: str, model_name: str | None = "TRL Model", *, repo_id: str | None = None) -> None:
        """Write a model card, README.md, into a folder.

        Args:
            path: the folder.
            model_name: the title.
            repo_id: what the model is loaded by; default: the folder's name.
        """
        write_model_card(
            path,
            name=model_name or "Model",
            trainer=type(self).__name__,
            paper="Ziegler et al. 2019, arXiv:1909.08593",
            usage=USAGE.replace("{model}", type(self.model).__name__),
            library="transformers",
            repo_id=repo_id,
            base_model=self.model.config.name_or_path or None,
            settings={name: value for name, value in to_flat_dict(self.config).items() if value not in (None, {})},
        )
