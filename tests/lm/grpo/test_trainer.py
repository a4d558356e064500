"""GRPOTrainer: what it samples, and what it learns from the samples."""

import asyncio
import gc
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tests.lm import tiny
from tests.lm.grpo.run_distributed import Fixed, Scripted, prompts, trainer, vowels
from transformers import GPT2LMHeadModel, TrainerCallback

from trimtab_lm.grpo.rollout import rollout_of
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.rollout import Rollout as Sampled
from trimtab_lm.sampling.rollout import SamplingSettings, StaleWeightsError
from trimtab_lm.tokens.layout import TokenGroup

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], lora_dropout=0.0)
MODELS = {
    "gpt2": lambda: tiny.gpt2(dtype=torch.float64),
    "llama": lambda: tiny.exact(tiny.llama()),
    "t5": lambda: tiny.exact(tiny.t5(initializer_factor=1.0)),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture
def make(tmp_path):
    return partial(trainer, str(tmp_path))


def rollout(count=2, size=3, seed=0, counted=True):
    """Returns a rollout with advantages, and with plausible log-probabilities of old policy and reference."""
    generator = torch.Generator().manual_seed(seed)
    rows = [tiny.rows(1 + size, 2, 6, 10 * seed + i) for i in range(count)]
    sampled = Sampled([ids for row in rows for ids in row[1:]], [True] * size * count)
    flags = torch.tensor([counted or k > 0 for k in range(size)]).expand(count, size)
    values = torch.randn(count, size, generator=generator, dtype=torch.float64)
    built, _ = rollout_of([row[0] for row in rows], sampled, is_counted=flags, advantages=values)
    old, ref = -3 + torch.randn(2, len(built.sequence), generator=generator, dtype=torch.float64)
    return replace(built, old_logprobs=old, ref_logprobs=ref)


def apart(whole, only=None):
    """Returns the same completions with a separate prompt each; `only` selects some of them."""
    pairs = [
        TokenGroup(group.prefix, [ids], [counts])
        for group in whole.groups
        for ids, counts in zip(group.branches, group.counts, strict=True)
    ]
    alone = replace(whole, groups=pairs)
    return alone if only is None else alone[only]


def batch_of(grpo, whole):
    return {**grpo.lay_out(whole.groups), "rollout": whole}


def sampled_of(batch):
    """Returns the completions of a micro-batch as lists of ids."""
    return [ids for group in batch["rollout"].groups for ids in group.branches]


def gradients(grpo, whole, model=None):
    """Returns loss and all gradients of a single micro-batch."""
    model = model or grpo.model
    model.zero_grad()
    loss = grpo.compute_loss(model, batch_of(grpo, whole))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# Generation


def test_one_call_of_generation_serves_all_steps(make):
    """8 steps with 4 prompts each take one call with 32 prompts; a second pass adds none."""
    grpo = make(per_device_train_batch_size=4, steps_per_generation=8, max_steps=8, train_dataset=prompts(32))
    grpo.train()
    assert grpo.backend.calls == [32]
    grpo = make(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=2,
        num_iterations=3,
        max_steps=12,
        train_dataset=prompts(16),
    )
    grpo.train()
    assert grpo.backend.calls == [8, 8]
    assert grpo.state.global_step == 12


class Recorded(TrainerCallback):
    """Keeps the weights after each step, and how many completions each forward pass reads."""

    def __init__(self):
        self.weights, self.completions = [], []

    def on_train_begin(self, args, state, control, model, **_):
        model.register_forward_pre_hook(
            lambda _, __, kwargs: self.completions.append(len(kwargs["tokens"]["lengths"])), with_kwargs=True
        )

    def on_step_end(self, args, state, control, model, **_):
        self.weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_micro_batches_of_less_than_a_group_change_no_step(loss_type, make):
    """Two prompts with four completions each, in one micro-batch, in one for each pair, and in one for each."""
    settings = {
        "loss_type": loss_type,
        "num_generations": 4,
        "mask_truncated_completions": True,
        "importance_sampling_level": "sequence",
        "beta": 0.1,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_steps": 4,
        "train_dataset": prompts(4),
        "optim": "sgd",
    }
    runs = []
    for parts in (1, 2, 4):
        record = Recorded()
        batch, accumulation = (2, 1) if parts == 1 else (1, 2 * parts)
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        grpo = make(MODELS["gpt2"](), **settings, **sizes, group_parts=parts, callbacks=[record])
        grpo.train()
        assert grpo.backend.calls == [4]
        assert set(record.completions) == {8 if parts == 1 else 4 // parts}
        runs.append(torch.stack(record.weights))
    assert (runs[0][1:] - runs[0][:-1]).abs().amax(1).min() > 1e-4  # every step moves the weights
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=1e-9, atol=1e-9)


def test_epochs_are_counted_in_passes_over_the_prompts(make):
    grpo = make(max_steps=-1, num_train_epochs=2, num_iterations=2, steps_per_generation=3, train_dataset=prompts(13))
    grpo.train()
    assert grpo.backend.calls == [6] * 4  # two whole calls of 6 in 13 prompts, in each of two epochs
    assert (grpo.state.global_step, grpo.state.epoch) == (24, 2)


def test_each_rollout_is_of_the_weights_as_they_are(make):
    seen = []

    class Watching(Scripted):
        def sync(self, model, version):
            super().sync(model, version)
            self.weights = {name: value.clone() for name, value in model.state_dict().items()}

        def generate(self, prompts, **options):
            seen.append(self.weights["transformer.wte.weight"])
            return super().generate(prompts, **options)

    grpo = make(rollout=Watching(), steps_per_generation=2, max_steps=6, eval_dataset=prompts(2))
    grpo.train()
    grpo.evaluate()
    assert len(seen) == 4
    assert all(not torch.equal(one, other) for one, other in pairwise(seen))
    assert torch.equal(seen[-1], grpo.model.transformer.wte.weight)
    versions = list(grpo.backend.versions)
    assert versions == sorted(set(versions))
    grpo.train()
    assert grpo.backend.versions[4] > versions[-1]


def test_a_sampler_of_old_weights_is_found_out(make):
    class Stale(Scripted):
        def sync(self, model, version):
            self.version = version if self.version is None else self.version

    with pytest.raises(StaleWeightsError):
        make(rollout=Stale()).train()


def test_generation_and_rewards_do_not_touch_the_random_numbers_of_training(make):
    draws = []

    def noisy(completions, **_):
        draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return [len(text) + draws[-1][0] for text in completions]

    def state():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    grpo = make(reward=noisy, rollout=None, eval_dataset=prompts(4), per_device_eval_batch_size=2)
    rows = grpo.train_dataset.select(range(2)).to_list()
    before = state()
    first = grpo.get_batch_samples(iter([rows]), 1, grpo.args.device)[0][0]
    grpo.evaluate()
    assert state() == before
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    grpo._begin()
    again = grpo.get_batch_samples(iter([rows]), 1, grpo.args.device)[0][0]
    assert draws[0] == draws[-1]  # a step's numbers do not depend on the global generators
    assert sampled_of(first) == sampled_of(again)


def test_the_end_token_is_learnt_and_special_tokens_are_not_in_the_texts(make):
    texts = []
    grpo = make(reward=lambda completions, **_: texts.extend(completions) or vowels(completions))
    batch = grpo.get_batch_samples(iter([grpo.train_dataset.select(range(2)).to_list()]), 1, grpo.args.device)[0][0]
    completions = sampled_of(batch)
    assert any(ids[-1] == tiny.EOS for ids in completions)
    assert batch["targets"].tolist() == [token for ids in completions for token in ids]
    assert not any("</s>" in text for text in texts)


def test_rewards_get_what_the_dataset_holds(make):
    seen = []

    def exact(prompts, completions, completion_ids, answer, **rest):
        seen.append((prompts, answer, rest))
        return [float(len(ids)) for ids in completion_ids]

    rows = Dataset.from_dict({"prompt": ["ab", "cd"], "answer": [1, 2], "source": ["x", "y"]})
    make(reward=exact, train_dataset=rows, max_steps=1, shuffle_dataset=False).train()
    assert seen == [(["ab"] * 3 + ["cd"] * 3, [1] * 3 + [2] * 3, {"source": ["x"] * 3 + ["y"] * 3})]


def test_conversations_are_rewarded_as_conversations(make):
    seen = []

    def polite(prompts, completions, **_):
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(answer[0]["content"])) for answer in completions]

    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}.{% endfor %}"
    conversation = [{"role": "user", "content": "hi"}]
    rows = Dataset.from_list([{"prompt": conversation}] * 2)
    make(reward=polite, train_dataset=rows, processing_class=tokenizer, max_steps=1).train()
    assert seen[0][0] == conversation
    assert seen[0][1][0]["role"] == "assistant"


