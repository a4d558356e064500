"""The protocol of environments: the other side of a conversation with the policy."""

import numbers
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from trimtab_common.reward_checks import LARGEST
from trimtab_lm.data.formats import Conversation

Observation: TypeAlias = str | Conversation | Sequence[int]
"""What the policy reads between two of its turns: a text, messages for the chat template, or token ids."""


class Reply(NamedTuple):
    """What an environment answers to a turn of the policy.

    Attributes:
        observation: what the policy reads before its next turn; ignored after the last turn.
        reward: for this turn.
        done: whether the episode is over.
        errors: how many things went wrong in this step, for the statistics.
    """

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False
    errors: int = 0


class Environment(Protocol):
    """The other side of a conversation: tools, a simulated user, a game. Both methods may be `async def`.

    An environment serves one episode at a time, and many environments run at once. Take random numbers from the `seed`
    of `reset`: all environments share the global generators, in no fixed order.
    """

    def reset(self, *args: Any, **columns: Any) -> Awaitable[None] | None:
        """Begin an episode.

        Args:
            args: nothing is passed by position.
            columns: those columns of the prompt's row that the signature names. It may also name `seed`, an int that is
                fixed by the rollout's seed and the number of the episode, unless the row has a column of this name.
        """
        ...

    def step(self, text: str, ids: list[int]) -> Awaitable[Reply] | Reply:
        """Reply to a turn of the policy.

        After an exception, or where the call takes too long, the policy reads an error, and the episode goes on.

        Args:
            text: what the policy wrote, without special tokens.
            ids: its tokens.
        """
        ...


def error_text(error: Exception) -> str:
    """Converts an exception to a text for the policy."""
    return f"Error: {type(error).__name__}: {error}"


def checked(reply: object, environment: Environment) -> Reply:
    """Checks the result of an environment's `step`.

    Raises:
        TypeError, ValueError: it is no `Reply`, or a part of it has another type.
    """
    name = type(environment).__name__
    if not isinstance(reply, Reply):
        raise TypeError(
            f"{name}.step returned {reply!r} ({type(reply).__name__}), and a Reply is needed. Write: "
            "return Reply(observation, reward=..., done=...)."
        )
    observation = reply.observation
    is_list = isinstance(observation, list | tuple) and len({isinstance(part, Mapping) for part in observation}) < 2
    if not isinstance(observation, str) and not (
        is_list and all(isinstance(part, Mapping | int) for part in observation)
    ):
        raise TypeError(
            f"{name}.step returned the observation {observation!r} ({type(observation).__name__}), and a text, a list "
            "of messages or a list of token ids is needed."
        )
    reward: object = reply.reward
    if not isinstance(reward, numbers.Real) or not abs(float(reward)) <= LARGEST:
        raise ValueError(f"{name}.step returned the reward {reward!r}, and a finite int or float is needed.")
    return reply
