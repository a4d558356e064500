"""What the trainers of diffusion pipelines share: settings, setup, optimizer, files."""