def test_async_functions_models_and_weights(make):
    async def slow(completions, **_):
        await asyncio.sleep(0.001)
        return [float(len(text)) for text in completions]

    grpo = make(
        reward=[slow, tiny.scorer(), vowels],
        reward_processing_classes=[None, tiny.tokenizer(), None],
        reward_weights=[1.0, 0.5, 2.0],
        reward_names=["length", "taste", "vowels"],
        max_steps=1,
    )
    grpo.train()
    log = grpo.state.log_history[0]
    parts = {name: log[f"rewards/{name}/mean"] for name in ("length", "taste", "vowels")}
    assert log["reward"] == pytest.approx(parts["length"] + 0.5 * parts["taste"] + 2 * parts["vowels"], rel=1e-5)
    assert all(log[f"rewards/{name}/std"] > 0 for name in parts)


# The loss


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "settings", [{"loss_type": "dapo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}]
)
def test_a_prompt_once_is_a_prompt_for_each_completion(make, name, settings):
    grpo = make(MODELS[name](), beta=0.3, temperature=0.7, **settings)
    whole = rollout(3)
    assert grpo.lay_out.keywords["layout"] == ("encoder-decoder" if name == "t5" else "row")
    loss, grads = gradients(grpo, whole)
    grpo.lay_out = partial(grpo.lay_out, layout="encoder-decoder" if name == "t5" else "padded")
    other_loss, other_grads = gradients(grpo, apart(whole))
    torch.testing.assert_close(loss, other_loss, rtol=1e-9, atol=1e-12)
    assert grads.keys() == other_grads.keys()
    assert loss != 0
    for weight, grad in grads.items():
        torch.testing.assert_close(grad, other_grads[weight], rtol=1e-9, atol=1e-12, msg=weight)


def test_on_policy_the_gradient_is_reinforce_with_a_baseline(make):
    """d/dw of -(1/S) sum_i A_i (1/|o_i|) sum_t log pi(o_it), at the sampling temperature, by plain forward passes."""
    model = tiny.gpt2(dtype=torch.float64)
    grpo = make(model, loss_type="grpo", temperature=0.7)
    whole = replace(rollout(2), old_logprobs=None, ref_logprobs=None)
    _, grads = gradients(grpo, whole)
    model.eval().zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for group, advantage in zip(apart(whole).groups, whole.advantages, strict=True):
        logits = model(input_ids=torch.tensor([group.prefix + group.branches[0]])).logits[0, len(group.prefix) - 1 : -1]
        taken = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(group.branches[0])[:, None])
        total = total - advantage * taken.mean() / 6
    total.backward()
    for name, parameter in model.named_parameters():
        # Tokens are weighted in float32, so terms that cancel leave its rounding error.
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-6, atol=1e-7, msg=name)


