"""The text of --help: each configuration's everyday flags, or all of its flags."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from typing import NamedTuple, get_args

WIDTH = 108
REQUIRED = "required"
"""The default of a flag that must be given, in words."""


class Flag(NamedTuple):
    """A setting as --help shows it.

    Attributes:
        name: the field's name.
        kind: its type, in words.
        default: the value without the flag, in words.
        text: the line of help.
        inherited_from: the class of another library that declares the field; empty if trimtab declares it.
        is_own: whether the configuration itself declares the field, and no class that it inherits from.
        is_everyday: whether --help shows the flag, or --help-all alone.
    """

    name: str
    kind: str
    default: str
    text: str
    inherited_from: str
    is_own: bool
    is_everyday: bool

    @classmethod
    def of(cls, kind: type, field: dataclasses.Field[object], hint: object, *, default: str, is_set: bool) -> "Flag":
        """The flag of a dataclass's field.

        --help shows what the program sets, and trimtab's fields unless deprecated. transformers.TrainingArguments has
        more fields than all algorithms together.
        """
        text = " ".join(str(field.metadata.get("help", "")).split())
        declares = next(one for one in kind.__mro__ if field.name in inspect.get_annotations(one))
        library = declares.__module__.partition(".")[0]
        inherited_from = f"{library}.{declares.__name__}" if library == "transformers" else ""
        is_everyday = is_set or not (inherited_from or text.startswith("Deprecated"))
        return cls(field.name, type_name(hint), default, text, inherited_from, declares is kind, is_everyday)

    def lines(self) -> list[str]:
        """The flag with its type and default, and its help."""
        help_lines = textwrap.wrap(self.text, WIDTH - 8, initial_indent=" " * 8, subsequent_indent=" " * 8)
        return [f"  --{self.name}  {self.kind}, {self.default}", *help_lines]


def type_name(hint: object) -> str:
    """Returns a type's name for --help."""
    if isinstance(hint, type) and not get_args(hint):
        return hint.__name__
    text = str(hint).replace("typing.", "")
    text = re.sub(r"Literal\[(.*?)\]", lambda choices: choices[1].replace(", ", " | "), text)
    return re.sub(r"Optional\[([^\[\]]+)\]", r"\1 | None", text)


def _rank(flag: Flag) -> tuple[bool, bool, bool]:
    is_optional = flag.default != REQUIRED
    return is_optional, bool(flag.inherited_from), is_optional and not flag.is_own


def help_text(
    program: str, description: str | None, flags_by_title: Mapping[str, Iterable[Flag]], *, everything: bool
) -> str:
    """The whole text.

    Args:
        flags_by_title: for the title of each configuration its flags.
        everything: whether to show all flags. Required ones stand first, then a configuration's own; those of other
            libraries stand last.
    """
    lines = [f"usage: {program} [--config FILE.yaml] [--name=value ...]", ""]
    lines += [description, ""] if description else []
    for title, flags in flags_by_title.items():
        ordered = sorted(flags, key=_rank)
        hidden = [] if everything else [flag for flag in ordered if not flag.is_everyday]
        lines.append(f"{title}:")
        lines += [line for flag in ordered if flag not in hidden for line in flag.lines()]
        if hidden:
            sources = sorted({flag.inherited_from for flag in hidden} - {""})
            lines.append(f"  --help-all shows the others{', of ' if sources else ''}{', '.join(sources)}.")
        lines.append("")
    return "\n".join(lines)
