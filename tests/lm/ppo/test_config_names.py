"""Settings of PPOConfig that name data, models, repositories and trackers."""

import dataclasses
import json
from contextlib import nullcontext

import datasets
import pytest
import torch
import wandb
from accelerate.state import AcceleratorState
from tests.lm import tiny

from trimtab_common import hub
from trimtab_lm import PPOConfig, PPOTrainer

# -------------------------------------------------------------- data and models by name


@pytest.fixture
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def prompts(count=8, **columns):
    texts = [letter * 3 for letter in "abcdefgh"[:count]]
    return datasets.Dataset.from_dict({"query": texts, **columns})


@pytest.mark.parametrize("column", ["query", "prompt"])
@pytest.mark.usefixtures("private_cache")
def test_query_dataset_is_loaded_and_tokenized(column, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({column: letter * 3}) for letter in "abcd"))
    (batch,) = tiny.ppo(query_dataset=str(file)).dataloader
    assert sorted(batch["query"]) == ["aaa", "bbb", "ccc", "ddd"]
    for text, ids in zip(batch["query"], batch["input_ids"], strict=True):
        assert ids.tolist() == [tiny.VOCABULARY[text[0]]] * 3


def test_query_dataset_may_be_a_saved_folder_and_a_given_dataset_wins(tmp_path):
    prompts().save_to_disk(tmp_path)
    assert len(tiny.ppo(query_dataset=str(tmp_path)).dataset) == 8
    arguments = datasets.Dataset.from_dict({"input_ids": [[5]] * 4})
    assert tiny.ppo(query_dataset=str(tmp_path), arguments={"dataset": arguments}).dataset is arguments


