"""Runs unchanged scripts that import `trl` (0.7 to 0.11) on trimtab's trainers.

On the command line, also after `accelerate launch`:

    python -m trimtab_lm.legacy.trl SCRIPT [arguments]

Inside a program, before it imports from `trl` or `transformers`:

    import trimtab_lm.legacy.trl

`trl_names.MODULES` lists the names that lead somewhere. Any other name raises an ImportError or AttributeError that
says what to use. What such scripts expect of transformers 4 is in `transformers4`.
"""

import importlib
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from trimtab_lm.legacy.trl_names import ADVICE, MODULES


class TrlModules(MetaPathFinder, Loader):
    """Finds `trl` and its modules, and looks their names up in `MODULES` at their first use."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Returns the module's spec; None for a module of another package.

        Raises:
            ImportError: the name leads nowhere.
        """
        if fullname.partition(".")[0] != "trl":
            return None
        if fullname not in MODULES:
            raise ImportError(_explain(fullname), name=fullname)
        return ModuleSpec(fullname, self, origin=__name__, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Gives a module its names."""
        names = MODULES[module.__name__]
        vars(module)["__all__"] = [name for name in names if not name.startswith("_")]
        vars(module)["__dir__"] = partial(sorted, names)
        vars(module)["__getattr__"] = partial(_look_up, module.__name__)


def _look_up(module: str, name: str) -> object:
    """Returns the object that a module's name stands for.

    Raises:
        ImportError: it leads to trimtab-diffusion, which is not installed.
        AttributeError: it leads nowhere.
    """
    if f"{module}.{name}" in MODULES:
        return importlib.import_module(f"{module}.{name}")
    place = MODULES[module].get(name)
    if place is None:
        raise AttributeError(_explain(f"{module}.{name}"))
    home, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(home), attribute)
    except ModuleNotFoundError as error:
        if error.name not in ("trimtab_diffusion", "diffusers"):
            raise
        raise ImportError(f"{module}.{name} is part of trimtab-diffusion: pip install trimtab-diffusion.") from error


def _explain(fullname: str) -> str:
    """Returns why there is nothing for a name, and what to use instead."""
    name = fullname.rpartition(".")[2]
    elsewhere = next((other for other, names in MODULES.items() if name in names), None)
    advice = f"import it from {elsewhere}" if elsewhere else ADVICE.get(name, "see trimtab's page on migration")
    return f"trimtab has nothing under the name {fullname}: {advice}"


def install() -> None:
    """Lets `import trl` find trimtab's modules, and restores names of transformers that TRL's scripts import.

    Raises:
        RuntimeError: another `trl` is imported already.
    """
    present = sys.modules.get("trl")
    if present is not None:
        raise RuntimeError(
            f"trl is imported already, from {present.__file__}. Import trimtab_lm.legacy.trl before the first import "
            "of trl, or uninstall trl."
        )
    sys.meta_path.insert(0, TrlModules())
    from trimtab_lm.legacy.transformers4 import restore  # imports transformers, which mistakes and --help do without

    restore()


def main(argv: Sequence[str]) -> None:
    """Runs a script.

    Raises:
        SystemExit: there is no such file.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m trimtab_lm.legacy.trl SCRIPT [arguments]")
        raise SystemExit(0 if argv else 2)
    script = Path(argv[0])
    if not script.is_file():
        print(f"python -m trimtab_lm.legacy.trl: error: {script} is no file.", file=sys.stderr)
        raise SystemExit(2)
    importlib.import_module("trimtab_lm.legacy.trl")  # which installs
    sys.argv = [str(script), *argv[1:]]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ModuleNotFoundError as error:
        error.add_note(f"{script} needs {error.name}, which trimtab does not install: pip install {error.name}.")
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
else:
    install()
