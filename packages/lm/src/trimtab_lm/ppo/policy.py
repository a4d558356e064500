"""Policy, value function and reference: what they say about the tokens of samples."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import PreTrainedModel

from trimtab_common.compat.fsdp import set_precision
from trimtab_common.sharding import on_one_device, prepared_for_inference, whole_weights
from trimtab_common.stats import Mean
from trimtab_lm.models.interface import base_of, trunk_of
from trimtab_lm.models.reference import Reference
from trimtab_lm.models.value_head import PreTrainedModelWrapper, ValueHead
from trimtab_lm.tokens.forward import model_inputs
from trimtab_lm.tokens.heads import last_hidden_state, lm_head_of, state_width, without_logits
from trimtab_lm.tokens.logprobs import HeadInputs, LanguageHead, exact_kl
from trimtab_lm.tokens.positions import positioned
from trimtab_lm.tokens.router import refuse_router_loss

from .samples import Layouts, Padding, Samples


class TokenOutputs(NamedTuple):
    """What a model says about N tokens that count, in the order of their `Samples`.

    Attributes:
        logprobs: [N], in nats.
        entropy: [N], in nats, of the distributions that the tokens come from.
        values: [N], what the critic expects; None for a reference.
        logits: [N, V], where they were asked for.
        head_inputs: [N, ...], what the LM head read at these tokens, where it was asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None
    logits: Tensor | None = None
    head_inputs: Tensor | None = None


class PolicyOutputs(NamedTuple):
    """The same for B responses of up to R tokens, 0 where the mask is 0.

    Attributes:
        logprobs: [B, R], in nats.
        entropy: [B, R], in nats; None if a subclass's forward pass does not tell.
        values: [B, R]; None for a reference.
        mask: [B, R], 1 where a token counts.
        logits: [B, R, V], where they were asked for.
        head_inputs: [N, ...], what the LM head read at the N tokens that count, where it was asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None
    values: Tensor | None
    mask: Tensor
    logits: Tensor | None = None
    head_inputs: Tensor | None = None

    @classmethod
    def of(cls, samples: Samples, outputs: TokenOutputs) -> "PolicyOutputs":
        """Outputs of tokens, spread to their places."""
        values, logits = (x if x is None else samples.spread(x) for x in (outputs.values, outputs.logits))
        logprobs, entropy = samples.spread(outputs.logprobs), samples.spread(outputs.entropy)
        return cls(logprobs, entropy, values, samples.mask, logits, outputs.head_inputs)

    def of_minibatch(self) -> dict[str, Any]:
        """What `PPOTrainer.train_minibatch` takes of the policy as it is, by its names."""
        return {"logprobs": self.logprobs, "logits": self.logits, "vpreds": self.values, "mask": self.mask}

    def entropy_stats(self) -> dict[str, Mean]:
        """The entropy of a token, where it is known."""
        return {} if self.entropy is None else {"policy/entropy": Mean.of(self.entropy, self.mask)}


class Compared(NamedTuple):
    """B responses under policy and reference, before the updates; [B, R] each.

    Attributes:
        logprobs: of the policy, in nats.
        ref_logprobs: of the reference, in nats.
        values: of the critic.
        entropy: of the policy, in nats; None if a subclass's forward pass does not tell.
        mask: 1 where a token counts.
        kl: KL(policy, reference) over the whole vocabulary, in nats, where it was asked for.
        distributions: [B, R, V], log-probabilities of the whole vocabulary, for a subclass that reads them.
        ref_distributions: [B, R, V], those of the reference.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    entropy: Tensor | None
    mask: Tensor
    kl: Tensor | None = None
    distributions: Tensor | None = None
    ref_distributions: Tensor | None = None

    def compared(self, sampled: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What `compute_rewards` takes of policy and reference: log-probabilities of tokens, or whole distributions.

        Args:
            sampled: [B, R], log-probabilities in nats of the policy that sampled, where it is an older one: on its
                samples, the estimates of the KL are those of its own KL.
        """
        if self.distributions is None or self.ref_distributions is None:
            return self.logprobs if sampled is None else sampled, self.ref_logprobs
        return self.distributions, self.ref_distributions


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
        # T5's trunk is the model with its LM head. A head that is tied to nothing would wait for gradients.
        if (head := lm_head_of(self.trunk)) is not None:
            tensors = [weight for _, weight in self.trunk.named_parameters(remove_duplicate=False)]
            if sum(weight is head.weight for weight in tensors) == 1:
                head.requires_grad_(False)

        self.layouts = Layouts.of(self.trunk)

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        """Values [N] of laid-out tokens; see `Samples.tokens`."""
        hidden = self._hidden(model_inputs(self.trunk, tokens))
        return self.v_head(hidden.flatten(0, 1).index_select(0, tokens["source"]))

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

    Args:
        policy: a wrapper with a value head.
        critic: a model for the values instead of that head, or None.
    """

    def __init__(self, policy: PreTrainedModelWrapper, critic: nn.Module | None = None):
        super().__init__()
        self.policy = policy
        self.critic = None if critic is None else Critic(critic)
        self.head = LanguageHead(policy.pretrained_model)
        self.layouts = Layouts.of(policy.pretrained_model)
        if self.critic is not None:  # else an unused head would wait for gradients that never come
            policy.v_head.requires_grad_(False)

    @property
    def value_function(self) -> nn.Module:
        """What has the weights of the values alone: the critic, or the policy's value head."""
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
        units = {"ValueHead"}.union(*(trunk._no_split_modules or () for trunk in self._trunks))
        return units & {type(module).__name__ for module in self.modules()}

    def tie_weights(self) -> None:
        """Ties again what is tied in policy and critic; accelerate asks for it after it has replaced the weights."""
        for trunk in self._trunks:
            trunk.tie_weights()

    @property
    def _trunks(self) -> list[PreTrainedModel]:
        return [base_of(self.pretrained_model)] + ([] if self.critic is None else [self.critic.trunk])

    def tokens(self, samples: Samples, padding: Padding) -> dict[str, dict[str, Tensor]]:
        """Samples as `forward` takes them, laid out for the policy and for the critic."""
        tokens = {"tokens": samples.tokens(self.layouts, padding)}
        if self.critic is not None:
            tokens["critic_tokens"] = samples.tokens(self.critic.layouts, padding)
        return tokens

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
    ) -> TokenOutputs | tuple[Any, ...]:
        """Two calls, because a strategy such as DDP sees this method alone.

        `tokens` gives the TokenOutputs of its tokens, at a temperature. Model inputs, by name or with `input_ids`
        in the first place, give (logits [B, T, V], loss, values [B, T]) as a model with a value head does.
        """
        if tokens is None:
            return self._logits_and_values(input_ids=input_ids, **inputs)
        scores, heads = self.head.score(
            tokens["source"],
            tokens["targets"],
            temperature=temperature,
            needs_state=needs_values and self.critic is None,
            **model_inputs(self.pretrained_model, tokens),
        )
        values = None
        if needs_values:
            values = self.policy.v_head(heads.state) if self.critic is None else self.critic(critic_tokens)
        logits = self.head.logits(heads) if return_logits else None
        read = self.head.packed(heads) if return_head_inputs else None
        return TokenOutputs(scores.logprobs, scores.entropy, values=values, logits=logits, head_inputs=read)

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


