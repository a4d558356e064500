"""Every chosen layout gives the numbers of plain rows, however a model mixes positions."""

from itertools import product
from typing import Any

import pytest
import torch
from tests.lm import families, tiny
from transformers import GPTNeoConfig, GPTNeoForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trimtab_lm.tokens.attention import VERIFIED
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward
from trimtab_lm.tokens.layout import TokenGroup, lay_out

WINDOWS = ("sliding_window", "window_size", "local_attention", "attention_chunk_size", "attention_window_size")
LOCAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {},
    "llama4_text": {},
    "mistral": {},
    "doge": {"keep_window_size": 14},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 16},
}


def rows(lengths: list[int], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, tiny.TOKENS["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def by_hand(model: PreTrainedModel, prefix: list[int], branch: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prefix + branch]), use_cache=False).logits[0].log_softmax(-1)
    return logits[torch.arange(len(branch)) + len(prefix) - 1, torch.tensor(branch)]


@torch.no_grad()
def check_layouts(model: PreTrainedModel) -> None:
    """Compares rows of up to 40 tokens that share a prompt of 16; together they exceed the model's positions."""
    prefix, *branches = rows([16, 24, 24, 24, 22])
    expected = torch.cat([by_hand(model, prefix, branch) for branch in branches])
    chosen = {
        best_layout(model, share_prefix=share, is_noisy=noisy) for share in (True, False) for noisy in (True, False)
    }
    score_tokens_in_forward(model)
    group = TokenGroup(prefix, branches, [[1] * len(branch) for branch in branches])
    for layout in chosen | {"padded"}:
        for width in (None, 80) if layout in ("tree", "packed") else (None,):  # packed: one branch in a row, or two
            batch = lay_out([group], layout, pad_token_id=0, width=width)
            scores = model(tokens=batch)
            torch.testing.assert_close(scores.logprobs, expected, rtol=1e-3, atol=1e-3, msg=f"{layout} {width}")


@pytest.mark.filterwarnings("ignore:.*separate padded row")
@pytest.mark.parametrize("model_type", LOCAL)
def test_a_window_that_is_shorter_than_rows_and_longer_than_a_probe_is_kept(model_type: str):
    check_layouts(families.causal(model_type, **dict.fromkeys(WINDOWS, 14) | LOCAL[model_type]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*separate padded row")
@pytest.mark.parametrize("model_type", sorted(VERIFIED))
def test_verified_types_give_the_numbers_of_plain_rows(model_type: str):
    has_window = not families.known_settings(model_type).isdisjoint(WINDOWS)
    for window, attention in product((4, 14, 30) if has_window else (None,), ("sdpa", "eager")):
        settings = {**dict.fromkeys(WINDOWS, window), "use_sliding_window": True, "max_window_layers": 0}
        model = families.causal(model_type, **settings)
        if attention == "eager" or model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(attention)
            check_layouts(model)


def test_an_answer_after_three_others_reads_its_own_window():
    """By hand: GPT-Neo's default window of 256, a prompt of 100 tokens and four answers of 120."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
    noise = {"resid_dropout": 0, "embed_dropout": 0, "attention_dropout": 0}
    kinds = [[["global", "local"], 1]]
    model = GPTNeoForCausalLM(GPTNeoConfig(**sizes, **noise, attention_types=kinds, initializer_range=0.3)).eval()
    prefix, *branches = [torch.randint(3, 64, (length,)).tolist() for length in (100, 120, 120, 120, 120)]
    with pytest.warns(UserWarning, match="GPTNeoForCausalLM.*'gpt_neo' is not verified"):
        layout = best_layout(model, share_prefix=True)
    score_tokens_in_forward(model)
    batch = lay_out([TokenGroup(prefix, branches, [[1] * 120] * 4)], layout, pad_token_id=0)
    with torch.no_grad():
        sums = torch.zeros(4).index_add(0, batch["sequence"], model(tokens=batch).logprobs)
    torch.testing.assert_close(sums, torch.tensor([-586.292, -586.914, -570.707, -572.010]), rtol=0, atol=2e-3)


@pytest.mark.parametrize("model_type", ["llama4_text", "mllama_text_model"])
def test_a_causal_class_whose_trunk_has_no_name_is_read(model_type: str):
    check_layouts(families.causal(model_type))


def test_code_of_a_models_own_is_not_verified_by_its_name():
    class Other(PreTrainedModel):
        config_class = type(tiny.llama().config)
        forward, _supports_sdpa = type(tiny.llama()).forward, True

    with pytest.warns(UserWarning, match="Other.*'llama' is not verified"):
        assert best_layout(Other(tiny.llama().config), share_prefix=True) == "padded"


def test_verified_types_exist():
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mllama_text_model"}
    assert names >= VERIFIED
