"""A process that raises, dies or hangs ends the job under torchrun and accelerate launch, which name it."""

import subprocess
import sys

import pytest
from tests.processes import ROOT, environment
from tests.run_failed_ranks import LEAVES_WITH, REWARD_LIMIT, TRAINERS

from trimtab_common.time_limit import EXIT_STATUS

pytestmark = pytest.mark.slow

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]  # "--cpu" starts MPI
ERRORS = {
    "raises": ["ValueError: no answer from the judge", "exitcode  : 1 "],
    "dies": ["exitcode  : -9 ", "Signal 9 (SIGKILL)"],
    "exits": [f"exitcode  : {LEAVES_WITH} "],
    "sleeps": [
        f"The rewards took more than {REWARD_LIMIT:g} s, which is the limit (reward_timeout)",
        "in wait_forever",  # the slow function
        f"exitcode  : {EXIT_STATUS} ",
    ],
}
CASES = [
    ("ppo_loop", "raises", 1),
    ("ppo_loop", "dies", 0),
    ("ppo_train", "exits", 0),
    ("grpo_train", "dies", 0),
    ("grpo_train", "sleeps", 0),
    ("ddpo_train", "raises", 1),
    ("ddpo_threads", "sleeps", 1),
    ("sft_data", "raises", 0),
]


def ended(launcher: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a job under a launcher; a process that would wait forever for the other reaches the time limit."""
    command = [sys.executable, "-m", *launcher, "-m", "tests.run_failed_ranks", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(("trainer", "failure", "rank"), CASES)
def test_torchrun_ends_the_job_and_names_the_process(trainer: str, failure: str, rank: int):
    job = ended(TORCHRUN, trainer, failure, str(rank))
    assert job.returncode == 1
    for text in [*ERRORS[failure], f"rank      : {rank} "]:
        assert text in job.stderr, job.stderr


@pytest.mark.parametrize("failure", ["raises", "sleeps"])
def test_accelerate_launch_ends_the_job_and_names_the_process(failure: str):
    job = ended(ACCELERATE, "ppo_train", failure, "1")
    assert job.returncode == 1
    for text in [*ERRORS[failure], "rank      : 1 "]:
        assert text in job.stderr, job.stderr


def test_every_trainer_fails_somewhere():
    assert {trainer for trainer, *_ in CASES} == set(TRAINERS)