def test_a_completion_that_is_masked_might_as_well_not_be_there(make):
    grpo = make(tiny.gpt2(dtype=torch.float64))
    masked = rollout(2, counted=False)
    loss, grads = gradients(grpo, masked)
    other_loss, other_grads = gradients(grpo, apart(masked, only=[1, 2, 4, 5]))
    torch.testing.assert_close(loss, other_loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(grads, other_grads, rtol=1e-9, atol=1e-12)


def test_truncated_completions_are_in_neither_baseline_nor_loss(make):
    rewards = [1.0, 5.0, 100.0]
    grpo = make(
        reward=lambda completions, **_: rewards * 2,
        rollout=Fixed([True, True, False]),
        scale_rewards="none",
        mask_truncated_completions=True,
        max_completion_length=3,
    )
    rows = grpo.train_dataset.select(range(2)).to_list()
    batches, totals = grpo.get_batch_samples(iter([rows]), 1, grpo.args.device)
    assert batches[0]["rollout"].advantages.tolist() == [-2.0, 2.0, 0.0] * 2
    assert batches[0]["targets"].tolist() == [5, 6, 6] * 2
    assert (totals.sequences, totals.tokens) == (4, 6)
    grpo.config.mask_truncated_completions = False
    grpo._begin()
    batches, totals = grpo.get_batch_samples(iter([rows]), 1, grpo.args.device)
    assert (totals.sequences, totals.tokens) == (6, 12)
    assert batches[0]["rollout"].advantages[:3].sum() == pytest.approx(0, abs=1e-5)


def test_a_step_in_which_all_is_masked_changes_nothing(make):
    grpo = make(rollout=Fixed([False] * 3), mask_truncated_completions=True, max_completion_length=3, max_steps=2)
    before = tiny.weights(grpo.model)
    grpo.train()
    assert not tiny.moved(before, grpo.model)
    assert grpo.state.log_history[0]["loss"] == 0
    assert "entropy" not in grpo.state.log_history[0]


@pytest.mark.parametrize("corrected", [True, False])
def test_adapters_off_are_a_frozen_copy(make, corrected):
    """Adapters off and a copy give the same KL term, and so the same loss; the adapter has moved from the reference."""
    settings = {"beta": 0.5, "use_bias_correction_kl": corrected, "loss_type": "grpo"}
    model = tiny.gpt2(dtype=torch.float64)
    adapted = make(get_peft_model(tiny.gpt2(dtype=torch.float64), LORA), **settings)
    copied = make(model, **settings)
    assert adapted.reference.is_adapter_off
    assert not copied.reference.is_policy
    generator = torch.Generator().manual_seed(0)
    for name, weight in adapted.model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    merged = get_peft_model(tiny.gpt2(dtype=torch.float64), LORA)
    merged.load_state_dict(adapted.model.state_dict())
    model.load_state_dict(merged.merge_and_unload().state_dict())
    losses = []
    for grpo in (adapted, copied):
        bare = replace(rollout(2), advantages=torch.zeros(6), old_logprobs=None, ref_logprobs=None)
        with torch.no_grad(), grpo.reference.active() as reference:
            ref = reference.eval()(tokens=grpo.lay_out(bare.groups)).logprobs
        losses.append(grpo.compute_loss(grpo.model, batch_of(grpo, replace(bare, ref_logprobs=ref))))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-12)
    assert losses[0] > 0.01


