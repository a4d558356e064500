"""Value heads: what they compute, and that folders written today or in 2024 restore the same model."""

import copy
import json
import shutil

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BitsAndBytesConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    T5Config,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from trimtab_common import hub
from trimtab_lm.models import head, loading
from trimtab_lm.models.head import VALUE_HEAD_FILE
from trimtab_lm.models.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
    ValueHead,
)

TOKENS = {"vocab_size": 23, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CAUSAL = {
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **TOKENS),
    "llama": LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **TOKENS),
    "opt": OPTConfig(
        hidden_size=16,
        word_embed_proj_dim=8,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        **TOKENS,
    ),
}
SEQ2SEQ = {
    "t5": T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, **TOKENS),
    "bart": BartConfig(
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        decoder_start_token_id=2,
        **TOKENS,
    ),
}
IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])


def causal(name: str = "gpt2", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CAUSAL[name])).to(dtype).eval()


def seq2seq(name: str = "t5") -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForSeq2SeqLM.from_config(copy.deepcopy(SEQ2SEQ[name])).eval()


def lora(**options) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, task_type="CAUSAL_LM", **options)


def wrapped(base: torch.nn.Module, **options) -> PreTrainedModelWrapper:
    seq = base.config.is_encoder_decoder
    cls = AutoModelForSeq2SeqLMWithValueHead if seq else AutoModelForCausalLMWithValueHead
    return cls.from_pretrained(base, **options).eval()


def run(model: PreTrainedModelWrapper) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = {"decoder_input_ids": IDS[:, :4]} if model.is_encoder_decoder else {}
    with torch.no_grad():
        logits, _, values = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **inputs)
    return logits, values


def assert_same(first: PreTrainedModelWrapper, second: PreTrainedModelWrapper) -> None:
    """Asserts that weights, logits and values are equal to the last bit."""
    assert first.state_dict().keys() == second.state_dict().keys()
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name
    # Loaded weights lie unaligned in a mapped file, where matrix products round differently; a copy is aligned.
    for one, other in zip(run(first), run(copy.deepcopy(second).eval()), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# What it computes


@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
def test_a_head_that_copies_a_row_of_the_lm_head_gives_that_logit(name):
    model = wrapped(causal(name) if name in CAUSAL else seq2seq(name))
    with torch.no_grad():
        row = model.pretrained_model.get_output_embeddings().weight[7:8]
        model.v_head.summary.weight.copy_(row * 16**-0.5 if name == "t5" else row)  # T5 scales tied logits like this
        model.v_head.summary.bias.zero_()
    logits, values = run(model)
    assert values.shape == logits.shape[:2] == ((2, 4) if model.is_encoder_decoder else (2, 5))
    torch.testing.assert_close(values, logits[..., 7], rtol=1e-5, atol=1e-6)


def test_logits_and_loss_are_the_models_own():
    base = causal()
    logits, loss, _ = wrapped(base)(IDS, labels=IDS)
    expected = base(IDS, labels=IDS)
    assert torch.equal(logits, expected.logits)
    assert loss == expected.loss
    assert wrapped(base)(IDS)[1] is None


@pytest.mark.parametrize("base", [causal("llama"), seq2seq()], ids=["llama", "t5"])
def test_a_cached_step_gives_the_values_of_the_whole_sequence(base):
    model = wrapped(base)
    _, whole = run(model)
    ids = IDS[:, : whole.shape[1]]
    if model.is_encoder_decoder:
        *_, cache = model(IDS, decoder_input_ids=ids[:, :-1], return_past_key_values=True)
        last = model(IDS, past_key_values=cache, decoder_input_ids=ids[:, -1:])
    else:
        *_, cache = model(ids[:, :-1], return_past_key_values=True)
        last = model(ids[:, -1:], past_key_values=cache)
    assert len(last) == 3
    torch.testing.assert_close(last[2], whole[:, -1:])


def test_gradients_reach_the_trunk_and_the_head():
    model = wrapped(causal())
    model(IDS)[2].sum().backward()
    assert model.v_head.summary.bias.grad.item() == IDS.numel()
    assert model.pretrained_model.transformer.wte.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("autocast", [False, True])
def test_a_bfloat16_model_has_float32_values_and_logits(autocast):
    model = wrapped(causal(dtype=torch.bfloat16))
    hidden = []
    model.v_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits, values = run(model)
    assert logits.dtype == values.dtype == torch.float32
    assert hidden[0].dtype == torch.bfloat16
    weight, bias = model.v_head.summary.weight, model.v_head.summary.bias
    torch.testing.assert_close(values, (hidden[0].float() * weight).sum(-1) + bias)


def test_the_head_is_as_precise_as_a_float64_model_and_follows_double():
    assert run(wrapped(causal(dtype=torch.float64)))[1].dtype == torch.float64
    assert run(wrapped(causal()).double())[1].dtype == torch.float64


def test_summary_dropout_acts_in_training_mode_only():
    head = ValueHead(64, summary_dropout_prob=0.5)
    hidden = torch.randn(3, 64)
    assert not torch.equal(head(hidden), head(hidden))
    head.eval()
    torch.testing.assert_close(head(hidden), hidden @ head.summary.weight[0] + head.summary.bias)


def test_summary_dropout_is_the_arguments_then_the_configurations_then_a_tenth():
    base = causal()
    assert wrapped(base).v_head.dropout.p == 0.1
    base.config.summary_dropout_prob = 0.5
    assert wrapped(base).v_head.dropout.p == 0.5
    assert wrapped(base, summary_dropout_prob=None).v_head.dropout.p == 0.5
    assert wrapped(base, summary_dropout_prob=0.0).v_head.dropout.p == 0.0


def test_initialisation_strategies():
    base = AutoModelForCausalLM.from_config(GPT2Config(n_embd=2048, n_layer=1, n_head=2, n_positions=8, **TOKENS))
    normal = wrapped(base, v_head_init_strategy="normal").v_head.summary
    assert normal.weight.std().item() == pytest.approx(0.2, rel=0.1)
    assert normal.bias.item() == 0
    narrow = wrapped(base, v_head_init_strategy="normal", v_head_initializer_range=0.01).v_head.summary
    assert narrow.weight.std().item() == pytest.approx(0.01, rel=0.1)
    for strategy in (None, "random"):  # uniform in +- 1 / sqrt(2048)
        default = wrapped(base, v_head_init_strategy=strategy).v_head.summary
        assert default.weight.abs().max().item() == pytest.approx(2048**-0.5, rel=0.02)
    assert (run(wrapped(base, v_head_init_strategy="zero"))[1] == 0).all()
    with pytest.raises(ValueError, match=r"'orthogonal'.*'zero'"):
        wrapped(base, v_head_init_strategy="orthogonal")


# What it accepts


def test_models_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match=r"GPT2Model has no LM head.*AutoModelForCausalLM"):
        wrapped(AutoModel.from_config(CAUSAL["gpt2"]))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration needs AutoModelForSeq2SeqLMWithValueHead"):
        AutoModelForCausalLMWithValueHead(seq2seq())
    with pytest.raises(TypeError, match="got a Linear"):
        AutoModelForCausalLMWithValueHead(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="AutoModelForCausalLMWithValueHead"):
        PreTrainedModelWrapper.from_pretrained("gpt2")


