"""The dispatch of `trimtab SUBCOMMAND ...`; a subcommand is a function of its words that returns the exit status."""

import difflib
import gc
import io
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, cast

from trimtab_common.compat.noise import silence_known


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        module: where its function is.
        function: takes the words after the subcommand, and returns the exit status.
        purpose: in a line.
    """

    module: str
    function: str
    purpose: str


TRAINING = {
    "sft": Command("trimtab_cli.train", "sft", "supervised fine-tuning on texts, conversations or completions"),
    "reward": Command("trimtab_cli.train", "reward", "a reward model from pairs of answers"),
    "dpo": Command("trimtab_cli.train", "dpo", "DPO and its relatives, from pairs of answers"),
    "kto": Command("trimtab_cli.train", "kto", "KTO, from single answers that are desirable or not"),
    "grpo": Command("trimtab_cli.train", "grpo", "GRPO, from prompts and rewards"),
    "ppo": Command("trimtab_cli.train", "ppo", "PPO with a value head, from prompts and rewards"),
    "iterative-sft": Command("trimtab_cli.raft", "iterative_sft", "fine-tuning on the best of n samples (RAFT)"),
    "ddpo": Command("trimtab_cli.ddpo", "ddpo", "DDPO of a diffusion pipeline, from rewards"),
    "nft": Command("trimtab_cli.ddpo", "nft", "DiffusionNFT of a pipeline, from rewards, without log-probabilities"),
    "align-prop": Command("trimtab_cli.ddpo", "align_prop", "AlignProp of a pipeline, from a reward's gradient"),
    "diffusion-dpo": Command("trimtab_cli.ddpo", "diffusion_dpo", "Diffusion-DPO, from pairs of pictures"),
}
OTHERS = {
    "sweep": Command("trimtab_cli.sweep.command", "main", "run a W&B sweep file, without a server"),
    "chat": Command("trimtab_cli.chat", "main", "talk to a model, beside its reference"),
    "merge": Command("trimtab_cli.merge", "main", "an adapter and its base model as one model"),
    "memory": Command("trimtab_cli.memory", "main", "what each GPU would hold in a training, per engine"),
    "memory ddpo": Command("trimtab_cli.diffusion_memory", "main", "what a GPU would hold in a training of DDPO"),
}
COMMANDS = TRAINING | OTHERS
NEEDED = dict.fromkeys(("ddpo", "nft", "align-prop", "diffusion-dpo", "memory ddpo"), "trimtab_diffusion")
"""Packages that subcommands need besides those that this one depends on."""
HELP = {"-h", "--help", "--help-all"}
PAGES = Path(__file__).with_name("help")
"""What `trimtab SUBCOMMAND --help` prints, without the seconds in which a subcommand's libraries are imported.

`python -m tests.cli.test_help` writes the pages from the configurations; a test compares them.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that the first word names, or the first two.

    Args:
        argv: the words after the program's name; None: those of the running program.

    Returns:
        The exit status: that of the subcommand; 2 where there is no such subcommand, or its package is missing.
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if argv is None and not HELP.isdisjoint(words):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `trimtab dpo --help | head` ends without an error
    name = pair if (pair := " ".join(words[:2])) in COMMANDS else words[0]
    if name in HELP:
        print(help_text())
        return 0
    if name == "--version":
        print(f"trimtab {metadata.version('trimtab-cli')}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        advice = f"Did you mean {near[0]}?" if near else f"Subcommands are {', '.join(COMMANDS)}."
        print(f"trimtab: error: {name!r} is no subcommand. {advice}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    silence_known()
    if argv is None:
        warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}\n"  # without our source
    if remedy := remedy_of(name):
        print(f"trimtab: error: {name} needs a package that is missing: {remedy}", file=sys.stderr)
        return 2
    if not {"-h", "--help"}.isdisjoint(words) and "--help-all" not in words:
        print(page_of(name).read_text(encoding="utf-8"), end="")
        return 0
    rest = words[len(name.split()) :]
    if "--help-all" not in rest and (mistake := import_module("trimtab_cli.mistakes").mistake_in(name, rest)):
        print(f"trimtab {name}: error: {mistake}", file=sys.stderr)
        return 2
    run = cast(Callable[[Sequence[str]], int], getattr(import_module(command.module), command.function))
    is_interrupted = False
    try:
        status = run(rest)
    except KeyboardInterrupt:  # after a training was saved, or at once
        is_saved = name in TRAINING and import_module("trimtab_common.sealing").published
        remedy = " --resume_from latest goes on from a checkpoint." if is_saved else ""
        print(f"trimtab {name}: interrupted.{remedy}", file=sys.stderr)
        status, is_interrupted = 130, True
    end_process_group()
    if is_interrupted and argv is None:  # Python ends by the signal, so that a shell's loop over trainings ends, too
        sys.excepthook = partial(_call_silently, sys.excepthook)
        raise KeyboardInterrupt
    return status


def _call_silently(hook: Callable[..., object], *error: object) -> None:
    """Calls a hook, of W&B for instance, without what it prints."""
    with redirect_stderr(io.StringIO()):
        hook(*error)


def end_process_group() -> None:
    """End the group that a training among several processes has left.

    With an open group, gloo's threads sometimes abort a process that exits, and a launcher reports a failure.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        gc.collect()  # a trainer and its callbacks refer to each other, and DDP holds on to the group
        distributed.destroy_process_group()


def page_of(name: str) -> Path:
    """The file with a subcommand's help."""
    return PAGES / f"{name.replace(' ', '-')}.txt"


def help_text() -> str:
    """What `trimtab --help` prints."""
    lines = ["usage: trimtab SUBCOMMAND [--config FILE.yaml] [--name=value ...]"]
    for title, commands in (("train a model", TRAINING), ("other subcommands", OTHERS)):
        lines += ["", f"{title}:"]
        for name, command in commands.items():
            missing = f" (missing: {remedy})" if (remedy := remedy_of(name)) else ""
            lines.append(f"  {name:<14} {command.purpose}{missing}")
    lines += [
        "",
        "An example: trimtab dpo --model gpt2 --dataset pairs.jsonl --output_dir runs/dpo",
        "`trimtab SUBCOMMAND --help` lists the flags of a subcommand. Under several processes:",
        "accelerate launch -m trimtab_lm dpo --config dpo.yaml",
    ]
    return "\n".join(lines)


def remedy_of(name: str) -> str:
    """How to install the package that a subcommand misses; empty if none is missing. Imports nothing."""
    package = NEEDED.get(name)
    return "" if package is None or find_spec(package) else f"pip install {package.replace('_', '-')}"
