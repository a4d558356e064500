"""The interface of all sampling backends: their arguments and results."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from trimtab_common.config import Count, CountFromZero, Fraction, Positive, Share, check_ranges
from trimtab_common.stats import Mean
from trimtab_lm.data.formats import Row
from trimtab_lm.interface import Model
from trimtab_lm.tokens.positions import Positions

PLAIN_SAMPLING = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "num_beams": 1,
    "num_return_sequences": 1,
}
"""Settings under which a sampled token follows the model's own distribution, whatever its generation config says."""
SAMPLING_ALONE = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


class Episodes(NamedTuple):
    """The masks, rewards and numbers of completions that are conversations with an environment.

    Attributes:
        masks: for each completion, 1-D, 1 where the policy wrote the token and 0 where the environment did.
        rewards: for each completion, 1-D, a turn's reward at the last token of the turn, 0 elsewhere.
        numbers: for the statistics, by name: a number for each completion.
    """

    masks: list[Tensor]
    rewards: list[Tensor]
    numbers: dict[str, list[float]]

    def stats(self, count: int | None = None) -> dict[str, Mean]:
        """The means of `numbers` over the first `count` completions, for `gather_stats`."""
        return {f"environment/{name}": Mean.of(torch.tensor(row[:count])) for name, row in self.numbers.items()}


class Rollout(NamedTuple):
    """Completions in the order of their prompts, the generations of a prompt side by side."""

    completions: list[Tensor]  # 1-D ids, with the end token where there is one
    ended: list[bool]  # by itself; otherwise it was cut at the length limit
    logprobs: list[Tensor] | None = None  # 1-D, nats, of these tokens as they were sampled, where the sampler tells
    episodes: Episodes | None = None  # where completions are conversations; the policy wrote all of any other one
    policy_step: int | None = None  # optimizer steps of the policy that sampled, where it may have sampled ahead
    is_policy: bool = False  # logprobs are what its forward pass gives at this temperature, but for float32's rounding


class RolloutBackend(Protocol):
    """A sampler of completions. `version` numbers the weights, see `new_version`; a rollout says which it must be of.

    A backend whose class has `is_remote = True` samples in another process: its `generate` only waits, and a thread may
    call it while the policy trains. One with `takes_rows = True` takes the argument `rows`, see `roll_out`, and its
    rollouts have `episodes`, whose rewards GRPO adds as a reward function.

    Attributes:
        settings: how completions are drawn. PPO takes log-probabilities at their temperature.
    """

    settings: "SamplingSettings"

    def sync(self, model: Model, version: int) -> None:
        """Sample from the weights of a model from this call on. Collective.

        It is called before every rollout; nothing happens where `version` is held already.

        Args:
            model: a PreTrainedModel or PeftModel, unwrapped.
        """
        ...

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        """Completions of each prompt, fixed by the weights, the batch and `seed`.

        The global random numbers are left as they are.

        Args:
            prompts: rows of token ids, 1-D.
            version: the number of the weights to sample from.

        Raises:
            StaleWeightsError: the sampler does not hold `version`.
        """
        ...


def takes_rows(backend: RolloutBackend | None) -> bool:
    """Whether an environment answers the policy and rewards it; see `RolloutBackend`."""
    return bool(getattr(backend, "takes_rows", False))


def roll_out(
    backend: RolloutBackend,
    prompts: Sequence[Tensor],
    rows: Sequence[Row],
    *,
    num_generations: int,
    version: int,
    seed: int,
) -> Rollout:
    """Completions from any backend; environments get the rows of their prompts."""
    options: dict[str, Any] = {"rows": rows} if takes_rows(backend) else {}
    return backend.generate(prompts, num_generations=num_generations, version=version, seed=seed, **options)


_VERSIONS = count(1)


def new_version() -> int:
    """Returns a number that no other weights in this process have, because several callers may share a backend."""
    return next(_VERSIONS)


class StaleWeightsError(RuntimeError):
    """A caller asked for completions by weights that the sampler does not hold."""


def require_version(held: int | None, wanted: int) -> None:
    """Checks the version of the weights: training would take samples of older weights for the policy's."""
    if held != wanted:
        raise StaleWeightsError(
            f"A rollout of the weights of version {wanted} was asked for, but the sampler holds "
            f"{'none' if held is None else f'version {held}'}. Call sync(model, {wanted}) before generate."
        )


