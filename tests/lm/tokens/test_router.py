"""A mixture of experts with `output_router_logits=True` trains on its own loss, including the router's term."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.lm import families, tiny
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
)

from trimtab_lm import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward
from trimtab_lm.tokens.layout import from_labels

pytestmark = pytest.mark.filterwarnings("ignore:.*separate padded row")
TEXTS = ["hello there my friend", "the cat sat on the mat"]
PAIRS = [("hello ", "there", "where are you"), ("the cat ", "sat on", "ran")]
STEP = {"max_steps": 1, "learning_rate": 0.0, "logging_steps": 1, "report_to": "none", "use_cpu": True}
STEP |= {"save_strategy": "no", "per_device_train_batch_size": 2}


def mixtral(router: bool = True, attention: str = "sdpa", kind: Any = MixtralForCausalLM, **settings: Any) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    config = MixtralConfig(**sizes | experts | tiny.TOKENS | settings, router_aux_loss_coef=0.5, initializer_range=0.3)
    config._attn_implementation, config.output_router_logits = attention, router
    return tiny.seeded(kind, config)


def loss_of(trainer: Any) -> float:
    trainer.train()
    return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def sft(model: Any, tmp_path: Any, texts: list[str] = TEXTS, **config: Any) -> SFTTrainer:
    args = SFTConfig(str(tmp_path), **STEP | config)
    return SFTTrainer(model, args, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tiny.tokenizer())


def own_loss(texts: list[str]) -> Any:
    """Returns the model's own output, with labels, on padded rows that end in EOS."""
    tokenizer = tiny.tokenizer()
    rows = tokenizer([text + tokenizer.eos_token for text in texts], padding=True, return_tensors="pt")
    ids, mask = rows["input_ids"], rows["attention_mask"]
    with torch.no_grad():
        return mixtral()(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("packing", [False, True])
def test_sft_has_the_models_own_loss(attention: str, packing: bool, tmp_path):
    options = {"packing": packing, "max_length": 64, "per_device_train_batch_size": 1 if packing else 2}
    loss = loss_of(sft(mixtral(attention=attention), tmp_path, **options))
    assert loss == pytest.approx(4.94825, abs=2e-5)  # 3.92711 + 0.5 * 2.04229
    assert loss == pytest.approx(float(own_loss(TEXTS).loss), abs=2e-5)


def test_micro_batches_weigh_the_routers_loss_by_their_tokens(tmp_path):
    options = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
    }
    trainer = sft(mixtral(), tmp_path, **options)
    own = [own_loss([text]) for text in TEXTS]
    tokens = [len(text) for text in TEXTS]  # with EOS, without the first token
    expected = sum(float(one.loss) * count for one, count in zip(own, tokens, strict=True)) / sum(tokens)
    assert loss_of(trainer) == pytest.approx(expected, abs=2e-5)


def test_the_loss_of_an_evaluation_has_it_too(tmp_path):
    trainer = sft(mixtral(), tmp_path)
    metrics = trainer.evaluate(Dataset.from_dict({"text": TEXTS}))
    assert metrics["eval_loss"] == pytest.approx(4.94825, abs=2e-5)


def dpo(model: Any, tmp_path: Any) -> Any:
    rows = Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS])
    return DPOTrainer(
        model, args=DPOConfig(str(tmp_path), **STEP), train_dataset=rows, processing_class=tiny.tokenizer()
    )


def kto(model: Any, tmp_path: Any) -> Any:
    rows = Dataset.from_list([{"prompt": p, "completion": c, "label": c == "there"} for p, c, _ in PAIRS])
    args = KTOConfig(str(tmp_path), **STEP)
    return KTOTrainer(model, args=args, train_dataset=rows, processing_class=tiny.tokenizer())


def reward(model: Any, tmp_path: Any) -> Any:
    rows = Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS])
    args = RewardConfig(str(tmp_path), gradient_checkpointing=False, **STEP)
    return RewardTrainer(model, args, train_dataset=rows, processing_class=tiny.tokenizer())


def grpo(model: Any, tmp_path: Any) -> Any:
    rows = Dataset.from_dict({"prompt": ["hello ", "the cat "]})
    args = GRPOConfig(str(tmp_path), num_generations=2, max_completion_length=6, beta=0.1, **STEP)
    scored = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
    return GRPOTrainer(model, args=args, train_dataset=rows, processing_class=tiny.tokenizer(), **scored)


