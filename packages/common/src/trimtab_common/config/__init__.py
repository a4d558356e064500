"""Dataclasses as the command line: flags, a YAML file, and whatever a W&B sweep agent passes.

Every field is a flag, `--learning_rate 1e-4`, `--learning-rate=1e-4`, unless it is computed. `--help` lists the
algorithm's fields, `--help-all` also those of other libraries. Values may be Python literals (`--x=['a', 'b']`,
`--x=None`, `--flag=False`), JSON or YAML (`--x=[a, b]`), or several words for a list.

    --ppo.learning_rate=1e-4      the field of PPOConfig only; `ppo` is the class name without Config, in snake case
    --ppo={'learning_rate': 1e-4} several fields of one class, as a nested sweep parameter arrives
    --tracker_kwargs.project=x    one entry of a field that holds a dict
    --config file.yaml            the same names, flat or under the class; flags override the file

A name that several classes have, without the class before it, sets the field in each; with the class it wins.
A program's recipe sets the same names before the file does, in place of the classes' defaults.
"""

from trimtab_common.config.command_line import parse_config
from trimtab_common.config.fields import (
    Computed,
    Count,
    CountFromZero,
    Decay,
    Finite,
    Fraction,
    NotNegative,
    Positive,
    Range,
    Seed,
    Share,
    check_ranges,
    computed,
    script_name,
    setting,
)
from trimtab_common.config.records import flattened, to_flat_dict, without_secrets
from trimtab_common.config.values import ConfigError, read_settings

__all__ = [
    "Computed",
    "ConfigError",
    "Count",
    "CountFromZero",
    "Decay",
    "Finite",
    "Fraction",
    "NotNegative",
    "Positive",
    "Range",
    "Seed",
    "Share",
    "check_ranges",
    "computed",
    "flattened",
    "parse_config",
    "read_settings",
    "script_name",
    "setting",
    "to_flat_dict",
    "without_secrets",
]
