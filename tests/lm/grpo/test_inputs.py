"""Wrong inputs to GRPOTrainer give a clear error before any training."""

from functools import partial

import pytest
from datasets import Dataset, IterableDataset
from tests.lm import tiny
from tests.lm.grpo.run_distributed import Scripted, config, prompts, trainer, vowels

from trimtab_lm.grpo import GRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture
def make(tmp_path):
    return partial(trainer, str(tmp_path))


def test_a_tokenizer_without_an_end_token(make):
    with pytest.raises(ValueError, match="has no EOS token"):
        make(processing_class=tiny.tokenizer(eos_token=None))


def test_a_tokenizer_without_a_pad_token_will_do(make):
    make(processing_class=tiny.tokenizer(pad_token=None), rollout=None, max_steps=1).train()


def test_a_model_that_was_not_loaded_by_name_needs_its_tokenizer(make):
    with pytest.raises(ValueError, match="processing_class=tokenizer"):
        make(processing_class=None)


def test_a_dataset_without_prompts(make):
    with pytest.raises(ValueError, match=r"cannot read a dataset with the columns \['question', 'answer'\]"):
        make(train_dataset=Dataset.from_dict({"question": ["a"], "answer": ["b"]}))
    with pytest.raises(ValueError, match=r"cannot read a dataset with the columns \['text'\]"):
        make(eval_dataset={"a": Dataset.from_dict({"text": ["a"]})})


def test_a_stream(make):
    with pytest.raises(TypeError, match="chosen by number, shuffled, and found again when training resumes"):
        make(train_dataset=IterableDataset.from_generator(lambda: iter([{"prompt": "a"}])))


def test_fewer_prompts_than_one_call_takes(make):
    trainer = make(train_dataset=prompts(7), per_device_train_batch_size=2, steps_per_generation=4, max_steps=5)
    assert trainer.train().global_step == 5


def test_no_dataset(make):
    grpo = make(train_dataset=None)
    with pytest.raises(ValueError, match="training requires a train_dataset"):
        grpo.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.7}, r"has temperature=0.7, and the rollout's settings have 1.0"),
        ({"top_k": 20}, r"has top_k=20, and the rollout's settings have 0"),
        ({"generation_kwargs": {"typical_p": 0.9}}, r"has generation_kwargs=.*have \{\}"),
        ({"rollout_backend": "continuous_batching"}, "and a rollout came"),
        ({"rollout_backend_kwargs": {"batch_size": 2}}, "and a rollout came"),
    ],
)
def test_settings_that_a_rollout_would_ignore(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(rollout=Scripted(), **settings)


def test_rewards_that_are_no_functions(make):
    with pytest.raises(TypeError, match="A reward function is a callable"):
        make(reward=3)
    with pytest.raises(ValueError, match="There is no reward function"):
        make(reward=[])
    with pytest.raises(ValueError, match="2 reward functions, but 1 weights"):
        make(reward=[vowels, len], reward_weights=[1.0])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda n: [1.0] * (n - 1), "returned has 5 scores for 6 items"),
        (lambda n: [float("nan")] * n, "returned has nan for completion 0"),
        (lambda n: [None] * n, "No reward function .* applies to completion 0"),
    ],
)
def test_rewards_that_cannot_be_learnt_from(make, answer, message):
    def careless(completions, **_):
        return answer(len(completions))

    grpo = make(reward=careless)
    before = tiny.weights(grpo.model)
    with pytest.raises(ValueError, match=message):
        grpo.train()
    assert not tiny.moved(before, grpo.model)


def test_a_reward_function_that_needs_a_column_that_is_not_there(make):
    def exact(completions, answer):
        return [0.0] * len(completions)

    with pytest.raises(TypeError, match=r"needs \['answer'\]"):
        make(reward=exact).train()


def test_settings_that_the_sampler_does_not_have(make):
    with pytest.raises(
        ValueError, match=r"sets \['batchsize'\]; rollout_backend='transformers' takes \['batch_size', "
    ):
        make(rollout=None, rollout_backend_kwargs={"batchsize": 3})


def test_a_loss_that_is_not_finite(make):
    from trimtab_common.health import TrainingDivergedError

    grpo = make(reward=lambda completions, **_: [float(i) for i in range(len(completions))])
    grpo.model.transformer.wte.weight.data[5:] = float("nan")
    with pytest.raises(TrainingDivergedError, match=r"logprobs of completion 0, 1, .* are not finite"):
        grpo.train()


def test_several_gpus_in_one_process(tmp_path):
    args = config(str(tmp_path))
    args._n_gpu = 2
    with pytest.raises(ValueError, match="accelerate launch"):
        GRPOTrainer(tiny.gpt2(), vowels, args, prompts(4), processing_class=tiny.tokenizer(), rollout=Scripted())
