"""Batches of queries and responses, and the module that scores and values them in one pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from trimtab_lm.models.reference import Reference
from trimtab_lm.models.value_head import PreTrainedModelWrapper, ValueHead
from trimtab_lm.sampling.generate import pad
from trimtab_lm.tokens.heads import last_hidden_state, lm_head_of, state_width, without_logits
from trimtab_lm.tokens.logprobs import HeadInputs, LanguageHead, exact_kl, positioned


@dataclass(frozen=True)
class TokenBatch:
    """B queries with their responses, of up to R tokens, as a model takes them.

    inputs: the model's inputs, each [B, T]. where: [B, T], True where the output predicts a response token that
    counts. targets: [B, R], the response tokens. mask: [B, R], 1 where they count. Rows hold as many True in `where` as
    1 in `mask`, in the same order.
    """

    inputs: dict[str, Tensor]
    where: Tensor
    targets: Tensor
    mask: Tensor

    def trimmed(self) -> "TokenBatch":
        """The same rows without the columns that are padding in all of them."""
        columns = {name: value.any(0) for name, value in self.inputs.items() if name.endswith("mask")}
        inputs = {
            name: value[:, columns[name if name.endswith("mask") else _mask_name(name)]]
            for name, value in self.inputs.items()
        }
        read = columns["decoder_attention_mask" if "decoder_attention_mask" in columns else "attention_mask"]
        width = int(self.mask.any(0).nonzero().max()) + 1
        return replace(
            self,
            inputs=inputs,
            where=self.where[:, read],
            targets=self.targets[:, :width],
            mask=self.mask[:, :width],
        )

    def spread(self, flat: Tensor) -> Tensor:
        """[N] numbers of the counted tokens, or [N, ...], to their places in [B, R, ...]; 0 elsewhere."""
        places = flat.new_zeros(*self.mask.shape, *flat.shape[1:])
        return places.index_put((self.mask.bool(),), flat)


def model_inputs(
    queries: Sequence[Tensor], responses: Sequence[Tensor], *, pad_token_id: int, decoder_start: int | None
) -> dict[str, Tensor]:
    """What a causal model reads (query and response in one row), or an encoder-decoder one (`decoder_start` given).

    Padded on the right: behind a causal mask padding there is invisible.
    """
    if decoder_start is None:
        rows = [torch.cat([query, response]) for query, response in zip(queries, responses, strict=True)]
        return dict(zip(("input_ids", "attention_mask"), pad(rows, pad_token_id), strict=True))
    shifted = [torch.cat([response.new_tensor([decoder_start]), response[:-1]]) for response in responses]
    return {
        **dict(zip(("input_ids", "attention_mask"), pad(queries, pad_token_id), strict=True)),
        **dict(zip(("decoder_input_ids", "decoder_attention_mask"), pad(shifted, pad_token_id), strict=True)),
    }


def token_batch(
    inputs: dict[str, Tensor],
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    response_masks: Sequence[Tensor] | None = None,
) -> TokenBatch:
    """Find the responses in model inputs that are padded on either side. `response_masks`: [R_i], 1 where it counts."""
    device = inputs["input_ids"].device
    targets, mask = pad(responses, 0)
    if response_masks is not None:
        mask, _ = pad([own.long() for own in response_masks], 0)
    targets, mask = targets.to(device), mask.to(device)
    if "decoder_input_ids" in inputs:
        read = inputs["decoder_attention_mask"]
        first_token = torch.zeros(len(queries), dtype=torch.long, device=device)
    else:
        read = inputs["attention_mask"]
        first_token = torch.tensor([len(query) - 1 for query in queries], device=device)
    # Position p predicts response token number (real tokens before p) - (where the response's first one is predicted).
    number = read.cumsum(1) - 1 - first_token[:, None]
    inside = read.bool() & (number >= 0) & (number < mask.shape[1])
    where = inside & mask.gather(1, number.clamp(0, mask.shape[1] - 1)).bool()
    return TokenBatch(inputs, where, targets, mask)


def _mask_name(name: str) -> str:
    return "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"


class PolicyOutputs(NamedTuple):
    """What a model says about the tokens of B responses. Each [B, R], 0 where the mask is 0.

    logprobs: in nats. entropy: of the distributions that the tokens come from, in nats; None if nobody knows it.
    values: None for a reference. mask: 1 where a token counts. logits: [B, R, V], where they were asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None
    values: Any
    mask: Tensor
    logits: Tensor | None = None


