"""Each subcommand trains a tiny model on files, saves it, and prints where it is."""

import functools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import datasets
import diffusers
import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from PIL import Image
from safetensors.torch import load_file
from tests.cli.conftest import write_rows
from tests.diffusion import tiny as tiny_diffusion
from tests.lm import tiny
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from trimtab_cli import ddpo, places, subcommands
from trimtab_cli.main import main
from trimtab_cli.subcommands import TUNED, EvaluationConfig, RunConfig, settings
from trimtab_common import sealing, tracking
from trimtab_diffusion import AlignPropConfig, DDPOConfig, DDPOTrainer
from trimtab_lm import (
    AutoModelForCausalLMWithValueHead,
    DPOConfig,
    KTOConfig,
    PPOConfig,
    RewardConfig,
    SFTConfig,
    SFTTrainer,
)

BATCH = ("--per_device_train_batch_size=2", "--max_steps=2", "--save_strategy=no", "--learning_rate=0.01")
REWARD = ("--dataset=prompts.jsonl", "--reward=rewards.py:length")
PPO = (*REWARD, "--steps=2", "--batch_size=4", "--mini_batch_size=2", "--learning_rate=0.01", "--max_new_tokens=5")
GRPO = (*REWARD, "--num_generations=2", "--max_completion_length=5")
DDPO = ("--sample_batch_size=2", "--sample_num_batches_per_epoch=1", "--train_batch_size=2")
DDPO += ("--train_gradient_accumulation_steps=1",)
RAFT = (*REWARD, "--rounds=2", "--prompts=4", "--samples=2", "--max_new_tokens=5")
COMMANDS = {
    "sft": ("--dataset=texts", *BATCH),
    "reward": ("--dataset=pairs", *BATCH),
    "dpo": ("--dataset=pairs", *BATCH),
    "kto": ("--dataset=answers.jsonl", *BATCH),
    "grpo": (*GRPO, *BATCH),
    "ppo": PPO,
    "iterative-sft": (*RAFT, *BATCH[:1], "--save_strategy=no", "--learning_rate=0.01"),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def run(name, *words, capsys=None, model="model"):
    """Returns the lines that a subcommand prints."""
    assert main([name, f"--model={model}", *words]) == 0
    return capsys.readouterr().out.splitlines() if capsys else []


def error_of(words, capsys):
    """Returns the line on stderr with which the command ends with status 2."""
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    assert status == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trimtab")]
    return line


@pytest.mark.parametrize("name", COMMANDS)
def test_a_subcommand_trains_and_saves_model_and_tokenizer(name, place, capsys):
    *_, last = run(name, *COMMANDS[name], capsys=capsys)
    assert last.startswith(f"The model is in runs/{name}. ")
    kind = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    trained, before = kind.from_pretrained(f"runs/{name}"), tiny.gpt2().transformer.state_dict()
    gaps = [float((weight - before[key]).abs().max()) for key, weight in trained.transformer.state_dict().items()]
    assert max(gaps) > 1e-3
    assert AutoTokenizer.from_pretrained(f"runs/{name}").get_vocab() == tiny.tokenizer().get_vocab()
    page = Path("runs", name, "README.md").read_text()
    assert f'from_pretrained("runs/{name}")' in page
    assert "| base model | model |" in page
    assert f"| local dataset | {COMMANDS[name][0].removeprefix('--dataset=')} |" in page
    assert ("| reward | " in page) is (name in ("grpo", "ppo", "iterative-sft"))


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_a_half_precision_checkpoint_trains_in_float32_unless_a_dtype_is_set(name, place):
    tiny.gpt2(dtype=torch.bfloat16).save_pretrained("half")
    tiny.tokenizer().save_pretrained("half")
    for words, dtype in (((), torch.float32), (("--dtype=auto",), torch.bfloat16)):
        run(name, *COMMANDS[name], *words, model="half")
        assert AutoModelForCausalLM.from_pretrained(f"runs/{name}").dtype == dtype


@pytest.mark.parametrize("name", ["dpo", "ppo", "iterative-sft"])
def test_arguments_of_loading_reach_model_and_tokenizer(name, place):
    tiny.gpt2().save_pretrained("outer/inner")
    tiny.tokenizer().save_pretrained("outer/inner")
    words = ("--model_init_kwargs.subfolder=inner", "--chat_template=chatml")
    run(name, *COMMANDS[name], *words, model="outer")
    assert AutoTokenizer.from_pretrained(f"runs/{name}").get_vocab() == tiny.tokenizer().get_vocab()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_adapters_train_alone(name, place, capsys):
    run(name, *COMMANDS[name], "--lora_r=2", "--lora_target_modules", "c_attn", capsys=capsys)
    assert Path("runs", name, "adapter_model.safetensors").exists()
    assert not Path("runs", name, "model.safetensors").exists()


def test_ppo_saves_its_value_head(place, capsys):
    run("ppo", *PPO, capsys=capsys)
    fresh, stored = (AutoModelForCausalLMWithValueHead.from_pretrained(name) for name in ("model", "runs/ppo"))
    assert not torch.equal(fresh.v_head.summary.weight, stored.v_head.summary.weight)
    again = AutoModelForCausalLMWithValueHead.from_pretrained("runs/ppo")
    torch.testing.assert_close(again.v_head.summary.weight, stored.v_head.summary.weight, rtol=0, atol=0)


@pytest.mark.slow
def test_a_reward_model_scores_for_grpo_beside_a_function(place, monkeypatch):
    monkeypatch.setenv("TRIMTAB_METRICS", "metrics.jsonl")
    run("reward", "--dataset=pairs", *BATCH)
    words = ("--reward", "rewards.py:length", "runs/reward", "--reward_weights", "1", "0.5", "--logging_steps=1")
    run("grpo", "--dataset=prompts.jsonl", *words, *GRPO[2:], *BATCH)
    logged = [line for line in Path("metrics.jsonl").read_text().splitlines() if "rewards/length/mean" in line]
    assert logged
    assert all("rewards/reward/mean" in line for line in logged)
    assert "| reward | length, reward |" in Path("runs/grpo/README.md").read_text()


@pytest.mark.parametrize("name", ["sft", "reward", "ppo"])
def test_adapters_train_over_weights_in_4_bits(name, place, capsys, monkeypatch):
    tiny.gpt2(n_embd=64, n_head=2, n_inner=128).save_pretrained("wide")  # wide enough for bitsandbytes to pack
    tiny.tokenizer().save_pretrained("wide")
    loaded = []
    load = PreTrainedModel.from_pretrained.__func__

    def note(*args, **kwargs):
        loaded.append(load(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(note))
    run(name, *COMMANDS[name], "--lora_r=2", "--load_in_4bit", "--output_dir=out", capsys=capsys, model="wide")
    assert loaded
    assert all(model.is_loaded_in_4bit for model in loaded)
    weights = load_file("out/adapter_model.safetensors")
    learnt = {key: float(weight.abs().max()) for key, weight in weights.items() if "lora_B" in key}
    assert len(learnt) == 8
    assert min(learnt.values()) > 0


@pytest.mark.parametrize(
    ("config", "words", "named"),
    [
        (SFTConfig, [], "seed=42"),
        (SFTConfig, ["--learning-rate=1e-3", "--seed", "3", "--report_to", "none"], "learning_rate=1e-3 seed=3"),
        (SFTConfig, ["--run_name=mine", "--seed=3"], "mine"),
        (SFTConfig, ["--hub_token=hush", "--model_init_kwargs.token=hush"], "seed=42"),
        (PPOConfig, ["--target", "3"], "target=3 seed=0"),
    ],
)
def test_a_run_is_named_by_its_flags_and_its_seed(config, words, named, place, monkeypatch):
    monkeypatch.setenv("WANDB_JOB_TYPE", "evaluation")
    argv = ["--model=model", "--dataset=texts", *words]
    name, recipe = ("ppo", {"exp_name": "ppo"}) if config is PPOConfig else ("sft", {})
    _, args = settings(name, argv, RunConfig, config, about="", recipe={"output_dir": "out", **recipe})
    assert (args.exp_name if config is PPOConfig else args.run_name) == named
    assert os.environ["WANDB_RUN_GROUP"] == f"{name} model texts"
    assert os.environ["WANDB_JOB_TYPE"] == "evaluation"


@pytest.mark.parametrize("held_out", ["--eval_split=test", "--eval_dataset=pairs/test.jsonl"])
def test_an_evaluation_comes_after_the_training(held_out, place, capsys):
    lines = run("dpo", "--dataset=pairs", held_out, *BATCH, capsys=capsys)
    assert any("eval_rewards/accuracies" in line for line in lines)


def test_an_evaluation_takes_another_dataset_and_both_may_have_configurations(place):
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("main", "other"))
    for folder in ("many", "held_out"):
        for name in ("main", "other"):
            write_rows(f"{folder}/{name}.jsonl", [{"text": f"{folder} {name}"}])
        Path(folder, "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    training = RunConfig(model="model", dataset="many", dataset_config="main")
    assert training.rows()["text"] == ["many main"]
    assert EvaluationConfig().rows(training) is None
    assert EvaluationConfig(eval_split="train").rows(training)["text"] == ["many main"]
    assert EvaluationConfig(eval_dataset="many/other.jsonl").rows(training)["text"] == ["many other"]
    other = EvaluationConfig(eval_dataset="held_out", eval_dataset_config="other", eval_split="train[:1]")
    assert other.rows(training)["text"] == ["held_out other"]
    with pytest.raises(ValueError, match="eval_dataset_config=other is of eval_dataset, which is missing"):
        EvaluationConfig(eval_dataset_config="other")


@pytest.mark.parametrize("reward", ["redness", "Redness"])
def test_ddpo_trains_a_pipeline_on_the_prompts_of_a_file(reward, place, capsys):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    write_rows("drawings.jsonl", [{"prompt": f"a {word}", "hue": "warm"} for word in ("red", "blue")])
    sizes = ("--sample_num_steps=2", "--sample_guidance_scale=1", *DDPO)
    words = ("--dataset=drawings.jsonl", f"--reward=rewards.py:{reward}", "--num_epochs=1", "--mixed_precision=no")
    _, first, last = run("ddpo", *words, *sizes, capsys=capsys, model="pipeline")
    assert first.startswith("epoch 1 of 1 | reward_mean ")
    assert last == 'The model is in runs/ddpo. Load it: pipeline.load_lora_weights("runs/ddpo")'
    assert Path("runs/ddpo/pytorch_lora_weights.safetensors").exists()


@pytest.mark.parametrize("frequency", [0, 1, 2])
def test_ddpo_evaluates_once_after_training_on_the_prompts_of_another_file(frequency, place, capsys, monkeypatch):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    for name, words in {"drawings": ("red",), "held-out": ("green", "blue")}.items():
        write_rows(f"{name}.jsonl", [{"prompt": f"a {word}", "hue": "warm"} for word in words])
    sizes = ("--sample_num_steps=2", "--sample_guidance_scale=1", *DDPO)
    words = ("--dataset=drawings.jsonl", "--reward=rewards.py:redness", "--num_epochs=1", "--mixed_precision=no")
    evaluation = ("--eval_dataset=held-out.jsonl", f"--eval_freq={frequency}", "--eval_num_steps=4")
    evaluated, evaluate = [], DDPOTrainer.evaluate
    monkeypatch.setattr(DDPOTrainer, "evaluate", lambda self: evaluated.append(self.eval_prompts) or evaluate(self))
    lines = run("ddpo", *words, *sizes, *evaluation, capsys=capsys, model="pipeline")
    assert [line.startswith("evaluation | eval/reward_mean ") for line in lines].count(True) == (frequency != 1)
    assert evaluated == [[("a green", {"hue": "warm"}), ("a blue", {"hue": "warm"})]]


def test_nft_trains_a_pipeline_on_the_prompts_of_a_file(place, capsys):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    Path("drawings.txt").write_text("a red cat\na blue dog\n")
    sizes = ("--sample_num_steps=2", "--sample_batch_size=2", "--group_size=2", "--train_batch_size=2")
    words = ("--dataset=drawings.txt", "--reward=rewards.py:warmth", "--num_epochs=1", "--mixed_precision=no")
    updates = ("--train_gradient_accumulation_steps=1", "--lora_rank=0")
    first, last = run("nft", *words, *sizes, *updates, capsys=capsys, model="pipeline")
    assert first.startswith("epoch 1 of 1 | reward_mean ")
    assert last == 'The model is in runs/nft. Load it: DiffusionPipeline.from_pretrained("runs/nft")'
    assert Path("runs/nft/unet/diffusion_pytorch_model.safetensors").exists()


def test_align_prop_follows_the_gradient_of_a_reward(place, capsys):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    Path("drawings.txt").write_text("a red cat\na blue dog\n")
    sizes = ("--sample_num_steps=2", "--sample_guidance_scale=1", *DDPO[2:])
    words = ("--dataset=drawings.txt", "--reward=rewards.py:warmth", "--num_epochs=1", "--mixed_precision=no")
    _, first, last = run("align-prop", *words, *sizes, capsys=capsys, model="pipeline")
    assert first.startswith("epoch 1 of 1 | reward_mean ")
    assert last == 'The model is in runs/align-prop. Load it: pipeline.load_lora_weights("runs/align-prop")'
    assert Path("runs/align-prop/pytorch_lora_weights.safetensors").exists()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("rows.jsonl", '{"prompt": "a cat"}\n{"prompt": null}\n', "Row 1 of rows.jsonl has the prompt None."),
        ("rows.jsonl", '{"prompt": "a cat"}\n{"prompt": " "}\n', "Row 1 of rows.jsonl has the prompt ' '."),
        ("rows.jsonl", '{"prompt": 3}\n', "Row 0 of rows.jsonl has the prompt 3."),
        ("rows.jsonl", "", "rows.jsonl is an empty file."),
        ("rows.txt", "\n \n", "rows.txt has no prompts in the split train."),
    ],
)
@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
def test_prompts_that_cannot_be_used_end_in_one_line_before_the_pipeline_is_loaded(
    flag, file, text, message, place, capsys, monkeypatch
):
    monkeypatch.setattr(ddpo.RewardArguments, "pipeline", lambda self: pytest.fail("The pipeline is loaded."))
    Path("good.txt").write_text("a red cat\n")
    Path(file).write_text(text)
    words = ("--dataset=good.txt", f"--{flag}={file}", "--reward=rewards.py:warmth", "--mixed_precision=no")
    assert message in error_of(["ddpo", "--model=model", *words], capsys)


