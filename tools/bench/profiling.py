"""Divides the time of a step among kinds of operations."""

from collections import Counter

from torch.profiler import ProfilerActivity, profile, schedule

# An operation belongs to the kind that lists a part of its name. Time between operations is ProfilerStep.
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
    """Returns a profiler of the step after the warm-up; `Clock` advances it at the end of each step."""
    return profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=1, repeat=1))


def shares(profiler: profile) -> dict[str, float]:
    """Returns each kind's share of the step's time; the shares add up to 1."""
    seconds = Counter[str]()
    for event in profiler.key_averages():
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), OTHER)
        seconds[kind] += event.self_cpu_time_total
    return {kind: seconds[kind] / seconds.total() for kind in [*KINDS, OTHER]}
