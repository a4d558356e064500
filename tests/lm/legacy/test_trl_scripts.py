"""Scripts that import `trl`, in the style of TRL 0.7 to 0.11's examples, run unchanged.

Each script in trl_scripts runs in its own process, because `trimtab_lm.legacy.trl` changes transformers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.diffusion.tiny import stable_diffusion
from tests.lm import tiny
from transformers import GPT2Config, GPT2ForSequenceClassification

SCRIPTS = Path(__file__).with_name("trl_scripts")


@pytest.fixture
def world(tmp_path):
    """Sets up a folder with a model, a classifier, texts and pairs, under the hub names that scripts use."""
    tokenizer = tiny.tokenizer()
    tiny.gpt2().save_pretrained(tmp_path / "model")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "num_labels": 2}
    tiny.seeded(GPT2ForSequenceClassification, GPT2Config(**sizes | tiny.TOKENS)).save_pretrained(
        tmp_path / "classifier"
    )
    for name in ("model", "classifier"):
        tokenizer.save_pretrained(tmp_path / name)
    write(tmp_path / "texts", [{"text": "the film was long."}, {"text": "i liked it a lot."}] * 4)
    said = [{"role": "user", "content": "say it"}]
    answers = [{"chosen": "yes.", "rejected": "no."}, {"chosen": "ok.", "rejected": "never."}]
    pairs = [{k: [*said, {"role": "assistant", "content": v}] for k, v in row.items()} for row in answers * 4]
    write(tmp_path / "pairs", pairs)
    return tmp_path


def write(folder: Path, rows: list[dict[str, object]]) -> None:
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def run(folder: Path, *words: str, status: int = 0) -> str:
    """Runs Python with these words in the folder, and returns what it writes."""
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=os.environ | offline, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def trains(folder: Path, script: str, *words: str) -> str:
    written = run(folder, "-m", "trimtab_lm.legacy.trl", str(SCRIPTS / script), *words)
    assert "trained" in written
    return written


@pytest.mark.slow
def test_a_script_of_ppo_with_a_sentiment_pipeline(world):
    sizes = ["--batch_size", "4", "--mini_batch_size", "2", "--learning_rate", "1e-3"]
    names = ["--model_name", "model", "--query_dataset", "texts", "--classifier", "classifier"]
    assert trains(world, "sentiment.py", *names, *sizes).count("KL") == 2
    assert (world / "sentiment" / "value_head.safetensors").exists()


@pytest.mark.slow
def test_a_script_of_sft_with_plain_arguments(world):
    written = trains(world, "texts.py", "model", "texts")
    assert "write args=SFTConfig(" in written
    assert "evaluation_strategy is deprecated: write eval_strategy" in written
    assert (world / "texts" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_script_of_dpo_and_rewards_with_a_file_of_settings(world):
    (world / "run.yaml").write_text("max_steps: 1\nrpo_alpha: 0.5\nuse_cpu: true\nenv:\n  TOLD: yes\nlora_r: 2\n")
    words = ["--config", "run.yaml", "--dataset_name", "pairs", "--output_dir", "run", "--model_name_or_path", "model"]
    words += [
        "--torch_dtype",
        "float32",
        "--use_peft",
        "--lora_target_modules",
        "c_attn",
        "--max_completion_length",
        "9",
    ]
    assert "trained ['sigmoid', 'sft'] 9" in trains(world, "pairs.py", *words)


@pytest.mark.slow
def test_a_script_of_first_steps_and_best_of_n(world):
    trains(world, "samples.py", "model")


@pytest.mark.slow
def test_a_script_of_ddpo(world):
    stable_diffusion().save_pretrained(world / "pipeline")
    trains(world, "images.py", "pipeline")
    assert (world / "images").is_dir()


NAMES = """
import importlib, warnings
warnings.simplefilter("ignore")
import trimtab_lm.legacy.trl
import trl, trl.trainer.utils
from trimtab_lm.legacy.trl_names import ADVICE, MODULES

for module, names in MODULES.items():
    found = importlib.import_module(module)
    assert set(dir(found)) == set(names), module
    for name in names:
        assert getattr(found, name) is not None, name
        assert name not in ADVICE, name
import trimtab_lm
assert trl.PPOTrainer is trimtab_lm.PPOTrainer
from trl.core import logprobs_from_logits
from trl.environment import TextEnvironment
from trl.trainer import compute_accuracy
assert trl.trainer.utils.ConstantLengthDataset is trimtab_lm.ConstantLengthDataset
assert not hasattr(trl, "BCOTrainer")


def says(statement, kind, *parts):
    try:
        exec(statement)
    except kind as error:
        assert all(part in str(error) for part in parts), error
    else:
        raise AssertionError(statement)


says("from trl import ORPOTrainer", ImportError, "trl.ORPOTrainer", "loss_type='orpo'")
says("trl.RichProgressCallback", AttributeError, "transformers shows the progress")
says("from trl.core import PPOTrainer", ImportError, "import it from trl")
says("from trl import Whatever", ImportError, "page on migration")
says("import trl.trainer.online_dpo_trainer", ImportError, "trl.trainer.online_dpo_trainer")
says("from trl.models.auxiliary_modules import aesthetic_scorer", ImportError, "trimtab_diffusion.rewards")
print("every name leads somewhere")
"""


@pytest.mark.slow
def test_every_name_leads_somewhere_or_says_what_to_use(tmp_path):
    assert "every name leads somewhere" in run(tmp_path, "-c", NAMES)


@pytest.mark.slow
def test_a_trl_that_is_imported_already_stays(tmp_path):
    (tmp_path / "trl.py").write_text("")
    written = run(tmp_path, "-c", "import trl; import trimtab_lm.legacy.trl", status=1)
    assert "RuntimeError: trl is imported already, from " in written
    assert "before the first import of trl" in written


@pytest.mark.slow
def test_mistakes_on_the_command_line(tmp_path):
    runner = ("-m", "trimtab_lm.legacy.trl")
    assert "usage: python -m trimtab_lm.legacy.trl SCRIPT" in run(tmp_path, *runner, "--help")
    assert "error: absent.py is no file." in run(tmp_path, *runner, "absent.py", status=2)
    (tmp_path / "script.py").write_text("import tyro_is_absent")
    assert "pip install tyro_is_absent" in run(tmp_path, *runner, "script.py", status=1)
