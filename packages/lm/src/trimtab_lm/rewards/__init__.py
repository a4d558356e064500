"""What scores a response: reward models and reward functions."""