def test_ddpo_evaluates_on_a_split_of_its_dataset(place):
    Path("rows.txt").write_text("a red cat\na blue dog\n")
    arguments = ddpo.DDPOArguments(
        model="m", dataset="rows.txt", split="train[:1]", reward="m:f", eval_split="train[1:]"
    )
    assert arguments.options() == {"eval_prompts": [("a blue dog", {})]}
    assert replace(arguments, eval_split=None).options() == {}


def test_blank_lines_of_a_text_file_are_no_prompts(place):
    Path("rows.txt").write_text("a red cat\n\n  \na blue dog\n\n")
    assert ddpo.prompts_of("rows.txt", "train").prompts == ("a red cat", "a blue dog")


def test_pictures_beside_prompts_are_read_when_their_prompt_is_drawn(place, monkeypatch):
    write_rows("drawings/metadata.jsonl", [{"file_name": f"{i}.png", "prompt": f"a cat {i}"} for i in range(3)])
    for number in range(3):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(f"drawings/{number}.png")
    decoded, decode = [], datasets.Image.decode_example
    monkeypatch.setattr(
        datasets.Image, "decode_example", lambda *args, **kwargs: (decoded.append(1), decode(*args, **kwargs))[1]
    )
    prompts = ddpo.prompts_of("drawings", "train")
    assert len(decoded) == 3  # to check that they can be read
    prompt, metadata = prompts()
    assert prompt == f"a cat {metadata['image'].getpixel((0, 0))[0]}"
    assert len(decoded) == 4


