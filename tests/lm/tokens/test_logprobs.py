"""Padding, batches and chunks do not change a sequence's log-probabilities, values and their gradients."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.tiny import gpt2, llama
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from trimtab_lm.models.value_head import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from trimtab_lm.ppo.passes import Padding, padded_inputs
from trimtab_lm.ppo.policy import ActorCritic
from trimtab_lm.tokens import scores
from trimtab_lm.tokens.logprobs import LanguageHead, exact_kl
from trimtab_lm.tokens.scores import score_logits

EXACT = {"rtol": 1e-9, "atol": 1e-12}
QUERIES = [torch.tensor(row) for row in ([5, 6, 7, 8, 9, 3], [4, 2], [9, 8, 7, 3])]
RESPONSES = [torch.tensor(row) for row in ([11, 12], [13, 14, 15, 16, 1], [17, 3, 1])]
BLOCK = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
SIZES = {"hidden_size": 16, "intermediate_size": 32, **BLOCK}


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Asserts equality to 1e-9 of the largest number: gradients sum many terms, the smallest of which cancel."""
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.abs().max()))


def t5(seed: int = 0):
    return tiny.t5(seed, initializer_factor=1.0)  # at 4 a token takes all, and its entropy's gradient is rounding


def lora(**settings):
    config = LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return get_peft_model(llama(**settings), config)


def actor_critic(build) -> ActorCritic:
    torch.manual_seed(0)
    model = build()
    kind = AutoModelForSeq2SeqLMWithValueHead if model.config.is_encoder_decoder else AutoModelForCausalLMWithValueHead
    return ActorCritic(kind.from_pretrained(model, v_head_init_strategy="normal").double().eval())


class Batch(NamedTuple):
    """Samples in padded inputs."""

    queries: list[torch.Tensor]
    responses: list[torch.Tensor]
    model_inputs: dict[str, torch.Tensor]


def batch_of(module: ActorCritic, rows: list[int], side: str = "right") -> Batch:
    queries, responses = [QUERIES[i] for i in rows], [RESPONSES[i] for i in rows]
    start = 0 if module.head.is_encoder_decoder else None
    inputs = padded_inputs(queries, responses, Padding(0, start))
    if side == "left":
        for mask_name in [name for name in inputs if name.endswith("mask")]:
            ids_name = mask_name.replace("attention_mask", "input_ids")
            shifts = (inputs[mask_name] == 0).sum(1).tolist()
            for name in (ids_name, mask_name):
                rolled = [row.roll(shift) for row, shift in zip(inputs[name], shifts, strict=True)]
                inputs[name] = torch.stack(rolled)
    return Batch(queries, responses, inputs)


def tokens_of(batch: Batch) -> dict[str, torch.Tensor]:
    return batch.model_inputs | tiny.places_of(batch.model_inputs, batch.queries, batch.responses)


