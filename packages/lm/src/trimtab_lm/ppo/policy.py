"""Policy, value function and reference."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import PreTrainedModel

from trimtab_common.compat.fsdp import set_precision
from trimtab_common.sharding import on_one_device, prepared_for_inference, whole_weights
from trimtab_lm.compat.models import undivided
from trimtab_lm.interface import Model, base_of, trunk_of
from trimtab_lm.models.reference import Reference
from trimtab_lm.models.value_head import PreTrainedModelWrapper, ValueHead
from trimtab_lm.tokens.forward import best_layout, masked_size
from trimtab_lm.tokens.inputs import TokenReader
from trimtab_lm.tokens.layout import Layout
from trimtab_lm.tokens.logprobs import LanguageHead, last_hidden_state, lm_head_of, state_width, without_logits
from trimtab_lm.tokens.positions import Positions, positioned
from trimtab_lm.tokens.router import refuse_router_loss


class Layouts(NamedTuple):
    """The layouts of a model's inputs: `apart` if no query repeats, `shared` if equal queries share one prefix.

    hidden_size: see `lay_out`.
    """

    apart: Layout
    shared: Layout
    hidden_size: int | None = None

    @classmethod
    def of(cls, model: Model) -> "Layouts":
        """The layouts with the fewest positions that give the model's own outputs; see `best_layout`."""
        apart = best_layout(model, share_prefix=False)
        shared = best_layout(model, share_prefix=True) if apart == "packed" else apart
        return cls(apart, shared, masked_size(model))


class Critic(nn.Module):
    """A value function with a separate trunk, such as a reward model that continues as critic.

    model: a wrapper with a value head (its LM head is not used), or any transformers model. The one-label head of a
    sequence classifier becomes the value head; otherwise the value head starts at 0.
    """

    def __init__(self, model: Any):
        super().__init__()
        if not isinstance(model, PreTrainedModelWrapper | PreTrainedModel | PeftModel):
            raise TypeError(
                f"value_model must be a transformers model, with or without value head, got {type(model).__name__}."
            )
        inner = model.pretrained_model if isinstance(model, PreTrainedModelWrapper) else model
        refuse_router_loss(inner, "PPOTrainer", " in value_model")
        score: Any = getattr(model, "score", None)
        if isinstance(score, ModulesToSaveWrapper):  # PEFT's trained copy of the head
            score.requires_grad_(False)
            score = score.modules_to_save[score.active_adapters[0]]
        if isinstance(model, PreTrainedModelWrapper):
            self.trunk = trunk_of(base_of(inner))
            self.v_head = model.v_head
        else:
            self.trunk = trunk_of(base_of(model))  # adapters are inside its layers
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
        # T5's trunk is the model with its LM head. DDP would wait for the gradient of an unused head.
        if (head := lm_head_of(self.trunk)) is not None:
            tensors = [weight for _, weight in self.trunk.named_parameters(remove_duplicate=False)]
            if sum(weight is head.weight for weight in tensors) == 1:
                head.requires_grad_(False)

        self.layouts, self.reader = Layouts.of(self.trunk), TokenReader(self.trunk)

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        """Values [N] of laid-out tokens; see `lay_out`."""
        hidden = self._hidden(self.reader.inputs(tokens))
        return self.v_head(hidden.flatten(0, 1).index_select(0, tokens["source"]))

    def values(self, **inputs: Tensor) -> Tensor:
        """Values of all positions, [B, T], from a model's inputs."""
        return self.v_head(self._hidden(inputs))

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        inputs = positioned(self.trunk.forward, inputs)
        with without_logits(self.trunk), self.reader.attending(inputs):
            output = self.trunk(**inputs, use_cache=False, return_dict=True, output_hidden_states=True)
        return last_hidden_state(self.trunk, output)


