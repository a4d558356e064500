"""Features of transformers' Trainer work in our trainers, here SFTTrainer, judged by their results."""

import json
import logging
import os
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import wandb
from datasets import Dataset
from huggingface_hub.utils import filter_repo_objects
from peft import AutoPeftModelForCausalLM, LoraConfig
from tests.lm import tiny
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
)

from trimtab_lm.hf.config import CHECKPOINTING
from trimtab_lm.hf.labels import numbered_rows
from trimtab_lm.models.loading import tokenizer_options
from trimtab_lm.ppo import PPOConfig, PPOTrainer
from trimtab_lm.reward import RewardConfig, RewardTrainer
from trimtab_lm.sft import SFTConfig, SFTTrainer

TEXTS = ["hello world.", "abc.", "a longer text than the others.", "x y z.", "no.", "some more words.", "tiny.", "end."]
PAIRS = {"prompt": [text[:2] for text in TEXTS], "completion": [text[2:] for text in TEXTS]}
IDS = torch.tensor([[5, 9, 7, 21, tiny.EOS]])


def trainer(folder: Path, model: Any = None, columns: Any = None, arguments: Any = None, **config: Any) -> SFTTrainer:
    settings = {
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    data = {"train_dataset": Dataset.from_dict(columns or {"text": TEXTS}), "processing_class": tiny.tokenizer()}
    args = SFTConfig(str(folder), **settings | config)
    return SFTTrainer(still() if model is None else model, args, **data | (arguments or {}))


def still() -> Any:
    """Returns a model without dropout."""
    return tiny.gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def losses(sft: SFTTrainer) -> list[float]:
    return [log["loss"] for log in sft.state.log_history if "loss" in log]


# Optimizers, adapters and saved files --------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["galore_adamw", "galore_adamw_layerwise", "adafactor", "adamw_bnb_8bit"])
def test_an_optimizer_by_name_trains_and_the_checkpoint_loads(optim: str, tmp_path):
    config: dict[str, Any] = {}
    if optim.startswith("galore"):
        pytest.importorskip("galore_torch", reason="GaLore needs galore-torch, from the development group")
        config = {"optim_target_modules": ["q_proj", "up_proj"], "optim_args": "rank=2, update_proj_gap=1, scale=1.0"}
    if "bnb" in optim:
        pytest.importorskip("bitsandbytes", reason="8-bit optimizers need bitsandbytes")
    model = tiny.llama()
    before = tiny.weights(model)
    sft = trainer(tmp_path, model, optim=optim, save_strategy="steps", save_steps=1, max_steps=2, **config)
    sft.train()
    moved = tiny.moved(before, sft.model)
    assert set(moved) == set(before)
    if optim.startswith("galore"):
        # A weight with a projected gradient gets an update of the projection's rank, apart from rounding.
        name = "model.layers.0.self_attn.q_proj.weight"
        sizes = torch.linalg.svdvals(sft.model.state_dict()[name] - before[name])
        assert sizes[4] < 1e-3 * sizes[0] < sizes[1]  # two steps of rank 2 each
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    torch.testing.assert_close(logits(again), logits(sft.model), rtol=0, atol=0)


def test_adapters_are_saved_so_that_peft_loads_them(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapters = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    sft = trainer(
        tmp_path, base, arguments={"peft_config": adapters}, save_strategy="steps", save_steps=1, learning_rate=1.0
    )
    sft.train()
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    torch.testing.assert_close(logits(again), logits(sft.model), rtol=0, atol=0)
    assert (logits(again) - logits(tiny.llama())).abs().max() > 1e-3


def test_the_name_of_an_adapter_is_refused_with_what_to_write(tmp_path):
    folder = str(tmp_path / "adapter")
    LoraConfig(base_model_name_or_path="base").save_pretrained(folder)
    message = r"adapter holds an adapter, .* trimtab merge .*adapter NEW_FOLDER\. Or .* AutoPeftModelForCausalLM"
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, folder)
    with pytest.raises(ValueError, match=message):
        RewardTrainer(folder, RewardConfig(str(tmp_path), use_cpu=True))
    with pytest.raises(ValueError, match=message):
        PPOTrainer(PPOConfig(model_name=folder))


@pytest.mark.parametrize("trains_embeddings", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_adapters_on_a_resized_model_are_saved_so_that_peft_loads_them(is_tied, trains_embeddings, tmp_path):
    """Only the trained model has the new token's row: the adapters' folder must hold it, trained or not."""
    tiny.llama(tie_word_embeddings=is_tied).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<new>"])
    base.resize_token_embeddings(len(tokenizer))
    trained = ["embed_tokens"] if is_tied else ["embed_tokens", "lm_head"]
    extra = {"modules_to_save": trained, "ensure_weight_tying": is_tied} if trains_embeddings else {}
    adapters = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **extra)
    sft = trainer(
        tmp_path,
        base,
        {"text": [f"{text}<new>" for text in TEXTS]},
        learning_rate=1.0,
        save_strategy="steps",
        save_steps=1,
        arguments={"peft_config": adapters, "processing_class": tokenizer},
    )
    row = base.get_input_embeddings().weight[-1].detach().clone()
    sft.train()
    ids = torch.tensor([[5, len(tokenizer) - 1, 7]])
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    torch.testing.assert_close(logits(again, ids), logits(sft.model, ids), rtol=0, atol=0)
    assert torch.equal(row, again.get_input_embeddings().weight[-1]) != trains_embeddings


def test_old_checkpoints_are_deleted(tmp_path):
    trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=1, save_total_limit=2).train()
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.slow
def test_training_stops_early_with_the_best_weights(tmp_path):
    """At a rate that is far too high, at most the first step helps."""
    arguments = {
        "eval_dataset": Dataset.from_dict({"text": TEXTS}),
        "callbacks": [EarlyStoppingCallback(early_stopping_patience=1)],
    }
    config = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    sft = trainer(
        tmp_path,
        arguments=arguments,
        max_steps=10,
        learning_rate=30.0,
        load_best_model_at_end=True,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        **config,
    )
    sft.train()
    evaluated = [log["eval_loss"] for log in sft.state.log_history if "eval_loss" in log]
    assert len(evaluated) == 1 + evaluated.index(min(evaluated)) + 1 < 10
    assert sft.state.best_metric == min(evaluated)
    assert sft.evaluate()["eval_loss"] == pytest.approx(min(evaluated), rel=1e-6)


