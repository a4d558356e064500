"""Whatever batch or backend samples, tokens, probabilities and ends are the model's own."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from tests.lm import tiny
from tests.marks import slow_but
from transformers import FalconH1Config, FalconH1ForCausalLM, MistralConfig, MistralForCausalLM, WatermarkingConfig

from trimtab_lm.interface import base_of
from trimtab_lm.sampling.backends import (
    PAGE_SIZE,
    ContinuousBatchingRollout,
    TransformersRollout,
)
from trimtab_lm.sampling.rollout import DISTORTIONS, PLAIN_SAMPLING, SamplingSettings, StaleWeightsError

PROMPTS = tiny.rows(5, 1, 9)


def lora(model: Any = None, **settings: Any) -> Any:
    modules = {"target_modules": ["q_proj", "v_proj"], **settings}
    return get_peft_model(model or tiny.llama(), LoraConfig(init_lora_weights=False, **modules)).eval()


def prompt_tuned() -> Any:
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    return get_peft_model(tiny.llama(), config).eval()


def prefix_tuned(model: Any = None) -> Any:
    model = model or tiny.llama()
    task = TaskType.SEQ_2_SEQ_LM if model.config.is_encoder_decoder else TaskType.CAUSAL_LM
    return get_peft_model(model, PrefixTuningConfig(task_type=task, num_virtual_tokens=3)).eval()


def prefix_tuned_t5() -> Any:
    return prefix_tuned(tiny.t5())


def sliding() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 2, "sliding_window": 4, "initializer_range": 0.3}
    return tiny.seeded(MistralForCausalLM, MistralConfig(**sizes, **heads, **tiny.TOKENS))


def hybrid() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    state = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
    return tiny.seeded(
        FalconH1ForCausalLM,
        FalconH1Config(**sizes, **state, num_key_value_heads=2, initializer_range=0.3, **tiny.TOKENS),
    )


def plain(limit: int = 6, temperature: float = 1.0, batch_size: int = 64, **settings: Any) -> TransformersRollout:
    return TransformersRollout(
        SamplingSettings(limit, temperature, **settings), tiny.tokenizer(), batch_size=batch_size
    )


def continuous(limit: int = 6, temperature: float = 1.0, **settings: Any) -> ContinuousBatchingRollout:
    return ContinuousBatchingRollout(SamplingSettings(limit, temperature, **settings), tiny.tokenizer())


def sample(backend: Any, model: Any, prompts: Any = PROMPTS, generations: int = 3, seed: int = 0) -> Any:
    backend.sync(model, 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The sampler is not the policy")
        return backend.generate(prompts, num_generations=generations, version=1, seed=seed)


def greedy_alone(model: Any, prompt: torch.Tensor, limit: int) -> list[int]:
    """Returns the most likely tokens, one by one, from plain forward passes on one row."""
    row, answer = prompt[None], [tiny.PAD] if model.config.is_encoder_decoder else []
    for _ in range(limit):
        if model.config.is_encoder_decoder:
            logits = model(input_ids=row, decoder_input_ids=torch.tensor([answer])).logits
        else:
            logits = model(input_ids=torch.cat([row, torch.tensor([answer], dtype=torch.long)], dim=1)).logits
        answer.append(int(logits[0, -1].argmax()))
        if answer[-1] == tiny.EOS:
            break
    return answer[1:] if model.config.is_encoder_decoder else answer


@pytest.mark.parametrize(
    "build",
    [tiny.gpt2, tiny.llama, tiny.t5, lora, prompt_tuned, prefix_tuned, prefix_tuned_t5, sliding, hybrid],
)
@pytest.mark.parametrize("batch_size", [64, 4, 2])
@torch.no_grad()
def test_completions_are_the_models_own_and_in_the_order_of_their_prompts(build: Callable, batch_size: int):
    model = build().eval()
    rollout = sample(plain(batch_size=batch_size, top_k=1), model)
    expected = [greedy_alone(model, prompt, 6) for prompt in PROMPTS for _ in range(3)]
    assert [row.tolist() for row in rollout.completions] == expected
    assert rollout.ended == [row[-1] == tiny.EOS for row in expected]


@torch.no_grad()
def test_a_prompt_runs_once_for_its_group():
    prompt = tiny.rows(1, 9, 9)

    def tokens_read(model: Any, share: bool) -> int:
        counted = []
        for name, module in model.named_modules():
            if name.endswith("embed_tokens"):
                module.register_forward_hook(lambda _, inputs, __: counted.append(inputs[0].numel()))
        one_token = SamplingSettings(1)  # the model never reads this token
        backend = TransformersRollout(one_token, tiny.tokenizer(), batch_size=64, share_prompts=share)
        sample(backend, model, prompt, generations=4)
        return sum(counted)

    assert tokens_read(tiny.llama(), share=True) == 8 + 4  # each row's last token gives its first sample
    assert tokens_read(tiny.llama(), share=False) == 9 * 4
    assert tokens_read(tiny.t5(), share=True) == 9 + 4  # the encoder's tokens, and a start token each


@torch.no_grad()
@pytest.mark.parametrize("backend", [plain, continuous])
def test_tokens_are_drawn_from_the_softmax_at_the_temperature(backend: Callable):
    model, prompt, count = tiny.llama().eval(), tiny.rows(1, 4, 4), 600
    drawn = torch.cat(sample(backend(1, 1.5), model, prompt, generations=count).completions)
    expected = (model(prompt[0][None]).logits[0, -1] / 1.5).softmax(-1)
    frequency = drawn.bincount(minlength=len(expected)) / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((frequency - expected).abs() < 4.5 * deviation + 1e-9).all()


@pytest.mark.parametrize("backend", [plain, continuous])
def test_sampling_depends_on_its_seed_alone_and_leaves_training_as_it_was(backend: Callable):
    model = tiny.llama(attention_dropout=0.5).train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = sample(backend(), model, seed=2**62 + 5)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == flags
    torch.manual_seed(2)
    again, other = sample(backend(), model, seed=2**62 + 5), sample(backend(), model, seed=6)
    assert [row.tolist() for row in again.completions] == [row.tolist() for row in first.completions]
    assert [row.tolist() for row in other.completions] != [row.tolist() for row in first.completions]


@pytest.mark.parametrize("backend", [plain, continuous])
def test_a_completion_ends_with_its_end_token_or_at_the_limit(backend: Callable):
    rollout = sample(backend(5), tiny.llama(), generations=40)
    for row, ended in zip(rollout.completions, rollout.ended, strict=True):
        assert tiny.EOS not in row[:-1]
        assert ended == (row[-1] == tiny.EOS)
        assert ended or len(row) == 5
    lengths_of_ended = {len(row) for row, ended in zip(rollout.completions, rollout.ended, strict=True) if ended}
    assert {1, 5} <= lengths_of_ended  # the end token may be the first token or the last possible one
    assert not all(rollout.ended)
    assert any(row[-1] == tiny.PAD for row in rollout.completions)  # sampled, so it stays


@pytest.mark.parametrize("pad", ["pad_token", "eos_token"])
def test_a_stop_string_ends_a_completion_too(pad: str):
    text = tiny.tokenizer().decode
    free = sample(plain(8, top_k=1), tiny.llama())
    stop = text(next(row for row in free.completions if len(row) == 8)[2])
    backend = plain(8, top_k=1, generation_kwargs={"stop_strings": [stop]})
    backend.tokenizer.pad_token = getattr(backend.tokenizer, pad)
    rollout = sample(backend, tiny.llama())
    expected = []
    for row in free.completions:
        characters = [text(token) for token in row]
        expected.append(row[: characters.index(stop) + 1] if stop in characters else row)
    assert [row.tolist() for row in rollout.completions] == [row.tolist() for row in expected]
    assert rollout.ended == [len(row) < 8 or int(row[-1]) == tiny.EOS for row in expected]


@pytest.mark.parametrize("backend", [plain, continuous])
def test_a_rollout_of_other_weights_than_asked_for_is_refused(backend: Callable):
    with pytest.raises(StaleWeightsError, match=r"holds none. Call sync\(model, 3\)"):
        backend().generate(PROMPTS, num_generations=2, version=3, seed=0)
    stale = backend()
    stale.sync(tiny.llama(), 3)
    with pytest.raises(StaleWeightsError, match="version 4 was asked for, but the sampler holds version 3"):
        stale.generate(PROMPTS, num_generations=2, version=4, seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_completion_length": 0}, "max_completion_length=0 must be a whole number of at least 1"),
        ({"temperature": 0.0}, "temperature=0.0 must be a finite number above 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be a number above 0 and up to 1"),
        ({"top_k": -1}, "top_k=-1 must be a whole number, 0 or above"),
        ({"top_k": None}, "top_k=None must be a whole number, 0 or above"),
        ({"min_p": 1.5}, "min_p=1.5 must be a number from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a finite number above 0"),
        ({"generation_kwargs": {"do_sample": False}}, "do_sample"),
        ({"generation_kwargs": {"num_return_sequences": 2, "n": 2}}, r"\['n', 'num_return_sequences'\]"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**settings)


def test_a_sampler_that_is_another_policy_says_so_once():
    backend = plain(1, top_k=2)
    with pytest.warns(UserWarning, match="top_k=2"):
        backend.sync(tiny.llama(), 0)
    rollout = backend.generate(PROMPTS[:1], num_generations=200, version=0, seed=0)
    assert len({int(row[0]) for row in rollout.completions}) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.sync(tiny.llama(), 1)
        backend.generate(PROMPTS[:1], num_generations=2, version=1, seed=0)


def test_an_end_token_that_the_generation_config_gets_later_ends_completions():
    model, backend = tiny.llama(), plain(4)
    backend.sync(model, 0)
    before = backend.generate(PROMPTS[:1], num_generations=1, version=0, seed=0).completions[0]
    model.generation_config.eos_token_id = int(before[1])
    backend.sync(model, 1)
    after = backend.generate(PROMPTS[:1], num_generations=1, version=1, seed=0)
    assert after.completions[0].tolist() == before[:2].tolist()
    assert after.ended == [True]


@pytest.mark.parametrize(
    "setting",
    [
        {"min_p": 0.9},
        {"top_h": 0.05},
        {"guidance_scale": 3.0},
        {"sequence_bias": [[[5], 8.0]]},
        {"exponential_decay_length_penalty": (1, 3.0)},
        {"watermarking_config": WatermarkingConfig(bias=9.0)},
        {"min_new_tokens": 8},
        {"bad_words_ids": [[token] for token in range(5, 20)]},
        {"suppress_tokens": list(range(5, 20))},
        {"begin_suppress_tokens": list(range(5, 20))},
        {"forced_eos_token_id": 5},
    ],
    ids=lambda setting: next(iter(setting)),
)
@pytest.mark.parametrize("build", [tiny.llama, lora, prompt_tuned])
@pytest.mark.filterwarnings("error:The sampler is not the policy")
def test_a_setting_that_only_none_turns_off_does_not_come_from_the_model(build: Callable, setting: dict[str, object]):
    model = build()
    expected = sample(plain(8), model)
    own = base_of(model).generation_config
    vars(own).update(setting)
    rollout = sample(plain(8), model)
    assert [row.tolist() for row in rollout.completions] == [row.tolist() for row in expected.completions]
    assert base_of(model).generation_config is own
    assert {name: getattr(own, name) for name in setting} == setting


def test_settings_of_the_models_own_generation_config_do_not_bend_the_distribution():
    model = tiny.llama()
    model.generation_config.update(top_k=1, temperature=0.1, repetition_penalty=3.0)
    bent, straight = sample(plain(1), model, generations=20), sample(plain(1), tiny.llama(), generations=20)
    assert [row.tolist() for row in bent.completions] == [row.tolist() for row in straight.completions]


def test_every_setting_that_is_reported_is_off_unless_the_caller_sets_it():
    assert DISTORTIONS.keys() <= PLAIN_SAMPLING.keys()


def test_continuous_batching_leaves_out_the_tokens_that_the_model_forbids_or_forces():
    model, forbidden = tiny.llama(), list(range(5, 20))
    straight = sample(continuous(), model)
    vars(model.generation_config).update(suppress_tokens=forbidden, min_new_tokens=4, forced_eos_token_id=5)
    bent = sample(continuous(), model)
    assert [row.tolist() for row in bent.completions] == [row.tolist() for row in straight.completions]


@pytest.mark.parametrize(
    "build", slow_but([tiny.llama, lora, lambda: tiny.llama(attn_implementation="eager")], tiny.llama)
)
@torch.no_grad()
def test_continuous_batching_gives_the_models_tokens_and_probabilities(build: Callable):
    model = build().eval()
    attention = model.config._attn_implementation
    greedy = sample(continuous(top_k=1), model)
    assert [row.tolist() for row in greedy.completions] == [
        greedy_alone(model, prompt, 6) for prompt in PROMPTS for _ in range(3)
    ]
    assert model.config._attn_implementation == attention
    rollout = sample(continuous(4, 0.7), model, generations=2)
    for i, (row, logprobs) in enumerate(zip(rollout.completions, rollout.logprobs, strict=True)):
        torch.testing.assert_close(logprobs, tiny.taken_of(model, PROMPTS[i // 2], row, 0.7), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("build", [tiny.gpt2, tiny.llama, lora, sliding, hybrid])
@pytest.mark.parametrize("batch_size", [64, 4])
@torch.no_grad()
def test_each_token_comes_with_its_log_probability(build: Callable, batch_size: int):
    model = build().eval()
    rollout = sample(plain(8, 0.7, batch_size=batch_size), model)
    assert rollout.is_policy
    assert len({len(row) for row in rollout.completions}) > 1
    for i, (row, logprobs) in enumerate(zip(rollout.completions, rollout.logprobs, strict=True)):
        torch.testing.assert_close(logprobs, tiny.taken_of(model, PROMPTS[i // 3], row, 0.7), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_log_probabilities_are_those_that_tokens_were_drawn_by():
    model = tiny.llama().eval()
    rollout = sample(plain(1, top_k=2), model)
    assert not rollout.is_policy
    for i, (row, logprobs) in enumerate(zip(rollout.completions, rollout.logprobs, strict=True)):
        two = model(PROMPTS[i // 3][None]).logits[0, -1].topk(2)
        expected = two.values.log_softmax(-1)[two.indices == row]
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-5)


def test_only_a_policy_in_plain_float32_tells_its_own_log_probabilities(fresh_accelerate):
    for model in (tiny.llama().bfloat16(), tiny.exact(tiny.llama())):
        assert not sample(plain(), model).is_policy
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(tiny.llama())
    assert not sample(plain(), prepared).is_policy
    stopped = sample(plain(8, generation_kwargs={"stop_strings": ["b"]}), tiny.llama())  # in transformers' loop
    assert stopped.logprobs is None
    assert not stopped.is_policy


@pytest.mark.parametrize("backend", [plain, continuous])
def test_a_prompt_without_room_for_its_completion_is_refused_before_it_is_sampled(backend: Callable):
    model = tiny.gpt2()
    message = r"prompt of 60 tokens with 5 new ones is too long: 65 tokens, .* 64 positions\. Lower max"
    with pytest.raises(ValueError, match=message):
        sample(backend(5), model, tiny.rows(1, 60, 60))
    assert all(len(row) <= 4 for row in sample(backend(4), model, tiny.rows(1, 60, 60)).completions)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Gives accelerate the state of a new process, before and after the test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_continuous_batching_of_a_model_prepared_for_mixed_precision_samples_in_its_weights_dtype(fresh_accelerate):
    plain_model, prepared = tiny.llama(), tiny.llama()
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(prepared)
    forward = prepared.forward
    expected = sample(continuous(top_k=1), plain_model).completions
    completions = sample(continuous(top_k=1), prepared).completions
    assert [ids.tolist() for ids in completions] == [ids.tolist() for ids in expected]
    assert prepared.forward == forward


def test_continuous_batching_refuses_what_it_would_ignore():
    for name, value in {"min_p": 0.1, "repetition_penalty": 1.2}.items():
        with pytest.raises(ValueError, match=f"would ignore: {name}={value}"):
            sample(continuous(**{name: value}), tiny.llama())
    with pytest.raises(ValueError, match="would ignore: stop_strings"):
        sample(continuous(generation_kwargs={"stop_strings": ["a"]}), tiny.llama())
    with pytest.raises(ValueError, match="encoder-decoder"):
        continuous().sync(tiny.t5(), 0)
    with pytest.raises(ValueError, match="learned prompt"):
        continuous().sync(prompt_tuned(), 0)


def test_a_failure_of_continuous_batching_is_raised_and_the_attention_put_back():
    def fail(*_: Any) -> None:
        raise MemoryError("no room left")

    model = tiny.llama(attn_implementation="eager")
    model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match=r"15 completions: no room left\. If it"):
        sample(continuous(), model)
    assert model.config._attn_implementation == "eager"
    sampler = ContinuousBatchingRollout(SamplingSettings(), tiny.tokenizer(), **{PAGE_SIZE: 2})
    # transformers 5.17 checks this in its thread.
    with pytest.raises((ValueError, RuntimeError), match=r"(page_size|Block size) must be at least"):
        sample(sampler, model)
    assert model.config._attn_implementation == "eager"