class ActorCritic(nn.Module):
    """Policy and value function as one module, so that one wrapper (DDP, FSDP, DeepSpeed) serves both.

    Args:
        policy: a wrapper with a value head.
        critic: a separate model for the values, or None.

    Attributes:
        readers: how `tokens` are laid out for the policy, and `critic_tokens` for the critic.
    """

    def __init__(self, policy: PreTrainedModelWrapper, critic: nn.Module | None = None):
        super().__init__()
        self.policy = policy
        self.critic = None if critic is None else Critic(critic)
        self.head = LanguageHead(policy.pretrained_model)
        self.readers = {"tokens": Layouts.of(policy.pretrained_model)}
        self.positions = Positions.of(policy.pretrained_model)
        if self.critic is not None:
            self.readers["critic_tokens"] = self.critic.layouts
            policy.v_head.requires_grad_(False)  # DDP would wait for the gradient of an unused head

    @property
    def value_function(self) -> nn.Module:
        """The module with only the value function's weights: the critic, or the policy's value head."""
        return self.policy.v_head if self.critic is None else self.critic

    @property
    def pretrained_model(self) -> Any:
        return self.policy.pretrained_model

    @property
    def config(self) -> Any:
        return self.policy.config

    @property
    def _no_split_modules(self) -> set[str]:
        """Classes of the modules that FSDP shards as units. A unit has one dtype, and the value head its own."""
        units = {"ValueHead"}.union(*(undivided(trunk) or () for trunk in self._trunks))
        return units & {type(module).__name__ for module in self.modules()}

    def tie_weights(self) -> None:
        """Ties weights of policy and critic again; accelerate calls it after it has replaced the weights."""
        for trunk in self._trunks:
            trunk.tie_weights()

    @property
    def _trunks(self) -> list[PreTrainedModel]:
        return [base_of(self.pretrained_model)] + ([] if self.critic is None else [self.critic.trunk])

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        tokens: dict[str, Tensor] | None = None,
        critic_tokens: dict[str, Tensor] | None = None,
        temperature: float = 1.0,
        return_logits: bool = False,
        return_head_inputs: bool = False,
        needs_values: bool = True,
        **inputs: Any,
    ) -> tuple[Any, ...]:
        """Runs policy and critic in one call, because DDP and others wrap only this method.

        `tokens` gives, at its N tokens with mask 1 and at a temperature, log-probabilities [N] and entropies [N] in
        nats, values [N], logits [N, V], and what the LM head read [N, ...]; None for what was not asked for. Model
        inputs, by name or with `input_ids` in the first place, give (logits [B, T, V], loss, values [B, T]) as a model
        with a value head does.
        """
        if tokens is None:
            return self._logits_and_values(input_ids=input_ids, **inputs)
        needs_read, needs_state = return_logits or return_head_inputs, needs_values and self.critic is None
        scores = self.head.score(tokens, temperature, needs_read=needs_read, needs_state=needs_state)
        values = None
        if needs_values:
            values = self.policy.v_head(scores.state) if self.critic is None else self.critic(critic_tokens)
        logits = self.head.logits(cast(Tensor, scores.read)) if return_logits else None
        return scores.logprobs, scores.entropy, values, logits, scores.read if return_head_inputs else None

    def _logits_and_values(self, **inputs: Any) -> tuple[Any, ...]:
        logits, loss, values, *cache = self.policy(**inputs)
        if self.critic is not None:
            names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
            values = self.critic.values(**{name: inputs[name] for name in names if name in inputs})
        return logits, loss, values, *cache


def keep_value_dtype(actor: ActorCritic) -> None:
    """Lets sharded value heads compute in their weights' dtype, whatever the precision of the policy's shards."""
    for head in actor.modules():
        if isinstance(head, ValueHead) and isinstance(head, FSDPModule):
            set_precision(head, MixedPrecisionPolicy())


class ReferencePolicy(nn.Module):
    """The reference of the KL penalty: runs like the policy, without its adapters, gradients and values.

    It is put on the accelerator's device, and sharded where the policy is.

    Args:
        reference: the reference of the KL penalty; switches adapters and gradients off.
        ref_model: the same with a value head, which is not used; None where the policy is its own reference.
        accelerator: that prepared the policy, and has its precision.
    """

    def __init__(
        self,
        actor: ActorCritic,
        reference: Reference,
        ref_model: PreTrainedModelWrapper | None,
        accelerator: Accelerator,
    ):
        super().__init__()
        if ref_model is not None:
            actor = prepared_for_inference(ActorCritic(on_one_device(ref_model, accelerator.device)), accelerator)
        self.actor, self.reference, self.accelerator = actor, reference, accelerator
        self.readers = {"tokens": actor.readers["tokens"]}

    def forward(self, *args: Any, **inputs: Any) -> tuple[Any, ...]:
        if "tokens" in inputs:
            inputs["needs_values"] = False
        with self.reference.active(), self.accelerator.autocast():
            return self.actor(*args, **inputs)


@contextmanager
def whole_models(policy: ActorCritic, ref: ReferencePolicy | None = None) -> Iterator[None]:
    """Every process holds all weights of the policy inside the block, and of the reference if given. Collective.

    Parts of the models may be called there, and processes may call them unequally often.
    """
    with whole_weights(policy), nullcontext() if ref is None else whole_weights(ref.actor):
        yield