class Scorer:
    """Scores samples under the policy and under its reference, token by token at the same temperature.

    Args:
        actor_critic: prepared by the accelerator.
        reference: of the KL penalty.
        ref_model: the same with a value head, which nobody reads; None where the policy is its own reference. It is put
            on the accelerator's device, and sharded where the policy is.
        accelerator: that prepared the policy.
        padding: what layouts add.
    """

    def __init__(
        self,
        actor_critic: nn.Module,
        reference: Reference,
        ref_model: PreTrainedModelWrapper | None,
        accelerator: Accelerator,
        padding: Padding,
    ):
        self.actor_critic, self.reference, self.accelerator = actor_critic, reference, accelerator
        self.bare: ActorCritic = accelerator.unwrap_model(actor_critic)
        self.padding = padding
        keep_value_dtype(self.bare)
        self.ref_actor = self.bare
        if ref_model is not None:
            ref_actor = ActorCritic(on_one_device(ref_model, accelerator.device))
            self.ref_actor = prepared_for_inference(ref_actor, accelerator)

    def policy(self, samples: Samples, *, temperature: float, **returned: bool) -> PolicyOutputs:
        """[B, R] of the policy; every process takes part. returned: `return_logits`, `return_head_inputs`."""
        tokens = self.bare.tokens(samples, self.padding)
        outputs = self.actor_critic(**tokens, temperature=temperature, **returned)
        return PolicyOutputs.of(samples, outputs)

    def policy_alone(self, samples: Samples, *, temperature: float) -> Tensor:
        """Log-probabilities [B, R] of the policy, on this process alone, without gradients."""
        tokens = self.bare.tokens(samples, self.padding)
        with torch.no_grad():
            return PolicyOutputs.of(samples, self.bare(**tokens, temperature=temperature)).logprobs

    @contextmanager
    def of_reference(self) -> Iterator[None]:
        """Run the reference inside the block: without its adapters, without gradients, in the policy's precision."""
        with self.reference.active(), self.accelerator.autocast():
            yield

    def ref(self, samples: Samples, *, temperature: float, **returned: bool) -> PolicyOutputs:
        """[B, R] of the reference, which has no values; every process takes part. returned: as for `policy`."""
        tokens = samples.tokens(self.ref_actor.layouts, self.padding)
        with self.of_reference():
            outputs = self.ref_actor(tokens=tokens, temperature=temperature, needs_values=False, **returned)
        return PolicyOutputs.of(samples, outputs)

    @torch.no_grad()
    def exact_kl(self, samples: Samples, policy: Tensor, ref: Tensor, *, temperature: float) -> Tensor:
        """KL(policy, reference) over the whole vocabulary at each token that counts, [B, R], in nats.

        Args:
            samples: B responses.
            policy: what the policy's head read at the tokens that count.
            ref: what the reference's head read there.
            temperature: of both distributions.
        """
        head, ref_head = self.bare.head, self.ref_actor.head

        def ref_logits(inputs: HeadInputs) -> Tensor:
            with self.reference.active():
                return ref_head.logits(inputs)

        with self.whole(has_reference=True), self.accelerator.autocast():
            size = head.config.vocab_size
            pair = head.logits, head.unpacked(policy), ref_logits, ref_head.unpacked(ref)
            flat = exact_kl(*pair, vocab_size=size, temperature=temperature)
        return samples.spread(flat)

    @contextmanager
    def whole(self, *, has_reference: bool) -> Iterator[None]:
        """Every process holds all weights of the policy inside the block, and of the reference if asked. Collective.

        Parts of the models may be called there, and processes may call them unequally often.
        """
        with whole_weights(self.bare), whole_weights(self.ref_actor) if has_reference else nullcontext():
            yield
