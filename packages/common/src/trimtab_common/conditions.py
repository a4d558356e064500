"""What commonly goes wrong in a policy-optimization step, as data: a number, its limit and the remedy."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Literal


def _number(words: str) -> float | None:
    """A quantity of `Vitals`; an alert says `words` with its value."""
    return field(default=None, metadata={"words": words})


@dataclass(frozen=True)
class Vitals:
    """The quantities of one step that the health monitor checks, in the units of their words; None: unchecked.

    Args:
        kl, kl_per_token: KL(policy, reference), the mean of the sampled log-ratios.
        surprise: how much less likely the sampled tokens are than samples of the policy, beyond what chance explains;
            negative where they are likelier.
        value_error: variance of returns - values, of the tokens.
        value_gain: share of the values' squared error that the updates of a step remove, on average over the updates;
            None with one update a step.
        reward_std: in the unit of the reward.
        scale: that of what the policy or the value function learns from, where nothing brings it to 1.
        ended: None where nothing says that responses should end by themselves.
    """

    kl: float | None = _number("KL to the reference is {} nats per response")
    kl_per_token: float | None = _number("KL to the reference is {} nats per token")
    kl_coef: float | None = _number("the KL coefficient is {}")
    entropy: float | None = _number("entropy is {} nats per token")
    surprise: float | None = _number("log-probabilities of the sampled tokens miss the entropy by {} nats per token")
    clip_fraction: float | None = _number("the share of clipped ratios is {}")
    explained_variance: float | None = _number("explained variance of the value function is {}")
    value_error: float | None = _number("the variance of its error is {}")
    value_gain: float | None = _number("the share of the value function's error that updates remove is {}")
    value_spread: float | None = _number("the value function's standard deviation is {} times that of the returns")
    reward_std: float | None = _number("the standard deviation of the scores is {}")
    scale: float | None = _number("what is learnt from has the scale {}")
    response_length: float | None = _number("responses have {} tokens")
    length_correlation: float | None = _number("scores and response lengths have a correlation of {}")
    ended: float | None = _number("the share of responses with an end token is {}")
    doubled_bos: float | None = _number("the share of queries that begin with two BOS tokens is {}")
    reference_gap: float | None = _number("before the first update, policy and reference differ by up to {} nats")
    ratio_gap: float | None = _number("before the first update, the policy and the rollout differ by up to {} nats")
    sampler_gap: float | None = _number("generate and the trainer differ by up to {} nats on the same tokens")


@dataclass(frozen=True)
class Sign:
    """A number on the wrong side of its limit.

    Args:
        statistic: the field of `Vitals`.
        above, below: exactly one is set: values above, or below, this limit are wrong.
        of: what the limit is a multiple of: the statistic's `first` value, the KL's `target`, or what `rounding`
            explains; None: nothing.
        slow: 0: one check tells. n: the last n * patience checks must be on the wrong side.
        share: how many of them must be there, at least.
        may_lack: whether the condition can do without the statistic.
    """

    statistic: str
    _: KW_ONLY
    above: float | None = None
    below: float | None = None
    of: Literal["first", "target", "rounding"] | None = None
    slow: int = 0
    share: float = 1.0
    may_lack: bool = False


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A problem, and the numbers that show it.

    Args:
        name: what goes wrong.
        signs: the problem exists if all signs do; the first one is logged.
        or_signs: other signs by which it shows too.
        cause: what the numbers say.
        remedy: sentences.
    """

    name: str
    signs: tuple[Sign, ...]
    or_signs: tuple[Sign, ...] = ()
    cause: str
    remedy: str