def test_without_beta_there_is_no_reference_in_memory(make):
    def count(**settings):
        gc.collect()
        before = sum(isinstance(thing, GPT2LMHeadModel) for thing in gc.get_objects())
        grpo = make(max_steps=1, **settings)
        grpo.train()
        gc.collect()
        number = sum(isinstance(thing, GPT2LMHeadModel) for thing in gc.get_objects()) - before
        assert (grpo.reference is None) == (number == 1)
        return number, "kl" in grpo.state.log_history[0]

    assert count() == (1, False)
    assert count(beta=0.1) == (2, True)


def test_old_logprobs_are_kept_where_the_policy_moves_and_only_there(make):
    for settings, expected in (({}, False), ({"num_iterations": 2}, True), ({"steps_per_generation": 2}, True)):
        grpo = make(**settings)
        rows = grpo.train_dataset.select(range(2 * settings.get("steps_per_generation", 1))).to_list()
        whole = grpo.get_batch_samples(iter([rows]), 1, grpo.args.device)[0][0]["rollout"]
        assert (whole.old_logprobs is not None) == expected
        if expected:
            row, ids = torch.tensor(whole.groups[0].prefix), torch.tensor(whole.groups[0].branches[0])
            first = whole.old_logprobs[: len(ids)]
            torch.testing.assert_close(first, tiny.taken_of(grpo.model, row, ids), rtol=1e-4, atol=1e-4)


class Silent(TransformersRollout):
    """Returns the policy's own samples without their log-probabilities."""

    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs)._replace(logprobs=None, is_policy=False)