def test_a_broken_line_beside_pictures_is_named(place, capsys, monkeypatch):
    monkeypatch.setattr(ddpo.PairArguments, "pipeline", lambda self: pytest.fail("The pipeline is loaded."))
    Path("pictures").mkdir()
    for text in ('{"prompt": "a cat"', "3", "[1]"):
        Path("pictures/metadata.jsonl").write_text(text + "\n")
        error = error_of(["diffusion-dpo", "--model=model", "--dataset=pictures", "--mixed_precision=no"], capsys)
        assert "pictures/metadata.jsonl, line 1, is no JSON object: " in error


def test_stored_adapters_keep_their_rank(place, capsys):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    Path("drawings.txt").write_text("a red cat\na blue dog\n")
    words = ("--dataset=drawings.txt", "--reward=rewards.py:brightness", "--num_epochs=1", "--mixed_precision=no")
    words += ("--sample_num_steps=2", "--sample_batch_size=2", "--train_batch_size=2", "--sample_guidance_scale=1")
    run("ddpo", *words, "--lora_rank=2", "--output_dir=first", model="pipeline")
    for rank in (0, 4, 16):
        error = error_of(["ddpo", "--model=first", *words, f"--lora_rank={rank}"], capsys)
        assert f"lora_rank={rank} came, and first has adapters of rank 2" in error
    *_, last = run("ddpo", *words, capsys=capsys, model="first")
    assert last == 'The model is in runs/ddpo. Load it: pipeline.load_lora_weights("runs/ddpo")'
    shapes = [weight.shape for name, weight in load_file("runs/ddpo/pytorch_lora_weights.safetensors").items()]
    assert {min(shape) for shape in shapes} == {2}