def test_unknown_arguments_are_not_swallowed(tmp_path):
    with pytest.warns(UserWarning, match="A model in memory stays as it is: revision, v_head_init_range changed noth"):
        wrapped(causal(), revision="main", v_head_init_range=0.1)
    causal().save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="v_head_init_range"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, v_head_init_range=0.1)


def test_loading_arguments_reach_transformers(tmp_path, monkeypatch):
    seen = {}

    def load(name, *args, **kwargs):
        seen.update(kwargs, name=name, args=args)
        return causal()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    quantization = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLMWithValueHead.from_pretrained(
        str(tmp_path),
        "positional",
        quantization_config=quantization,
        device_map={"": 0},
        torch_dtype="auto",
        revision="v1",
        token="t",
        gguf_file="q.gguf",
        summary_dropout_prob=0.0,
    )
    assert seen == {
        "name": str(tmp_path),
        "args": ("positional",),
        "quantization_config": quantization,
        "device_map": {"": 0},
        "torch_dtype": "auto",
        "revision": "v1",
        "token": "t",
        "gguf_file": "q.gguf",
    }
    with pytest.warns(FutureWarning, match=r"load_in_8bit is deprecated"):
        AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path), load_in_8bit=True)
    assert seen["quantization_config"].load_in_8bit
    assert "load_in_8bit" not in seen


def test_a_quantized_model_is_prepared_before_it_takes_an_adapter(monkeypatch):
    prepared = []
    monkeypatch.setattr(loading, "prepare_model_for_kbit_training", lambda m, **told: prepared.append((m, told)) or m)
    base = causal()
    wrapped(base, peft_config=lora())
    assert prepared == []
    base = causal()
    base.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    wrapped(base, peft_config=lora(), use_gradient_checkpointing=False)
    assert prepared == [(base, {"use_gradient_checkpointing": False})]