# The hub -------------------------------------------------------------------------------------------------------------


class Hub:
    """Replaces the hub's client; records what would be uploaded, and where to."""

    def __init__(self) -> None:
        self.uploads: list[tuple[str, str, set[str]]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        return type("Url", (), {"repo_id": f"someone/{name}"})()

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, **options: Any) -> Any:
        paths = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        kept = set(filter_repo_objects(paths, ignore_patterns=options.get("ignore_patterns")))
        self.uploads.append((commit_message, options.get("path_in_repo", ""), kept))
        done: Future[None] = Future()
        done.set_result(None)
        return done if options.get("run_as_future") else None


MODEL = {"model.safetensors", "config.json", "tokenizer.json", "training_args.bin"}
STATE = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "manifest.json"}
FOLDERS = {
    "end": [],
    "every_save": ["", ""],
    "checkpoint": ["", "last-checkpoint"] * 2,
    "all_checkpoints": ["", "checkpoint-1", "", "checkpoint-2"],
}


@pytest.mark.parametrize("strategy", FOLDERS)
def test_the_hub_gets_what_the_strategy_says(strategy: str, tmp_path, monkeypatch):
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *args, **kwargs: hub)
    config = {"push_to_hub": True, "hub_strategy": strategy, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    sft = trainer(tmp_path / "model", **config)
    sft.train()
    assert [folder for _, folder, _ in hub.uploads] == FOLDERS[strategy]
    for message, folder, files in hub.uploads:
        assert message.startswith("Training in progress, step ")
        assert files >= (MODEL | STATE if folder else MODEL)
        assert folder or not files & STATE
    del hub.uploads[:]
    sft.save_model()
    sft.push_to_hub("done")
    assert [message for message, _, _ in hub.uploads] == ["Model save", "done"]
    assert all(files >= MODEL | {"README.md"} and not files & STATE for _, _, files in hub.uploads)
    assert sft.hub_model_id == "someone/model"


# Logs and trackers ---------------------------------------------------------------------------------------------------

# By a process's (rank, rank on its node): its log level, with and without log_on_each_node.
LEVELS = {
    (0, 0): (logging.INFO, logging.INFO),
    (1, 1): (logging.ERROR, logging.ERROR),
    (2, 0): (logging.INFO, logging.ERROR),
}


@pytest.mark.parametrize("place", LEVELS)
def test_log_levels_are_those_of_the_process(place, tmp_path, monkeypatch):
    before = transformers.logging.get_verbosity()
    for name, index in zip(("process_index", "local_process_index"), place, strict=True):
        monkeypatch.setattr(SFTConfig, name, property(lambda self, index=index: index))
    try:
        for on_each_node, level in zip((True, False), LEVELS[place], strict=True):
            sft = trainer(tmp_path, log_level="info", log_level_replica="error", log_on_each_node=on_each_node)
            assert sft.args.get_process_log_level() == transformers.logging.get_verbosity() == level
    finally:
        transformers.logging.set_verbosity(before)


def test_tensorboard_gets_the_recorded_statistics(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    arguments = {"eval_dataset": Dataset.from_dict({"text": TEXTS})}
    sft = trainer(
        tmp_path, arguments=arguments, report_to="tensorboard", max_steps=2, eval_strategy="steps", eval_steps=2
    )
    sft.train()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    for name in ("loss", "entropy"):
        values = [event.value for event in events.Scalars(f"train/{name}")]
        assert values == pytest.approx([log[name] for log in sft.state.log_history if name in log], rel=1e-6)
        assert len(values) == 2
        (event,) = events.Scalars(f"eval/{name}")
        assert (event.step, event.value) == (2, pytest.approx(sft.state.log_history[2][f"eval_{name}"], rel=1e-6))


@pytest.mark.usefixtures("offline_wandb")
def test_wandb_without_a_key_runs_offline(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setattr(wandb, "login", lambda **how: bool(how["prompt"]))  # there is no key and no terminal
    sft = trainer(tmp_path, report_to="wandb", run_name="first")
    try:
        assert os.environ["WANDB_MODE"] == "offline"
        sft.about = {"dataset": "texts"}
        sft.train()
        assert "wandb sync" in capsys.readouterr().err
        assert (wandb.run.id, wandb.run.project) == (sft.checkpoints.run.id, "huggingface")
        assert wandb.run.config["dataset"] == "texts"
        assert (wandb.run.settings._offline, wandb.run.name) == (True, "first")
        assert wandb.run.config["packing"] is False  # includes our settings, not only transformers'
        assert {"train/loss", "train/entropy"} <= set(wandb.run.summary.keys())
        wandb.finish()
        assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
    finally:
        os.environ.pop("WANDB_MODE", None)
        wandb.finish()


def test_tokens_that_were_read_are_counted(tmp_path):
    read = sum(len(text) + 1 for text in TEXTS)
    sft = trainer(tmp_path, max_steps=2, include_num_input_tokens_seen="non_padding")
    sft.train()
    assert sft.state.num_input_tokens_seen == 2 * read
    assert [log["num_input_tokens_seen"] for log in sft.state.log_history[:2]] == [read, 2 * read]
    whole = trainer(tmp_path, include_num_input_tokens_seen="all")
    whole.train()
    assert whole.state.num_input_tokens_seen == next(iter(whole.get_train_dataloader()))["input_ids"].numel() >= read
    assert json.loads(json.dumps(sft.state.log_history)) == sft.state.log_history  # as a checkpoint writes it


# Forward passes ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_model_takes_the_same_steps(tmp_path):
    """The same batch repeats: a compiled program that kept its first inputs would differ from the second step on."""
    config = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    plain = trainer(tmp_path / "plain", tiny.llama(), **config)
    compiled = trainer(tmp_path / "compiled", tiny.llama(), torch_compile=True, torch_compile_backend="eager", **config)
    torch._dynamo.reset()
    for sft in (plain, compiled):
        sft.train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "compiled" / "checkpoint-3")
    torch.testing.assert_close(logits(again), logits(plain.model), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_activations_computed_again_change_no_number(tmp_path):
    calls = {}

    def run(**config: Any) -> list[float]:
        sft = trainer(tmp_path, max_steps=2, **config)
        block = sft.model.transformer.h[0]
        calls[len(config)] = 0
        block.attn.register_forward_hook(lambda *_: calls.__setitem__(len(config), calls[len(config)] + 1))
        sft.train()
        return losses(sft)

    again = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}}
    assert run() == pytest.approx(run(**again), rel=1e-6)
    assert calls[2] == 2 * calls[0] > 0


# Data ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_like_length_share_a_batch(packing: bool, tmp_path):
    """In 32 rows, lengths within a batch of two differ far less than at random; packed rows have lengths too."""
    columns = {"text": ["a" * (1 + 11 * i % 32) for i in range(32)]}

    def spread(strategy: str) -> int:
        config = {"train_sampling_strategy": strategy, "per_device_train_batch_size": 2, "max_length": 33}
        sft = trainer(tmp_path, columns=columns, packing=packing, **config)
        sft.train()
        order = list(sft._get_train_sampler())
        lengths = [len(sft.train_dataset[i]["input_ids"]) for i in order]
        assert sorted(order) == list(range(len(sft.train_dataset)))
        return sum(abs(one - other) for one, other in zip(lengths[::2], lengths[1::2], strict=False))

    if packing:
        assert spread("group_by_length") <= spread("random")
    else:
        assert spread("group_by_length") < 0.6 * spread("random")


def test_repeated_rows_of_an_encoder_decoder_do_not_count_whatever_the_widths(tmp_path):
    sft = trainer(tmp_path, tiny.t5(), PAIRS)
    rows = [{"input_ids": [5, 6, 7], "labels": [8]}, {"input_ids": [9], "labels": [10, 11, 12]}]
    batch = numbered_rows(sft.data_collator)(rows)
    assert batch["input_ids"].shape == batch["labels"].shape
    labels = sft.without_repetitions(batch, 1)["labels"]
    assert labels.tolist() == [[8, -100, -100], [-100] * 3]


@pytest.mark.slow
def test_a_collator_of_the_users_makes_the_batches(tmp_path):
    """It pads on the left; or returns only the labels of an encoder-decoder model, which derives its inputs."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        width = max(len(row["input_ids"]) for row in rows)
        ids = torch.tensor([[tiny.PAD] * (width - len(row["input_ids"])) + row["input_ids"] for row in rows])
        mask = (ids != tiny.PAD).long()
        labels = torch.where(mask.cumsum(1) > 1, ids, -100)  # before a row's first token there is only padding
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    plain, sft = trainer(tmp_path, max_steps=2), trainer(tmp_path, arguments={"data_collator": collate}, max_steps=2)
    for one in (plain, sft):
        one.train()
    assert losses(sft) == pytest.approx(losses(plain), rel=1e-5)

    def t5() -> Any:
        return tiny.t5(initializer_factor=1.0, dropout_rate=0.0)

    collator = DataCollatorForSeq2Seq(tiny.tokenizer())
    plain, sft = trainer(tmp_path, t5(), PAIRS), trainer(tmp_path, t5(), PAIRS, {"data_collator": collator})
    for one in (plain, sft):
        one.train()
    assert losses(sft) == pytest.approx(losses(plain), rel=1e-5)


def test_predictions_are_those_of_each_row(tmp_path):
    model = tiny.exact(still())
    sft = trainer(tmp_path, model, per_device_eval_batch_size=3)
    data = Dataset.from_dict({"text": TEXTS})
    output = sft.predict(data)
    rows = [torch.tensor([[tiny.VOCABULARY[c] for c in text] + [tiny.EOS]]) for text in TEXTS]
    for i, ids in enumerate(rows):
        expected = logits(model, ids)[0].numpy()
        np.testing.assert_allclose(output.predictions[i, : ids.shape[1]], expected, rtol=1e-6, atol=1e-6)
        assert output.label_ids[i, 1 : ids.shape[1]].tolist() == ids[0, 1:].tolist()
    nll = [-tiny.taken_of(model, ids[0, :1], ids[0, 1:]) for ids in rows]
    assert output.metrics["test_loss"] == pytest.approx(float(torch.cat(nll).mean()), rel=1e-6)
    measured = trainer(
        tmp_path, model, arguments={"eval_dataset": data, "compute_metrics": lambda _: {}}, per_device_eval_batch_size=3
    )
    assert measured.evaluate()["eval_loss"] == pytest.approx(output.metrics["test_loss"], rel=1e-6)


@pytest.mark.slow
def test_hyperparameters_are_searched(tmp_path):
    optuna = pytest.importorskip("optuna", reason="the search needs optuna")
    arguments = {"model_init": still, "eval_dataset": Dataset.from_dict({"text": TEXTS})}
    args = SFTConfig(str(tmp_path), max_steps=2, save_strategy="no", use_cpu=True, optim="sgd", disable_tqdm=True)
    sft = SFTTrainer(
        None, args, train_dataset=arguments["eval_dataset"], processing_class=tiny.tokenizer(), **arguments
    )

    def rates(trial: Any) -> dict[str, Any]:
        return {"learning_rate": trial.suggest_categorical("learning_rate", [1e-2, 1e-9])}

    # A random sampler would try only one of the two rates in one run of eight.
    sampler = optuna.samplers.GridSampler({"learning_rate": [1e-2, 1e-9]})
    best = sft.hyperparameter_search(rates, n_trials=2, direction="minimize", backend="optuna", sampler=sampler)
    assert best.hyperparameters == {"learning_rate": 1e-2}


def test_a_seq2seq_checkpoint_loads(tmp_path):
    sft = trainer(tmp_path, tiny.t5(), PAIRS, save_strategy="steps", save_steps=1)
    sft.train()
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "checkpoint-1")
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint-1").eos_token_id == tiny.EOS
    for name, weight in tiny.weights(sft.model).items():
        assert torch.equal(weight, again.state_dict()[name])


def test_no_secret_of_a_model_or_sampler_reaches_a_tracker(tmp_path):
    args = SFTConfig(
        str(tmp_path), use_cpu=True, model_init_kwargs={"token": "hush", "revision": "main"}, hub_token="hush"
    )
    for told in (args.to_dict(), args.to_sanitized_dict(), args.to_json_string()):
        assert "hush" not in repr(told)
        assert "main" in repr(told)
    assert args.model_init_kwargs == {"token": "hush", "revision": "main"}


def test_arguments_of_loading_reach_the_tokenizer_too(tmp_path):
    folder, options = tmp_path / "model", {"subfolder": "inner"}
    tiny.gpt2().save_pretrained(folder / "inner")
    tiny.tokenizer().save_pretrained(folder / "inner")
    sft = trainer(tmp_path, str(folder), arguments={"processing_class": None}, model_init_kwargs=options)
    ppo = PPOTrainer(PPOConfig(model_name=str(folder), model_init_kwargs=options))
    for loaded in (sft.processing_class, ppo.tokenizer):
        assert loaded.get_vocab() == tiny.tokenizer().get_vocab()
    with pytest.raises(ValueError, match="the model is loaded already") as refused:
        tiny.ppo(model_init_kwargs={"token": "hush", **options})
    assert "hush" not in str(refused.value)
    shared = {"revision": "v1", "token": "hush", "trust_remote_code": True, **options}
    assert tokenizer_options({"dtype": "auto", "device_map": "auto", **shared}) == shared
