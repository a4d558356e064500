"""Where the time of a step goes, by kinds of operations."""

from collections import Counter

from torch.profiler import ProfilerActivity, profile, schedule

# A kind's operations have one of these in their names. The profiler names the time between operations ProfilerStep.
KINDS = {
    "attention": ("scaled_dot_product",),
    "convolutions": ("convolution",),
    "matrix products": ("mm", "dot"),
    "norms": ("norm",),
    "optimizer": ("adam",),
    "Python": ("ProfilerStep",),
}
OTHER = "other operations"


def second_step() -> profile:
    """A profiler of the step after the one that warms up; `Clock` tells it where steps end."""
    return profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=1, repeat=1))


def shares(profiler: profile) -> dict[str, float]:
    """The share of each kind of operations in the time of the step; the shares add up to 1."""
    seconds = Counter[str]()
    for event in profiler.key_averages():
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), OTHER)
        seconds[kind] += event.self_cpu_time_total
    return {kind: seconds[kind] / seconds.total() for kind in [*KINDS, OTHER]}
