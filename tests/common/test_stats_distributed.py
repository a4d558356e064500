"""Statistics over two processes with unequal shares equal those of one process that holds everything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trimtab_common.formulas.masking import explained_variance, global_mean, rescale, whiten
from trimtab_common.stats import Deviation, Mean, RunningMoments, Variance, gather_over_ranks, gather_stats

SHARE = """
import sys, torch
import torch.distributed as dist
from trimtab_common.formulas.masking import explained_variance, global_mean, rescale, whiten
from trimtab_common.stats import Deviation, Mean, RunningMoments, Variance
from trimtab_common.stats import everywhere, gather_over_ranks, gather_stats, sum_over_ranks
dist.init_process_group("gloo")
rank = dist.get_rank()
x, y, mask = (column[rank * 3 : 3 + rank * 5] for column in torch.load(sys.argv[1] + "/whole.pt"))
local = torch.tensor([1.0, 2.0])
assert sum_over_ranks(local).tolist() == [2.0, 4.0] and local.tolist() == [1.0, 2.0]
moments = RunningMoments()
moments.update(x[mask.bool()])
moments.update(y)
results = {
    "mean": global_mean(x, mask), "whitened": whiten(x, mask), "rescaled": rescale(x, mask),
    "explained": explained_variance(x, y, mask), "moments": moments.state_dict(),
    "ranks": gather_over_ranks({"rank": rank}),
    "stats": gather_stats({"mean": Mean.of(x, mask), "deviation": Deviation.of(x, mask), "variance": Variance.of(x),
                           "dist": x[mask.bool()], "number": 3.5 + rank}),
}
class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
def fails():
    if rank == 1:
        raise Unpicklable("this", "that")
try:
    everywhere(fails)
except Exception as error:
    results["error"] = [type(error).__name__, str(error)]
torch.save(results, f"{sys.argv[1]}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_two_processes_with_unequal_shares_are_one(tmp_path):
    torch.manual_seed(0)
    x, y = (100 + 3 * torch.randn(8, 5, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(8, 5) < 0.6).long()
    x[mask == 0] = float("nan")  # masked values must not matter
    y[mask == 0] = 7.0
    torch.save((x, y, mask), tmp_path / "whole.pt")
    script = tmp_path / "share.py"
    script.write_text(SHARE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*launch, str(script), str(tmp_path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(Path(tmp_path, f"{rank}.pt"), weights_only=True) for rank in (0, 1))

    assert first["error"] == ["RuntimeError", "Unpicklable: this and that"]
    assert second["error"] == ["Unpicklable", "this and that"]
    seen = x[mask.bool()]
    for part in (first, second):
        torch.testing.assert_close(part["mean"], seen.mean())
        torch.testing.assert_close(
            part["explained"], 1 - (y - x)[mask.bool()].var(correction=0) / y[mask.bool()].var(correction=0)
        )
        everything = torch.cat([seen, y.flatten()])
        assert part["moments"]["count"] == everything.numel()
        assert part["moments"]["mean"] == pytest.approx(float(everything.mean()), rel=1e-12)
        assert part["moments"]["squares"] == pytest.approx(
            float(everything.var(correction=0)) * everything.numel(), rel=1e-12
        )
        assert part["ranks"] == [{"rank": 0}, {"rank": 1}]
        assert part["stats"]["mean"] == pytest.approx(float(seen.mean()), rel=1e-12)
        assert part["stats"]["deviation"] == pytest.approx(float(seen.std(correction=0)), rel=1e-12)
        assert part["stats"]["number"] == 4.0
        assert torch.equal(part["stats"]["dist"], seen)
    for name, function in (("whitened", whiten), ("rescaled", rescale)):
        torch.testing.assert_close(torch.cat([first[name], second[name]]), function(x, mask))


def test_one_process_needs_no_group():
    x, mask = torch.tensor([[1.0, 2.0, 30.0]]), torch.tensor([[1, 1, 0]])
    assert float(global_mean(x, mask)) == 1.5
    assert float(explained_variance(x, x, mask)) == 1
    assert gather_over_ranks("a") == ["a"]
    moments = RunningMoments()
    moments.update(x)
    assert moments.mean == 11
    assert gather_stats({"m": Mean(3, 2), "v": Variance.of(x, mask), "d": Deviation.of(x, mask)}) == {
        "m": 1.5,
        "v": 0.25,
        "d": 0.5,
    }
