"""Shared parts of the trainers on transformers.Trainer."""
