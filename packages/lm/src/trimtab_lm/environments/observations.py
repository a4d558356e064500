"""Converts an environment's observation to the token ids after a turn of the policy."""

import re
from typing import cast

from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import Conversation, TemplateSettings, Tools, common_length
from trimtab_lm.data.tokenization import renderer, stop_strings, stop_token_ids

from .protocol import Observation


def observation_ids(
    tokenizer: PreTrainedTokenizerBase,
    observation: Observation,
    *,
    text: str,
    ids: list[int],
    role: str | None,
    tools: Tools | None = None,
    chat_template_kwargs: TemplateSettings | None = None,
) -> list[int]:
    """The token ids of an observation, to be appended to those of the turn before it.

    Args:
        observation: see `Reply`. Messages become what the chat template writes between two answers.
        text: the turn before it.
        ids: the tokens of that turn. Where they do not end in a stop token, the template's comes first.
        role: the role of the message that a text becomes; None leaves it a text.
        tools, chat_template_kwargs: see `trimtab_lm.data.tokenization`.

    Raises:
        ValueError: the template writes the turn in another way once an observation follows it.
    """
    if isinstance(observation, str) and role is not None:
        observation = [{"role": role, "content": observation}]
    if not isinstance(observation, str):
        if not observation or isinstance(observation[0], int):
            return list(cast(list[int], observation))
        is_closed = ids[-1] in stop_token_ids(tokenizer)
        messages = cast(Conversation, observation)
        observation = _between_answers(tokenizer, text, messages, is_closed, tools, chat_template_kwargs)
    return list(tokenizer(observation, add_special_tokens=False)["input_ids"])


def _between_answers(
    tokenizer: PreTrainedTokenizerBase,
    answer: str,
    messages: Conversation,
    is_closed: bool,
    tools: Tools | None,
    chat_template_kwargs: TemplateSettings | None,
) -> str:
    """What the chat template writes between an answer and the next one, its header included.

    A short conversation stands for the real one: what a template writes after an answer does not depend on what came
    before, and rendering the whole of it would cost more with every turn.
    """
    render = renderer(tokenizer, tools, chat_template_kwargs)
    begun = [{"role": "user", "content": "."}, {"role": "assistant", "content": answer}]
    until = render(begun)
    end = cast(re.Match[str], re.search(rf"(?:{stop_strings(tokenizer)})?(\s*)$", until))  # matches the empty end too
    until = until[: end.start(1) if is_closed else end.start()]
    whole = render([*begun, *messages], add_generation_prompt=True)
    if not whole.startswith(until):
        kept = common_length(until, whole)
        raise ValueError(
            f"The chat template writes an answer differently once a message of role {messages[0]['role']!r} follows "
            f"it, from {until[max(kept - 20, 0) : kept + 20]!r} on: the policy would go on from a conversation that it "
            "never reads later. Use a template that only appends, another role, or token ids as observations."
        )
    return whole[len(until) :]