@pytest.mark.parametrize("build", [causal, seq2seq])
def test_loading_arguments_of_2024_leave_a_model_in_memory_as_it_is(build):
    for model in (build(), get_peft_model(build(), LoraConfig(target_modules="all-linear"))):
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        loading_arguments = {"torch_dtype": torch.bfloat16, "device_map": "auto", "trust_remote_code": True}
        with pytest.warns(UserWarning, match="torch_dtype, device_map, trust_remote_code changed nothing"):
            wrapper = wrapped(model, is_trainable=True, summary_dropout_prob=0.3, **loading_arguments)
        assert wrapper.pretrained_model is model
        assert wrapper.v_head.dropout.p == 0.3
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=["attention", "head"])
def test_peft_models_by_config_and_by_instance_are_the_same(options):
    by_config = wrapped(causal(), peft_config=lora(**options), v_head_init_strategy="zero")
    by_instance = wrapped(get_peft_model(causal(), lora(**options)), v_head_init_strategy="zero")
    by_instance.load_state_dict(by_config.state_dict())
    assert by_config.is_peft_model
    assert by_instance.is_peft_model
    assert not wrapped(causal()).is_peft_model
    assert_same(by_config, by_instance)


def test_lora_on_the_lm_head_leaves_its_input_as_the_value():
    peft = get_peft_model(
        causal("llama"), LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    )
    model = wrapped(peft)
    hidden = peft.base_model.model.model(IDS).last_hidden_state
    torch.testing.assert_close(run(model)[1], model.v_head(hidden).detach())


def test_generate_and_configs_are_the_models_own():
    model = wrapped(causal())
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(model.generate(IDS, **options), model.pretrained_model.generate(IDS, **options))
    assert model.config is model.pretrained_model.config
    model.generation_config = GPT2Config  # any object shows whether it arrives
    assert model.pretrained_model.generation_config is GPT2Config
    assert model.device == torch.device("cpu")


@pytest.mark.filterwarnings("error:.gradient_checkpointing_:FutureWarning")
@pytest.mark.parametrize("peft_config", [None, lora()], ids=["full", "lora"])
def test_gradient_checkpointing_keeps_the_gradients(peft_config):
    model = wrapped(causal(), peft_config=peft_config, summary_dropout_prob=0.0).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def gradients():
        model.zero_grad()
        logits, _, values = model(IDS)
        (values.sum() + logits.square().mean()).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    checkpointed = gradients()
    model.gradient_checkpointing_disable()
    if peft_config is not None:
        assert not model.pretrained_model.get_input_embeddings()(IDS).requires_grad
    assert plain.keys() == checkpointed.keys() == gradients().keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient)


def test_fused_losses_that_bypass_the_head_are_named():
    base = causal("llama")
    model = wrapped(base)
    base.forward = lambda **_: CausalLMOutputWithPast(loss=torch.zeros(()))
    with pytest.raises(RuntimeError, match=r"returned no logits.*Liger"):
        model(IDS)


# What it writes and reads


@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
def test_save_and_load_round_trip(name, tmp_path):
    model = wrapped(causal(name) if name in CAUSAL else seq2seq(name))
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / VALUE_HEAD_FILE)) == {"v_head.summary.weight", "v_head.summary.bias"}
    assert not list(tmp_path.glob("*.part"))
    assert_same(model, type(model).from_pretrained(tmp_path))
    auto = type(model).transformers_parent_class
    _, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_round_trip_keeps_the_dtypes(dtype, tmp_path):
    model = wrapped(causal(dtype=dtype))
    model.v_head.double()
    model.save_pretrained(tmp_path)
    assert_same(model, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, dtype=dtype))


