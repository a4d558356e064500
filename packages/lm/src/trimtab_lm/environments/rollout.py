"""Rollouts as conversations with environments, with any backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab_common.seeding import sampling_seed
from trimtab_common.stats import gather_over_ranks
from trimtab_lm.data.formats import Row, TemplateSettings
from trimtab_lm.data.tokenization import template_settings
from trimtab_lm.interface import Model, base_of
from trimtab_lm.sampling.generate import response_texts
from trimtab_lm.sampling.rollout import Episodes, Rollout, RolloutBackend
from trimtab_lm.tokens.positions import Positions

from .observations import observation_ids
from .pool import EnvironmentPool, Slot
from .protocol import Environment


@dataclass
class Episode:
    """A conversation so far.

    Attributes:
        prompt: token ids, 1-D.
        row: the prompt's row of the dataset.
        slot: the environment.
        limit: the most tokens after the prompt.
        ids, mask, logprobs, rewards: an entry for each token after the prompt; see `Rollout` and `Episodes`.
        turns, errors: so far.
        is_over: whether there is no further turn.
        ended: whether it came to its end, and was not cut.
    """

    prompt: Tensor
    row: Row
    slot: Slot
    limit: int
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: int = 0
    errors: int = 0
    is_over: bool = False
    ended: bool = False

    @property
    def context(self) -> Tensor:
        """All tokens that the policy has read and written."""
        return torch.cat([self.prompt, self.prompt.new_tensor(self.ids)])

    def append(self, ids: list[int], mask: int, logprobs: list[float]) -> None:
        """Append a turn of the policy, with mask 1, or an observation, with mask 0; the reward of each token is 0."""
        self.ids += ids
        self.mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.rewards += [0.0] * len(ids)


class EnvironmentRollout:
    """Samples episodes: the policy writes a turn, its environment replies, and so on until the episode is over.

    In each turn the episodes that go on are one batch of the backend, and their environments reply at once. Token ids
    are appended and never tokenized again: the policy is trained on exactly what it read and wrote. A turn begins only
    where all of it has room. An episode without this room, or without turns left, is cut: its `ended` is False, as it
    is where the last turn was cut at its limit. The last token of an episode is the policy's.

    The first turn is what the backend samples by the rollout's seed. The seed of turn t is fixed by that seed and t.

    Args:
        backend: samples the turns; `settings.max_completion_length` is the limit of one turn.
        make_environment: creates an environment, such as its class. Environments are reset and used again.
        max_completion_length: the most tokens of an episode, observations included.
        max_turns: the most turns of the policy.
        role: the role of the message that a text or an error becomes, for policies with a chat template. None: the
            policy reads texts as they are.
        time_limit: seconds that an environment has for a step, and for a reset.
        concurrency: environments that reply at a time.
        chat_template_kwargs: more arguments of the chat template, as for the prompts. A row's own count before these.
    """

    takes_rows = True

    def __init__(
        self,
        backend: RolloutBackend,
        make_environment: Callable[[], Environment],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_completion_length: int,
        max_turns: int = 8,
        role: str | None = None,
        time_limit: float = 60.0,
        concurrency: int = 64,
        chat_template_kwargs: TemplateSettings | None = None,
    ):
        turn = backend.settings.max_completion_length
        if max_completion_length < turn or max_turns < 1:
            raise ValueError(
                f"max_completion_length={max_completion_length}, max_turns={max_turns}: an episode has room for a turn "
                f"of the backend, which may have {turn} tokens. Raise these, or lower max_completion_length of the "
                "backend's settings."
            )
        self.backend, self.tokenizer, self.settings = backend, tokenizer, backend.settings
        self.max_completion_length, self.max_turns = max_completion_length, max_turns
        self.role, self.chat_template_kwargs = role, chat_template_kwargs
        self.environments = EnvironmentPool(make_environment, time_limit=time_limit, concurrency=concurrency)
        self.model: Model | None = None

    def sync(self, model: Model, version: int) -> None:
        """Sample from the weights of a model from this call on; see `RolloutBackend`.

        Raises:
            ValueError: the model is an encoder-decoder.
        """
        if base_of(model).config.is_encoder_decoder:
            raise ValueError(
                f"{type(base_of(model)).__name__} is an encoder-decoder, whose encoder reads the prompt alone: "
                "there is no place for observations. Use a causal model."
            )
        self.model = model
        self.backend.sync(model, version)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Tensor],
        *,
        num_generations: int,
        version: int,
        seed: int,
        rows: Sequence[Row] | None = None,
    ) -> Rollout:
        """An episode for each completion; see `RolloutBackend`. Collective: every process calls it as often.

        Args:
            prompts: rows of token ids, 1-D.
            version: the number of the weights to sample from.
            rows: a row of the dataset for each prompt, whose columns the environments get; None: they get none.
        """
        assert self.model is not None, "sync comes before generate"
        episodes = self._begin(self.model, prompts, rows or [{}] * len(prompts), num_generations, seed)
        is_told = is_policy = True
        for turn in range(self.max_turns):
            active = [episode for episode in episodes if not episode.is_over]
            if not any(gather_over_ranks(bool(active))):
                break
            self.backend.sync(self.model, version)  # an engine that slept since the last turn has lost its weights
            if turn == 0:
                sampled = self.backend.generate(prompts, num_generations=num_generations, version=version, seed=seed)
            else:
                # A process whose episodes are over takes part, because the weights may be divided among processes. It
                # samples from a prompt, which has room for a turn.
                contexts = [episode.context for episode in active] or [episode.prompt for episode in episodes[:1]]
                turn_seed = sampling_seed(seed, rank=0, draw=turn)
                sampled = self.backend.generate(contexts, num_generations=1, version=version, seed=turn_seed)
            is_told, is_policy = is_told and sampled.logprobs is not None, is_policy and sampled.is_policy
            if active:
                self._take_turn(active, sampled)
        device = prompts[0].device if prompts else None
        return Rollout(
            [torch.tensor(episode.ids, device=device) for episode in episodes],
            [episode.ended for episode in episodes],
            [torch.tensor(episode.logprobs, device=device) for episode in episodes] if is_told else None,
            Episodes(
                masks=[torch.tensor(episode.mask, device=device) for episode in episodes],
                rewards=[torch.tensor(episode.rewards, device=device) for episode in episodes],
                numbers={
                    "turns": [float(episode.turns) for episode in episodes],
                    "errors": [float(episode.errors) for episode in episodes],
                    "cut": [float(not episode.ended) for episode in episodes],
                },
            ),
            is_policy=is_policy,
        )

    def _begin(
        self, model: Model, prompts: Sequence[Tensor], rows: Sequence[Row], num_generations: int, seed: int
    ) -> list[Episode]:
        """The episodes, and their environments reset, those of a prompt side by side."""
        repeated = [pair for pair in zip(prompts, rows, strict=True) for _ in range(num_generations)]
        # Turns have the seeds of rank 0.
        seeds = [sampling_seed(seed, rank=1 + number, draw=0) for number in range(len(repeated))]
        columns = [{"seed": one, **row} for one, (_, row) in zip(seeds, repeated, strict=True)]
        slots, positions = self.environments.reset(columns), Positions.of(model)
        episodes = []
        for slot, (prompt, row) in zip(slots, repeated, strict=True):
            room = positions.room(len(prompt), is_encoder_decoder=False)
            limit = self.max_completion_length if room is None else min(self.max_completion_length, room)
            episodes.append(Episode(prompt, row, slot, limit))
        return episodes

    def _take_turn(self, active: Sequence[Episode], sampled: Rollout) -> None:
        """Append a turn to each episode, and the environment's reply where another turn follows."""
        texts = response_texts(self.tokenizer, [episode.context for episode in active], sampled.completions)
        written = [ids.tolist() for ids in sampled.completions]
        turns = zip([episode.slot for episode in active], texts, written, strict=True)
        for number, reply in enumerate(self.environments.step(list(turns))):
            episode, ids = active[number], written[number]
            logprobs = [0.0] * len(ids) if sampled.logprobs is None else sampled.logprobs[number].tolist()
            episode.append(ids, 1, logprobs)
            episode.rewards[-1] = float(reply.reward)
            episode.turns += 1
            episode.errors += reply.errors
            episode.is_over = reply.done or episode.turns == self.max_turns
            episode.ended = reply.done and sampled.ended[number]
            if episode.is_over:
                continue
            observation = observation_ids(
                self.tokenizer,
                reply.observation,
                text=texts[number],
                ids=ids,
                role=self.role,
                **template_settings(episode.row, self.chat_template_kwargs),
            )
            episode.is_over = len(episode.ids) + len(observation) + self.settings.max_completion_length > episode.limit
            if not episode.is_over:
                episode.append(observation, 0, [0.0] * len(observation))


def environment(environment_rewards: Sequence[float]) -> Sequence[float]:
    """The reward function that stands for the environment: the sum of its rewards in each completion."""
    return environment_rewards
