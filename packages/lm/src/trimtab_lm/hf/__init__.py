"""What the trainers on transformers.Trainer share."""
