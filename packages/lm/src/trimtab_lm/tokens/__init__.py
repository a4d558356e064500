"""Tokens in a model: their layout in a batch, the fused LM head, log-probabilities, positions."""