def test_a_gathered_state_dict_is_saved_instead_of_the_models(tmp_path):
    model, other = wrapped(causal()), wrapped(causal())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    model.save_pretrained(tmp_path / "no", state_dict=other.state_dict(), is_main_process=False)
    assert not (tmp_path / "no" / VALUE_HEAD_FILE).exists()
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    assert_same(other, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=["attention", "head"])
def test_peft_round_trip(options, tmp_path):
    causal("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **options)
    model = wrapped(base, peft_config=config)
    with torch.no_grad():
        model.pretrained_model.get_output_embeddings().weight.add_(0.1 if options else 0.0)
    model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved")
    assert isinstance(loaded.pretrained_model, PeftModel)
    assert_same(model, loaded)

    def trainable(m):
        return {name for name, p in m.named_parameters() if p.requires_grad}

    assert trainable(loaded) == trainable(model)
    frozen = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved", is_trainable=False)
    assert trainable(frozen) == {"v_head.summary.weight", "v_head.summary.bias"}
    with pytest.warns(UserWarning, match="peft_config is not used"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved", peft_config=config)


def test_an_adapter_with_its_own_name_keeps_its_value_head(tmp_path):
    causal().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = wrapped(get_peft_model(base, lora(), adapter_name="policy"))
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved" / "policy").eval()
    for one, other in zip(run(model), run(copy.deepcopy(loaded)), strict=True):
        assert torch.equal(one, other)


def test_an_adapter_without_a_base_name_says_what_to_do(tmp_path):
    wrapped(causal(), peft_config=lora()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"names no base model.*PeftModel"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def legacy_state(model: PreTrainedModelWrapper) -> dict[str, torch.Tensor]:
    return {key.removeprefix("pretrained_model."): value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("layout", ["bin", "old_bin", "safetensors", "sharded"])
def test_heads_inside_legacy_weight_files_are_found(layout, tmp_path):
    model = wrapped(causal("llama"))
    model.config.save_pretrained(tmp_path)
    state = legacy_state(model)
    if layout in ("bin", "old_bin"):
        torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=layout == "bin")
    elif layout == "safetensors":
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    else:
        names = sorted(state)
        places = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
        for shard in set(places.values()):
            save_file({n: state[n] for n in names if places[n] == shard}, tmp_path / shard, {"format": "pt"})
        index = {"metadata": {}, "weight_map": places}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same(model, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))


def test_a_legacy_adapter_keeps_its_head_in_a_bin_file(tmp_path):
    causal().save_pretrained(tmp_path / "base")
    model = wrapped(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), peft_config=lora())
    model.pretrained_model.save_pretrained(tmp_path / "saved")
    head = {key: value for key, value in model.state_dict().items() if key.startswith("v_head.")}
    torch.save(head, tmp_path / "saved" / "pytorch_model.bin")
    assert_same(model, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved"))


def test_a_hub_repository_is_read_like_a_folder(tmp_path, monkeypatch):
    model = wrapped(causal())
    snapshot = tmp_path / "models--someone--policy" / "snapshots" / ("0" * 40)
    model.save_pretrained(snapshot)
    (tmp_path / "models--someone--policy" / "refs").mkdir()
    (tmp_path / "models--someone--policy" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    options = {"cache_dir": str(tmp_path), "local_files_only": True}
    assert_same(model, AutoModelForCausalLMWithValueHead.from_pretrained("someone/policy", **options))
    (snapshot / VALUE_HEAD_FILE).unlink()
    fresh = AutoModelForCausalLMWithValueHead.from_pretrained("someone/policy", v_head_init_strategy="zero", **options)
    assert (run(fresh)[1] == 0).all()


def test_a_head_that_does_not_fit_is_an_error(tmp_path):
    wrapped(causal()).save_pretrained(tmp_path)
    file = tmp_path / VALUE_HEAD_FILE
    save_file({"v_head.summary.weight": torch.zeros(1, 8), "v_head.summary.bias": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=rf"{VALUE_HEAD_FILE}.*\(1, 8\).*\(1, 16\)"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    save_file({"v_head.summary.weight": torch.zeros(1, 16)}, file)
    with pytest.raises(ValueError, match=r"v_head\.summary\.bias"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    save_file({"summary.weight": torch.zeros(1, 16), "summary.bias": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"holds \{'summary\."):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_no_pickled_code_runs_from_a_checkpoint(tmp_path):
    causal().save_pretrained(tmp_path)

    class Payload:
        def __reduce__(self):
            return (shutil.rmtree, (str(tmp_path / "nothing"),))

    torch.save({"v_head.summary.weight": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)


def test_push_to_hub_uploads_base_and_head(monkeypatch):
    seen = {}

    class Repo:
        repo_id = "me/policy"

    def upload(*, repo_id, folder_path, **options):
        seen.update(options, repo_id=repo_id, files={path.name for path in folder_path.iterdir()})
        return "commit"

    monkeypatch.setattr(hub, "create_repo", lambda name, **options: seen.update(options) or Repo)
    monkeypatch.setattr(hub, "upload_folder", upload)
    assert wrapped(causal()).push_to_hub("policy", private=True, commit_message="step 10") == "commit"
    assert {"config.json", "model.safetensors", VALUE_HEAD_FILE} <= seen.pop("files")
    assert seen.pop("ignore_patterns") == ["_*"]
    assert seen == {
        "private": True,
        "token": None,
        "exist_ok": True,
        "repo_id": "me/policy",
        "commit_message": "step 10",
    }


def test_a_crash_while_writing_leaves_the_old_head(tmp_path, monkeypatch):
    old, new = wrapped(causal()), wrapped(causal())
    torch.nn.init.ones_(new.v_head.summary.weight)
    old.save_pretrained(tmp_path)
    monkeypatch.setattr(head.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        new.save_pretrained(tmp_path)
    monkeypatch.undo()
    assert_same(old, AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))
