"""Best of n: several samples for each query, of which those with the highest scores are kept."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from trimtab_common.seeding import private_rng, sampling_seed
from trimtab_lm.sampling.generate import eos_token_ids, generate, sampling_config


class BestOfNSampler:
    """Samples `sample_size` responses per query and gives the `n_candidates` that score highest, best first.

    model: a causal or encoder-decoder model, with a value head or adapters or without. queries_to_scores: from a list
    of texts (query and response; the response alone of an encoder-decoder model) to one score each. length_sampler:
    called for the number of new tokens of each query, such as LengthSampler. seed: of the sampling, which neither
    moves nor depends on the global random numbers; None takes one from them now. generation_config: settings of the
    sampling; it is plain, at temperature 1, where they say nothing.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        queries_to_scores: Callable[[list[str]], Sequence[float] | Tensor],
        length_sampler: Callable[[], int],
        sample_size: int = 4,
        seed: int | None = None,
        n_candidates: int = 1,
        generation_config: GenerationConfig | None = None,
    ):
        if not 1 <= n_candidates <= sample_size:
            raise ValueError(
                f"n_candidates={n_candidates} of sample_size={sample_size} samples cannot be chosen. Give 1 <= "
                "n_candidates <= sample_size."
            )
        self.model = getattr(model, "pretrained_model", model)
        self.tokenizer, self.queries_to_scores, self.length_sampler = tokenizer, queries_to_scores, length_sampler
        self.sample_size, self.n_candidates = sample_size, n_candidates
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

        tokenized_query: one query of token ids, a list of queries, or a tensor [queries, tokens]. device: where the
        queries go, the model's by default. generation_kwargs: settings of this call. Raises ValueError where
        queries_to_scores gives another number of scores than it got texts, or one that is not finite.
        """
        device = self.model.device if device is None else device
        return [
            self._best(query.to(device), skip_special_tokens, generation_kwargs) for query in _queries(tokenized_query)
        ]

    def _best(self, query: Tensor, skip_special_tokens: bool, generation_kwargs: dict[str, Any]) -> list[str]:
        pad = self.tokenizer.pad_token_id
        eos = self.tokenizer.eos_token_id
        settings = {
            "pad_token_id": (0 if eos is None else eos) if pad is None else pad,
            "do_sample": True, "max_new_tokens": self.length_sampler(), **self.settings, **generation_kwargs,
        }  # fmt: skip
        config, rest = sampling_config(self.model, **settings)
        self.calls += 1
        training, _ = self.model.training, self.model.eval()
        try:
            with private_rng(sampling_seed(self.seed, rank=0, draw=self.calls), self.model.device):
                rows = generate(
                    self.model, [query] * self.sample_size, config, eos_ids=eos_token_ids(self.model, eos, config),
                    batch_size=self.sample_size, return_prompt=True, **rest,
                )  # fmt: skip
        finally:
            self.model.train(training)
        texts = self.tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=skip_special_tokens)
        scores = torch.as_tensor(self.queries_to_scores(texts), dtype=torch.float32).flatten()
        if len(scores) != len(texts) or not bool(scores.isfinite().all()):
            raise ValueError(
                f"queries_to_scores gave {scores.tolist()} for {len(texts)} texts. Give one finite score for each."
            )
        return [texts[i] for i in scores.topk(self.n_candidates).indices]


def _queries(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given] if given.dim() == 1 else list(given)
    if all(isinstance(token, int) for token in given):
        return [torch.tensor(given)]
    return [torch.as_tensor(query) for query in given]
