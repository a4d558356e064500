"""Runs modules in processes forked from this one, which has imported the trainers: see `tests.processes.launch`.

Reads a job as a line of JSON: `module`, `args`, `environment`, and the file `log` for its output. Answers with a line
for the process's number, and with another for its status when it has ended.
"""

import json
import os
import runpy
import sys
from functools import partial
from pathlib import Path

import numpy as np

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # an import that prints writes no answer

from tools.chaos.processes import end_as  # noqa: E402 (imports the trainers)


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        if not (pid := os.fork()):
            os.environ.clear()
            os.environ |= job["environment"]
            np.random.seed()  # each run has its own, as without a fork
            sys.argv = [job["module"], *job["args"]]
            end_as(partial(runpy.run_module, job["module"], run_name="__main__", alter_sys=True), log=Path(job["log"]))
        for answer in (pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])):
            print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