@pytest.mark.parametrize(
    "settings", [{"num_iterations": 2}, {"steps_per_generation": 2, "temperature": 0.7}, {"importance_sampling_cap": 2}]
)
def test_a_sampler_that_is_the_policy_saves_a_forward_pass_and_changes_nothing(make, settings):
    def run(kind, **more):
        sampling = SamplingSettings(6, settings.get("temperature", 1.0))
        grpo = make(rollout=kind(sampling, tiny.tokenizer()), beta=0.1, learning_rate=1e-3, **settings | more)
        scored = [0]

        def count(_, args, kwargs):
            scored[0] += "tokens" in kwargs and not torch.is_grad_enabled()

        grpo.model.register_forward_pre_hook(count, with_kwargs=True)
        grpo.train()
        return scored[0], [entry for entry in grpo.state.log_history if "loss" in entry]

    passes, logs = run(TransformersRollout)
    silent_passes, silent_logs = run(Silent, importance_sampling_cap=None)
    mismatch = [entry.get("sampling/logp_difference/mean") for entry in logs]
    if "importance_sampling_cap" in settings:
        assert passes == silent_passes == 0  # one step to a rollout
        assert mismatch == pytest.approx([0] * 4, abs=1e-5)
    else:
        rollouts, parts = 2, settings.get("steps_per_generation", 1)
        assert (passes, silent_passes) == (0, rollouts * parts)
        assert mismatch[::2] == pytest.approx([0, 0], abs=1e-5)
        assert mismatch[1::2] == [None, None]  # the policy has moved; this is not a mismatch
    for told, silent in zip(logs, silent_logs, strict=True):
        for name in ("loss", "grad_norm", "kl", "ratio", "entropy"):
            assert told[name] == pytest.approx(silent[name], rel=1e-3, abs=1e-5), name


def test_dropout_stays_off_until_the_end_of_backward(make):
    """Backward runs a checkpointed block again: with dropout back on, its gradient would be that of another network."""
    grads = []
    for checkpointing in (False, True):
        grpo = make(
            tiny.gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
            max_steps=1,
            learning_rate=0.0,
            gradient_checkpointing=checkpointing,
            max_grad_norm=0.0,
        )
        seen = {}
        for name, weight in grpo.model.named_parameters():
            weight.register_hook(lambda grad, name=name, seen=seen: seen.__setitem__(name, grad.clone()))
        grpo.train()
        grads.append(seen)
        assert grpo.model.training
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-6, msg=name)


# Learning


def wrong_sign(loss):
    return lambda *args, **options: -loss(*args, **options)


def letter_a(completions, **_):
    return [text.count("a") / 6 for text in completions]


@pytest.mark.parametrize("is_broken", [False, True])
def test_it_learns_to_write_the_letter_a_and_not_with_a_broken_loss(make, monkeypatch, is_broken):
    if is_broken:
        import trimtab_lm.grpo.algorithm as module

        monkeypatch.setattr(module, "clipped_surrogate", wrong_sign(module.clipped_surrogate))
    grpo = make(
        reward=letter_a,
        rollout=None,
        per_device_train_batch_size=8,
        num_generations=8,
        max_steps=40,
        learning_rate=1e-2,
        logging_steps=4,
    )
    grpo.train()
    rewards = [entry["reward"] for entry in grpo.state.log_history if "reward" in entry]
    assert (rewards[-1] > 0.6) == (not is_broken)
    assert rewards[0] < 0.4


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"delta": 1.5},
        {"scale_rewards": "batch", "mask_truncated_completions": True},
        {"beta": 0.1, "temperature": 0.8},
        {"scale_rewards": "raw"},
        {"loss_type": "cispo", "scale_rewards": "rloo"},
        {"scale_rewards": "reinforce++"},
        {"rollout_backend": "continuous_batching", "rollout_backend_kwargs": {"max_batch_tokens": 256}},
    ],
)
def test_every_form_trains(make, settings):
    grpo = make(rollout=None, steps_per_generation=2, max_steps=2, **settings)
    before = tiny.weights(grpo.model)
    grpo.train()
    assert tiny.moved(before, grpo.model)
    logs = [entry for entry in grpo.state.log_history if "loss" in entry]
    assert logs[0]["ratio"] == pytest.approx(1, abs=1e-4)
    mismatch = logs[0].get("sampling/logp_difference/mean", 0.0)
    assert mismatch == pytest.approx(0, abs=1e-3)
    assert logs[0]["sampling/importance_ratio/mean"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_other_models_train(make, name):
    model = {"llama": tiny.llama, "t5": partial(tiny.t5, initializer_factor=1.0)}[name]()
    grpo = make(model, rollout=None, max_steps=2, steps_per_generation=2, beta=0.1)
    ends = {ids[-1] == tiny.EOS for ids in grpo.train_dataset["prompt_ids"]}
    assert ends == {name == "t5"}  # an encoder reads a finished text, a decoder continues one
    before = tiny.weights(grpo.model)
    grpo.train()
    assert tiny.moved(before, grpo.model)


# Statistics
