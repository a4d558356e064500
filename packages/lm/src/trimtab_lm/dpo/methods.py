"""Methods of DPOTrainer that its algorithm does not need: documented ones, and samples of both models."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trimtab_common.seeding import sampling_seed
from trimtab_common.sharding import placed
from trimtab_common.stats import Mean, gather_over_ranks, world_size
from trimtab_lm.data.formats import Row, Text
from trimtab_lm.hf.adapter import TrainerAdapter
from trimtab_lm.hf.types import Batch
from trimtab_lm.models.interface import Model
from trimtab_lm.models.reference import Reference
from trimtab_lm.tokens.dropout import without_dropout

from .config import DPOConfig
from .data import PairTokenizer
from .evaluation import prompts_to_sample, sampled_texts, unpadded
from .pairs import concatenated_inputs, get_batch_logps


class DPOMethods(TrainerAdapter[DPOConfig, Tensor]):
    """What users of DPOTrainer call, beside training and evaluation."""

    pair_tokenizer: PairTokenizer
    reference: Reference | None
    padding_value: int

    concatenated_inputs = staticmethod(concatenated_inputs)
    get_batch_logps = staticmethod(get_batch_logps)

    def tokenize_row(self, feature: Row, model: Model | None = None) -> dict[str, object]:
        """A row's columns of token ids, attention masks and labels: see `data.PairTokenizer.row`."""
        return self.pair_tokenizer.row(feature, model)

    def build_tokenized_answer(self, prompt: Text, answer: Text) -> dict[str, list[int]]:
        """Token ids and masks of a prompt and of the answer to it: see `data.PairTokenizer.split`."""
        return self.pair_tokenizer.split(prompt, answer)

    def get_batch_loss_metrics(
        self, model: nn.Module, batch: Batch, train_eval: str = "train"
    ) -> tuple[Tensor, dict[str, float]]:
        """The mean loss of a batch and its statistics, whose names begin with eval_ if train_eval is "eval"."""
        loss, stats, _ = self.batch_loss(model, batch, self.items_of([batch], of_all_processes=False))
        prefix = "eval_" if train_eval == "eval" else ""
        numbers = {name: stat.value for name, stat in stats.items() if isinstance(stat, Mean) and name != "loss"}
        return loss, {f"{prefix}{name}": number for name, number in numbers.items()}

    @contextmanager
    def null_ref_context(self) -> Iterator[None]:
        """The policy as its own reference inside the block, by its adapters; nothing changes with a ref_model."""
        with self.reference.active() if self.reference is not None and self.reference.is_policy else nullcontext():
            yield

    def generate_from_model_and_ref(self, model: Model, batch: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Sampled answers of the model and of the reference to a batch's `prompt_input_ids`, as texts.

        There are none of the reference where it is not a model that can be run.
        """
        return self.sample_answers(model, unpadded(batch))

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference is a model that can be run at any time, also after training."""
        return self.reference is not None and (self.reference.is_policy or self.reference.model is not self.model)

    def sample_answers(self, model: Model, prompts: Sequence[Tensor]) -> tuple[list[str], list[str]]:
        """Answers of the model, and of the reference if it can be run, to prompts (1-D token ids), as texts."""

        def sample(unwrapped: Model) -> list[str]:
            return sampled_texts(
                unwrapped,
                prompts,
                tokenizer=self.tokenizer,
                config=self.config,
                padding_value=self.padding_value,
                step=self.state.global_step,
            )

        with without_dropout(model), torch.no_grad():
            policy = sample(self.accelerator.unwrap_model(model))
        if self.reference is None or not self.has_reference_model:
            return policy, []
        with self.reference.active() as reference:
            return policy, sample(placed(reference, self.config.device))

    def log_samples(self, dataloader: DataLoader[Batch], prefix: str) -> None:
        """A table of prompts and the answers of policy and reference, if `generate_during_eval` asks for it."""
        config = self.config
        if not config.generate_during_eval:
            return
        seed = sampling_seed(config.seed, rank=0, draw=self.state.global_step)
        prompts = prompts_to_sample(dataloader.dataset, config.num_eval_samples, seed=seed)
        prompts = prompts[config.process_index :: world_size()]
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        columns = [texts, *self.sample_answers(self.model, prompts)]
        names = ["prompt", "policy", "reference"] if self.has_reference_model else ["prompt", "policy"]
        rows = list(zip(*columns[: len(names)], strict=True))
        turns = itertools.zip_longest(*gather_over_ranks(rows))
        self.tables.add(self, f"{prefix}_samples", names, [row for turn in turns for row in turn if row is not None])
