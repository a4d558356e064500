"""`trl.environment`: conversations of a policy with tools, as texts, with the names and arguments of 2024.

`trimtab_lm.environments` does the same for trainers, with many environments at once, statistics and time limits.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import is_rich_available

from trimtab_lm.data.tokenization import begins_with_bos
from trimtab_lm.sampling.generate import generate
from trimtab_lm.sampling.rollout import sampling_config
from trimtab_lm.tokens.dropout import without_dropout

COLORS = {
    "Prompt": "black on grey85",
    "System": "black on cyan3",
    "Model": "black on deep_sky_blue1",
    "Reward": "black on plum1",
}


class TextHistory:
    """A conversation so far, as a text and as tokens, in segments of the system and of the model.

    Args:
        text: the first segment, which is the query.
        tokens: its ids, [Q].

    Attributes:
        token_masks: [T], 1 where the model wrote the token.
        text_spans, token_spans: start and end of each segment.
        system_spans: whether the system wrote each segment.
        completed, truncated: whether the conversation is over, and whether it was cut.
        reward: 0 until it is known.
    """

    def __init__(self, text: str, tokens: Tensor, system: bool = True):
        self.text, self.tokens, self.token_masks = "", tokens[:0], tokens[:0].long()
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.system_spans: list[bool] = []
        self.completed = self.truncated = False
        self.reward: Any = 0.0
        self.append_segment(text, tokens, system=system)

    def append_segment(self, text: str, tokens: Tensor, system: bool = True) -> None:
        """Appends a segment.

        Raises:
            ValueError: it is empty.
        """
        if not text or not len(tokens):
            raise ValueError(f"A segment needs text and tokens, got {text!r} and {len(tokens)} tokens.")
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens])
        self.token_masks = torch.cat([self.token_masks, torch.full_like(tokens, int(not system))])

    def complete(self, truncated: bool = False) -> None:
        """Ends the conversation."""
        self.completed, self.truncated = True, truncated

    @property
    def last_text_segment(self) -> str:
        """The text of the last segment."""
        return self.text[slice(*self.text_spans[-1])]

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, response and the response's mask, as `PPOTrainer.step` takes them."""
        end = self.token_spans[0][1]
        return self.tokens[:end], self.tokens[end:], self.token_masks[end:]

    def show_text(self, show_legend: bool = False) -> None:
        """Prints the conversation in colours."""
        self._show([(self.text[slice(*span)], number) for number, span in enumerate(self.text_spans)], show_legend)

    def show_tokens(self, tokenizer: PreTrainedTokenizerBase, show_legend: bool = False) -> None:
        """Prints the tokens of the conversation in colours."""
        spans = [tokenizer.convert_ids_to_tokens(self.tokens[slice(*span)].tolist()) for span in self.token_spans]
        self._show([(" ".join([*tokens, ""]), number) for number, tokens in enumerate(spans)], show_legend)

    def show_colour_legend(self) -> None:
        """Prints what the colours mean."""
        _print([(f"{word} ", color) for word, color in COLORS.items()])

    def _show(self, segments: Sequence[tuple[str, int]], show_legend: bool) -> None:
        writers = ["Prompt", *("System" if system else "Model" for system in self.system_spans[1:])]
        parts = [(text, COLORS[writers[number]]) for text, number in segments]
        _print([*parts, (f"\n\nReward: {self.reward}", COLORS["Reward"])])
        if show_legend:
            self.show_colour_legend()


def _print(parts: Sequence[tuple[str, str]]) -> None:
    """Prints texts, each in a style."""
    if not is_rich_available():
        warnings.warn("rich shows conversations, and is not installed: pip install rich.", stacklevel=4)
        return
    from rich.console import Console
    from rich.text import Text

    Console().print(Text.assemble(*parts))


