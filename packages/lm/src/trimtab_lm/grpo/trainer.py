"""GRPO on transformers.Trainer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import TrainOutput

from trimtab_common.kl import k3
from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import Mean, gather_over_ranks
from trimtab_lm.data.prompts import PROMPT_IDS, tokenize_prompts
from trimtab_lm.data.tokenization import require_eos
from trimtab_lm.hf.checkpoints import CheckpointedTrainer
from trimtab_lm.hf.support import (
    device_share,
    load_language_model,
    load_processing_class,
    own_arguments,
    prepare_trackers,
    require_finite,
    window_total,
    with_adapters,
)
from trimtab_lm.legacy.arguments import takes_constructor_of_2024
from trimtab_lm.models.reference import Reference
from trimtab_lm.rewards.functions import RewardSet, Scored, as_completions
from trimtab_lm.sampling.generate import response_texts
from trimtab_lm.sampling.rollout import RolloutBackend
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.forward import base_of, best_layout, score_tokens_in_forward
from trimtab_lm.tokens.layout import token_columns
from trimtab_lm.tokens.positions import Positions

from .batches import (
    Group,
    PromptBatches,
    PromptLoader,
    RolloutBuffer,
    as_groups,
    as_list,
    column,
    everyones_advantages,
    micro_batch,
    window_of,
)
from .config import GRPOConfig
from .loss import LOG_RATIOS, Window, corrected_k3, policy_losses, policy_stats, token_weights
from .saving import load_state, save_state
from .selfcheck import check_start, tolerance
from .setup import make_backend, own_random_numbers, real_rows, reference_of
from .statistics import Journal, mismatch_stats

EVALUATION = 2**31  # draws of evaluation begin here: steps of training, which number its draws, never get so far


class GRPOTrainer(CheckpointedTrainer):
    """Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300).

    model: a causal or encoder-decoder model, with adapters or without, or the name of one. With beta > 0 the reference
        is the model as it is now: with its adapters off where it has some, else a frozen copy.
    reward_funcs: callables, plain or async, and reward models, one or several: see `RewardSet`. They are given
        `prompts`, `completions`, `completion_ids` and the dataset's other columns; random numbers that they draw from
        the global generators are fixed by (seed, rank, step), and those of training are not moved.
    train_dataset, eval_dataset (or a dict of several): a `prompt` column, of texts or conversations, and any others.
    reward_processing_classes: tokenizers of the reward models. peft_config: adapters to add.
    rollout: what samples, instead of the backend that the config names.

    Of a dataset, what is left over after the last whole call of generation is not used in that epoch.
    """

    loss_is_scaled_for_ga = True  # compute_loss divides by what the whole optimizer step holds
    _config: GRPOConfig
    _is_checked: bool  # has the first update been seen to start from where the rollout was?

    @takes_constructor_of_2024(GRPOConfig)
    def __init__(
        self,
        model: Any = None,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: PeftConfig | None = None,
        rollout: RolloutBackend | None = None,
        model_init: Callable[..., Any] | None = None,
    ):
        self._config = args = own_arguments(args, train_dataset)
        processing_class = load_processing_class(processing_class, model)
        self.tokenizer = getattr(processing_class, "tokenizer", processing_class)
        eos, pad = require_eos(self.tokenizer), self.tokenizer.pad_token_id
        self.peft_config = peft_config
        self.reference: Reference | None = None
        if model is not None:
            model = self._made_trainable(load_language_model(model, args.model_init_kwargs))
        super().__init__(
            model=model,
            args=args,
            data_collator=as_list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        prepare_trackers(args)
        if args.n_gpu > 1:
            raise ValueError(
                f"This one process sees {args.n_gpu} GPUs, among which completions cannot be divided. Start a process "
                "for each (accelerate launch), or show it one (CUDA_VISIBLE_DEVICES=0)."
            )
        base = base_of(self.model)
        is_encoder_decoder = bool(base.config.is_encoder_decoder)
        self.texts_of = partial(response_texts, self.tokenizer, is_encoder_decoder=is_encoder_decoder)
        self.lay_out = partial(
            micro_batch,
            layout=best_layout(self.model, share_prefix=True),
            pad_token_id=eos if pad is None else pad,  # what pads is told by its place
            decoder_start_token_id=getattr(base.config, "decoder_start_token_id", None),
        )
        self.rewards = RewardSet(
            reward_funcs, args.reward_weights, reward_processing_classes, names=args.reward_names, device=args.device
        )
        self.backend = make_backend(args, self.tokenizer) if rollout is None else rollout
        self.positions = Positions.of(self.model)
        self.version = 0  # of the weights, as backends count it
        self._evaluated = 0
        self._until_backward: ExitStack | None = None
        self._begin()
        self.tokenized = partial(
            tokenize_prompts,
            tokenizer=self.tokenizer,
            is_encoder_decoder=is_encoder_decoder,
            needed_for="GRPO",
            max_length=args.max_prompt_length,
            # A sampler of the caller's has a limit of its own, so that its completions are measured as they come.
            max_completion_length=args.max_completion_length if rollout is None else 0,
            positions=self.positions,
            chat_template_kwargs=args.chat_template_kwargs,
            num_proc=args.dataset_num_proc,
        )
        with args.main_process_first(desc="tokenizing"):
            self.train_dataset, self.eval_dataset = self.tokenized(train_dataset), self.tokenized(eval_dataset)

    # Data ------------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """Each batch holds the prompts of one call of generation, and comes as often as that serves a micro-batch."""
        if self.train_dataset is None:
            raise ValueError("GRPOTrainer: training requires a train_dataset.")
        args, rows = self._config, cast(Dataset, self.train_dataset)
        batches = PromptBatches(
            len(rows),
            prompts_per_step=self._train_batch_size * args.gradient_accumulation_steps,
            steps=args.steps_per_generation,
            repeats=self.buffer.micro_batches * self.buffer.passes,
            seed=args.seed if args.data_seed is None else args.data_seed,
            rank=args.process_index,
            world_size=args.world_size,
            shuffle=args.shuffle_dataset and args.train_sampling_strategy == "random",
        )
        return PromptLoader(
            rows,
            batches,
            num_workers=args.dataloader_num_workers,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            in_order=args.dataloader_in_order,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches of prompts; a dataset that was not given to the constructor is tokenized here."""
        is_name = isinstance(eval_dataset, str)
        return super().get_eval_dataloader(eval_dataset if is_name else self.tokenized(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Batches of prompts for `predict`, whose metrics are those of an evaluation."""
        return super().get_test_dataloader(self.tokenized(test_dataset))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of an optimizer step, out of a new rollout if one is due, and what their loss divides by.

        Generation is here and not in training_step, because that has to know how many tokens the whole step learns
        from before its first micro-batch.
        """
        drawn, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = []
        for rows in drawn:
            if self.buffer.is_used_up or len(self.buffer.groups) != len(rows):
                self._roll_out_for_training(rows)
            batches.append(self.lay_out(self.buffer.next()))
        return batches, self._window([group for batch in batches for group in batch["groups"]])

    # Algorithm 1 of the paper ----------------------------------------------------------------------------------------

    def _roll_out_for_training(self, rows: list[dict[str, Any]]) -> None:
        """Lines 5 to 9: sample a group for each prompt, score it, compute advantages; what the policy thought of it."""
        args, draw = self._config, self.state.global_step
        groups = self.roll_out(rows, draw=draw, training=True)
        # As long as the policy has not moved since it sampled, its own log-probabilities are the old ones.
        is_moving = args.steps_per_generation * args.num_iterations > 1
        for part in self.buffer.slices(groups):
            if is_moving:
                self._attach("old", part, self.model_wrapped)
            self._attach_reference(part)
        self.buffer.fill(groups, seed=self._seed(draw))
        own = sum(len(group.prompt) + len(ids) for group in groups for ids in group.completions)
        self.num_tokens += sum(gather_over_ranks(own))

    def roll_out(
        self, rows: Sequence[Mapping[str, Any]], *, draw: int, training: bool, count: int | None = None
    ) -> list[Group]:
        """A group of completions for each row, with its advantages; statistics are recorded of the first `count`.

        draw: which random numbers to take. With scale_rewards="batch" collective: the same number of calls everywhere.
        """
        args, seed = self._config, self._seed(draw)
        prompts = [torch.tensor(row[PROMPT_IDS]) for row in rows]
        with own_random_numbers(seed):
            self.backend.sync(self.accelerator.unwrap_model(self.model), self.version)
            rollout = self.backend.generate(
                prompts, num_generations=args.num_generations, version=self.version, seed=seed
            )
            each = [prompt for prompt in prompts for _ in range(args.num_generations)]
            is_encoder_decoder = bool(base_of(self.model).config.is_encoder_decoder)
            remedy = "Let the rollout sample fewer tokens, or lower max_prompt_length."
            for prompt, ids in zip(each, rollout.completions, strict=True):
                self.positions.check_sample(len(prompt), len(ids), is_encoder_decoder=is_encoder_decoder, remedy=remedy)
            texts = self.texts_of(each, rollout.completions)
            scored = self._score(rows, texts, [ids.tolist() for ids in rollout.completions])
        shape = (len(rows), args.num_generations)
        counted = torch.tensor(rollout.ended).view(shape) | (not args.mask_truncated_completions)
        found = everyones_advantages(
            scored.rewards.view(shape), counted, scale=str(args.scale_rewards), rank=args.process_index
        )
        groups = as_groups(prompts, rollout, is_counted=counted, advantages=found)
        real = groups[:count]
        read = self.tokenizer.batch_decode([group.prompt for group in real])
        self.journal.add_rollout(real, rollout, scored, prompts=read, completions=texts, training=training)
        return groups

    def _score(
        self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], completions: Sequence[list[int]]
    ) -> Scored:
        given = [row["prompt"] for row in rows]
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", PROMPT_IDS)}
        return self.rewards(given, as_completions(given, texts), completions, columns)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The clipped surrogate and the KL, as this micro-batch's part of the loss of the step.

        num_items_in_batch: the step's `Window`; None, the micro-batch alone.
        """
        args, groups, training = self._config, inputs["groups"], model.training
        with ExitStack() as until_here:
            if args.disable_dropout:
                (self._until_backward or until_here).enter_context(without_dropout(model))
            scores = model(tokens=token_columns(inputs), temperature=args.temperature)
        logprobs, sequence, lengths = scores.logprobs, inputs["sequence"], inputs["lengths"]
        old, ref = column(groups, "old", logprobs.device), column(groups, "ref", logprobs.device)
        old = logprobs.detach() if old is None else old
        own = torch.cat([group.advantages for group in groups]).to(logprobs)[sequence]

        log_ratio = LOG_RATIOS[args.importance_sampling_level](logprobs, old, sequence, lengths)
        losses, kl = policy_losses(log_ratio, own, **args.clip), None
        if ref is not None:
            kl = corrected_k3(logprobs, old, ref) if args.use_bias_correction_kl else k3(logprobs, ref)
            losses = losses + args.beta * kl
        window = num_items_in_batch or window_of(groups)
        limit = args.max_completion_length
        weights = token_weights(args.loss_type, sequence, lengths, window=window, max_completion_length=limit)
        loss = (weights * losses).sum() * window.ranks

        stats = policy_stats(log_ratio, own, **args.clip, kl=kl) | {"entropy": Mean.of(scores.entropy)}
        if (sampled := column(groups, "sampler", logprobs.device)) is not None:
            stats |= mismatch_stats(old, sampled, lengths=lengths)
        if not training:
            weight = window.tokens if args.loss_type in ("bnpo", "dapo") else window.sequences
            stats["loss"] = Mean(loss.detach() * weight, weight)
        elif not self._is_checked:
            check_start(logprobs, old, ref, most=tolerance(self.model, args))
            self._is_checked = True
        self.journal.recorder.add(stats, training=training)
        return (loss, scores) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch; TrainingDivergedError before a loss that is not finite can train."""
        with ExitStack() as stack:
            self._until_backward = stack  # dropout stays off for checkpointed blocks, which run again in backward
            stack.callback(setattr, self, "_until_backward", None)
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self.version += 1  # the optimizer comes next
        return require_finite(loss, self)

    def _window(self, groups: Sequence[Group]) -> Window:
        """What the loss of an optimizer step divides by. Collective."""
        own = window_of(groups)
        sequences, tokens = (int(window_total(self, [count])) for count in (own.sequences, own.tokens))
        return Window(sequences, tokens, rank_tokens=own.tokens, ranks=device_share(self))

    @torch.no_grad()
    def _attach(self, name: str, groups: Sequence[Group], model: Any) -> None:
        """Give each group the log-probabilities that `model` gives its tokens."""
        batch = self._prepare_inputs(self.lay_out(groups))
        with without_dropout(model), self.accelerator.autocast():
            logprobs = model(tokens=token_columns(batch), temperature=self._config.temperature).logprobs.cpu()
        for group, part in zip(groups, logprobs.split([group.num_tokens for group in groups]), strict=True):
            group.logprobs[name] = part.clone()

    def _attach_reference(self, groups: Sequence[Group]) -> None:
        if self.reference is not None:
            with self.reference.active() as reference:
                self._attach("ref", groups, reference)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Completions of a batch of prompts, their rewards, and the loss on them."""
        real = real_rows(self.accelerator.gradient_state, len(inputs), self.args.process_index)
        groups = self.roll_out(inputs, draw=EVALUATION + self._evaluated, training=False, count=real)
        self._evaluated += 1
        for repeated in groups[real:]:
            repeated.is_counted = [False] * len(repeated.completions)
            repeated.logprobs = {name: values[:0] for name, values in repeated.logprobs.items()}
        self._attach_reference(groups)
        batch = self._prepare_inputs(self.lay_out(groups))
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, batch).detach(), None, None

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As in transformers, with the statistics of the completions; every evaluation samples by the same seeds."""
        self._evaluated = 0
        self.version += 1  # whoever changed the weights meanwhile
        arguments = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        with own_random_numbers(self._seed(EVALUATION)):  # a data loader draws some too
            output = super().evaluation_loop(*arguments)
        assert output.metrics is not None
        prefix = f"{metric_key_prefix}_"
        output.metrics.update(self.journal.numbers(training=False, prefix=prefix))
        self.journal.show(self, f"{prefix}completions", training=False)
        return output

    # Logs ------------------------------------------------------------------------------------------------------------

    def hyperparameter_search(
        self, hp_space: Any = None, compute_objective: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers, whose objective would sum all statistics; here it is the mean reward, to be maximised."""
        objective = compute_objective or itemgetter("eval_reward")
        return super().hyperparameter_search(hp_space, objective, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what was recorded since the last time, and warn of what looks unhealthy."""
        if "loss" in logs:
            numbers = self.journal.numbers(training=True)
            logs = numbers | {"num_tokens": self.num_tokens} | self.journal.warn(numbers) | logs
            self.journal.show(self, "completions", training=True)
        super().log(logs, start_time)

    # Saving and resuming ---------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> TrainOutput:
        """Train; from a checkpoint in the middle of a rollout, with what is left of that."""
        self._begin()
        self.version += 1
        output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        self.version += 1  # the best model may have been loaded
        return output

    def open_run(self, resume_from_checkpoint: str | Path | bool | None, trial: Any = None) -> str | None:
        """Begin a run, or take one up, with the rollout that its checkpoint was in. Collective."""
        checkpoint = super().open_run(resume_from_checkpoint, trial)
        if checkpoint is not None:
            self._is_checked = True  # policy and reference have parted
            if (state := load_state(checkpoint, self.args.process_index)) is not None:
                self.buffer.load_state_dict(state["buffer"])
                self.journal.health.load_state_dict(state["health"])
                self.num_tokens = state["num_tokens"]
        return checkpoint

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; into a checkpoint the rollout that is in use too, of each process its own."""
        super().save_model(output_dir, _internal_call)
        if output_dir is not None and _internal_call and not self.args.save_only_model:
            buffer, health = self.buffer.state_dict(), self.journal.health.state_dict()
            state = {"buffer": buffer, "health": health, "num_tokens": self.num_tokens}
            save_state(output_dir, self.args.process_index, state)

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model from `model_init`, with adapters and a reference where they are asked for."""
        return self._made_trainable(super().call_model_init(trial))

    def _begin(self) -> None:
        args = self._config
        self.buffer = RolloutBuffer(
            micro_batches=args.gradient_accumulation_steps * args.steps_per_generation, passes=args.num_iterations
        )
        self.journal = Journal(self.rewards.names, printed=args.num_completions_to_print if args.log_completions else 0)
        self.num_tokens = 0  # sampled and read, by all processes
        self._is_checked = False

    def _made_trainable(self, model: Any) -> Any:
        model = with_adapters(model, self.peft_config, self._config)
        if self._config.beta:
            self.reference = reference_of(model, self._config.device)
        score_tokens_in_forward(model)  # not before: a reference copied from this would run the policy
        return model

    def _seed(self, draw: int) -> int:
        return sampling_seed(self.args.seed, rank=self.args.process_index, draw=draw)
