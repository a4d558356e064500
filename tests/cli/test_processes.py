"""Subcommands in separate processes: two that train together, and the trials of a sweep."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.processes import environment

from trimtab_cli.main import main
from trimtab_cli.sweep.study import read_study, status_of, trials_of

DPO = ("--model=model", "--dataset=pairs", "--max_steps=2", "--save_strategy=no", "--learning_rate=0.01")
EXACT = ("--use_cpu", "--optim=sgd", "--train_sampling_strategy=sequential", "--max_grad_norm=0")


def output_of(*words):
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


@pytest.mark.distributed
def test_two_processes_under_accelerate_train_as_one(place):
    # On one machine, only this launcher of accelerate starts torchrun; the processes see no GPU and talk over gloo.
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--mixed_precision=no")
    words = ("-m", "trimtab_lm", "dpo", *DPO, *EXACT, "--per_device_train_batch_size=2", "--output_dir=two")
    shown = output_of(sys.executable, *launch, *words)
    assert shown.count("The model is in two.") == 1
    assert main(["dpo", *DPO, *EXACT, "--per_device_train_batch_size=4", "--output_dir=one"]) == 0
    one, two = (load_file(Path(folder, "model.safetensors")) for folder in ("one", "two"))
    before = load_file("model/model.safetensors")
    assert max(float((weight - before[name]).abs().max()) for name, weight in one.items()) > 1e-3
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-6)


TRAINING = """
import torch._dynamo  # as the trainers do: a DDP that is the first to import it keeps the group
from torch import distributed, nn
from tests.processes import threads_of_gloo
from trimtab_cli.main import end_process_group

class Trainer:
    def __init__(self):
        self.model, self.callback = nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), self

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
Trainer()
assert threads_of_gloo()
end_process_group()
assert not threads_of_gloo()
"""


def test_no_thread_of_the_group_is_left_when_a_process_exits():
    output_of(sys.executable, "-c", TRAINING)


@pytest.mark.slow
def test_a_sweep_of_a_subcommand_ranks_its_runs_by_the_evaluation(place):
    words = [sys.executable, "-m", "trimtab_cli", "dpo", *DPO, "--eval_split=test", "--output_dir=out", "${args}"]
    sweep = {
        "method": "grid",
        "metric": {"name": "eval/loss", "goal": "minimize"},
        "command": words,
        "parameters": {"beta": {"values": [0.1, 5.0]}},
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")
    output_of(sys.executable, "-m", "trimtab_cli", "sweep", "sweep.yaml", "--folder=sweep")
    study = read_study(Path("sweep"))
    trials = trials_of(study)
    assert [status_of(trial) for trial in trials] == ["finished", "finished"], trials
    assert len({trial.value for trial in trials}) == 2
    for trial in trials:
        folder = Path("out", study.user_attrs["id"], trial.user_attrs["run_id"])
        arguments = torch.load(folder / "training_args.bin", weights_only=False)
        assert arguments.beta == trial.user_attrs["parameters"]["beta"]
