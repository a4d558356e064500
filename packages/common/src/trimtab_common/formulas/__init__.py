"""The arithmetic of policy optimization, as pure functions of tensors: KL, advantages, whitening, clipping."""