@pytest.mark.parametrize("make", [dpo, kto, reward, grpo])
def test_preferences_and_rewards_add_the_routers_loss_of_plain_rows(make: Any, tmp_path):
    """The same trunk under a causal head gives the router's loss for the same rows."""
    seen: list[torch.Tensor] = []
    kind = {"kind": MixtralForSequenceClassification, "num_labels": 1} if make is reward else {}
    plain = loss_of(make(mixtral(router=False, **kind), tmp_path / "plain"))
    trainer = make(mixtral(**kind), tmp_path / "router")
    causal, trunk = mixtral(), trainer.model.model

    def keep(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if trunk.training:
            seen.append((kwargs["input_ids"], kwargs["attention_mask"]))

    trunk.register_forward_pre_hook(keep, with_kwargs=True)
    loss = loss_of(trainer)
    (ids, mask), *_ = seen
    with torch.no_grad():
        aux = float(causal(input_ids=ids, attention_mask=mask).aux_loss)
    assert loss - plain == pytest.approx(0.5 * aux, abs=1e-4)
    assert 0.5 * aux > 0.9


def test_iterative_sft_has_the_models_own_loss(tmp_path):
    args = IterativeSFTConfig(str(tmp_path), **{**STEP, "max_steps": -1})
    trainer = IterativeSFTTrainer(mixtral(), args, processing_class=tiny.tokenizer())
    stats = trainer.step(texts=[text + "</s>" for text in TEXTS])
    assert stats["loss"] == pytest.approx(float(own_loss(TEXTS).loss), abs=2e-5)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "jetmoe", "dbrx"])
def test_each_familys_coefficient_is_that_of_its_own_loss(model_type: str):
    check_family(model_type)


MORE = (
    "ernie4_5_moe flex_olmo gpt_oss granitemoe granitemoe_swa granitemoeshared jamba laguna mellum minimax minimax_m2"
)
MORE += " minimax_m3_vl_text olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_next afmoe"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MORE.split())
def test_each_other_familys_coefficient_is_that_of_its_own_loss(model_type: str):
    check_family(model_type)


def check_family(model_type: str) -> None:
    coefficients = {"router_aux_loss_coef": 0.5, "aux_loss_coef": 0.5}
    model = families.causal(model_type, output_router_logits=True, **coefficients)
    ids = torch.randint(4, 30, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [6], [3]])).long()
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        score_tokens_in_forward(model)
        scores = model(tokens={"input_ids": ids, "attention_mask": mask, **from_labels(labels)})
    torch.testing.assert_close(scores.router_loss - scores.logprobs.mean(), expected, rtol=1e-5, atol=1e-5)


def test_checkpoints_that_cut_its_gradient_off_are_refused():
    model = mixtral().train()
    score_tokens_in_forward(model)
    ids = torch.randint(4, 30, (2, 7))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **from_labels(ids)}
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model(tokens=batch).router_loss.requires_grad
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=True gives the router's loss"):
        model(tokens=batch)


def test_rows_are_not_shared_and_the_reason_is_said():
    with pytest.warns(UserWarning, match="router's loss .* padded rows"):
        assert best_layout(mixtral(), share_prefix=True) == "padded"


def test_what_cannot_add_it_refuses_by_name(tmp_path):
    with pytest.raises(ValueError, match="output_router_logits=True, and PPOTrainer does not add"):
        tiny.ppo(tiny.with_value_head(mixtral()))
    with pytest.raises(ValueError, match="output_router_logits = False in value_model"):
        tiny.ppo(arguments={"value_model": mixtral()})
    with pytest.raises(ValueError, match="label_smoothing_factor does not add"):
        sft(mixtral(), tmp_path, label_smoothing_factor=0.1)
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_experts": 4}
    config = NllbMoeConfig(**layers | sizes | tiny.TOKENS, output_router_logits=True, decoder_start_token_id=1)
    with pytest.raises(ValueError, match="NllbMoeForConditionalGeneration has output_router_logits=True"):
        score_tokens_in_forward(tiny.seeded(NllbMoeForConditionalGeneration, config))