class TextEnvironment:
    """Lets a policy solve tasks with tools: it writes `<request><tool>query<call>`, and reads `answer<response>`.

    A conversation ends with `<submit>`, an end token, a turn without a call, too many turns or too many tokens.

    Args:
        model: with a value head, or without.
        tools: functions from a text to a text: a dict by name, or a list, named by their classes.
        reward_fn: `(last segments, **keywords of run) -> rewards`.
        prompt: what each task begins with.
        max_turns: the most turns of the model.
        max_tool_reponse: characters of a tool's answer; a longer one is cut, and ends in "...".
        max_length: tokens of a conversation; a longer one is truncated. None: no limit.
        generation_kwargs: settings of transformers' GenerationConfig. Sampling is plain unless they say otherwise.
    """

    request_token, call_token, response_token, submit_token = "<request>", "<call>", "<response>", "<submit>"

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        tools: Mapping[str, Callable[[str], Any]] | Sequence[Callable[[str], Any]] = (),
        reward_fn: Callable[..., Sequence[Any]] | None = None,
        prompt: str | None = None,
        max_turns: int = 4,
        max_tool_reponse: int = 100,
        max_length: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
    ):
        self.model, self.tokenizer, self.reward_fn, self.prompt = model, tokenizer, reward_fn, prompt
        self.tools = dict(tools) if isinstance(tools, Mapping) else {type(tool).__name__: tool for tool in tools}
        self.max_turns, self.max_tool_response, self.max_length = max_turns, max_tool_reponse, max_length
        self.generation_kwargs = dict(generation_kwargs or {})

    @property
    def current_device(self) -> torch.device:
        """The model's device."""
        return self._language_model.device

    @property
    def _language_model(self) -> Any:
        model = extract_model_from_parallel(self.model)
        return getattr(model, "pretrained_model", model)

    def run(
        self, queries: Sequence[str], **rewards_kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Any], list[TextHistory]]:
        """Solves tasks.

        Returns:
            Queries, responses and the responses' masks, rows of tokens as `PPOTrainer.step` takes them; the rewards,
            and the conversations.
        """
        texts = [(self.prompt or "") + query for query in queries]
        special = [not begins_with_bos(self.tokenizer, text) for text in texts]
        ids = [self._ids(text, add_special_tokens=one) for text, one in zip(texts, special, strict=True)]
        histories = [TextHistory(*start) for start in zip(texts, ids, strict=True)]
        for _ in range(self.max_turns):
            if all(history.completed for history in histories):
                break
            histories = self.tasks_end_check(self.generate(histories))
            histories = self.tasks_end_check([self.step(history) for history in histories], model_turn=False)
        self.compute_reward(histories, **rewards_kwargs)
        rows = [history.split_query_response_tokens() for history in histories]
        columns = [list(column) for column in zip(*rows, strict=True)]
        return (*columns, [history.reward for history in histories], histories)  # type: ignore[return-value]

    def step(self, history: TextHistory) -> TextHistory:
        """Appends the tool's answer to the last call, unless the conversation is over."""
        (history,) = self.tasks_end_check([history])
        if history.completed:
            return history
        name, query = self.parse_tool_call(history.last_text_segment)
        if name is None or query is None:
            answer = f"Unknown tool call: {history.last_text_segment}"
        elif name not in self.tools:
            answer = f"Unknown tool {name}."
        else:
            try:
                answer = str(self.tools[name](query))
            except Exception as error:
                answer = f"Tool error: {error}"
        if len(answer) > self.max_tool_response:
            answer = answer[: self.max_tool_response - 3] + "..."
        answer += self.response_token
        history.append_segment(answer, self._ids(answer, add_special_tokens=False))
        return history

    def parse_tool_call(self, text: str) -> tuple[str | None, str | None]:
        """The tool and the query of `<request><tool>query<call>`; None and None without a call."""
        _, requested, rest = text.partition(self.request_token)
        request, called, _ = rest.partition(self.call_token)
        _, opened, rest = request.partition("<")
        name, closed, query = rest.partition(">")
        return (name, query) if requested and called and opened and closed else (None, None)

    def compute_reward(self, histories: list[TextHistory], **reward_kwargs: Any) -> list[TextHistory]:
        """Gives each conversation the reward of its last segment."""
        if self.reward_fn is None:
            raise ValueError("TextEnvironment needs a reward_fn: (last segments, **keywords of run) -> rewards.")
        rewards = self.reward_fn([history.last_text_segment for history in histories], **reward_kwargs)
        for history, reward in zip(histories, rewards, strict=True):
            history.reward = reward
        return histories

    def generate(self, histories: list[TextHistory]) -> list[TextHistory]:
        """Appends a turn of the model to each conversation that is not over."""
        active = [history for history in histories if not history.completed]
        turns = self._generate_batched([history.tokens for history in active])
        for history, text, ids in zip(active, self.tokenizer.batch_decode(turns), turns, strict=True):
            history.append_segment(text, ids, system=False)
        return histories

    def tasks_end_check(self, histories: list[TextHistory], model_turn: bool = True) -> list[TextHistory]:
        """Ends the conversations that `task_end_check` says are over."""
        for history in histories:
            if not history.completed:
                truncated, ended = self.task_end_check(history, model_turn=model_turn)
                if ended:
                    history.complete(truncated=truncated)
        return histories

    def task_end_check(self, history: TextHistory, model_turn: bool = True) -> tuple[bool, bool]:
        """Whether a conversation is cut, and whether it is over.

        Args:
            model_turn: whether the last segment is the model's, which must call a tool or submit.
        """
        last = history.last_text_segment
        if history.completed:
            return False, False
        if self.max_length is not None and len(history.tokens) > self.max_length:
            return True, True
        calls = self.request_token in last and self.call_token in last
        has_end = self.tokenizer.eos_token is not None and self.tokenizer.eos_token in history.text
        return False, has_end or self.submit_token in last or (model_turn and not calls)

    def _ids(self, text: str, *, add_special_tokens: bool) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=add_special_tokens, return_tensors="pt").input_ids[0]
        return ids.to(self.current_device)

    def _generate_batched(self, query_tensors: Sequence[Tensor], batch_size: int = 16) -> list[Tensor]:
        """A turn after each row of token ids, which ends with a call, a submission or an end token."""
        model, settings = self._language_model, dict(self.generation_kwargs)
        own = settings.pop("stop_strings", None) or []
        settings["stop_strings"] = [self.call_token, self.submit_token, *([own] if isinstance(own, str) else own)]
        config, rest = sampling_config(model, self.tokenizer, **settings)
        with torch.no_grad(), without_dropout(model):
            return generate(
                model,
                list(query_tensors),
                config,
                batch_size=batch_size,
                return_prompt=False,
                **rest,
            )