def check_room(
    positions: Positions, prompts: Sequence[Tensor], settings: "SamplingSettings", *, remedy: str = ""
) -> None:
    """Checks that the longest prompt and its completion fit into the engine.

    Args:
        positions: the positions of the model, or of the engine that runs it.
        prompts: rows of token ids.
        settings: with the length limit of completions.
        remedy: what else would help, such as "raise the engine's max_model_len".

    Raises:
        ValueError: they have no room.
    """
    ways = f"Lower max_completion_length, shorten the prompts{', or ' + remedy if remedy else ''}."
    longest = max(map(len, prompts), default=0)
    positions.check_sample(longest, settings.max_completion_length, is_encoder_decoder=False, remedy=ways)


def without_unset(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those of `PLAIN_SAMPLING` that set nothing: None, and a `min_length` of 0 or -1."""
    kept = {name: value for name, value in settings.items() if value is not None or name not in PLAIN_SAMPLING}
    if kept.get("min_length", 1) <= 0:
        del kept["min_length"]
    return kept


def sampling_config(
    model: Any, tokenizer: PreTrainedTokenizerBase, **kwargs: Any
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The complete generation config for `kwargs`, and the further arguments of a `Completer`.

    The latter are the end tokens, the kwargs that are not generation settings, and the tokenizer where there are stop
    strings.

    Sampling is plain unless `kwargs` say otherwise: a `top_k` or `top_p` of the model's own generation config, or
    transformers' default top_k of 50, would make the sampler another policy than the one that is trained, and so would
    tokens that it forbids or forces. End tokens and the length limit come from it. None, `top_k=0.0` and
    `min_length=-1` mean off.
    """
    config, kwargs = GenerationConfig(pad_token_id=padding_id(tokenizer)), without_unset(kwargs)
    if "top_k" in kwargs:
        kwargs["top_k"] = int(kwargs["top_k"])
    defaults = {name: value for name, value in model.generation_config.to_dict().items() if name not in PLAIN_SAMPLING}
    if "max_new_tokens" in kwargs:
        defaults["max_length"] = None
    config.update(**defaults, defaults_only=True)
    rest = config.update(**kwargs)
    for name, neutral in PLAIN_SAMPLING.items():
        # transformers complains of settings of sampling where there is none.
        if name not in kwargs and (config.do_sample or name not in SAMPLING_ALONE):
            setattr(config, name, neutral)
    # `generate` follows min_new_tokens where there is one, and would warn of the other.
    if config.min_new_tokens:
        config.min_length = None
    else:
        config.min_new_tokens = None
    if config.num_beams != 1 or config.num_return_sequences not in (None, 1):
        raise ValueError(
            f"num_beams={config.num_beams} and num_return_sequences={config.num_return_sequences}: one sampled "
            "response per query is needed. Leave both at 1, and repeat a query in the list to sample it again."
        )
    if config.stop_strings:
        rest.setdefault("tokenizer", tokenizer)
    return config, {**rest, "eos_ids": eos_token_ids(model, tokenizer.eos_token_id, config)}


TRUNCATED = "unlikely tokens are never drawn, so the KL is estimated on another distribution and drifts below 0"
REWEIGHTED = "tokens are drawn from reweighted probabilities that neither policy nor reference has: the KL is biased"
FORBIDDEN = "tokens (the end token above all) are forbidden by force, which the log-probs do not know: negative KL"
DISTORTIONS = {
    **dict.fromkeys(("top_k", "top_p", "min_p", "top_h", "typical_p"), TRUNCATED),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), TRUNCATED),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "sequence_bias"), REWEIGHTED),
    **dict.fromkeys(("guidance_scale", "exponential_decay_length_penalty", "watermarking_config"), REWEIGHTED),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), FORBIDDEN),
    **dict.fromkeys(("min_new_tokens", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), FORBIDDEN),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), FORBIDDEN),
}
"""Settings that make the sampler another policy than the one whose log-probabilities are taken, and what they do."""