class Texts(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


@pytest.mark.parametrize("kind", [list, Texts])
def test_rows_of_texts_without_a_table_are_tokenized(kind):
    rows = kind([{"query": letter * 3} for letter in "abcd"])
    (batch,) = tiny.ppo(arguments={"dataset": rows}).dataloader
    assert sorted(batch["query"]) == ["aaa", "bbb", "ccc", "ddd"]
    ids = kind([{"input_ids": torch.tensor([5])}] * 4)
    assert tiny.ppo(arguments={"dataset": ids}).dataset is ids


@pytest.mark.parametrize("row", [{"text": "a", "answer": "b"}, {"query": torch.tensor([5])}, "a text"])
def test_rows_of_a_torch_dataset_that_hold_no_texts_to_tokenize_are_the_loops(row):
    rows = Texts([row] * 4)
    assert tiny.ppo(arguments={"dataset": rows}).dataset is rows


def test_a_stream_needs_a_dataloader_of_ones_own():
    class Streams(PPOTrainer):
        def prepare_dataloader(self, dataset, data_collator=None):
            return torch.utils.data.DataLoader(dataset, batch_size=4)

    stream = datasets.Dataset.from_dict({"query": ["a"] * 4}).to_iterable_dataset()
    (batch,) = tiny.ppo(kind=Streams, arguments={"dataset": stream}).dataloader
    assert batch["query"] == ["a"] * 4


def test_a_stream_of_prompts_is_refused():
    stream = datasets.Dataset.from_dict({"query": ["a"] * 4}).to_iterable_dataset()
    with pytest.raises(TypeError, match=r"PPO takes its prompts from a datasets\.Dataset, not from a IterableDataset"):
        tiny.ppo(arguments={"dataset": stream})


@pytest.mark.parametrize("is_dropped", [True, False])
def test_remove_unused_columns(is_dropped):
    data = datasets.Dataset.from_dict(
        {"input_ids": [[5]] * 4, "query": ["b"] * 4, "response": [""] * 4, "label": [1] * 4, "prompt_id": [3] * 4}
    )
    with pytest.warns(match="columns prompt_id of the dataset are dropped") if is_dropped else nullcontext():
        (batch,) = tiny.ppo(arguments={"dataset": data}, remove_unused_columns=is_dropped).dataloader
    assert set(batch) == {"input_ids", "query", "response", "label"} | (set() if is_dropped else {"prompt_id"})


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_model_name_loads_model_value_head_and_tokenizer(kind, tmp_path):
    model = tiny.with_value_head(getattr(tiny, kind)())
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    trainer = PPOTrainer(PPOConfig(model_name=str(tmp_path), batch_size=4, mini_batch_size=4))
    assert type(trainer.model) is type(model)
    assert tiny.moved(tiny.weights(model), trainer.model) == {}
    assert trainer.tokenizer("ab")["input_ids"] == tiny.tokenizer()("ab")["input_ids"]
    trainer.step(*tiny.batch())


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_without_a_model_name_model_and_tokenizer_are_needed(what):
    arguments = {"model": tiny.policy(), "tokenizer": tiny.tokenizer()}
    del arguments[what]
    with pytest.raises(ValueError, match=f"PPOTrainer needs a {what}: .*model_name"):
        PPOTrainer(PPOConfig(), **arguments)


def test_reward_model_scores_in_train(tmp_path):
    scorer = tiny.scorer()
    scorer.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    texts, rewards = [], []

    def keep(step, stats, batch):
        texts.extend(query + response for query, response in zip(batch["query"], batch["response"], strict=True))
        rewards.extend(stats["env/reward_dist"].tolist())

    trainer = tiny.ppo(
        arguments={"dataset": datasets.Dataset.from_dict({"input_ids": [[5, 6]] * 4})}, reward_model=str(tmp_path)
    )
    trainer.train(
        steps=1,
        generation_kwargs={"max_new_tokens": 5, "suppress_tokens": [0, 1, 2, 3]},  # texts would lose special ids
        on_step=keep,
    )
    with torch.no_grad():
        ids = [torch.tensor([tiny.tokenizer()(f"{text}</s>")["input_ids"]]) for text in texts]
        expected = [scorer.eval()(row).logits.item() for row in ids]
    assert rewards == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore:The sampler is not the policy")
def test_steps_are_the_length_of_train():
    trainer = tiny.ppo(arguments={"dataset": datasets.Dataset.from_dict({"input_ids": [[5]] * 4})}, steps=3)
    history = trainer.train(lambda queries, responses: [0.0, 1.0, 2.0, 3.0], generation_kwargs={"max_new_tokens": 3})
    assert (len(history), trainer.steps_done) == (3, 3)


@pytest.mark.parametrize(
    ("limit", "kept"), [(None, ["checkpoint-2", "checkpoint-4", "checkpoint-6"]), (2, ["checkpoint-4", "checkpoint-6"])]
)
def test_output_dir_save_steps_and_save_total_limit(limit, kept, tmp_path):
    data = datasets.Dataset.from_dict({"input_ids": [[5]] * 4})
    trainer = tiny.ppo(
        arguments={"dataset": data}, steps=7, output_dir=str(tmp_path / "out"), save_steps=2, save_total_limit=limit
    )
    trainer.train(lambda queries, responses: [0.0, 1.0, 2.0, 3.0], generation_kwargs={"max_new_tokens": 3})
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == kept


# -------------------------------------------------------------- hub


@pytest.mark.parametrize(("compare_steps", "pushed_at"), [(1, [1, 3, 6]), (2, [2, 4, 6])])
def test_push_to_hub_if_best(compare_steps, pushed_at, monkeypatch):
    scores, pushes = [1.0, 0.0, 2.0, 1.0, 0.5, 3.0], []

    class Repo:
        repo_id = "me/policy"

    def upload(*, repo_id, folder_path, **options):
        files = {path.name for path in folder_path.iterdir()}
        assert {"value_head.safetensors", "model.safetensors", "tokenizer.json", "README.md"} <= files
        pushes.append((step, repo_id, options["commit_message"]))

    monkeypatch.setattr(hub, "create_repo", lambda name, **options: Repo)
    monkeypatch.setattr(hub, "upload_folder", upload)
    settings = {"repo_id": "policy", "commit_message": "best"}
    trainer = tiny.ppo(push_to_hub_if_best_kwargs=settings, compare_steps=compare_steps)
    queries, responses, _ = tiny.batch()
    for step, score in enumerate(scores, start=1):  # noqa: B007
        trainer.step(queries, responses, [score, score, score - 0.1, score + 0.1])
    assert pushes == [(step, "me/policy", "best") for step in pushed_at]


# -------------------------------------------------------------- tracking and accelerate


def logged(trainer):
    """Returns the statistics of one step that go to the tracker."""
    queries, responses, scores = tiny.batch()
    texts = {"query": ["q"] * 4, "response": ["r"] * 4}
    trainer.log_stats(trainer.step(queries, responses, scores), texts, scores)
    trainer.tracker.finish()


def event_files(folder):
    return sorted(folder.rglob("events.out.tfevents*"))


def test_log_with_tensorboard_writes_into_logging_dir_under_the_run_name(tmp_path):
    logged(tiny.ppo(log_with="tensorboard", exp_name="my-run", project_kwargs={"logging_dir": str(tmp_path)}))
    (file,) = event_files(tmp_path)
    assert file.parent.name.startswith("my-run-")


@pytest.mark.parametrize("name", [None, "none"])
def test_no_tracker_writes_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logged(tiny.ppo(log_with=name, project_kwargs={"logging_dir": str(tmp_path)}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_nested", [False, True])
def test_tracker_kwargs_reach_the_tracker(is_nested, tmp_path):
    chosen = {"log_dir": str(tmp_path / "mine")}
    logged(tiny.ppo(log_with="tensorboard", tracker_kwargs={"tensorboard": chosen} if is_nested else chosen))
    assert len(event_files(tmp_path / "mine")) == 1


@pytest.mark.usefixtures("offline_wandb")
def test_wandb_run_has_project_name_task_and_settings(tmp_path):
    trainer = tiny.ppo(
        log_with="wandb",
        tracker_project_name="my-project",
        exp_name="my-run",
        task_name="my-task",
        tracker_kwargs={"wandb": {"group": "my-group"}},
        project_kwargs={"logging_dir": str(tmp_path)},
    )
    trainer.tracker.log({}, 0)
    run = wandb.run
    try:
        assert (run.project, run.name, run.group, run.tags) == ("my-project", "my-run", "my-group", ("my-task",))
        assert run.config["learning_rate"] == 1e-3
        assert trainer.run.tracker_id == run.id
        assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
    finally:
        trainer.tracker.finish()


def test_a_run_is_named_after_its_script_by_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/train_sentiment.py", "--seed=1"])
    assert PPOConfig().exp_name == "train_sentiment"


def test_accelerator_kwargs_reach_accelerate():
    queries, responses, scores = tiny.batch()
    exact = tiny.ppo().step(queries, responses, scores)["objective/logprobs"]
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        trainer = tiny.ppo(accelerator_kwargs={"mixed_precision": "bf16"})
        rounded = trainer.step(queries, responses, scores)["objective/logprobs"]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert 1e-4 < float((exact - rounded).abs().max()) < 0.5


def test_documented_defaults():
    documented = {
        "seed": 0,
        "log_with": None,
        "remove_unused_columns": True,
        "tracker_project_name": "trl",
        "steps": 20000,
        "learning_rate": 1e-5,
        "adap_kl_ctrl": True,
        "init_kl_coef": 0.2,
        "kl_penalty": "kl",
        "target": 6,
        "horizon": 10000,
        "gamma": 1,
        "lam": 0.95,
        "cliprange": 0.2,
        "cliprange_value": 0.2,
        "vf_coef": 0.1,
        "batch_size": 256,
        "mini_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "ppo_epochs": 4,
        "max_grad_norm": None,
        "early_stopping": False,
        "target_kl": 1,
        "compare_steps": 1,
        "ratio_threshold": 10.0,
        "use_score_scaling": False,
        "use_score_norm": False,
        "score_clip": None,
        "whiten_rewards": False,
    }
    config = PPOConfig()
    assert {name: getattr(config, name) for name in documented} == documented


def test_every_field_says_what_it_is():
    assert all(field.metadata.get("help") for field in dataclasses.fields(PPOConfig))


def test_a_hub_token_reaches_neither_the_model_card_nor_the_tracker(tmp_path):
    trainer = tiny.ppo(
        push_to_hub_if_best_kwargs={"repo_id": "me/mine", "token": "hf_secret"},
        log_with="tensorboard",
        project_kwargs={"logging_dir": str(tmp_path / "logs")},
    )
    trainer.create_model_card(str(tmp_path))
    assert "me/mine" in (tmp_path / "README.md").read_text()
    assert "hf_secret" not in (tmp_path / "README.md").read_text()
    trainer.tracker.log({"a": 1.0}, 1)
    trainer.tracker.finish()
    written = b"".join(file.read_bytes() for file in (tmp_path / "logs").rglob("*") if file.is_file())
    assert b"me/mine" in written
    assert b"hf_secret" not in written
