"""The pretend accelerator, under the name of a device that accelerate and transformers look for.

`make test-accelerator` puts the folder above on Python's path and compiles the library. Every program then sees one
device, `musa:0`, or as many as PRETEND_DEVICES says. It runs on the CPU, and

- refuses a tensor or a generator of the CPU beside its own, as a GPU does;
- counts the operators that it launches, the times that the host waits for it, and the copies to it;
- knows the bytes in use and their peak, and fails beyond `set_total_memory` (1 GiB).

It has no streams, no kernels of its own and no speed. Every copy to the host counts as a wait, a non-blocking one too.

    torch_musa.clear()
    step()
    print(torch_musa.counts(), torch_musa.waits(), torch_musa.copies(), torch_musa.peak())
"""

import atexit
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from tests.pretend.build import compiled

if not compiled().exists():
    raise ImportError("The pretend accelerator is not compiled for this torch: run `make test-accelerator`.")
torch.ops.load_library(compiled())
_device = torch.ops.pretend


def counts() -> dict[str, int]:
    """Returns how often each operator was launched since `clear`, a copy within the device among them."""
    return dict(_device.operators())


def waits() -> dict[str, int]:
    """Returns how often the host waited for the device since `clear`, by reason."""
    return dict(_device.waits())


def copies() -> int:
    """Returns the number of copies from the host to the device since `clear`."""
    return _device.copies_to_device()


def peak(device: Any = None) -> int:
    """Returns the most bytes that were in use at one time since `clear`."""
    return _device.memory(_index(device))[1]


def clear() -> None:
    """Sets the counts to zero, and the peak to the bytes in use."""
    _device.clear()


def set_total_memory(size: int, device: Any = None) -> None:
    """Makes the device of another size, in bytes; what asks for more raises torch.OutOfMemoryError."""
    _device.set_total_memory(_index(device), size)


def _index(device: Any) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


# What PyTorch, accelerate and transformers call in the module of a device ------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _device.device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


class device:
    """A block in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *error: object) -> None:
        set_device(self.before)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


class Stream:
    """The one stream that there is."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        synchronize()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class Event:
    """An event that is over."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        synchronize()


def current_stream(device: Any = None) -> Stream:
    return Stream()


def stream(stream: Stream) -> Stream:
    return stream


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _device.default_generator(index).manual_seed(seed)


manual_seed = manual_seed_all


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _device.default_generator(_index(device)).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _device.default_generator(_index(device)).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def memory_allocated(device: Any = None) -> int:
    return _device.memory(_index(device))[0]


memory_reserved = memory_allocated
max_memory_allocated = max_memory_reserved = peak


def mem_get_info(device: Any = None) -> tuple[int, int]:
    live, _, total = _device.memory(_index(device))
    return total - live, total


def memory_stats(device: Any = None) -> dict[str, int]:
    return {}


def reset_peak_memory_stats(device: Any = None) -> None:
    clear()


def empty_cache() -> None:
    pass


def get_device_properties(device: Any = None) -> SimpleNamespace:
    total = _device.memory(_index(device))[2]
    return SimpleNamespace(name="pretend", total_memory=total, major=9, minor=0, multi_processor_count=132)


def get_device_name(device: Any = None) -> str:
    return "pretend"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return 9, 0


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


amp = SimpleNamespace(GradScaler=lambda **options: torch.amp.GradScaler("musa", **options))

# The thread of a backward pass lets go of Python objects shortly after the pass has returned. Where Python has ended by
# then, PyTorch aborts the process; programs that end with a backward pass are short ones like tests.
atexit.register(time.sleep, 0.1)

torch.utils.rename_privateuse1_backend("musa")
torch._register_device_module("musa", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend()
torch.backends.musa = SimpleNamespace(matmul=SimpleNamespace(allow_tf32=False))  # type: ignore[attr-defined]
