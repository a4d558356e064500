import io
import random

import numpy as np
import pytest
import torch

from trimtab_common.seeding import load_rng_state, private_rng, rng_state, sampling_seed, set_seed


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_same_seed_same_draws_in_every_library():
    set_seed(3)
    first = draws()
    set_seed(3)
    assert draws() == first
    set_seed(4)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_seed_outside_numpys_range_is_refused():
    with pytest.raises(ValueError, match="4294967296"):
        set_seed(2**32)


def test_sampling_seeds_of_neighbours_never_meet():
    seeds = {
        sampling_seed(seed, rank=rank, draw=draw) for seed in range(12) for rank in range(12) for draw in range(12)
    }
    assert len(seeds) == 12**3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(5, rank=1, draw=2) == sampling_seed(5, rank=1, draw=2)


def test_private_rng_leaves_no_trace_even_after_an_exception():
    set_seed(0)
    torch.rand(3)
    before = torch.get_rng_state()
    with private_rng(9, "cpu"):
        inside = torch.rand(4)
    with pytest.raises(IndexError), private_rng(9, "cpu"):
        torch.rand(4)[7]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    with private_rng(9, "cpu"):
        assert torch.equal(torch.rand(4), inside)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_private_rng_on_a_gpu():
    set_seed(0)
    expected = torch.rand(3, device="cuda")
    set_seed(0)
    with private_rng(9, "cuda"):
        inside = torch.rand(3, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    with private_rng(9, "cuda:0"):
        assert torch.equal(torch.rand(3, device="cuda"), inside)
    state = rng_state()
    following = torch.rand(3, device="cuda")
    load_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), following)


def test_saved_state_repeats_the_stream_after_a_weights_only_load():
    set_seed(1)
    draws()  # leaves a cached second Gaussian in both random and numpy
    buffer = io.BytesIO()
    torch.save(rng_state(), buffer)
    expected = draws()
    buffer.seek(0)
    load_rng_state(torch.load(buffer, weights_only=True))
    assert draws() == expected


def test_state_of_other_accelerators_warns():
    state = rng_state() | {"accelerator": "cuda", "accelerators": [torch.zeros(16, dtype=torch.uint8)] * 99}
    with pytest.warns(UserWarning, match="99 of 'cuda'"):
        load_rng_state(state)
