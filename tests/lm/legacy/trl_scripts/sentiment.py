"""PPO for sentiment: a classifier's pipeline scores the responses, and a policy with a value head learns from it."""

from dataclasses import dataclass, field

import torch
from datasets import load_dataset
from tqdm import tqdm
from transformers import AutoTokenizer, HfArgumentParser, pipeline
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model, set_seed
from trl.core import LengthSampler
from trl.import_utils import is_npu_available, is_xpu_available

tqdm.pandas()


@dataclass
class ScriptArguments:
    classifier: str = field(metadata={"help": "the classifier"})


parser = HfArgumentParser((ScriptArguments, PPOConfig))
script_args, config = parser.parse_args_into_dataclasses()
set_seed(config.seed)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
tokenizer.pad_token = tokenizer.eos_token
lengths = LengthSampler(2, 6)


def tokenize(sample):
    sample["input_ids"] = tokenizer.encode(sample["review"])[: lengths()]
    sample["query"] = tokenizer.decode(sample["input_ids"])
    return sample


dataset = load_dataset(config.query_dataset, split="train").rename_columns({"text": "review"}).map(tokenize)
dataset.set_format(type="torch")


def collator(rows):
    return {key: [row[key] for row in rows] for key in rows[0]}


model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ppo_trainer = PPOTrainer(
    config, model, create_reference_model(model), tokenizer, dataset=dataset, data_collator=collator
)
assert not is_npu_available()
assert not is_xpu_available()
sentiment = pipeline("sentiment-analysis", model=script_args.classifier, device=ppo_trainer.accelerator.device)
for _, batch in tqdm(enumerate(ppo_trainer.dataloader)):
    queries = batch["input_ids"]
    responses = ppo_trainer.generate(
        queries, return_prompt=False, min_length=-1, top_k=0.0, top_p=1.0, do_sample=True, max_new_tokens=4
    )
    batch["response"] = tokenizer.batch_decode(responses)
    texts = [query + response for query, response in zip(batch["query"], batch["response"], strict=True)]
    outputs = sentiment(texts, return_all_scores=True, function_to_apply="none", batch_size=4)
    assert [[label["label"] for label in output] for output in outputs] == [["LABEL_0", "LABEL_1"]] * len(texts)
    scores = [torch.tensor(output[1]["score"]) for output in outputs]
    stats = ppo_trainer.step(queries, responses, scores)
    ppo_trainer.log_stats(stats, batch, scores)
    print("KL", stats["objective/kl"])
ppo_trainer.save_pretrained("sentiment")
print("trained")
