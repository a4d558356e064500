"""The value head reads the decoder's last hidden state, whatever the model does between it and the logits."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    EncoderDecoderConfig,
    FSMTConfig,
    GPT2Config,
    LongT5Config,
    MiniCPM3Config,
    ModernBertDecoderConfig,
    MT5Config,
    ProphetNetConfig,
    SwitchTransformersConfig,
    T5Config,
    UMT5Config,
)

from trimtab_lm.ppo.passes import Padding, padded_inputs, score
from trimtab_lm.ppo.policy import ActorCritic
from trimtab_lm.tokens.logprobs import lm_head_of

QUERIES = [torch.tensor(row) for row in ([5, 6, 7, 8, 9, 3], [4, 2], [9, 8, 7, 3])]
RESPONSES = [torch.tensor(row) for row in ([11, 12], [13, 14, 15, 16, 1], [17, 3, 1])]
T5_SIZES = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
    **tiny.TOKENS,
}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    **tiny.TOKENS,
}
ENCODER_DECODER = {
    "t5": T5Config(**T5_SIZES),
    "t5 untied": T5Config(**T5_SIZES, tie_word_embeddings=False),
    "mt5": MT5Config(**T5_SIZES),
    "umt5": UMT5Config(**T5_SIZES),
    "longt5": LongT5Config(**T5_SIZES),
    "switch": SwitchTransformersConfig(
        **T5_SIZES, num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
    ),
}
"""T5 and similar models scale the state by d_model^-0.5 before a tied LM head."""
PROJECTED = {
    "bert": BertConfig(**SIZES, is_decoder=True),
    "modernbert": ModernBertDecoderConfig(**SIZES),
    "minicpm3": MiniCPM3Config(
        **SIZES, dim_model_base=4, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8
    ),
}
"""A layer (BERT) or a division (MiniCPM) lies between the last hidden state and the projection to the vocabulary."""


def module_of(config) -> ActorCritic:
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = tiny.with_value_head(auto.from_config(config), v_head_init_strategy="normal")
    return ActorCritic(tiny.exact(model).eval())


def batch_of(module: ActorCritic):
    """Returns what the module reads of the samples, the same padded for a plain forward pass, and its positions."""
    start = 0 if module.head.is_encoder_decoder else None
    return batch_from(module, start)


def batch_from(module: ActorCritic, start: int | None):
    inputs, read = padded_inputs(QUERIES, RESPONSES, Padding(0, start)), []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: read.append(kwargs), with_kwargs=True)
    score(module, module, QUERIES, RESPONSES, inputs, padding=Padding(0, start))
    hook.remove()
    places = tiny.places_of(inputs, QUERIES, RESPONSES)
    return read[0], inputs, places["source"], places["targets"]


def at(states: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return states.flatten(0, 1)[source]


def last_hidden_state(model, inputs) -> torch.Tensor:
    """Runs the model's parts: encoder and decoder stack, or the trunk without the LM head."""
    if not model.config.is_encoder_decoder:
        return model.base_model(**inputs).last_hidden_state
    mask = inputs["attention_mask"]
    encoded = model.encoder(input_ids=inputs["input_ids"], attention_mask=mask).last_hidden_state
    return model.decoder(
        input_ids=inputs["decoder_input_ids"],
        attention_mask=inputs["decoder_attention_mask"],
        encoder_hidden_states=encoded,
        encoder_attention_mask=mask,
    ).last_hidden_state


@pytest.mark.parametrize("config", [pytest.param(c, id=name) for name, c in (ENCODER_DECODER | PROJECTED).items()])
@pytest.mark.parametrize("path", ["forward", "scoring"])
@pytest.mark.filterwarnings("ignore:.*computed whole")
def test_values_and_gradients_are_those_of_the_last_hidden_state(config, path):
    module = module_of(config)
    tokens, inputs, source, _ = batch_of(module)
    wrapper = module.policy
    if path == "forward":
        values = at(wrapper(**inputs)[2], source)
    else:
        _, _, values, *_ = module(**tokens)
    values.sum().backward()
    gradients = {name: p.grad.clone() for name, p in wrapper.named_parameters() if p.grad is not None}
    wrapper.zero_grad()

    hidden = at(last_hidden_state(wrapper.pretrained_model, inputs), source)
    summary = wrapper.v_head.summary
    expected = hidden @ summary.weight[0] + summary.bias
    torch.testing.assert_close(values, expected)
    expected.sum().backward()
    for name, parameter in wrapper.named_parameters():
        if parameter.grad is not None and parameter.grad.abs().max() > 0:
            torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
    torch.testing.assert_close(gradients["v_head.summary.weight"][0], hidden.detach().sum(0))


def test_a_tied_t5_gives_the_values_of_its_old_head():
    """The head has weight 1 on the first unit only, so the value is that unit of the state, not a quarter of it."""
    module = module_of(ENCODER_DECODER["t5"])
    _, inputs, _, _ = batch_of(module)
    summary = module.policy.v_head.summary
    with torch.no_grad():
        summary.weight.copy_(torch.eye(1, 16))
        summary.bias.zero_()
        logits, _, values = module.policy(**inputs)
    states = last_hidden_state(module.policy.pretrained_model, inputs)
    torch.testing.assert_close(values, states[..., 0])
    scaled = states * 16**-0.5
    torch.testing.assert_close(logits, scaled @ module.policy.pretrained_model.lm_head.weight.T)


