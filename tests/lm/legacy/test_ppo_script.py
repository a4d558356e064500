"""The loop shared by scripts of early 2024, written against the documentation, with only its import changed."""

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny

from trimtab_lm import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    set_seed,
)


def build_dataset(tokenizer):
    dataset = Dataset.from_dict({"review": ["the film was long", "a good story", "i liked it a lot", "so so"] * 4})
    input_size = LengthSampler(2, 8)

    def tokenize(sample):
        sample["input_ids"] = tokenizer.encode(sample["review"])[: input_size()]
        sample["query"] = tokenizer.decode(sample["input_ids"])
        return sample

    dataset = dataset.map(tokenize, batched=False)
    dataset.set_format(type="torch")
    return dataset


def collator(data):
    return {key: [d[key] for d in data] for key in data[0]}


@pytest.mark.filterwarnings("ignore:step .* health/", "ignore:The sampler is not the policy")
def test_the_sentiment_loop_runs(tmp_path):
    set_seed(0)  # LengthSampler draws from numpy's global generator
    config = PPOConfig(model_name="tiny", learning_rate=1e-2, init_kl_coef=0.01, batch_size=8, mini_batch_size=4)
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny.gpt2())
    ref_model = create_reference_model(model)
    dataset = build_dataset(tokenizer)
    ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset, data_collator=collator)
    output_length_sampler = LengthSampler(3, 6)
    generation_kwargs = {
        "min_length": -1,
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "pad_token_id": tokenizer.eos_token_id,
    }
    rewards_seen = []
    for _ in range(10):
        for batch in ppo_trainer.dataloader:
            query_tensors = batch["input_ids"]
            response_tensors = []
            for query in query_tensors:
                gen_len = output_length_sampler()
                generation_kwargs["max_new_tokens"] = gen_len
                response = ppo_trainer.generate(query, **generation_kwargs)
                response_tensors.append(response.squeeze()[len(query) :])
            batch["response"] = [tokenizer.decode(r) for r in response_tensors]
            rewards = [
                torch.tensor(sum(c in "abcdefghijklm" for c in text) / max(len(text), 1)) for text in batch["response"]
            ]
            stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
            ppo_trainer.log_stats(stats, batch, rewards)
            rewards_seen.append(float(torch.stack(rewards).mean()))
    assert sum(rewards_seen[-4:]) > sum(rewards_seen[:4]) + 0.4
    ppo_trainer.save_pretrained(str(tmp_path))
    again = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
    torch.testing.assert_close(again.v_head.summary.weight, model.v_head.summary.weight)


def test_train_tokenizes_texts_by_itself():
    dataset = Dataset.from_dict({"prompt": ["the film", "a story", "i liked", "so so"]})
    trainer = tiny.ppo(arguments={"dataset": dataset}, steps=1)
    seen = []
    trainer.train(
        lambda queries, responses: (seen.extend(queries), [0.5] * 4)[1], generation_kwargs={"max_new_tokens": 2}
    )
    assert sorted(seen) == ["a story", "i liked", "so so", "the film"]