class Critic(nn.Module):
    """A value function with a trunk of its own, such as a reward model that continues as critic.

    model: a wrapper with a value head (its LM head is not used), or any transformers model. The one-label head of a
    sequence classifier becomes the value head; otherwise the value head starts at 0.
    """

    def __init__(self, model: Any):
        super().__init__()
        if not isinstance(model, PreTrainedModelWrapper | PreTrainedModel | PeftModel):
            raise TypeError(
                f"value_model must be a transformers model, with or without value head, got {type(model).__name__}."
            )
        score: Any = getattr(model, "score", None)
        if isinstance(score, ModulesToSaveWrapper):  # PEFT's trained copy of the head
            score.requires_grad_(False)
            score = score.modules_to_save[score.active_adapters[0]]
        if isinstance(model, PreTrainedModelWrapper):
            base = model.pretrained_model
            self.trunk = (base.get_base_model() if model.is_peft_model else base).base_model
            self.v_head = model.v_head
        else:
            self.trunk = model.base_model  # a PEFT model's adapters sit inside it
            is_scorer = isinstance(score, nn.Linear) and score.out_features == 1
            width = score.in_features if is_scorer else state_width(model)
            weight = next(self.trunk.parameters())
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self.v_head = ValueHead(width, summary_dropout_prob=0.0, device=weight.device, dtype=dtype)
            self.v_head.init_weights("zero", 0.0)
            if is_scorer:
                self.v_head.summary.weight.data.copy_(score.weight.data)
                if score.bias is not None:
                    self.v_head.summary.bias.data.copy_(score.bias.data)
        # T5's trunk is the model with its LM head. A head that is tied to nothing would wait for gradients.
        if (head := lm_head_of(self.trunk)) is not None:
            tensors = [weight for _, weight in self.trunk.named_parameters(remove_duplicate=False)]
            if sum(weight is head.weight for weight in tensors) == 1:
                head.requires_grad_(False)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Values of the counted positions, [N]."""
        return self.v_head(self._hidden(batch.inputs)[batch.where])

    def values(self, **inputs: Tensor) -> Tensor:
        """Values of all positions, [B, T], from a model's inputs."""
        return self.v_head(self._hidden(inputs))

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        inputs = positioned(self.trunk.forward, inputs)
        with without_logits(self.trunk):
            output = self.trunk(**inputs, use_cache=False, return_dict=True, output_hidden_states=True)
        return last_hidden_state(self.trunk, output)


class ActorCritic(nn.Module):
    """Policy and value function as one module, so that one wrapper (DDP, FSDP, DeepSpeed) serves both.

    policy: a wrapper with a value head. critic: a model for the values instead of that head, or None.
    """

    def __init__(self, policy: PreTrainedModelWrapper, critic: nn.Module | None = None):
        super().__init__()
        self.policy = policy
        self.critic = None if critic is None else Critic(critic)
        self.head = LanguageHead(policy.pretrained_model)
        if self.critic is not None:  # else an unused head would wait for gradients that never come
            policy.v_head.requires_grad_(False)

    @property
    def pretrained_model(self) -> Any:
        return self.policy.pretrained_model

    @property
    def config(self) -> Any:
        return self.policy.config

    def forward(
        self,
        batch: TokenBatch | Tensor | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        **inputs: Any,
    ) -> Any:
        """Two calls, because a strategy such as DDP sees this method alone.

        A TokenBatch gives the PolicyOutputs of its tokens, at a temperature. Model inputs, by name or with `input_ids`
        in the first place, give (logits [B, T, V], loss, values [B, T]) as a model with a value head does.
        """
        if not isinstance(batch, TokenBatch):
            return self._logits_and_values(**inputs if batch is None else {"input_ids": batch, **inputs})
        read = (self.head.read_with_state if self.critic is None else self.head.read)(batch.where, **batch.inputs)
        scores = self.head.score(read, batch.targets[batch.mask.bool()], temperature=temperature)
        values = self.policy.v_head(read.state) if self.critic is None else self.critic(batch)
        return PolicyOutputs(
            batch.spread(scores.logprobs),
            batch.spread(scores.entropy),
            batch.spread(values),
            batch.mask,
            batch.spread(self.head.logits(read)) if return_logits else None,
        )

    def _logits_and_values(self, **inputs: Any) -> tuple[Any, ...]:
        logits, loss, values, *cache = self.policy(**inputs)
        if self.critic is not None:
            names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
            values = self.critic.values(**{name: inputs[name] for name in names if name in inputs})
        return logits, loss, values, *cache


class Scorer:
    """Log-probabilities under the policy and under its reference, of the same tokens at the same temperature.

    actor_critic: prepared by the accelerator; head: the policy's. The reference is put on the accelerator's device.
    """

    def __init__(self, actor_critic: nn.Module, head: LanguageHead, reference: Reference, accelerator: Accelerator):
        self.actor_critic, self.reference, self.accelerator = actor_critic, reference, accelerator
        self.head = self.ref_head = head
        if not reference.is_adapter_off:
            self.ref_head = LanguageHead(reference.model)
            accelerator.prepare_model(reference.model, evaluation_mode=True)

    def policy(self, batch: TokenBatch, *, temperature: float, return_logits: bool = False) -> PolicyOutputs:
        return self.actor_critic(batch, temperature, return_logits)

    @contextmanager
    def of_reference(self) -> Iterator[None]:
        """Run the reference inside the block: without its adapters, without gradients, in the policy's precision."""
        with self.reference.active(), self.accelerator.autocast():
            yield

    def ref(self, batch: TokenBatch, *, temperature: float, return_logits: bool = False) -> PolicyOutputs:
        with self.of_reference():
            read = self.ref_head.read(batch.where, **batch.inputs)
            scores = self.ref_head.score(read, batch.targets[batch.mask.bool()], temperature=temperature)
            logits = batch.spread(self.ref_head.logits(read)) if return_logits else None
        return PolicyOutputs(batch.spread(scores.logprobs), batch.spread(scores.entropy), None, batch.mask, logits)

    @torch.no_grad()
    def exact_kl(self, batch: TokenBatch, *, temperature: float) -> Tensor:
        """KL(policy, reference) over the whole vocabulary at each token that counts, [B, R], in nats."""

        def ref_logits(inputs: HeadInputs) -> Tensor:
            with self.reference.active():
                return self.ref_head.logits(inputs)

        with self.accelerator.autocast():
            read = self.head.read(batch.where, **batch.inputs)
            with self.reference.active():
                ref_read = self.ref_head.read(batch.where, **batch.inputs)
            size = self.head.config.vocab_size
            flat = exact_kl(self.head.logits, read, ref_logits, ref_read, vocab_size=size, temperature=temperature)
        return batch.spread(flat)
