"""Scores response tokens under a model, without padding: the one place where PPO calls `tokens/`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad as fill
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from trimtab_common.accelerators import WeighingAccelerator, moved
from trimtab_common.formulas.kl import FixedKLController
from trimtab_common.run import Run
from trimtab_common.stats import Stats
from trimtab_lm.models.value_head import PreTrainedModelWrapper
from trimtab_lm.sampling.rollout import RolloutBackend
from trimtab_lm.tokens.layout import TokenGroup, lay_out, pad
from trimtab_lm.tokens.logprobs import exact_kl
from trimtab_lm.tokens.scores import score_logits, upcast

from .config import PPOConfig
from .experience import UNKNOWN, Experience, Unfinished
from .optimizer_step import OptimizerStep
from .policy import ActorCritic, ReferencePolicy, whole_models


class Padding(NamedTuple):
    """Tokens that a layout adds to samples.

    Attributes:
        pad_token_id: the id at padding.
        decoder_start: what a decoder reads first; None for a causal model.
    """

    pad_token_id: int
    decoder_start: int | None = None


class Scores(tuple[Tensor, Tensor | None, Tensor | None, Tensor]):
    """The four columns that `batched_forward_pass` returns, and two that only the built-in pass computes.

    Columns are [b, R], logits [b, R, V] and head inputs [b, R, ...], 0 where the mask is 0.

    Attributes:
        entropy: in nats; None if the pass did not compute it.
        head_inputs: what the LM head read, where it was asked for.
    """

    logprobs: Tensor
    logits: Tensor | None
    values: Tensor | None
    mask: Tensor
    entropy: Tensor | None
    head_inputs: Tensor | None

    def __new__(
        cls,
        logprobs: Tensor,
        logits: Tensor | None,
        values: Tensor | None,
        mask: Tensor,
        entropy: Tensor | None = None,
        head_inputs: Tensor | None = None,
    ) -> "Scores":
        scores = super().__new__(cls, (logprobs, logits, values, mask))
        scores.logprobs, scores.logits, scores.values, scores.mask = scores
        scores.entropy, scores.head_inputs = entropy, head_inputs
        return scores


_Group = tuple[list[int], list[list[int]], list[list[int]]]
"""The rows of one query, the ids of their responses, and for each response token 1 where it counts."""


class Trainer(Protocol):
    """The attributes of a PPOTrainer that its parts use. Its documented methods may be replaced."""

    config: PPOConfig
    accelerator: WeighingAccelerator
    tokenizer: PreTrainedTokenizerBase
    padding: Padding
    model: PreTrainedModelWrapper
    is_encoder_decoder: bool
    actor_critic: nn.Module
    bare: ActorCritic
    reference_policy: ReferencePolicy
    optimizer: Optimizer
    optimizer_step: OptimizerStep
    kl_ctl: FixedKLController
    rounding: float
    rollout: RolloutBackend | None
    current_device: torch.device
    dataset: Any
    run: Run
    unfinished: Unfinished

    def prepare_dataloader(
        self, dataset: Any, data_collator: Callable[[Sequence[Any]], Any] | None = None
    ) -> DataLoader[Any]: ...
    @property
    def temperature(self) -> float: ...
    @property
    def prepare_model_inputs(self) -> Callable[[list[Tensor], list[Tensor]], dict[str, Tensor]]: ...
    @property
    def batched_forward_pass(self) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor]]: ...
    @property
    def compute_rewards(self) -> Callable[..., tuple[Tensor, ...]]: ...
    @property
    def compute_advantages(self) -> Callable[..., tuple[Tensor, Tensor, Tensor]]: ...
    @property
    def train_minibatch(self) -> Callable[..., Stats]: ...
    def _kl_penalty(self, logprob: Tensor, ref_logprob: Tensor) -> Tensor: ...
    def record_step_stats(self, kl_coef: float, **data: Any) -> Stats: ...
    def gather_stats(self, stats: Mapping[str, object]) -> Stats: ...
    def save_checkpoint(self) -> Path: ...


def forward(trainer: Trainer, model: nn.Module, rollout: Experience, replaced: Collection[str]) -> Scores:
    """The results of `batched_forward_pass` for a minibatch, which is evaluated before if this is an update.

    The mask and the width are the minibatch's own. `replaced` names the trainer's methods that are replaced, some of
    which read logits.
    """
    is_replaced = "batched_forward_pass" in replaced
    if torch.is_grad_enabled():
        keeps_logits = "loss" in replaced or "train_minibatch" in replaced
    else:
        keeps_logits = trainer.config.kl_penalty == "full" and (is_replaced or "compute_rewards" in replaced)
    columns = trainer.batched_forward_pass(
        *(model, rollout.queries, rollout.responses, rollout.model_inputs),
        # The entropy of a replaced pass comes from its logits.
        return_logits=keeps_logits or (is_replaced and model is trainer.actor_critic),
        response_masks=rollout.response_masks,
    )
    scores = columns if isinstance(columns, Scores) else completed(columns, rollout.masks, trainer.temperature)
    logprobs, logits, values, mask = scores
    return Scores(logprobs, logits if keeps_logits else None, values, mask, scores.entropy, scores.head_inputs)


def forward_in_parts(
    trainer: Trainer, model: nn.Module, rollout: Experience, order: Sequence[Tensor], replaced: Collection[str]
) -> Scores:
    """The scores of B rows, [B, W, ...], from a forward pass over each minibatch, whose row numbers are `order`."""
    parts = [forward(trainer, model, rollout[rows], replaced) for rows in order]
    back, whole = torch.cat(list(order)).argsort().to(parts[0].logprobs.device), list[Any]()
    for values in zip(*((*part, part.entropy, part.head_inputs) for part in parts), strict=True):
        if any(value is None for value in values):
            whole.append(None)
            continue
        width = max(value.shape[1] for value in values)
        filled = [fill(value, (0, 0) * (value.dim() - 2) + (0, width - value.shape[1])) for value in values]
        whole.append(torch.cat(filled)[back])
    return Scores(*whole)


def score(
    reader: ActorCritic | ReferencePolicy,
    run: nn.Module,
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    model_inputs: Mapping[str, Tensor],
    response_masks: Sequence[Tensor] | None = None,
    *,
    padding: Padding,
    **options: float,
) -> Scores:
    """Scores the responses of b rows in one forward pass, which reads no padding, and an equal query once.

    Args:
        reader: says how the model reads tokens.
        run: the model, as the accelerator wrapped it.
        queries: their lengths are used.
        responses: their lengths are used.
        model_inputs: the ids, as from `padded_inputs`, padded on either side. On the host nothing waits for a device.
        response_masks: for each response, 1 where a token counts; None: all count.
        options: arguments of `ActorCritic.forward`.
    """
    read = {name: column.cpu().numpy() for name, column in model_inputs.items()}
    counts = np.zeros((len(responses), max(map(len, responses))), dtype=np.int64)
    groups: dict[tuple[int, ...], _Group] = {}
    for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
        counts[i, : len(response)] = True if response_masks is None else response_masks[i].cpu().numpy() > 0
        ids = read["input_ids"][i][read["attention_mask"][i] > 0].tolist()
        prompt, answer = ids[: len(query)], ids[len(query) :]
        if "decoder_input_ids" in read:
            prompt, answer = ids, read["decoder_input_ids"][i][read["decoder_attention_mask"][i] > 0][1:].tolist()
        rows, branches, counted = groups.setdefault(tuple(prompt), ([], [], []))
        rows.append(i)
        branches.append(answer)
        counted.append(counts[i, : len(response)].tolist())
    pieces, order = list[TokenGroup](), list[int]()
    for prompt_ids, (rows, branches, counted) in groups.items():
        pieces.append(TokenGroup(prompt_ids, branches, counted))
        order += rows
    places = np.arange(counts.size).reshape(counts.shape)[order][counts[order] > 0]
    host = [torch.from_numpy(places), torch.from_numpy(counts)]
    device, (filler, start), tokens = next(reader.parameters()).device, padding, {}
    for name, layouts in reader.readers.items():
        layout = layouts.apart if len(groups) == len(queries) else layouts.shared
        sizes = {"hidden_size": layouts.hidden_size, "decoder_start_token_id": start}
        columns = lay_out(pieces, layout, pad_token_id=filler, is_lean=True, **sizes)
        tokens[name] = columns
        host += columns.values()
    index, mask, *rest = moved(host, device)  # one copy
    there = iter(rest)
    for name, columns in tokens.items():
        tokens[name] = dict(zip(columns, there, strict=False))
    outputs = run(**tokens, **options)

    spread = list[Any]()
    for flat in outputs:
        whole = None if flat is None else flat.new_zeros(mask.numel(), *flat.shape[1:]).index_copy(0, index, flat)
        spread.append(None if whole is None else whole.view(*mask.shape, *whole.shape[1:]))
    logprobs, entropy, values, logits, head_inputs = spread
    return Scores(logprobs, logits, values, mask, entropy, head_inputs)


def padded_inputs(queries: Sequence[Tensor], responses: Sequence[Tensor], padding: Padding) -> dict[str, Tensor]:
    """The padded inputs of a causal model (query and response in one row) or of an encoder-decoder model.

    The last token of each response is read too: callers that shift the columns themselves find it as a label.

    Returns:
        `input_ids` and `attention_mask` [B, T]; for an encoder-decoder model the query's, and
        `decoder_input_ids` and `decoder_attention_mask` [B, 1 + R] of the decoder start and the response.
    """
    pad_token_id, decoder_start = padding
    if decoder_start is None:
        read = {"": [*map(torch.cat, zip(queries, responses, strict=True))]}
    else:
        starts = [torch.cat([response.new_tensor([decoder_start]), response]) for response in responses]
        read = {"": list(queries), "decoder_": starts}
    inputs = dict[str, Tensor]()
    for name, rows in read.items():
        inputs[f"{name}input_ids"], inputs[f"{name}attention_mask"] = pad(rows, pad_token_id)
    return inputs


def completed(columns: Sequence[Tensor | None], before: Tensor, temperature: float) -> Scores:
    """The scores that a replaced forward pass returned, 0 where its mask is 0, with the entropy if it gave logits.

    Args:
        columns: log-probabilities, logits or None, values or None, and the mask, in any width.
        before: the mask that it returned for the same rows before the updates; UNKNOWN: it is the first.
        temperature: the temperature at which the entropy is taken.

    Raises:
        ValueError: it counts other tokens than it did before.
    """
    logprobs, logits, values, mask = columns
    assert logprobs is not None
    assert mask is not None
    width, counts = mask.shape[1], mask.bool()
    if before is not UNKNOWN and (not torch.equal(counts, before[:, :width].bool()) or before[:, width:].any()):
        raise ValueError(
            f"batched_forward_pass counts {mask.sum(1).tolist()} tokens in the rows of a minibatch, and counted "
            f"{before.sum(1).tolist()} in the same rows before the updates, or it counts them in other columns. Its "
            "masks must depend on queries, responses, response_masks and the width of model_inputs alone."
        )
    values = None if values is None else torch.where(counts, values, 0.0)
    entropy = None if logits is None else token_entropy(logits, mask, temperature=temperature)
    return Scores(torch.where(counts, logprobs, 0.0), logits, values, mask, entropy)


def kl_terms(trainer: Trainer, policy: Scores, reference: Scores, sampled: Tensor | None) -> tuple[Tensor, ...]:
    """What `compute_rewards` takes of policy and reference, and the exact KL where it takes that too.

    Where an older policy sampled, whose log-probabilities are `sampled` [B, R], the estimates of the KL on its samples
    are those of its own KL.
    """
    temperature = trainer.temperature
    if trainer.config.kl_penalty != "full":
        is_older = trainer.config.asynchronous_rollouts
        return (sampled if sampled is not None and is_older else policy.logprobs), reference.logprobs
    if policy.head_inputs is None or reference.head_inputs is None:
        return full_logprobs(policy.logits, temperature), full_logprobs(reference.logits, temperature)
    exact = exact_kl_of(trainer.bare, trainer.reference_policy, policy, reference, temperature=temperature)
    return policy.logprobs, reference.logprobs, exact


@torch.no_grad()
def exact_kl_of(
    policy: ActorCritic, ref: ReferencePolicy, scores: Scores, ref_scores: Scores, *, temperature: float
) -> Tensor:
    """KL(policy, reference) over the whole vocabulary at each token with mask 1, [B, R], in nats.

    The scores have what the heads read. The policy is not wrapped.
    """
    mask, head, ref_head = scores.mask.bool(), policy.head, ref.actor.head
    assert scores.head_inputs is not None
    assert ref_scores.head_inputs is not None

    def ref_logits(read: Tensor) -> Tensor:
        with ref.reference.active():
            return ref_head.logits(read)

    read, ref_read = scores.head_inputs[mask], ref_scores.head_inputs[mask]
    with whole_models(policy, ref), ref.accelerator.autocast():
        size = head.config.vocab_size
        flat = exact_kl(head.logits, read, ref_logits, ref_read, vocab_size=size, temperature=temperature)
    return flat.new_zeros(mask.shape).masked_scatter(mask, flat)


def at_tokens(rows: Sequence[Tensor] | None, rollout: Experience, scores: Scores) -> Tensor | None:
    """Places numbers of response tokens at the positions that count, [B, W]; 0 elsewhere.

    Args:
        rows: B rows, a number for each response token; None if the numbers are unknown.
        rollout: has the masks of the responses.
        scores: have the mask [B, W], and the dtype and the device of the numbers.
    """
    if rows is None:
        return None
    if rollout.response_masks is not None:
        pairs = zip(rows, rollout.response_masks, strict=True)
        rows = [row[counts.to(row.device) > 0] for row, counts in pairs]
    flat = torch.cat([row.to(scores.logprobs) for row in rows])
    return flat.new_zeros(scores.mask.shape).masked_scatter(scores.mask.bool(), flat)


def token_entropy(logits: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy in nats, [b, R], of the distributions of logits [b, R, V] where mask [b, R] is 1; 0 elsewhere."""
    at_mask = logits[mask.bool()]
    targets = torch.zeros(len(at_mask), dtype=torch.long, device=logits.device)
    entropy = score_logits(at_mask, targets, temperature=temperature).entropy
    return entropy.new_zeros(mask.shape).masked_scatter(mask.bool(), entropy)


def full_logprobs(logits: Tensor | None, temperature: float) -> Tensor:
    """Log-probabilities of the whole vocabulary, in float32 at least; shape of `logits`."""
    if logits is None:
        raise ValueError(
            "kl_penalty='full' needs the logits of policy and reference. batched_forward_pass was called with "
            "return_logits=True, and returned None in their place."
        )
    return (upcast(logits) / temperature).log_softmax(-1)
