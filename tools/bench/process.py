"""Measures one side in its own process: `python -m tools.bench.process JSON` prints the report as JSON."""

import contextlib
import importlib
import json
import sys
import warnings
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tools.bench.measuring import Clock
from tools.bench.profiling import second_step, shares
from tools.bench.sizes import SIZES

OF_THE_OTHER = {"trl": "trimtab_common", "trimtab_lm": "trl"}
VERSIONS = ("torch", "transformers", "accelerate", "peft", "diffusers")


def main(order: dict[str, Any]) -> dict[str, object]:
    """Runs a task of tasks/.

    Args:
        order: `task`, `package` (trimtab_lm or trl), `size`, `pair`, `settings`, `folder` (which holds the models), and
            `is_profiled` (whether to add a `profile` to the report, which slows the steps down).
    """
    task = importlib.import_module(f"tools.bench.tasks.{order['task']}")
    package, settings = str(order["package"]), dict[str, Any](order["settings"])
    size = replace(SIZES[str(order["size"])], pair=order["pair"], **settings.pop("sizes", {}))
    if settings.pop("positions", None):  # TRL asks this whether only those with a loss go through the head
        importlib.import_module("trl.trainer.utils")._use_triton = lambda device: True
    Clock.profiler = second_step() if order["is_profiled"] else None
    with Clock.profiler or contextlib.nullcontext():
        result = asdict(task.run(package, size, settings, order["folder"]))
    if Clock.profiler:
        result["profile"] = shares(Clock.profiler)
    if OF_THE_OTHER[package] in sys.modules:
        raise RuntimeError(f"The process that measures {package} imported {OF_THE_OTHER[package]}.")
    return result | {"versions": {name: _version(name) for name in VERSIONS}}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):  # the trainers print their logs
        report = main(json.loads(sys.argv[1]))
    print(json.dumps(report))
