"""Tokens in a model: their layout in a batch, the fused head, log-probabilities, positions."""
