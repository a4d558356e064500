"""A trainer whose process fails ends the trainers of the other processes, each of which says who failed and where."""

import ast
import re

import pytest
from tests.common.test_ranks import BUSY
from tests.processes import ends_of_two
from tests.run_failed_ranks import LIMIT, REWARD_LIMIT, TRAINERS

from trimtab_common.ranks import EXIT_STATUS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ERRORS = {
    "raises": "no answer from the judge",
    "dies": "its process was killed or crashed, perhaps for lack of memory",
    "sleeps": rf"the rewards took more than {REWARD_LIMIT:g} s, which is the limit \(reward_timeout\)",
}
CASES = [
    ("ppo_loop", "raises", 1, "after generation, step 2"),
    ("ppo_loop", "dies", 1, "after generation, step 2"),
    ("ppo_loop", "dies", 0, "after generation, step 2"),
    ("ppo_train", "raises", 1, "rewards, step 2"),
    ("grpo_train", "raises", 1, "rewards, step 2"),
    ("grpo_train", "dies", 0, "rewards, step 2"),
    ("ddpo_train", "raises", 1, "rewards, epoch 1"),
    ("sft_data", "raises", 0, "preparing the dataset"),
    ("ppo_train", "sleeps", 1, "rewards, step 2"),
    ("grpo_train", "sleeps", 0, "rewards, step 2"),
    ("ddpo_threads", "sleeps", 1, "rewards, epoch 1"),
]


@pytest.mark.parametrize(("trainer", "failure", "rank", "phase"), CASES)
def test_the_other_process_ends_within_the_limit_and_says_why(trainer: str, failure: str, rank: int, phase: str):
    ends = ends_of_two("tests.run_failed_ranks", trainer, failure, str(rank), seconds=200)
    failed, survivor = ends[rank], ends[1 - rank]
    assert survivor.status in (1, EXIT_STATUS)
    text = rf"Rank {rank} failed in phase '{phase}': .*{ERRORS[failure]}\. This process, rank {1 - rank} in phase '"
    assert re.search(text, survivor.errors), survivor.errors
    assert survivor.time - ast.literal_eval(failed.output.splitlines()[-1])["failed_at"] < LIMIT + BUSY
    if failure == "sleeps":
        assert failed.status == EXIT_STATUS
        assert "in wait_forever" in failed.errors  # the function that was slow


def test_every_trainer_fails_somewhere():
    assert {trainer for trainer, *_ in CASES} == set(TRAINERS)
