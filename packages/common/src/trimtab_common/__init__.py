"""What policy optimization needs whatever the policy is: KL control, surrogates, statistics, checkpoints, tracking."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
