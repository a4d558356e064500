"""Reward functions for DDPO with models that people trained on preferences or classes; see `trimtab_diffusion.rewards`.

They take what those rewards take, and load their models as those do.
"""
