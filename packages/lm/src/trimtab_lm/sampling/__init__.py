"""Responses to prompts: transformers' generate, its continuous batching, vLLM, best of n."""