def test_a_replay_that_differs_ends_in_one_line(place, capsys, monkeypatch):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    Path("drawings.txt").write_text("a red cat\na blue dog\n")
    words = ("--dataset=drawings.txt", "--reward=rewards.py:brightness", "--num_epochs=1", "--mixed_precision=no")
    words += ("--sample_num_steps=2", "--sample_batch_size=2", "--train_batch_size=2", "--sample_guidance_scale=1")
    # Each pass through the denoiser adds noise, as dropout does.
    forward = diffusers.UNet2DConditionModel.forward
    monkeypatch.setattr(diffusers.UNet2DConditionModel, "forward", with_noise(forward))
    error = error_of(["ddpo", "--model=pipeline", *words], capsys)
    assert error.startswith("trimtab ddpo: error: Before the first update, replayed steps differ")


def test_noise_that_the_scheduler_does_not_have_ends_in_one_line(place, capsys):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    Path("drawings.txt").write_text("a red cat\n")
    words = ("--dataset=drawings.txt", "--reward=rewards.py:brightness", "--mixed_precision=no", "--sample_eta=1.5")
    assert "eta=1.5: DDIM takes 0 to 1" in error_of(["ddpo", "--model=pipeline", *words], capsys)


def with_noise(forward):
    """Returns a forward pass whose output changes from call to call."""

    @functools.wraps(forward)
    def noisy(*args, **kwargs):
        (output,) = forward(*args, **kwargs | {"return_dict": False})
        return (output + 0.1 * torch.randn_like(output),)

    return noisy


DAMAGES = pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "No such file or directory"),
        (lambda file: file.write_text("hello"), "cannot identify image file"),
        (lambda file: file.write_bytes(file.read_bytes()[:600]), "truncated"),
    ],
)


@DAMAGES
def test_a_picture_that_cannot_be_read_ends_in_one_line_before_the_pipeline_is_loaded(
    damage, message, place, capsys, monkeypatch
):
    monkeypatch.setattr(ddpo.PairArguments, "pipeline", lambda self: pytest.fail("The pipeline is loaded."))
    names = {"chosen_file_name": "0.png", "rejected_file_name": "1.png"}
    write_rows("pictures/metadata.jsonl", [{"prompt": "a cat", **names}, {"prompt": "a dog", **names}])
    for number in range(2):
        Image.effect_noise((64, 64), 50).save(f"pictures/{number}.png")
    damage(Path("pictures/1.png"))
    error = error_of(["diffusion-dpo", "--model=model", "--dataset=pictures", "--mixed_precision=no"], capsys)
    assert "A picture of row 0 cannot be read: " in error
    assert message in error


@DAMAGES
@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
def test_a_picture_beside_a_prompt_that_cannot_be_read_ends_in_one_line_before_the_pipeline_is_loaded(
    damage, message, flag, place, capsys, monkeypatch
):
    monkeypatch.setattr(ddpo.RewardArguments, "pipeline", lambda self: pytest.fail("The pipeline is loaded."))
    Path("good.txt").write_text("a red cat\n")
    write_rows("drawings/metadata.jsonl", [{"prompt": "a cat", "file_name": f"{number}.png"} for number in range(3)])
    for number in range(3):
        Image.effect_noise((64, 64), 50).save(f"drawings/{number}.png")
    damage(Path("drawings/1.png"))
    words = ("--dataset=good.txt", f"--{flag}=drawings", "--reward=rewards.py:warmth", "--mixed_precision=no")
    error = error_of(["ddpo", "--model=model", *words], capsys)
    assert "A picture of row 1 of drawings cannot be read: " in error
    assert message in error


