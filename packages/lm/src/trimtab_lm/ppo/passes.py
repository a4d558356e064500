"""Forward passes over samples, by the built-in pass or by one that a subclass of PPOTrainer brings."""

from abc import ABC, abstractmethod
from contextlib import nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from trimtab_common.formulas.kl import full
from trimtab_lm.models.value_head import PreTrainedModelWrapper
from trimtab_lm.tokens.dropout import without_dropout

from .config import PPOConfig
from .policy import Compared, PolicyOutputs, Scorer
from .sampler import Sampler
from .samples import Samples, full_logprobs, in_minibatches, padded_inputs, token_entropy


class ForwardPasses(ABC):
    """The methods of PPOTrainer that run the models. PPOTrainer's constructor sets the attributes."""

    config: PPOConfig
    model: PreTrainedModelWrapper
    ref_model: PreTrainedModelWrapper | None
    actor_critic: nn.Module
    scorer: Scorer
    sampler: Sampler

    @abstractmethod
    def _replaces(self, *names: str) -> bool:
        """Whether somebody replaces one of PPOTrainer's methods; PPOTrainer knows."""

    def prepare_model_inputs(self, queries: list[Tensor], responses: list[Tensor]) -> dict[str, Tensor]:
        """Padded inputs, as `batched_forward_pass` takes them; `step` needs none unless a subclass replaces either."""
        return padded_inputs(queries, responses, self.scorer.padding)

    def batched_forward_pass(
        self,
        model: nn.Module | None,
        queries: list[Tensor],
        responses: list[Tensor],
        model_inputs: dict[str, Tensor],
        return_logits: bool = False,
        response_masks: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Log-probabilities, logits, values and mask of B responses, `mini_batch_size` rows of like length at a time.

        A subclass's method may return columns of its own layout, such as [B, T - 1] over query and response, or over
        what the decoder reads: `step` reads the positions where the mask is 1, and calls it for one minibatch at a
        time, with gradients in the updates. `model` is then a module that gives (logits, loss, values) of the model
        inputs.

        Args:
            model: `trainer.model`, or `trainer.ref_model`, which is None where the adapters are switched off.
            queries: B rows of token ids.
            responses: B rows of token ids.
            model_inputs: as from `prepare_model_inputs`, [B, T] each, padded on either side.
            return_logits: whether to return logits as well.
            response_masks: for each response, 1 where a token counts.

        Returns:
            Log-probabilities in nats at the sampling temperature, [B, R]; logits [B, R, V], or None; values [B, R], or
            None for the reference; the mask [B, R]. All are 0 where a token does not count.
        """
        scorer = self.scorer
        is_policy = any(model is one for one in (self.model, self.actor_critic, scorer.bare))
        of_reference = not is_policy and any(model is one for one in (None, self.ref_model, scorer.ref_actor))
        if not is_policy and not of_reference:
            raise ValueError(
                "batched_forward_pass runs trainer.model or trainer.ref_model; it was given another model."
            )
        score = scorer.ref if of_reference else scorer.policy
        forward = partial(score, temperature=self.sampler.temperature, return_logits=return_logits)
        with without_dropout(self.actor_critic):
            samples = Samples(queries, responses, response_masks, model_inputs)
            outputs = in_minibatches(forward, samples, self.config.mini_batch_size)
        return outputs.logprobs, outputs.logits, outputs.values, outputs.mask

    def _forward(
        self,
        samples: Samples,
        *,
        of_reference: bool = False,
        return_logits: bool = False,
        return_head_inputs: bool = False,
    ) -> PolicyOutputs:
        """A minibatch under the policy or the reference, by the built-in pass or by a subclass's.

        The built-in pass needs no logits for log-probabilities and entropies. A subclass's is asked for the policy's,
        and has no inputs of heads to return.
        """
        temperature = self.sampler.temperature
        if not self._replaces("batched_forward_pass"):
            score = self.scorer.ref if of_reference else self.scorer.policy
            return score(
                samples, temperature=temperature, return_logits=return_logits, return_head_inputs=return_head_inputs
            )
        model = self.scorer.ref_actor if of_reference else self.actor_critic
        context = self.scorer.of_reference() if of_reference else nullcontext()
        with context, without_dropout(self.actor_critic):
            logprobs, logits, values, mask = self.batched_forward_pass(
                model,
                samples.queries,
                samples.responses,
                samples.model_inputs or {},
                return_logits=return_logits or not of_reference,
                response_masks=samples.response_masks,
            )
        counts = mask.bool()
        return PolicyOutputs(
            logprobs=torch.where(counts, logprobs, 0.0),
            entropy=None if logits is None else token_entropy(logits, mask, temperature=temperature),
            values=None if values is None else torch.where(counts, values, 0.0),
            mask=mask,
            logits=logits,
        )

    def _compare(self, samples: Samples) -> Compared:
        """A minibatch under policy and reference.

        With `kl_penalty="full"` a subclass's `compute_rewards` reads the log-probabilities of the whole vocabulary, as
        documented; the built-in one takes the exact KL, for which no logits are kept.
        """
        is_full, temperature = self.config.kl_penalty == "full", self.sampler.temperature
        needs_logits = is_full and self._replaces("compute_rewards", "batched_forward_pass")
        needed = {"return_logits": needs_logits, "return_head_inputs": is_full and not needs_logits}
        policy = self._forward(samples, **needed)
        ref = self._forward(samples, of_reference=True, **needed)
        values = cast(Tensor, policy.values)  # None for a reference alone
        compared = Compared(policy.logprobs, ref.logprobs, values, policy.entropy, policy.mask)
        if not is_full:
            return compared
        if policy.head_inputs is not None and ref.head_inputs is not None:
            read = policy.head_inputs, ref.head_inputs
            return compared._replace(kl=self.scorer.exact_kl(samples, *read, temperature=temperature))
        if policy.logits is None or ref.logits is None:
            raise ValueError(
                "kl_penalty='full' needs the logits of policy and reference. batched_forward_pass was called with "
                "return_logits=True, and returned None in their place."
            )
        pair = [full_logprobs(logits, temperature=temperature) for logits in (policy.logits, ref.logits)]
        if self._replaces("compute_rewards"):
            return compared._replace(distributions=pair[0], ref_distributions=pair[1])
        return compared._replace(kl=full(*pair))
