"""How much variance a linear value head explains while the policy stays, by its learning rate and its updates.

`python -m experiments.ziegler_2019_sentiment.value_head FILE.json` samples the pretrained model once and trains fresh
value heads on its states, in batches as PPO does. Minutes on one core; docs/ppo-critic.md has the result.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from experiments.assets import openings
from experiments.evaluation import continued
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import load
from trimtab_common.formulas.masking import explained_variance
from trimtab_lm import PPOConfig
from trimtab_lm.ppo.loss import clipped_value_loss, gae, per_token_rewards
from trimtab_lm.tokens.layout import pad

TOKENS, BATCH, MINIBATCH, STEPS = 16, 32, 16, 30  # as in reproduce.yaml
RATES, EPOCHS, SEEDS = (1e-5, 2e-5, 3e-5, 1e-4, 2e-4, 3e-4, 1e-3), (1, 2, 4, 8), range(8)
RIDGE_SIZES, HELD_OUT, PENALTIES = (200, 400, 700, 1000), 400, (1e2, 1e3, 1e4, 1e5)


@torch.no_grad()
def states_and_scores() -> tuple[Tensor, Tensor]:
    """States before each token [N, TOKENS, width] of continuations by the pretrained model, and their rewards [N]."""
    policy, tokenizer = load("stories15m")
    model, prompts = policy.pretrained_model.eval(), openings("train")
    rows, texts = continued(model, tokenizer, prompts, max_new_tokens=TOKENS, seed=0)
    scores, states, kept = sentiment(texts), [], []
    for prompt, row, score in zip(prompts, rows, scores, strict=True):
        if len(row) == TOKENS:
            ids, _ = pad([torch.cat([torch.tensor(tokenizer(prompt)["input_ids"]), row])], 0)
            states.append(model.model(input_ids=ids).last_hidden_state[0, -TOKENS - 1 : -1])
            kept.append(score)
    return torch.stack(states), torch.tensor(kept)


def by_ridge(states: Tensor, scores: Tensor, count: int) -> float:
    """Explained variance of held-out scores by a ridge regression on `count` responses, with the best penalty."""
    train, test = states[:count].flatten(0, 1).double(), states[-HELD_OUT:].double()
    target, held_out = scores[:count].repeat_interleave(TOKENS).double(), scores[-HELD_OUT:, None].double()
    middle, centred = train.mean(0), train - train.mean(0)
    covariance, correlation = centred.T @ centred, centred.T @ (target - target.mean())
    shares = []
    for penalty in PENALTIES:
        weights = torch.linalg.solve(covariance + penalty * torch.eye(len(middle), dtype=torch.float64), correlation)
        values = (test - middle) @ weights
        shares.append(float(explained_variance(values, held_out.expand_as(values), torch.ones_like(values))))
    return max(shares)


def by_updates(states: Tensor, scores: Tensor, *, rate: float, epochs: int, seed: int) -> list[float]:
    """Explained variance of each batch before a value head learns from it; see PPO's loss and returns."""
    config, shuffle = PPOConfig(), torch.Generator().manual_seed(seed)
    head = torch.nn.Linear(states.shape[-1], 1)
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer, mask, shares = torch.optim.Adam(head.parameters(), lr=rate), torch.ones(BATCH, TOKENS), []
    for rows in torch.randperm(len(scores), generator=shuffle)[: STEPS * BATCH].split(BATCH):
        values = head(states[rows]).detach().squeeze(-1)
        rewards, _ = per_token_rewards(scores[rows], torch.zeros_like(mask), mask, kl_coef=0.0)
        returns = values + gae(rewards, values, mask=mask, gamma=config.gamma, lam=config.lam)
        shares.append(float(explained_variance(values, returns, mask)))
        for _ in range(epochs):
            for part in torch.randperm(BATCH, generator=shuffle).split(MINIBATCH):
                predicted = head(states[rows[part]]).squeeze(-1)
                optimizer.zero_grad()
                clipped_value_loss(
                    predicted, values[part], returns[part], clip=config.cliprange_value
                ).mean().backward()
                optimizer.step()
    return shares


def thirds(curves: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each third of the steps, over all curves."""
    size = STEPS // 3
    return [round(fmean(fmean(curve[at : at + size]) for curve in curves), 3) for at in range(0, STEPS, size)]


def main(path: Path) -> None:
    """Writes and prints the explained variance of every setting."""
    torch.manual_seed(0)
    states, scores = states_and_scores()
    result = {"responses": len(scores), "ridge": {n: round(by_ridge(states, scores, n), 3) for n in RIDGE_SIZES}}
    thirds_of: dict[str, list[float]] = {}
    for rate in RATES:
        for epochs in EPOCHS:
            curves = [by_updates(states, scores, rate=rate, epochs=epochs, seed=seed) for seed in SEEDS]
            thirds_of[f"learning rate {rate:g}, epochs {epochs}"] = thirds(curves)
    path.write_text(json.dumps({**result, "thirds of 30 steps": thirds_of}, indent=1) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