def test_diffusion_dpo_learns_from_a_folder_of_pictures_with_captions(place, capsys, monkeypatch):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    rows = []
    for number in range(4):
        row = {"prompt": f"a cat {number}"}
        for name, level in (("chosen", 200), ("rejected", 10 * number)):
            row[f"{name}_file_name"] = f"{name}{number}.png"
            Path("pictures").mkdir(exist_ok=True)
            Image.new("RGB", (16, 16), (level, 0, 0)).save(f"pictures/{name}{number}.png")
        rows.append(row)
    write_rows("pictures/metadata.jsonl", rows)
    words = ("--dataset=pictures", "--train_batch_size=2", "--mixed_precision=no")
    decoded, decode = [], datasets.Image.decode_example
    monkeypatch.setattr(
        datasets.Image, "decode_example", lambda *args, **kwargs: (decoded.append(1), decode(*args, **kwargs))[1]
    )
    *_, last = run("diffusion-dpo", *words, capsys=capsys, model="pipeline")
    assert len(decoded) == 3 * 8 + 2  # to check all, for the fingerprint, and to encode; of row 0 for the size
    assert last == 'The model is in runs/diffusion-dpo. Load it: pipeline.load_lora_weights("runs/diffusion-dpo")'
    assert Path("runs/diffusion-dpo/pytorch_lora_weights.safetensors").exists()
    Image.new("RGB", (24, 16)).save("pictures/chosen2.png")
    with pytest.raises(SystemExit):
        run("diffusion-dpo", *words, "--output_dir=runs/again", capsys=capsys, model="pipeline")
    assert "The chosen picture of row 2 has 24 x 16 pixels" in capsys.readouterr().err
    write_rows("pictures/metadata.jsonl", [{"prompt": "a cat", "chosen": "chosen0.png", "rejected": "rejected0.png"}])
    with pytest.raises(SystemExit):
        run("diffusion-dpo", *words, "--output_dir=runs/again", capsys=capsys, model="pipeline")
    assert "and not ['chosen_file_name', 'rejected_file_name']" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "reward", "message"),
    [
        ("align-prop", "brightness", "reward_function returned a Tensor without a gradient to the images."),
        ("align-prop", "broken", "What reward_function returned has nan for image 0"),
        ("nft", "broken", "What reward_function returned has nan for image 0"),
        ("ddpo", "broken", "What reward_function returned has nan for image 0"),
    ],
)
def test_a_reward_that_cannot_be_used_ends_in_one_line(place, capsys, command, reward, message):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    Path("drawings.txt").write_text("a red cat\na blue dog\n")
    sizes = {
        "align-prop": DDPO[2:],
        "nft": (
            "--sample_batch_size=2",
            "--group_size=2",
            "--train_gradient_accumulation_steps=1",
            "--train_batch_size=2",
        ),
        "ddpo": DDPO,
    }
    words = ("--dataset=drawings.txt", f"--reward=rewards.py:{reward}", "--num_epochs=1", "--mixed_precision=no")
    steps = ("--sample_num_steps=2", "--sample_guidance_scale=1")
    error = error_of([command, "--model=pipeline", *words, *steps, *sizes[command]], capsys)
    assert error.startswith(f"trimtab {command}: error: {message}")
    assert not Path("runs", command, "pytorch_lora_weights.safetensors").exists()


# --- settings ----------------------------------------------------------------------------------------------------


def test_flags_win_over_the_file_and_the_file_over_the_defaults(place, capsys):
    nested = {"model": "model", "dataset": "pairs", "dpo": {"beta": 0.3, "max_steps": 1, "save_strategy": "no"}}
    Path("dpo.yaml").write_text(yaml.safe_dump({**nested, "output_dir": "from_file"}), encoding="utf-8")
    assert main(["dpo", "--config", "dpo.yaml", "--beta", "0.7"]) == 0
    arguments = torch.load("from_file/training_args.bin", weights_only=False)
    assert (arguments.beta, arguments.max_steps, arguments.output_dir) == (0.7, 1, "from_file")
    assert not Path("runs").exists()


