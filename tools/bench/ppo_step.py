"""Time of one PPO step against the plain way: padded rows and whole logits in every pass. See README.md."""

import statistics
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from trimtab_common.masking import masked_mean, whiten
from trimtab_common.surrogate import clipped_surrogate
from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trimtab_lm.ppo.loss import clipped_value_loss
from trimtab_lm.ppo.returns import gae, per_token_rewards

Rows = list[Tensor]


def model_of(options: Namespace, device: torch.device) -> AutoModelForCausalLMWithValueHead:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        vocab_size=options.vocabulary,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return AutoModelForCausalLMWithValueHead.from_pretrained(LlamaForCausalLM(config).to(device))


class Plain:
    """The step as it was written in 2024: rows padded to the longest, logits of every position."""

    def __init__(self, options: Namespace, device: torch.device):
        self.model, self.reference = model_of(options, device), model_of(options, device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.size, self.epochs = options.minibatch, options.epochs

    def passes(self, model: AutoModelForCausalLMWithValueHead, rows: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        logits, _, values = model(input_ids=rows, attention_mask=mask)
        log_p = logits[:, :-1].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, rows[:, 1:, None]).squeeze(-1), values[:, :-1], entropy

    def step(self, queries: Rows, responses: Rows, scores: list[float]) -> None:
        pairs = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
        rows = pad_sequence(pairs, batch_first=True)
        reads = pad_sequence([torch.ones_like(row) for row in pairs], batch_first=True)
        place = torch.arange(rows.shape[1] - 1, device=rows.device)
        starts = torch.tensor([len(query) - 1 for query in queries], device=rows.device)
        mask = ((place >= starts[:, None]) & (reads[:, 1:] == 1)).long()
        parts = torch.arange(len(rows)).split(self.size)
        with torch.no_grad():
            old = [self.passes(self.model, rows[part], reads[part]) for part in parts]
            ref = [self.passes(self.reference, rows[part], reads[part]) for part in parts]
            logprobs, values, _ = (torch.cat(column) for column in zip(*old, strict=True))
            values = values * mask
            kl = (logprobs - torch.cat([part[0] for part in ref])) * mask
            rewards, _ = per_token_rewards(torch.tensor(scores, device=rows.device), kl, mask, kl_coef=0.2)
            advantages = gae(rewards, values, mask=mask, gamma=1.0, lam=0.95)
            returns, advantages = advantages + values, whiten(advantages, mask)
        for _ in range(self.epochs):
            for part in torch.randperm(len(rows)).split(self.size):
                new, vpreds, entropy = self.passes(self.model, rows[part], reads[part])
                masked_mean(entropy.detach(), mask[part])
                ratio = (new - logprobs[part]) * mask[part]
                policy = clipped_surrogate(ratio, advantages[part], clip_low=0.2, clip_high=0.2)
                value = clipped_value_loss(vpreds, values[part], returns[part], clip=0.2)
                (masked_mean(policy, mask[part]) + 0.1 * masked_mean(value, mask[part])).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()


def trainer_of(options: Namespace, device: torch.device) -> PPOTrainer:
    config = PPOConfig(
        batch_size=options.batch,
        mini_batch_size=options.minibatch,
        ppo_epochs=options.epochs,
        accelerator_kwargs={"cpu": device.type == "cpu"},
    )
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2)
    return PPOTrainer(config, model_of(options, device), tokenizer=tokenizer)


def timed(step: object, batch: tuple[Rows, Rows, list[float]], device: torch.device) -> float:
    started = time.perf_counter()
    step(*batch)  # type: ignore[operator]
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main(options: Namespace) -> None:
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    ours, plain = trainer_of(options, device), Plain(options, device)
    generator = torch.Generator().manual_seed(0)

    def rows(shortest: int, longest: int) -> Rows:
        lengths = torch.randint(shortest, longest + 1, (options.batch,), generator=generator).tolist()
        return [torch.randint(3, options.vocabulary, (n,), generator=generator).to(device) for n in lengths]

    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for repeat in range(options.repeats + 1):
        batch = (rows(8, options.query), rows(8, options.response), torch.randn(options.batch).tolist())
        runs = [("ours", ours.step), ("plain", plain.step)]
        for name, step in runs if repeat % 2 else reversed(runs):
            seconds = timed(step, batch, device)
            if repeat:  # the first round warms up
                times[name].append(seconds)
    print(f"{vars(options)} on {device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, seconds_of in times.items():
        print(f"{name:6} min {min(seconds_of):.3f} s, median {statistics.median(seconds_of):.3f} s")
    ratios = [ours / plain for ours, plain in zip(times["ours"], times["plain"], strict=True)]
    print(f"ours / plain: min {min(ratios):.2f}, median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    for name, default in (
        ("vocabulary", 32_000),
        ("width", 256),
        ("layers", 4),
        ("batch", 16),
        ("minibatch", 4),
        ("epochs", 2),
        ("query", 64),
        ("response", 96),
        ("repeats", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu", action="store_true", help="although there is an accelerator")
    sys.exit(main(parser.parse_args()))
