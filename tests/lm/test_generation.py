"""What a response is: cut where it ends, and nowhere else."""

import torch

from trimtab_lm.generation import cut_at_eos, pad

EOS, PAD = 1, 0


def cut(*tokens: int, padding: int | None = None) -> list[int]:
    return cut_at_eos(torch.tensor(tokens), [EOS, 9], padding).tolist()


def test_a_response_ends_with_its_first_end_token():
    assert cut(5, EOS, PAD, EOS) == [5, EOS]
    assert cut(5, 9, EOS) == [5, 9]
    assert cut(EOS, EOS) == [EOS]


def test_a_pad_token_at_the_end_was_sampled_unless_something_else_stopped_the_row():
    assert cut(5, PAD, PAD) == [5, PAD, PAD]
    assert cut(5, PAD, 6, PAD, PAD, padding=PAD) == [5, PAD, 6]
    assert cut(PAD, PAD, padding=PAD) == [PAD]


def test_padding_is_told_by_length_and_not_by_token():
    rows, mask = pad([torch.tensor([PAD, 5]), torch.tensor([7, 8, PAD])], PAD, side="left")
    assert rows.tolist() == [[PAD, PAD, 5], [7, 8, PAD]]
    assert mask.tolist() == [[0, 1, 1], [1, 1, 1]]