def test_a_run_of_a_sweep_has_a_folder_of_its_own(place, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep7")
    monkeypatch.setenv("WANDB_RUN_ID", "run3")
    run("sft", *COMMANDS["sft"], "--report_to=none", "--output_dir=out")
    assert Path("out/sweep7/run3/model.safetensors").exists()


@pytest.mark.slow
def test_latest_goes_on_from_a_checkpoint_where_there_is_one(place, capsys):
    words = ("--dataset=texts", *BATCH[:2], *BATCH[3:], "--save_strategy=steps", "--save_steps=1", "--logging_steps=1")
    straight = run("sft", *words, "--resume_from=latest", "--output_dir=one", capsys=capsys)
    assert [line for line in straight if "| loss " in line][1:]
    again = run("sft", *words, "--resume_from=latest", "--output_dir=one", capsys=capsys)
    assert [line for line in again if "| loss " in line] == []
    assert "of another run" in error_of(["sft", "--model=model", *words, "--output_dir=one"], capsys)


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["dpo", "--dataset=pairs", "--betta=3"], "--betta is not a setting. Did you mean beta?"),
        (["dpo", "--dataset=pairs", "--config=no.yaml"], "no.yaml: No such file or directory."),
        (["dpo", "--dataset=pairs", "--output_dir"], "--output_dir: got 'True', expected str | None"),
        (["dpo"], "RunConfig needs a value for --dataset."),
        (["dpo", "--dataset=texts"], "DPO cannot read a dataset with the columns ['text']. It needs one of"),
        (["dpo", "--dataset=pairs/none.jsonl"], "There is no file or folder pairs/none.jsonl."),
        (["dpo", "--dataset=pairs", "--eval_dataset=none.jsonl"], "There is no file or folder none.jsonl."),
        (["dpo", "--dataset=pairs", "--eval_split=dev"], 'Unknown split "dev"'),
        (["dpo", "--dataset=pairs", "--lora_alpha=3"], "Set lora_r, such as 16."),
        (["dpo", "--dataset=pairs", "--load_in_4bit"], "Set lora_r to 16."),
        (["grpo", *REWARD[:1]], "RewardsConfig needs a value for --reward."),
        (["grpo", *REWARD[:1], "--reward=rewards.py:lenght"], "no function 'lenght'. Did you mean length?"),
        (["grpo", *REWARD[:1], "--reward=rewards.py:wrong"], "rewards.py has no function 'wrong'."),
        (["grpo", *REWARD[:1], "--reward=email.message:Message"], "email.message has no function 'Message'."),
        (["grpo", *REWARD[:1], "--reward=rewardz.py:length"], "There is no file rewardz.py."),
        (["grpo", *REWARD[:1], "--reward=no_module:length"], "There is no module 'no_module'."),
        (["grpo", *REWARD[:1], "--reward=email.no_module:length"], "There is no module 'email.no_module'."),
        (["grpo", *REWARD[:1], "--reward=pairs/scorer"], "There is no file or folder pairs/scorer."),
        (
            ["grpo", *REWARD[:1], "--reward=rewards.py"],
            "rewards.py is a file: which of its functions? Write rewards.py:",
        ),
        (["grpo", *REWARD[:1], "--reward=model"], "model is no reward model: it is "),
        (["grpo", *REWARD[:1], "--reward=accuracy_reward"], "Name a function, file.py:accuracy_reward or module:"),
        (
            ["grpo", *REWARD[:1], "--reward=rewards.py:Scaled"],
            "rewards.py:Scaled is a class that needs scale, shift. Write into rewards.py: reward = Scaled(scale=..., "
            "shift=...). Then name rewards.py:reward.",
        ),
        (
            ["ddpo", "--dataset=prompts.jsonl", "--reward=trimtab_diffusion.rewards:AestheticScore"],
            "is a class that needs checkpoint. Write into rewards.py: from trimtab_diffusion.rewards import "
            "AestheticScore; reward = AestheticScore(checkpoint=...). Then name rewards.py:reward.",
        ),
        (
            ["grpo", *GRPO, "--rollout_backend_kwargs={'batchsize': 3}"],
            "rollout_backend_kwargs sets ['batchsize']; rollout_backend='transformers' takes ['batch_size', ",
        ),
        (["ppo", *PPO, "--rollout_backend=vllm_server"], "needs ['servers'] in rollout_backend_kwargs"),
        (["grpo", *GRPO[:1], *GRPO[2:], *BATCH, "--reward=rewards.py:needs_more"], "needs ['more']; there are"),
        (["grpo", *GRPO[:1], *GRPO[2:], *BATCH, "--reward=rewards.py:silent"], "all returned None"),
        (["ppo", *PPO[:-1], "--max_new_tokens=5000"], "Lower max_new_tokens (5000), or leave long prompts out."),
        (["iterative-sft", *RAFT[:-1], "--max_new_tokens=5000"], "Lower max_new_tokens (5000), or leave long"),
        (["iterative-sft", *RAFT, "--save_strategy=epoch"], "save_strategy='epoch': training by step(...)"),
        (["sft", *COMMANDS["sft"], "--resume_from=lastest"], "lastest"),
        (["sft", "--dataset=texts", "--chat_template_path=x"], "Did you mean chat_template?"),
        (["reward", "--dataset=pairs", "--reward.chat_template_path=x"], "Did you mean chat_template?"),
        (["sft", "--dataset=texts", "--eos_token=x"], "--eos_token is not a setting of the command line. Set it on"),
        (["sft", "--dataset=texts", "--batch_size=2"], "Did you mean per_device_train_batch_size?"),
        (["ppo", *REWARD, "--max_steps=2"], "Did you mean steps?"),
        (["grpo", *REWARD, "--max_new_tokens=2"], "Did you mean max_completion_length?"),
        (["ppo", *REWARD, "--global_batch_size=4"], "--global_batch_size is no setting, because it is computed."),
        (["ppo", *REWARD, "--model_name=x"], "--model_name is not a setting. Did you mean model?"),
        (["ppo", "--dataset=texts", "--reward=rewards.py:length"], "none of input_ids, query or prompt"),
        (["iterative-sft", "--dataset=texts", "--reward=rewards.py:length"], "iterative-sft cannot read a dataset"),
        (["ppo", *REWARD, "--output_dir=None"], "output_dir=None: name the folder that the run writes into."),
        (["diffusion-dpo", "--dataset=pairs", "--lora_rank=-1"], "lora_rank=-1 must be a whole number, 0 or above."),
        (["sft", *COMMANDS["sft"], "--lora_r=-1"], "RunConfig: lora_r=-1 must be a whole number, 0 or above."),
        (["ppo", *PPO[:-1], "--max_new_tokens=0"], "max_new_tokens=0 must be a whole number of at least 1."),
        (["iterative-sft", *RAFT, "--samples=0"], "samples=0 must be a whole number of at least 1."),
        (["ddpo", "--dataset=pairs", "--reward=x", "--model=no/such/pipeline"], "no file or folder no/such/pipeline."),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_status_2(words, error, place, capsys):
    line = error_of([words[0], "--model=model", *words[1:]], capsys)
    assert line.startswith(f"trimtab {words[0]}: error: ")
    assert error in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def length(:", "faulty.py: SyntaxError: "),
        ("import nonexistent_library", "faulty.py imports nonexistent_library, which is not installed."),
        ("\n\nprint(1 / 0)", "faulty.py, line 3: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_of_rewards_that_cannot_be_run_is_one_line(text, says, place, capsys):
    Path("faulty.py").write_text(text, encoding="utf-8")
    assert says in error_of(["grpo", "--model=model", *REWARD[:1], "--reward=faulty.py:length"], capsys)


@pytest.mark.parametrize(
    ("words", "absent", "remedy"),
    [
        (["ppo", *PPO, "--log_with=tensorboard"], None, "PPOConfig: log_with='tensorboard' needs its package: pip in"),
        (["sft", *COMMANDS["sft"], "--report_to=tensorboard"], None, "pip install tensorboard"),
        (["grpo", *GRPO, "--rollout_backend=vllm"], "vllm", "pip install 'trimtab-lm[vllm]'"),
        (["ppo", *PPO, "--rollout_backend=vllm"], "vllm", "pip install 'trimtab-lm[vllm]'"),
        (
            ["ddpo", "--model=pipeline", *REWARD[:1], "--reward=rewards.py:warmth", "--train_use_8bit_adam"],
            "bitsandbytes.optim",
            "pip install bitsandbytes",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_missing_package_is_one_line_before_the_training(words, absent, remedy, place, capsys, monkeypatch):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    if absent is None:
        monkeypatch.setattr(tracking, "get_available_trackers", list)
    else:
        monkeypatch.setitem(sys.modules, absent, None)  # makes the import fail, as for a missing package
    line = error_of([words[0], "--model=model", *words[1:]], capsys)
    assert line.startswith(f"trimtab {words[0]}: error: ")
    assert remedy in line


def test_a_class_of_rewards_makes_the_function(place):
    assert subcommands.named("rewards.py:Length")(completions=["a", "the"]) == [1.0, 3.0]


def test_a_name_of_the_hub_may_begin_like_a_folder(place, monkeypatch):
    monkeypatch.setattr(places, "HF_HUB_CACHE", str(place))
    for folder in ("Qwen", "models--Qwen--Qwen3-0.6B", "datasets--Qwen--questions"):
        Path(folder).mkdir()
    for name in ("Qwen/Qwen3-0.6B", "Qwen/questions"):
        places.refuse_missing_path(name)
    for name in ("Qwen/Qwen3-0.7B", "Qwen/no such name", "models--Qwen--Qwen3-0.6B/Qwen3"):
        with pytest.raises(ValueError, match=f"There is no file or folder {name}"):
            places.refuse_missing_path(name)


def test_a_module_of_the_working_directory_is_found(place, capsys):
    Path("rewards_of_mine.py").write_text("def length(completions, **_): return [0.0]", encoding="utf-8")
    assert callable(subcommands.named("rewards_of_mine:length"))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--save_strategy=steps", "--save_steps=1"), " --resume_from latest goes on from a checkpoint."),
        (("--save_strategy=no",), ""),
    ],
)
def test_an_interruption_is_one_line_and_status_130(words, hint, place, capsys, monkeypatch):
    train = SFTTrainer.train

    def interrupted(*args, **kwargs):
        train(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(SFTTrainer, "train", interrupted)
    monkeypatch.setattr(sealing, "published", [])
    assert main(["sft", "--model=model", *COMMANDS["sft"], *words]) == 130
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trimtab")]
    assert line == f"trimtab sft: interrupted.{hint}"


def test_an_interrupted_program_ends_by_the_signal_so_that_a_shells_loop_ends():
    program = "import sys, types\nimport trimtab_cli.main as cli\ncli.silence_known()\n"
    program += "def interrupted(words): raise KeyboardInterrupt\n"
    program += "sys.modules['trimtab_cli.chat'] = types.SimpleNamespace(main=interrupted)\n"
    program += "raise SystemExit(cli.main())\n"
    ended = subprocess.run([sys.executable, "-c", program, "chat", "model"], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.splitlines() == ["trimtab chat: interrupted."]


def test_a_checkpoint_that_is_not_there_is_one_line_for_a_pipeline(place, capsys):
    tiny_diffusion.stable_diffusion().save_pretrained("pipeline")
    Path("drawings.txt").write_text("a red cat\n")
    words = ("--dataset=drawings.txt", "--reward=rewards.py:redness")
    line = error_of(["ddpo", "--model=pipeline", *words, "--resume_from=nope"], capsys)
    assert line.startswith("trimtab ddpo: error: There is no checkpoint to resume from: nope does not exist.")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model_name_or_path", "model"),
        ("dataset_name", "dataset"),
        ("use_peft", "lora_r"),
        ("lora_rank", "lora_r"),
        ("cutoff_len", "max_length"),
    ],
)
def test_names_of_other_libraries_lead_to_ours_as_flags_and_in_files(theirs, ours, place, capsys):
    words = ["sft", "--model=model", "--dataset=texts"]
    assert error_of([*words, f"--{theirs}=8"], capsys).endswith(f"{theirs} is not a setting. Did you mean {ours}?")
    Path("sft.yaml").write_text(f"{theirs}: 8\n", encoding="utf-8")
    assert error_of([*words, "--config=sft.yaml"], capsys).endswith(f"Did you mean {ours}?")


@pytest.mark.parametrize(
    ("words", "need"),
    [
        (("--model=model", "--push_to_hub"), "push_to_hub=True needs the hub"),
        (("--run={'model': 'nobody/nothing'}",), "There is no folder nobody/nothing, and the cache has no such model"),
    ],
)
def test_a_hub_that_does_not_answer_ends_the_command_at_once(words, need, place, capsys, monkeypatch):
    monkeypatch.setattr(places, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(places, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    assert need in error_of(["sft", *words, "--dataset=texts"], capsys)
    monkeypatch.setattr(places, "HF_HUB_OFFLINE", True)
    assert error_of(["sft", *words, "--dataset=texts"], capsys).endswith("HF_HUB_OFFLINE is set. Unset it.")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", TUNED)
def test_a_training_prints_the_defaults_that_it_chose(name, place, capsys):
    kinds = {"sft": SFTConfig, "reward": RewardConfig, "dpo": DPOConfig, "kto": KTOConfig, "ppo": PPOConfig}
    pipelines = {"ddpo": DDPOConfig, "align-prop": AlignPropConfig}
    kind = (kinds | pipelines)[name]
    data, flag = (ddpo.PipelineArguments, "train_batch_size") if name in pipelines else (RunConfig, "learning_rate")
    changed = TUNED[name] | {flag: 8 if name in pipelines else 3e-4}
    argv = ["--model=model", "--dataset=texts", f"--{flag}={changed[flag]}"]
    *_, config = settings(name, argv, data, kind, about="", recipe={"output_dir": "out"})
    assert {each: getattr(config, each) for each in changed} == changed
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "Settings: " + ", ".join(f"{each} {changed[each]}" for each in TUNED[name])
    assert any(getattr(kind("other"), each) != value for each, value in TUNED[name].items())


def test_a_file_that_is_no_json_is_named_with_its_fault(place, capsys):
    Path("broken.jsonl").write_text('{"prompt": ', encoding="utf-8")
    line = error_of(["sft", "--model=model", "--dataset=broken.jsonl"], capsys)
    assert "broken.jsonl, line 1: Expecting value" in line


def test_a_folder_of_an_adapter_is_no_model_to_train(place, capsys):
    run("sft", *COMMANDS["sft"], "--lora_r=2")
    line = error_of(["dpo", "--model=runs/sft", "--dataset=pairs"], capsys)
    assert line.endswith("Merge it: trimtab merge runs/sft NEW_FOLDER.")


def test_an_adapter_without_a_tokenizer_merges_with_that_of_its_base_and_virtual_tokens_do_not(place, capsys):
    base = AutoModelForCausalLM.from_pretrained("model")
    get_peft_model(base, LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM")).save_pretrained("lora")
    assert main(["merge", "lora", "whole"]) == 0
    assert AutoTokenizer.from_pretrained("whole").get_vocab() == tiny.tokenizer().get_vocab()
    base = AutoModelForCausalLM.from_pretrained("model")
    get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).save_pretrained("virtual")
    assert "learns virtual tokens (PROMPT_TUNING)" in error_of(["merge", "virtual", "other"], capsys)
    assert not Path("other").exists()


@pytest.mark.parametrize("saved", [["score"], None])
def test_a_merged_classifier_keeps_its_labels(saved, place):
    """Its head is saved with the adapter, or is the base model's."""
    head = AutoModelForSequenceClassification.from_pretrained("model", num_labels=2)
    head.save_pretrained("base")
    base = AutoModelForSequenceClassification.from_pretrained("model" if saved else "base", num_labels=2)
    lora = LoraConfig(r=2, target_modules=["c_attn"], task_type="SEQ_CLS", init_lora_weights=False)
    adapted = get_peft_model(base, lora).eval()
    adapted.peft_config["default"].base_model_name_or_path = base.name_or_path
    adapted.peft_config["default"].modules_to_save = saved
    adapted.save_pretrained("adapter")
    tiny.tokenizer().save_pretrained("adapter")
    assert main(["merge", "adapter", "whole"]) == 0
    ids = torch.tensor([[5, 6, 7, 8]])
    whole = AutoModelForSequenceClassification.from_pretrained("whole").eval()
    torch.testing.assert_close(whole(ids).logits, adapted(ids).logits)
    assert whole.config.num_labels == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("sft", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)]
)
def test_a_merged_model_computes_what_base_and_adapter_compute(name, kind, place, capsys):
    run(name, *COMMANDS[name], "--lora_r=2")
    assert main(["merge", f"runs/{name}", "whole"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The model is in whole."
    options = {"num_labels": 1} if name == "reward" else {}
    adapted = PeftModel.from_pretrained(kind.from_pretrained("model", **options), f"runs/{name}").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    whole = kind.from_pretrained("whole").eval()
    torch.testing.assert_close(whole(ids).logits, adapted(ids).logits)
    base = kind.from_pretrained("model", **options).eval()
    assert (whole.transformer(ids)[0] - base.transformer(ids)[0]).abs().max() > 1e-4
    assert AutoTokenizer.from_pretrained("whole").get_vocab() == tiny.tokenizer().get_vocab()
    with pytest.raises(SystemExit, match="2"):
        main(["merge", f"runs/{name}", "whole"])
    assert "whole has files" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["merge", "model", "new"])
