"""Experiments that reproduce papers: each has a folder, a recipe, a report and a README."""

from trimtab_common.compat.noise import silence_known

silence_known()
