"""`trimtab doctor`: what is installed, on which devices, what is missing, and what is wrong, without the network."""

import argparse
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

DISTRIBUTIONS = ("trimtab-common", "trimtab-lm", "trimtab-diffusion")
EXTRAS = {
    "deepspeed": "training with DeepSpeed ZeRO, through accelerate launch",
    "galore": "GaLore optimizers: --optim galore_adamw",
    "liger": "Liger kernels: --use_liger_kernel",
    "quantization": "8-bit and 4-bit models, 8-bit optimizers",
    "sweeps": "trimtab sweep with method: bayes, and --report",
    "tensorboard": "logs for TensorBoard: --report_to tensorboard, --log_with tensorboard",
    "vllm": "rollouts with vLLM: --rollout_backend vllm (an environment of its own)",
}
"""What the extras of the distributions bring."""
FREE = 10
"""GB of free disk space below which the cache of models may soon be full."""


@dataclass
class Report:
    """What the doctor says.

    Attributes:
        lines: for the terminal.
        problems: what is wrong, and how to fix it; none: all is well.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def section(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Add aligned rows of a name and what there is to say of it."""
        width = max(len(name) for name, _ in rows)
        self.lines += ["", title, *(f"  {name:<{width}}  {text}" for name, text in rows)]


def main(argv: Sequence[str]) -> int:
    """Print the report; the exit status is 1 if something is broken."""
    parser = argparse.ArgumentParser(prog="trimtab doctor", description=__doc__)
    parser.parse_args(argv)
    report = Report([f"Python {platform.python_version()}, {sys.executable}"])
    look_at_packages(report)
    look_at_devices(report)
    look_at_extras(report)
    look_at_services(report)
    print("\n".join(report.lines))
    print("\nproblems" if report.problems else "\nNothing is wrong.")
    for problem in report.problems:
        print(f"  - {problem}")
    return 1 if report.problems else 0


def version_of(name: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(name: str, extra: str = "") -> Iterator[Requirement]:
    """What an installed distribution needs on this machine, or what one of its extras adds."""
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        is_of_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if is_of_extra == bool(extra) and (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
            yield requirement


def fault_of(requirement: Requirement) -> str | None:
    """How what is installed fails a requirement, with the remedy; None where it does not."""
    version = version_of(requirement.name)
    if version is None:
        return f'{requirement.name} is missing: pip install "{requirement}"'
    if not requirement.specifier.contains(version, prereleases=True):
        return f'{requirement.name} {version} is installed, which is too old or too new: pip install "{requirement}"'
    return None


def look_at_packages(report: Report) -> None:
    """The versions of our distributions, and of what they need."""
    installed = [name for name in DISTRIBUTIONS if version_of(name)]
    rows = [(name, version_of(name) or f"not installed: pip install {name}") for name in DISTRIBUTIONS]
    needed = {one.name: one for name in installed for one in requirements_of(name) if one.name not in DISTRIBUTIONS}
    report.section("packages", [*rows, *((name, version_of(name) or "missing") for name in sorted(needed))])
    faults = (fault_of(one) for name in installed for one in requirements_of(name))
    report.problems += sorted({fault for fault in faults if fault is not None})


def look_at_devices(report: Report) -> None:
    """The accelerators, as torch sees them."""
    try:
        import torch
    except (ImportError, OSError) as error:
        report.problems.append(f"torch cannot be imported ({error}): install it again, see pytorch.org/get-started.")
        return
    rows = [("CPU", f"{os.cpu_count()} cores, threads in a process: {torch.get_num_threads()}")]
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(number)
            bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16"
            rows.append((f"GPU {number}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {bf16}"))
    elif torch.accelerator.is_available():
        rows.append((str(torch.accelerator.current_accelerator()), f"{torch.accelerator.device_count()} device(s)"))
    else:
        rows.append(("GPU", "none"))
        if torch.version.cuda and shutil.which("nvidia-smi"):
            report.problems.append(
                f"torch is built for CUDA {torch.version.cuda} and sees no GPU, although nvidia-smi is here: compare "
                "the driver's CUDA version in nvidia-smi, and CUDA_VISIBLE_DEVICES."
            )
    report.section("devices", rows)


def look_at_extras(report: Report) -> None:
    """The extras: what they bring, and how to install those that are missing."""
    rows = []
    for extra, purpose in EXTRAS.items():
        owners = [name for name in DISTRIBUTIONS if version_of(name) and extra in extras_of(name)]
        needed = [one for name in owners for one in requirements_of(name, extra)]
        absent = [one for one in needed if version_of(one.name) is None]
        report.problems += [fault for one in needed if one not in absent and (fault := fault_of(one))]
        if absent:
            rows.append((extra, f'missing: {purpose}. pip install "{owners[-1]}[{extra}]"'))
        elif owners:
            versions = {one.name: version_of(one.name) for one in needed}
            rows.append((extra, ", ".join(f"{name} {version}" for name, version in versions.items())))
    report.section("extras", rows)


def extras_of(name: str) -> list[str]:
    """The extras of an installed distribution."""
    return metadata.metadata(name).get_all("Provides-Extra") or []


def look_at_services(report: Report) -> None:
    """W&B's login and the cache of models, without the network."""
    from huggingface_hub import constants, get_token

    rows = [("W&B", wandb_state())]
    rows.append(("Hugging Face hub", "a token is there" if get_token() else "no token: public models only"))
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        rows.append(("cache of models", f"{cache}: not writable"))
        report.problems.append(
            f"Models cannot be downloaded to {cache} ({error.strerror}): set HF_HOME to a folder that you may write to."
        )
    else:
        free = shutil.disk_usage(existing).free / 1e9
        scarce = ": a model may not fit; HF_HOME names another place" if free < FREE else ""
        rows.append(("cache of models", f"{cache}, {free:.0f} GB free{scarce}"))
    report.section("services", rows)


def wandb_state() -> str:
    """Whether W&B knows its user, and what a run does."""
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode in ("offline", "disabled"):
        return f"WANDB_MODE={mode}: nothing is uploaded"
    if wandb.login(prompt=False, verify=False):
        return "there is a key: runs are uploaded"
    return "not logged in: runs are offline, in ./wandb; `wandb login` changes that, `wandb sync` uploads them"