CONDITIONS = (
    Condition(
        name="negative_kl",
        signs=(Sign("kl", below=-1.0),),
        cause="responses are not drawn from the policy that is scored",
        remedy="Generate with top_k=0, top_p=1, no min_length, no ban on EOS; score at the sampling temperature; "
        "check the padding side and the attention mask.",
    ),
    Condition(
        name="runaway_kl",
        signs=(Sign("kl", above=5.0, of="target"),),
        cause="the policy leaves the reference, and the reward may be exploited",
        remedy="Raise the KL coefficient, lower its horizon or the learning rate, and read samples.",
    ),
    Condition(
        name="far_from_reference",
        signs=(Sign("kl_per_token", above=2.0),),
        cause="the policy has moved far from the reference, and may exploit the reward",
        remedy="Raise the KL coefficient (init_kl_coef, beta), lower the learning rate, and read samples.",
    ),
    Condition(
        name="kl_coef_winds_up",
        signs=(Sign("kl_coef", above=10.0, of="first"), Sign("kl", above=1.2, of="target")),
        cause="the adaptive coefficient rises, and the KL does not follow: soon the penalty is all that is learnt",
        remedy="Raise target, which may be out of reach, raise horizon, lower the learning rate, or set "
        "adap_kl_ctrl=False. Is the reference the policy at the start?",
    ),
    Condition(
        name="entropy_collapse",
        signs=(Sign("entropy", below=0.05, of="first"),),
        cause="the policy stops exploring",
        remedy="Lower the learning rate, raise the KL coefficient, or add an entropy bonus.",
    ),
    Condition(
        name="likelier_than_samples",
        signs=(Sign("surprise", below=-0.05),),
        cause="responses are likelier than samples of the policy: they were drawn at a lower temperature, or with "
        "top_k, top_p or min_p",
        remedy="Sample with top_k=0, top_p=1 and no min_p, at the temperature that log-probabilities are taken at: "
        "call trainer.generate, or set the config's temperature.",
    ),
    Condition(
        name="unlikelier_than_samples",
        signs=(Sign("surprise", above=0.05),),
        cause="responses are less likely than samples of the policy: they were drawn at a higher temperature, from "
        "other weights, or without some tokens (min_length, a ban on EOS)",
        remedy="Sample from the weights of this step, at the temperature that log-probabilities are taken at: call "
        "trainer.generate, or set the config's temperature.",
    ),
    Condition(
        name="clipping",
        signs=(Sign("clip_fraction", above=0.3),),
        cause="updates are larger than the clip range",
        remedy="Lower the learning rate or the epochs per batch, or enlarge the batch.",
    ),
    Condition(
        name="bad_value_function",
        signs=(
            Sign("explained_variance", below=-0.5, slow=2),
            Sign("value_error", above=0.75, of="first", slow=2),
            Sign("value_gain", below=0.0, slow=2, share=0.25, may_lack=True),
        ),
        cause="the value function does worse than a constant and does not learn, and its noise is in the advantages",
        remedy="Does the value head train (requires_grad, the optimizer)? Raise vf_coef or the learning rate, start "
        "from v_head_init_strategy='zero', whiten or scale rewards, or give the value function a rate of its own: "
        "value_learning_rate of PPO.",
    ),
    Condition(
        name="dead_critic",
        signs=(Sign("value_spread", below=1e-3, slow=1),),
        cause="the value function gives all tokens one value, and advantages have no baseline but the mean",
        remedy="Does the value head train (requires_grad, the optimizer)? Raise vf_coef or the learning rate.",
    ),
    Condition(
        name="constant_rewards",
        signs=(Sign("reward_std", below=1e-6, slow=1),),
        cause="there is nothing to learn from",
        remedy="Check the reward function, its truncation, and whether the prompts are too easy or too hard.",
    ),
    Condition(
        name="reward_scale",
        signs=(Sign("scale", above=100.0),),
        cause="rewards are so large that the KL penalty counts for nothing, and one loss drowns the other",
        remedy="Divide the rewards, or scale them: use_score_scaling, score_clip or whiten_rewards of PPO, "
        "scale_rewards='group' of GRPO, a smaller rwr_beta of DDPO.",
    ),
    Condition(
        name="growing_responses",
        signs=(Sign("response_length", above=3.0, of="first"),),
        or_signs=(Sign("length_correlation", above=0.7, slow=1),),
        cause="the reward favours length, or EOS is not learnt",
        remedy="Read samples; penalize length or a missing EOS in the reward; check that EOS is scored and not masked.",
    ),
    Condition(
        name="never_ends",
        signs=(Sign("ended", below=0.01, slow=1),),
        cause="no response ends by itself: the pad token is the EOS token, and a model that was fine-tuned with "
        "padding masked in its labels has not learnt to stop",
        remedy="Fine-tune with a pad token of its own, or with EOS in the labels; reward EOS (missing_eos_penalty). If "
        "responses are to have a fixed length, give the tokenizer another pad token.",
    ),
    Condition(
        name="doubled_bos",
        signs=(Sign("doubled_bos", above=0.0),),
        cause="the tokenizer adds a BOS token to texts that begin with one, such as those of a chat template",
        remedy="Tokenize with add_special_tokens=False, or leave the BOS token out of the texts.",
    ),
)
"""What a `HealthMonitor` looks for at every step."""

OTHER_REFERENCE = Condition(
    name="other_reference",
    signs=(Sign("reference_gap", above=1.0, of="rounding"),),
    cause="the reference is not the policy at the start, which is right only if it was meant to be another model",
    remedy="Otherwise change no weights between the construction of the trainer and the first step, let adapters "
    "start from zero (trained ones and PiSSA's do not), run both models in one precision, and leave dropout off.",
)
OTHER_START = Condition(
    name="other_start",
    signs=(Sign("ratio_gap", above=1.0, of="rounding"),),
    cause="the model does not repeat its log-probabilities, so that ratios do not start from 1",
    remedy="Is disable_dropout off, or does the model apply dropout by itself? Does it route tokens by their batch "
    "(mixture of experts)? Is batched_forward_pass overridden?",
)
OTHER_SAMPLER = Condition(
    name="other_sampler",
    signs=(Sign("sampler_gap", above=1.0, of="rounding"),),
    cause="they are two policies, and the KL will be biased",
    remedy="Does the model need position ids or a mask that generate alone passes, a fixed cache, or an attention "
    "implementation that ignores padding? Try attn_implementation='eager'.",
)
