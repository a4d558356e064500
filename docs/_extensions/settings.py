"""An extension of griffe: the fields of a configuration, each with its line of help, in the reference of its class."""

import ast

from griffe import Attribute, Class, Expr, ExprCall, ExprKeyword, Extension, GriffeLoader


class Settings(Extension):
    """Writes what `setting("...")` says of each field of a class into the class's docstring."""

    def on_class(self, *, cls: Class, loader: GriffeLoader, **kwargs: object) -> None:
        """See griffe."""
        fields = [member for member in cls.members.values() if isinstance(member, Attribute) and _call(member)]
        if not fields or cls.docstring is None:
            return
        lines = [f"    {field.name}: {_help(field)} {_default(field)}" for field in fields]
        before, raises, after = cls.docstring.value.partition("\n\nRaises:")
        cls.docstring.value = before + "\n\nAttributes:\n" + "\n".join(lines) + raises + after


def _call(field: Attribute) -> ExprCall | None:
    value = field.value
    is_setting = isinstance(value, ExprCall) and value.canonical_path == "trimtab_common.config.setting"
    return value if is_setting else None  # type: ignore[return-value]


def _help(field: Attribute) -> str:
    text = _call(field).arguments[0]  # type: ignore[union-attr]
    if isinstance(text, Expr):  # the name of a constant
        text = field.modules_collection[text.canonical_path].value
    return " ".join(ast.literal_eval(str(text)).split())


def _default(field: Attribute) -> str:
    given = [one for one in _call(field).arguments if isinstance(one, ExprKeyword)]  # type: ignore[union-attr]
    values = [str(one.value) for one in given if one.name in ("default", "default_factory")]
    if not values:
        return "Required."
    return f"Default: `{ {'dict': '{}', 'script_name': 'name of the script'}.get(values[0], values[0])}`."
