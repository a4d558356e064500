"""The sentiment of a text by VADER (Hutto & Gilbert 2014), as a reward."""

from collections.abc import Sequence
from functools import cache

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


@cache
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()


def sentiment(completions: Sequence[str], **columns: object) -> list[float]:
    """VADER's compound score of each text, from -1 (negative) to 1 (positive); 0 if VADER knows none of its words.

    Ignores the columns, such as the prompts, that trainers give a reward function.
    """
    return [float(_analyzer().polarity_scores(text)["compound"]) for text in completions]
