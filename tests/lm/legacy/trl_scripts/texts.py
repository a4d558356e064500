"""Supervised fine-tuning: plain TrainingArguments, and the rest as arguments of the trainer."""

import sys

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTTrainer, is_xpu_available
from trl.trainer import ConstantLengthDataset, DataCollatorForCompletionOnlyLM
from trl.trainer.utils import DataCollatorForCompletionOnlyLM as SameCollator

model_name, dataset_name = sys.argv[1:]
assert not is_xpu_available()
assert SameCollator is DataCollatorForCompletionOnlyLM
model = AutoModelForCausalLM.from_pretrained(model_name, use_auth_token=False, load_in_8bit=False)
tokenizer = AutoTokenizer.from_pretrained(model_name)
dataset = load_dataset(dataset_name, split="train")
args = TrainingArguments(
    "texts", max_steps=2, evaluation_strategy="steps", eval_steps=1, no_cuda=True, report_to="none"
)
trainer = SFTTrainer(
    model=model,
    args=args,
    max_seq_length=16,
    train_dataset=ConstantLengthDataset(tokenizer, dataset, dataset_text_field="text", seq_length=16),
    eval_dataset=dataset,
    dataset_text_field="text",
    peft_config=LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"),
    tokenizer=tokenizer,
)
trainer.train()
trainer.save_model("texts")
print("trained")
