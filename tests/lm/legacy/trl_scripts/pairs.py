"""DPO and then a reward model on the same pairs, with the parser and the model arguments of TRL 0.9 to 0.11."""

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import (
    DPOConfig,
    DPOTrainer,
    ModelConfig,
    RewardConfig,
    RewardTrainer,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
    maybe_apply_chat_template,
    maybe_extract_prompt,
)
from trl.commands.cli_utils import DPOScriptArguments, TrlParser
from trl.trainer.utils import SIMPLE_CHAT_TEMPLATE

parser = TrlParser((DPOScriptArguments, DPOConfig, ModelConfig))
args, training_args, model_config = parser.parse_args_and_config()
quantization = get_quantization_config(model_config)
model_kwargs = {
    "torch_dtype": getattr(torch, model_config.torch_dtype),
    "device_map": None if quantization is None else get_kbit_device_map(),
    "quantization_config": quantization,
}
name = model_config.model_name_or_path
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.chat_template = tokenizer.chat_template or SIMPLE_CHAT_TEMPLATE
dataset = load_dataset(args.dataset_name)[args.dataset_train_split].map(maybe_extract_prompt)
dataset = dataset.map(maybe_apply_chat_template, fn_kwargs={"tokenizer": tokenizer})
trainer = DPOTrainer(
    AutoModelForCausalLM.from_pretrained(name, **model_kwargs),
    None,
    args=training_args,
    train_dataset=dataset,
    tokenizer=tokenizer,
    peft_config=get_peft_config(model_config),
)
trainer.train()

words = "--output_dir scores --max_steps 1 --max_length 64 --no_cuda --evaluation_strategy no --trust_remote_code"
config, model_config = HfArgumentParser((RewardConfig, ModelConfig)).parse_args_into_dataclasses(words.split())
assert model_config.trust_remote_code
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
RewardTrainer(model, config, train_dataset=dataset, tokenizer=tokenizer).train()
print("trained", trainer.args.loss_type, trainer.args.max_target_length)
