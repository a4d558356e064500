"""A griffe extension that adds a configuration's fields, each with its line of help, to the reference of its class."""

import ast
from collections.abc import Iterator

from griffe import Attribute, Class, Expr, ExprCall, ExprKeyword, Extension, GriffeLoader

SHOWN = {"dict": "{}", "script_name": "name of the script"}
"""How to show default factories."""


class Settings(Extension):
    """Adds the help text of each `setting("...")` in a class to the class's docstring."""

    def on_class(self, *, cls: Class, loader: GriffeLoader, **kwargs: object) -> None:
        """Adds the fields of a class; griffe calls this."""
        lines = [f"    {name}: {_help(call, cls)} {_default(call)}" for name, call in _settings(cls)]
        if lines and cls.docstring is not None:
            text, raises, errors = cls.docstring.value.partition("\n\nRaises:")
            cls.docstring.value = "\n".join([f"{text}\n\nAttributes:", *lines]) + raises + errors


def _settings(cls: Class) -> Iterator[tuple[str, ExprCall]]:
    """Yields the fields of a class that are declared with `trimtab_common.config.setting`."""
    for name, member in cls.all_members.items():
        value = member.value if isinstance(member, Attribute) else None
        if isinstance(value, ExprCall) and value.canonical_path == "trimtab_common.config.setting":
            yield name, value


def _help(call: ExprCall, cls: Class) -> str:
    text = call.arguments[0]
    if isinstance(text, Expr):  # the name of a constant
        text = cls.modules_collection[text.canonical_path].value
    return " ".join(ast.literal_eval(str(text)).split())


def _default(call: ExprCall) -> str:
    keywords = {one.name: str(one.value) for one in call.arguments if isinstance(one, ExprKeyword)}
    value = keywords.get("default", keywords.get("default_factory"))
    return "Required." if value is None else f"Default: `{SHOWN.get(value, value)}`."