@pytest.mark.parametrize(
    "config",
    [
        ProphetNetConfig(
            hidden_size=16,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_encoder_attention_heads=2,
            num_decoder_attention_heads=2,
            decoder_start_token_id=0,
            **tiny.TOKENS,
        ),
        EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**SIZES), BertConfig(**SIZES)),
        EncoderDecoderConfig.from_encoder_decoder_configs(
            BertConfig(**SIZES), GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **tiny.TOKENS)
        ),
    ],
    ids=["prophetnet", "bert to bert", "bert to gpt2"],
)
def test_composed_models_give_a_value_per_position(config):
    torch.manual_seed(0)
    model = tiny.with_value_head(AutoModelForSeq2SeqLM.from_config(config)).eval()
    states = []
    decoder = model.pretrained_model.get_decoder()
    trunk = decoder if decoder.get_output_embeddings() is None else decoder.base_model
    trunk.register_forward_hook(lambda *passed: states.append(passed[2][0]))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    _, _, values = model(ids, attention_mask=torch.ones_like(ids), decoder_input_ids=ids[:, :3])
    assert values.shape == (2, 3)
    torch.testing.assert_close(values, model.v_head(states[0]))


def fsmt(**settings):
    """Returns FSMT in float32, because its causal mask fails in float64. Its output embeddings are the decoder's."""
    sizes = {
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "langs": ["en", "de"],
        "src_vocab_size": tiny.TOKENS["vocab_size"],
        "tgt_vocab_size": tiny.TOKENS["vocab_size"],
        "forced_eos_token_id": None,
        "decoder_start_token_id": tiny.EOS,
        "init_std": 0.3,
        "num_beams": 1,
    }
    tokens = {name: value for name, value in tiny.TOKENS.items() if name != "vocab_size"}
    return tiny.seeded(AutoModelForSeq2SeqLM.from_config, FSMTConfig(**sizes | tokens | settings))


@pytest.mark.parametrize("tied", [False, True])
def test_fsmt_has_values_and_logprobs(tied):
    model = fsmt(tie_word_embeddings=tied)
    module = ActorCritic(tiny.with_value_head(model).eval())
    assert module.head.separable
    assert lm_head_of(model) is model.model.decoder.output_projection
    tokens, inputs, source, targets = batch_from(module, tiny.EOS)
    states = []
    projection = model.model.decoder.output_projection
    handle = projection.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    logits, _, values = module.policy(**inputs)
    handle.remove()
    torch.testing.assert_close(values, module.policy.v_head(states[0]))
    scored, _, value, *_ = module(**tokens)
    torch.testing.assert_close(value, at(values, source))
    logprobs = at(logits, source).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(scored, logprobs)


def test_ppo_trains_fsmt():
    model = tiny.with_value_head(fsmt())
    trainer = tiny.ppo(model)
    before = tiny.weights(model)
    trainer.step(*tiny.batch())
    moved = tiny.moved(before, model)
    assert {"v_head.summary.weight", "pretrained_model.model.decoder.output_projection.weight"} <= moved.keys()


def test_a_model_whose_lm_head_is_unknown_says_how_to_name_it():
    model = fsmt()
    model.model.decoder.output_projection = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"0 of its linear layers have that shape.*get_output_embeddings"):
        tiny.with_value_head(model)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("build", [tiny.t5, fsmt])
def test_an_encoder_decoder_critic_gives_the_values_of_its_wrapper(build, tied):
    wrapper = tiny.with_value_head(build(tie_word_embeddings=tied), v_head_init_strategy="normal").eval()
    module = ActorCritic(tiny.with_value_head(tiny.t5()).eval(), wrapper)
    tokens, inputs, source, _ = batch_from(module, 0)
    _, _, values, *_ = module(**tokens)
    torch.testing.assert_close(values, at(wrapper(**inputs)[2], source))
    values.sum().backward()
    waiting = [name for name, p in module.critic.named_parameters() if p.requires_grad and p.grad is None]
    assert waiting == []


def test_an_adapter_of_a_sequence_classifier_goes_on_as_critic_with_its_trained_head():
    config = LoraConfig(target_modules=["c_attn"], task_type="SEQ_CLS", init_lora_weights=False, fan_in_fan_out=True)
    classifier = get_peft_model(tiny.scorer(), config).eval()
    module = ActorCritic(tiny.policy().eval(), classifier)
    rows, padding = (QUERIES[:1], RESPONSES[:1]), Padding(0)
    inputs = padded_inputs(*rows, padding)
    values = score(module, module, *rows, inputs, padding=padding).values[0]
    last_read = torch.cat([QUERIES[0], RESPONSES[0]])[None, :-1]
    torch.testing.assert_close(values[-1], classifier(last_read).logits[0, 0])
    values.sum().backward()
    waiting = [name for name, p in module.critic.named_parameters() if p.requires_grad and p.grad is None]
    assert waiting == []
