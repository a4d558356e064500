"""Trainers that fine-tune diffusion pipelines from rewards. DDPO is the first to come; nothing is exported yet."""

__all__: list[str] = []
