"""Best of n, and the first steps with PPO: one query, one response, one score."""

import sys

import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.core import LengthSampler, respond_to_batch
from trl.extras import BestOfNSampler

model = AutoModelForCausalLMWithValueHead.from_pretrained(sys.argv[1])
reference = AutoModelForCausalLMWithValueHead.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.eos_token

trainer = PPOTrainer(PPOConfig(batch_size=1), model, reference, tokenizer)
query = tokenizer.encode("this is a ", return_tensors="pt")
response = respond_to_batch(model, query, txt_len=5, top_k=3)
assert response.shape == (1, 5)
trainer.step([query[0]], [response[0]], [torch.tensor(1.0)])

sampler = BestOfNSampler(
    model, tokenizer, lambda texts: torch.tensor([float(len(text)) for text in texts]), LengthSampler(2, 6)
)
(best,) = sampler.generate(query[0], device="cpu")
print("trained", len(best))
