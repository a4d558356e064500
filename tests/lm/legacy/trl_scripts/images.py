"""DDPO with the script's own reward, and a hook that reads the last batch of images."""

import sys

from trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline
from trl.trainer.ddpo_config import DDPOConfig as SameConfig

assert SameConfig is DDPOConfig


def reward(images, prompts, metadata):
    return images.mean(dim=(1, 2, 3)), {}


def prompt():
    return "a cat", {}


def last_images(image_data, global_step, accelerate_logger):
    images, prompts, _, rewards, _ = image_data[-1]
    titles = [f"{prompt:.25} | {score:.2f}" for prompt, score in zip(prompts, rewards, strict=True)]
    accelerate_logger.log_images(dict(zip(titles, images.unsqueeze(1), strict=True)), step=global_step)


config = DDPOConfig(
    num_epochs=1,
    sample_num_steps=2,
    sample_batch_size=2,
    train_batch_size=2,
    mixed_precision="no",
    per_prompt_stat_tracking=True,
    project_kwargs={"automatic_checkpoint_naming": True, "total_limit": 5, "project_dir": "save"},
)
pipeline = DefaultDDPOStableDiffusionPipeline(sys.argv[1], pretrained_model_revision="main", use_lora=True)
trainer = DDPOTrainer(config, reward, prompt, pipeline, image_samples_hook=last_images)
trainer.train()
trainer.save_pretrained("images")
print("trained")
