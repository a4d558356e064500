"""What a GRPOTrainer is made of: its sampler, its rewards, its layout and its reference."""

from functools import partial

from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.tokenization import require_eos
from trimtab_lm.environments.rollout import EnvironmentRollout, environment
from trimtab_lm.hf.types import Batch
from trimtab_lm.interface import Model, decoder_start_of
from trimtab_lm.models.reference import Reference
from trimtab_lm.rewards.functions import Rewards, RewardSet, Tokenizers
from trimtab_lm.sampling.rollout import RolloutBackend
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward

from .batches import micro_batch
from .config import GRPOConfig


def rewards_of(
    reward_funcs: Rewards | None, config: GRPOConfig, tokenizers: Tokenizers, backend: RolloutBackend
) -> RewardSet:
    """The reward functions and, after them, the environment that the backend samples with.

    Args:
        reward_funcs: see `RewardSet`; with an environment, None leaves them out.
        config: of the trainer.
        tokenizers: of reward models.
        backend: samples the completions.
    """
    if isinstance(backend, EnvironmentRollout):
        functions = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        reward_funcs = [*(function for function in functions if function is not None), environment]
        tokenizers = [*tokenizers, None] if isinstance(tokenizers, list | tuple) else tokenizers
    names, timeout = config.reward_names, config.reward_timeout
    return RewardSet(
        reward_funcs, config.reward_weights, tokenizers, names=names, device=config.device, timeout=timeout
    )


def layout_of(model: Model, tokenizer: PreTrainedTokenizerBase, *, is_noisy: bool) -> partial[Batch]:
    """What makes a micro-batch of groups, in the layout that suits the model; `is_noisy`: see `best_layout`."""
    eos, pad = require_eos(tokenizer), tokenizer.pad_token_id
    return partial(
        micro_batch,
        layout=best_layout(model, share_prefix=True, is_noisy=is_noisy),
        pad_token_id=eos if pad is None else pad,  # padding is masked by its place, so it may be EOS
        decoder_start_token_id=decoder_start_of(model),
    )


def reference_of(model: Model) -> Reference:
    """The reference of the KL: the model as it is now, without its adapters or as a frozen copy."""
    reference = Reference.of(model)
    if not reference.is_policy:
        score_tokens_in_forward(reference.model)
    return reference
