"""Random numbers: one seed for a run, a private stream per rank and draw, and states that survive a restart."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def set_seed(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's global generators, including every accelerator's.

    Args:
        seed: in [0, 2**32).

    Raises:
        ValueError: the seed is outside NumPy's range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} is outside [0, 2**32), the range NumPy takes. Choose a seed within it.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def sampling_seed(seed: int, *, rank: int, draw: int) -> int:
    """Returns the seed of one draw of one process; equal arguments give equal seeds.

    It is a hash: adding strides (`seed + rank * 100003 + draw`) would make streams of different runs meet.

    Args:
        rank: the process's rank, below 2**32.
        draw: number of the draw, below 2**32.

    Returns:
        An int in [0, 2**63).
    """
    mixed = np.random.SeedSequence(seed, spawn_key=(rank, draw)).generate_state(1, np.uint64)
    return int(mixed[0]) >> 1


@contextmanager
def private_rng(seed: int, device: torch.device | str) -> Iterator[None]:
    """Seeds torch on the CPU and on `device` inside the block, and restores the caller's streams after it.

    Generation inside the block neither depends on, nor moves, the random numbers of training.
    """
    device = torch.device(device)
    is_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if is_cpu else [device], device_type=device.type):
        # Not torch.manual_seed: that would reseed every accelerator, and only this one is put back.
        torch.default_generator.manual_seed(seed)
        if not is_cpu:
            state = torch.Generator(device).manual_seed(seed).get_state()
            torch.get_device_module(device).set_rng_state(state, device)
        yield


@contextmanager
def private_rngs(seed: int) -> Iterator[None]:
    """Seeds Python's, NumPy's and torch's generators inside the block, and restores each after it.

    For user code, which may draw from any of them.

    Args:
        seed: in [0, 2**63).
    """
    python, numpy, (device_type, devices) = random.getstate(), np.random.get_state(), _accelerators()
    with torch.random.fork_rng(devices, device_type=device_type):
        try:
            set_seed(seed % 2**32)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def rng_state() -> dict[str, Any]:
    """State of every global generator of this process, as ints, lists and tensors (safe for `weights_only`)."""
    version, words, gauss_next = random.getstate()
    kind, key, pos, has_gauss, cached_gauss = np.random.get_state()
    device_type, devices = _accelerators()
    return {
        "python": [version, list(words), gauss_next],
        "numpy": [kind, np.asarray(key).tolist(), int(pos), int(has_gauss), float(cached_gauss)],
        "torch": torch.get_rng_state(),
        "accelerator": device_type,
        "accelerators": [torch.get_device_module(device).get_rng_state(device) for device in devices],
    }


def load_rng_state(state: Mapping[str, Any]) -> None:
    """Restores what `rng_state` returned.

    Warns where this process sees other accelerators than the saved one did: their streams cannot be restored, so that
    their draws differ from an uninterrupted run's.
    """
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    kind, key, pos, has_gauss, cached_gauss = state["numpy"]
    np.random.set_state((kind, np.array(key, dtype=np.uint32), pos, has_gauss, cached_gauss))
    torch.set_rng_state(state["torch"])
    device_type, devices = _accelerators()
    saved = state["accelerators"]
    if (device_type, len(devices)) != (state["accelerator"], len(saved)):
        warnings.warn(
            f"The random state holds {len(saved)} of '{state['accelerator']}', this process sees {len(devices)} of "
            f"'{device_type}': draws on the accelerator will not repeat. Resume on the same devices for the same bits.",
            stacklevel=2,
        )
        return
    for device, device_state in zip(devices, saved, strict=True):
        torch.get_device_module(device).set_rng_state(device_state, device)


def _accelerators() -> tuple[str, list[torch.device]]:
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return "cpu", []
    return current.type, [torch.device(current.type, i) for i in range(torch.accelerator.device_count())]