def distortions(config: GenerationConfig) -> list[str]:
    """The settings of a generation config that change the distribution of tokens, one line each.

    The temperature is not among them: it enters the log-probabilities.
    """
    if not config.do_sample:
        return ["do_sample=False: each response is the mode, not a sample, so KL and advantages mean nothing"]
    values = {name: value for name in DISTORTIONS if (value := getattr(config, name, None)) is not None}
    return [
        f"{name}={value}: {DISTORTIONS[name]}"
        for name, value in values.items()
        if value != PLAIN_SAMPLING.get(name) and (value != 0 or name.endswith("token_id"))  # token 0 is a token
    ]


WARPERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings that warp a token's distribution, by the names that all backends share."""


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample completions. With the defaults, a token follows the model's own distribution.

    max_completion_length: tokens. temperature: divides the logits. top_p, top_k (0 is off), min_p and
    repetition_penalty as in transformers. generation_kwargs: further settings in the backend's own terms, those of
    GenerationConfig or vllm.SamplingParams.
    """

    max_completion_length: Count = 256
    temperature: Positive = 1.0
    top_p: Share = 1.0
    top_k: CountFromZero = 0
    min_p: Fraction | None = None
    repetition_penalty: Positive = 1.0
    generation_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self)
        object.__setattr__(self, "generation_kwargs", without_unset(self.generation_kwargs))
        if "do_sample" in self.generation_kwargs:
            raise ValueError("generation_kwargs sets do_sample: completions are always sampled; top_k=1 is greedy.")
        if owned := sorted(OWNED.intersection(self.generation_kwargs)):
            raise ValueError(
                f"generation_kwargs sets {owned}, which the trainer sets: leave it out, or use its own arguments "
                "(max_completion_length, num_generations, temperature, top_p, top_k, min_p, repetition_penalty)."
            )

    @classmethod
    def of(cls, generation_kwargs: Mapping[str, Any]) -> Self:
        """The settings for arguments of transformers' `generate`.

        Args:
            generation_kwargs: `max_new_tokens`, `temperature` and so on, under their names in GenerationConfig.
        """
        kwargs = without_unset(generation_kwargs)
        if kwargs.get("do_sample"):
            del kwargs["do_sample"]
        kwargs.pop("pad_token_id", None)  # masks mark padding by its place
        if "max_new_tokens" in kwargs:
            kwargs["max_completion_length"] = kwargs.pop("max_new_tokens")
        names = [name for name in cls.__dataclass_fields__ if name in kwargs and name != "generation_kwargs"]
        settings = {name: kwargs.pop(name) for name in names}
        return cls(**settings, generation_kwargs=kwargs)

    @property
    def warpers(self) -> dict[str, Any]:
        """The values of `WARPERS`."""
        return {name: getattr(self, name) for name in WARPERS}

    def config(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[GenerationConfig, dict[str, Any]]:
        """See `sampling_config`."""
        chosen = {
            "do_sample": True,
            "use_cache": True,
            "max_new_tokens": self.max_completion_length,
            **self.warpers,
            **self.generation_kwargs,
        }
        return sampling_config(model, tokenizer, **chosen)

    def end_tokens(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Every token that ends a completion; vLLM's `stop_token_ids` join those of the model."""
        own = self.generation_kwargs
        config = GenerationConfig(eos_token_id=own["eos_token_id"]) if "eos_token_id" in own else None
        return [*eos_token_ids(model, tokenizer.eos_token_id, config), *(own.get("stop_token_ids") or ())]


OWNED = {
    *("max_length", "max_new_tokens", "max_tokens", "max_time", "n", "num_beams", "num_return_sequences", "seed"),
    *("logprobs", "pad_token_id", *WARPERS),
}
"""What `generation_kwargs` may not set: it has an argument of its own, or the trainer decides it."""


class Notes:
    """Warns once of each setting that makes the sampler another policy than the trained one."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, lines: Sequence[str]) -> None:
        for line in lines:
            if line not in self._seen:
                self._seen.add(line)
                warnings.warn(f"The sampler is not the policy that is trained: {line}.", stacklevel=4)


def eos_token_ids(model: Any, tokenizer_eos: int | None, config: GenerationConfig | None = None) -> list[int]:
    """Every token that ends a response: the generation config may name several (Llama 3, Gemma)."""
    ids = (config or model.generation_config).eos_token_id
    ids = tokenizer_eos if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The tokenizer's padding token, or its end token; either will do, because masks and lengths mark padding."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