class Outputs(NamedTuple):
    """The policy's outputs for tokens."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor


def spread(batch: Batch, outputs: Sequence[torch.Tensor]) -> Outputs:
    """Returns the outputs of tokens as padded rows, with 0 at the padding."""
    lengths = [len(row) for row in batch.responses]
    rows = (torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True) for x in outputs[:3])
    return Outputs(*rows)


def score(module: ActorCritic, batch: Batch, temperature: float = 1.0) -> Outputs:
    return spread(batch, module(tokens=tokens_of(batch), temperature=temperature))


def objective(outputs) -> torch.Tensor:
    weights = torch.arange(outputs.logprobs.numel(), dtype=torch.float64).view_as(outputs.logprobs).cos()
    return (weights * (outputs.logprobs + 0.3 * outputs.entropy + outputs.values)).sum()


@pytest.mark.parametrize("build", [gpt2, llama, t5])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_on_either_side_changes_nothing(build, side):
    module = actor_critic(build)
    together = score(module, batch_of(module, [0, 1, 2], side), 0.7)
    for i in range(3):
        alone = score(module, batch_of(module, [i]), 0.7)
        for whole, one in zip(together[:3], alone[:3], strict=True):
            torch.testing.assert_close(whole[i, : len(RESPONSES[i])], one[0], **EXACT)
            assert (whole[i, len(RESPONSES[i]) :] == 0).all()


@pytest.mark.parametrize("build", [gpt2, llama, t5])
@pytest.mark.parametrize("chunk", [1, 3 * 50, 10**9])
def test_chunks_change_neither_values_nor_gradients(build, chunk, monkeypatch):
    module = actor_critic(build)

    def gradients():
        module.zero_grad()
        outputs = score(module, batch_of(module, [0, 1, 2]), 0.7)
        objective(outputs).backward()
        return [outputs.logprobs, outputs.entropy, *[p.grad.clone() for p in module.parameters()]]

    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", 10**9)
    whole = gradients()
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", chunk)
    for a, b in zip(whole, gradients(), strict=True):
        assert_same(b, a)


@pytest.mark.parametrize("build", [gpt2, llama, t5, lora])
def test_scores_and_gradients_equal_those_of_plain_logits(build):
    module = actor_critic(build)
    batch = batch_of(module, [0, 1, 2])
    trained = [p for p in module.parameters() if p.requires_grad]
    source, targets = (tokens_of(batch)[name] for name in ("source", "targets"))
    ours = score(module, batch, 0.7)
    objective(ours).backward()
    gradients = [p.grad.clone() for p in trained]
    module.zero_grad()

    logits, _, values = module.policy(**batch.model_inputs)
    log_p = (logits.flatten(0, 1)[source] / 0.7).log_softmax(-1)
    flat = log_p.gather(-1, targets[:, None])[:, 0]
    outputs = (flat, -(log_p.exp() * log_p).sum(-1), values.flatten()[source])
    plain = spread(batch, outputs)
    for a, b in zip(ours[:3], plain[:3], strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    objective(plain).backward()
    for gradient, p in zip(gradients, trained, strict=True):
        assert_same(gradient, p.grad)


@pytest.mark.parametrize("build", [gpt2, llama, t5])
def test_full_kl_is_the_sum_over_the_vocabulary(build, monkeypatch):
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", 100)
    policy, ref = (LanguageHead(build(seed).double().eval()) for seed in range(2))
    module = actor_critic(build)
    batch = batch_of(module, [0, 1, 2])
    tokens = tokens_of(batch)
    source, reads = tokens["source"], [head.score(tokens, needs_read=True).read for head in (policy, ref)]
    kl = exact_kl(policy.logits, reads[0], ref.logits, reads[1], vocab_size=policy.config.vocab_size, temperature=0.7)
    p, q = (
        (head.model(**batch.model_inputs).logits.flatten(0, 1)[source] / 0.7).log_softmax(-1) for head in (policy, ref)
    )
    torch.testing.assert_close(kl, (p.exp() * (p - q)).sum(-1), **EXACT)
    assert kl.min() > 0


@pytest.mark.parametrize(
    "build",
    [
        lambda: Gemma2ForCausalLM(
            Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.1)
        ),
        lambda: CohereForCausalLM(
            CohereConfig(**SIZES, logit_scale=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        ),
        lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)),
        lambda: OPTForCausalLM(OPTConfig(hidden_size=16, ffn_dim=32, word_embed_proj_dim=8, **BLOCK)),
        lambda: BartForConditionalGeneration(
            BartConfig(
                d_model=16,
                encoder_layers=1,
                decoder_layers=1,
                encoder_ffn_dim=8,
                decoder_ffn_dim=8,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                vocab_size=40,
                decoder_start_token_id=2,
            )
        ),
    ],
    ids=["gemma2 soft cap", "cohere scale", "granite scale", "opt projection", "bart"],
)
def test_what_models_do_behind_the_head_is_done_here_too(build):
    module = actor_critic(build)
    assert module.head.separable
    batch = batch_of(module, [0, 1, 2])
    tokens = tokens_of(batch)
    logits = module.head.logits(module.head.score(tokens, needs_read=True).read)
    expected = module.policy.pretrained_model(**batch.model_inputs).logits.flatten(0, 1)[tokens["source"]]
    torch.testing.assert_close(logits, expected, **EXACT)


def test_a_model_that_cannot_be_split_is_run_whole_and_says_so():
    config = FalconH1Config(
        **(SIZES | {"num_hidden_layers": 1}),
        num_key_value_heads=2,
        lm_head_multiplier=0.3,
        mamba_d_ssm=16,
        mamba_n_heads=2,
        mamba_d_head=8,
    )
    with pytest.warns(UserWarning, match="computes all of them"):
        module = actor_critic(lambda: FalconH1ForCausalLM(config))
    batch = batch_of(module, [0])
    source = tokens_of(batch)["source"]
    plain = module.policy.pretrained_model(**batch.model_inputs).logits.flatten(0, 1)[source].log_softmax(-1)
    expected = plain.gather(-1, RESPONSES[0][:, None])[:, 0]
    torch.testing.assert_close(score(module, batch).logprobs[0], expected, **EXACT)


def test_a_biased_coin_by_hand():
    logits = torch.tensor([[math.log(3.0), 0.0]], requires_grad=True)
    logprobs_, entropy, *_ = score_logits(logits, torch.tensor([0]), temperature=1.0)
    assert logprobs_.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


def test_a_forbidden_token_is_no_nan():
    logits = torch.tensor([[0.0, 1.0, float("-inf")]], requires_grad=True)
    scores = score_logits(logits, torch.tensor([1]))
    (scores.logprobs + scores.entropy).sum().backward()
    assert torch.isfinite(scores.entropy).all()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("low", [-200.0, -1e30, float("-inf")])
@pytest.mark.parametrize("weight", [0.01, 1e3, -1e6])
def test_a_probability_that_underflows_adds_nothing_to_the_entropy_or_its_gradient(low, weight):
    logits = torch.tensor([[math.log(3.0), low, 0.0]], requires_grad=True)
    scores = score_logits(logits, torch.tensor([0]))
    (weight * scores.entropy).sum().backward()
    assert scores.entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    slope = 0.75 * 0.25 * math.log(3.0)  # dH/dz of a coin with log-odds z is -p (1 - p) z
    torch.testing.assert_close(logits.grad, weight * torch.tensor([[-slope, 0.0, slope]]))


@pytest.mark.parametrize("low", [-200.0, float("-inf")])
def test_exact_kl_of_a_forbidden_token_is_finite(low):
    p, q = (torch.tensor([[z, 0.0, low]]) for z in (math.log(3.0), 0.0))
    kl = exact_kl(lambda logits: logits, p, lambda logits: logits, q, vocab_size=3)
    assert kl.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))


def test_bfloat16_logits_are_summed_in_float32():
    logits = torch.zeros(1, 2**15, dtype=torch.bfloat16)
    assert score_logits(logits, torch.tensor([7])).logprobs.item() == pytest.approx(-15 * math.log(2), rel=1e-6)


class Rows(TorchDispatchMode):
    """Records the largest number of rows of `width` that any operation returns."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.most = width, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.width,):
                self.most = max(self.most, tensor.numel() // self.width)
        return result


@pytest.mark.parametrize("build", [llama, lora], ids=["plain head", "LoRA on the head"])
def test_no_tensor_of_positions_by_vocabulary_is_made(build, monkeypatch):
    module = actor_critic(lambda: build(vocab_size=5000))
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", 2 * 5000)
    responses = [torch.arange(4, 14)] * 3
    batch = Batch(QUERIES, responses, padded_inputs(QUERIES, responses, Padding(0)))
    with Rows(5000) as rows:
        objective(score(module, batch)).backward()
    assert rows.most == tiny.WIDTH < 30  # the head's own weight, transposed; there are 30 positions


def test_the_entry_of_no_positions_is_empty():
    head = LanguageHead(llama().eval())
    nothing, ids = torch.zeros(0, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)
    tokens = {"source": nothing, "targets": nothing, "input_ids": ids, "attention_mask": ids}
    scores = head.score(tokens)
    assert scores.logprobs.shape == (0,)
