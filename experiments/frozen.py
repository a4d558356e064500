"""Linear models on the states of frozen language models."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from trimtab_lm.sampling.generate import pad


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


def logistic_regression(x: Tensor, labels: Tensor, *, penalty: float, bias: bool = True) -> tuple[Tensor, Tensor]:
    """Minimizes sum -log p(label) + penalty / 2 |weight|^2.

    Args:
        x: Features, [N, D].
        labels: 0 or 1, [N].
        penalty: The coefficient of the squared norm.
        bias: Whether to fit the bias; else it is 0.

    Returns:
        Weight [D] and bias, a scalar.
    """
    inputs, targets = x.double(), labels.double()
    weight = torch.zeros(inputs.shape[1], dtype=torch.float64, requires_grad=True)
    offset = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, offset] if bias else [weight], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(inputs @ weight + offset, targets, reduction="sum")
        loss = loss + penalty / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach().float(), offset.detach().float()
