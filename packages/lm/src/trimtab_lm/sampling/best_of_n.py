"""Best of n: takes several samples for each query, and keeps those with the highest scores."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from trimtab_common.reward_checks import checked_scores
from trimtab_common.seeding import private_rng, sampling_seed
from trimtab_common.sharding import whole_weights
from trimtab_lm.sampling.generate import Completer
from trimtab_lm.sampling.rollout import RolloutBackend, new_version, sampling_config
from trimtab_lm.tokens.dropout import without_dropout


class BestOfNSampler:
    """Samples `sample_size` responses per query and gives the `n_candidates` that score highest, best first.

    Args:
        model: a causal or encoder-decoder model, with a value head or adapters or without.
        queries_to_scores: from a list of texts (query and response; the response alone of an encoder-decoder model) to
            one score each.
        length_sampler: called for the number of new tokens of each query, such as LengthSampler; None with `rollout`.
        seed: seeds the sampling, which leaves the global random numbers alone; None draws a seed from them.
        n_candidates: the number of samples to keep.
        generation_config: settings of the sampling; it is plain, at temperature 1, where they say nothing.
        rollout: what samples, by its own settings, such as a VLLMRollout; None: transformers' generate.

    Raises:
        ValueError: there are fewer samples than candidates, or settings of the sampling beside a rollout.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        queries_to_scores: Callable[[list[str]], Sequence[float] | Tensor],
        length_sampler: Callable[[], int] | None,
        sample_size: int = 4,
        seed: int | None = None,
        n_candidates: int = 1,
        generation_config: GenerationConfig | None = None,
        *,
        rollout: RolloutBackend | None = None,
    ):
        if not 1 <= n_candidates <= sample_size:
            raise ValueError(
                f"n_candidates={n_candidates} of sample_size={sample_size} samples cannot be chosen. Give 1 <= "
                "n_candidates <= sample_size."
            )
        if (rollout is None) == (length_sampler is None) or (rollout is not None and generation_config is not None):
            raise ValueError(
                "Give a length_sampler, and generation_config if you like, or a rollout, which samples by its own "
                "settings; not both, and not neither."
            )
        self.model = getattr(model, "pretrained_model", model)
        self.tokenizer, self.queries_to_scores, self.length_sampler = tokenizer, queries_to_scores, length_sampler
        self.sample_size, self.n_candidates, self.rollout = sample_size, n_candidates, rollout
        self.settings = {} if generation_config is None else generation_config.to_diff_dict()
        self.settings.pop("transformers_version", None)
        self.seed = int(torch.randint(2**31, ())) if seed is None else seed
        self.calls = 0

    def generate(
        self,
        tokenized_query: Tensor | Sequence[int] | Sequence[Tensor] | Sequence[Sequence[int]],
        skip_special_tokens: bool = True,
        device: torch.device | str | None = None,
        **generation_kwargs: Any,
    ) -> list[list[str]]:
        """The best texts for each query.

        Args:
            tokenized_query: one query of token ids, a list of queries, or a tensor [queries, tokens].
            skip_special_tokens: whether texts leave special tokens out.
            device: where the queries go, the model's by default.
            generation_kwargs: settings of this call, for transformers' generate.

        Raises:
            TypeError, ValueError: `queries_to_scores` returns something else than a finite number for each text; or
                there are settings for a rollout.
        """
        best = self._best_of_each(_queries(tokenized_query), skip_special_tokens, device, generation_kwargs)
        return [[text for text, _ in candidates] for candidates in best]

    def generate_ids(
        self,
        tokenized_query: Tensor | Sequence[int] | Sequence[Tensor] | Sequence[Sequence[int]],
        device: torch.device | str | None = None,
        **generation_kwargs: Any,
    ) -> list[list[Tensor]]:
        """The best responses to each query, as `generate` chooses them, but as token ids on the query's device.

        A response ends in an end token exactly if the model has sampled one, which its text does not tell: learn these
        ids, not the text. Arguments and errors are those of `generate`.
        """
        queries = _queries(tokenized_query)
        best = self._best_of_each(queries, True, device, generation_kwargs)
        pairs = zip(queries, best, strict=True)
        return [[response.to(query.device) for _, response in candidates] for query, candidates in pairs]

    def _best_of_each(
        self,
        queries: list[Tensor],
        skip_special_tokens: bool,
        device: torch.device | str | None,
        generation_kwargs: dict[str, Any],
    ) -> list[list[tuple[str, Tensor]]]:
        """The best texts for each query, with their responses."""
        device = self.model.device if device is None else device
        queries = [query.to(device) for query in queries]
        if self.rollout is None:
            groups = self._sample(queries, generation_kwargs)
        else:
            groups = self._roll_out(self.rollout, queries, generation_kwargs)
        return [self._best(query, group, skip_special_tokens) for query, group in zip(queries, groups, strict=True)]

    def _sample(self, queries: list[Tensor], generation_kwargs: dict[str, Any]) -> list[list[Tensor]]:
        assert self.length_sampler is not None  # the constructor sees to it
        settings = {"do_sample": True, **self.settings, **generation_kwargs}
        lengths = [settings.get("max_new_tokens") or self.length_sampler() for _ in queries]
        groups: list[list[Tensor]] = [[] for _ in queries]
        with (
            whole_weights(self.model),  # processes may have different numbers of queries
            without_dropout(self.model),
            private_rng(self._next_seed(), self.model.device),
        ):
            for length in sorted(set(lengths)):
                chosen = [i for i, other in enumerate(lengths) if other == length]
                config, rest = sampling_config(self.model, self.tokenizer, **settings | {"max_new_tokens": length})
                samples = Completer(self.model, config, **rest)([queries[i] for i in chosen], self.sample_size)
                for number, i in enumerate(chosen):
                    groups[i] = samples.completions[number * self.sample_size : (number + 1) * self.sample_size]
        return groups

    def _roll_out(
        self, rollout: RolloutBackend, queries: list[Tensor], generation_kwargs: dict[str, Any]
    ) -> list[list[Tensor]]:
        if generation_kwargs:
            raise ValueError(f"The rollout samples by its own settings: leave {sorted(generation_kwargs)} out.")
        seed, size, version = self._next_seed(), self.sample_size, new_version()
        rollout.sync(self.model, version)  # the weights may have changed since the last call
        samples = rollout.generate(queries, num_generations=size, version=version, seed=seed).completions
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def _next_seed(self) -> int:
        self.calls += 1
        return sampling_seed(self.seed, rank=0, draw=self.calls)

    def _best(self, query: Tensor, responses: list[Tensor], skip_special_tokens: bool) -> list[tuple[str, Tensor]]:
        has_query = not self.model.config.is_encoder_decoder
        rows = [torch.cat([query, response]) if has_query else response for response in responses]
        texts = self.tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=skip_special_tokens)
        items = [f"text {i}" for i in range(len(texts))]
        scores = checked_scores(self.queries_to_scores(texts), items, source="What queries_to_scores returned")
        return [(texts[i], responses[i]) for i in torch.tensor(scores).topk(self.n_candidates).indices]


def _queries(tokenized_query: Any) -> list[Tensor]:
    if isinstance(tokenized_query, Tensor):
        return [tokenized_query] if tokenized_query.dim() == 1 else list(tokenized_query)
    if tokenized_query and all(isinstance(token, int) for token in tokenized_query):
        return [torch.tensor(tokenized_query)]
    return [torch.as_tensor(query) for query in tokenized_query]
