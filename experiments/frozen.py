"""Linear models on the states of frozen language models."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from trimtab_lm.tokens.layout import pad


@torch.no_grad()
def mean_states(model: PreTrainedModel, rows: Sequence[Tensor], *, batch_size: int = 32) -> Tensor:
    """Averages the last hidden states over the tokens of each row: N rows of token ids [T_i] -> [N, D] on the CPU."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    means = torch.zeros(len(rows), model.config.hidden_size)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids, mask = (part.to(model.device) for part in pad([rows[i] for i in chosen], 0))
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        means[chosen] = ((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).float().cpu()
    return means


def logistic_regression(x: Tensor, labels: Tensor, *, penalty: float) -> tuple[Tensor, Tensor]:
    """Minimizes sum -log p(label) + penalty / 2 |weight|^2.

    Args:
        x: Features, [N, D].
        labels: 0 or 1, [N].
        penalty: The coefficient of the squared norm.

    Returns:
        Weight [D] and bias, a scalar.
    """
    inputs, targets = x.double(), labels.double()
    weight, bias = (torch.zeros(size, dtype=torch.float64) for size in ((inputs.shape[1],), ()))

    def loss() -> Tensor:
        terms = F.binary_cross_entropy_with_logits(inputs @ weight + bias, targets, reduction="sum")
        return terms + penalty / 2 * weight.square().sum()

    minimize(loss, weight, bias)
    return weight.float(), bias.float()


def choice_regression(gaps: Tensor, *, penalty: float) -> Tensor:
    """Learns a linear score from choices, each of one among K + 1 alternatives.

    It minimizes sum_n log(1 + sum_k exp(-w . gap_nk)) + penalty / 2 |w|^2, which is the cross-entropy of the chosen
    alternatives under the softmax of their scores (Ziegler et al. 2019, arXiv:1909.08593, Eq. 1). With two alternatives
    it is the logistic loss of a comparison.

    Args:
        gaps: Features of the chosen alternative minus each other alternative's, [N, K, D].
        penalty: The coefficient of the squared norm.

    Returns:
        The weight w, [D].
    """
    inputs = gaps.double()
    weight = torch.zeros(inputs.shape[-1], dtype=torch.float64)

    def loss() -> Tensor:
        terms = F.pad(-inputs @ weight, (0, 1)).logsumexp(1)
        return terms.sum() + penalty / 2 * weight.square().sum()

    minimize(loss, weight)
    return weight.float()


def minimize(loss: Callable[[], Tensor], *variables: Tensor) -> None:
    """Moves the variables to a minimum of a smooth convex loss, by L-BFGS."""
    optimizer = torch.optim.LBFGS(
        [variable.requires_grad_() for variable in variables], max_iter=200, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
    for variable in variables:
        variable.requires_grad_(False)
