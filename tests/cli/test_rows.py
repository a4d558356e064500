"""Files as people have them train through the command."""

from pathlib import Path

import pytest
from datasets import Dataset
from tests.cli.conftest import WORDS, write_rows
from tests.cli.formats import ROWS, TALK
from tests.lm import tiny

from trimtab_cli.main import main
from trimtab_cli.rows import columns_of_words, recognized, tokenizer_of, with_columns

SHORT = ("--per_device_train_batch_size=2", "--max_steps=1", "--save_strategy=no", "--output_dir=out")


@pytest.fixture
def base(place: Path) -> str:
    """The folder of a base model, long enough for conversations, whose tokenizer has no chat template."""
    tiny.gpt2(n_positions=256).save_pretrained("base")
    tiny.tokenizer().save_pretrained("base")
    return "base"


@pytest.mark.parametrize("name", ROWS)
def test_a_widespread_format_trains_a_base_model(name: str, base: str):
    command, row = ROWS[name]
    write_rows("rows.jsonl", [row] * 4)
    words = ("--dataset=rows.jsonl", "--chat_template=chatml", "--max_length=256", *SHORT)
    assert main([command, f"--model={base}", *words]) == 0
    assert "<|im_start|>" in tokenizer_of("out", None).chat_template


@pytest.mark.parametrize("command", ["grpo", "ppo", "iterative-sft"])
def test_questions_are_prompts_and_rewards_get_the_answers(command: str, base: str):
    write_rows("questions.jsonl", [{"question": words, "answer": words[-1]} for words in WORDS])
    sizes = {
        "grpo": ("--num_generations=2", "--max_completion_length=3", *SHORT),
        "ppo": ("--steps=1", "--batch_size=2", "--mini_batch_size=2", "--max_new_tokens=3"),
        "iterative-sft": ("--rounds=1", "--prompts=2", "--samples=2", "--max_new_tokens=3", "--save_strategy=no"),
    }
    words = ("--dataset=questions.jsonl", "--reward=rewards.py:length", "--chat_template=chatml")
    assert main([command, f"--model={base}", *words, *sizes[command]]) == 0


def test_columns_are_renamed_by_a_flag(base: str, capsys: pytest.CaptureFixture[str]):
    write_rows("rows.jsonl", [{"ask": "the dog", "reply": " sat."}] * 4)
    with pytest.raises(SystemExit) as ended:
        main(["sft", f"--model={base}", "--dataset=rows.jsonl", *SHORT])
    assert ended.value.code == 2
    assert "--columns prompt=question,completion=answer" in capsys.readouterr().err
    words = ("--dataset=rows.jsonl", "--columns=prompt=ask,completion=reply", "--max_length=64")
    assert main(["sft", f"--model={base}", *words, *SHORT]) == 0


def test_a_base_model_on_conversations_ends_with_a_line_that_names_the_flag(
    base: str, capsys: pytest.CaptureFixture[str]
):
    write_rows("rows.jsonl", [{"messages": TALK}] * 4)
    with pytest.raises(SystemExit) as ended:
        main(["sft", f"--model={base}", "--dataset=rows.jsonl", *SHORT])
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trimtab")]
    assert "has no chat template" in line
    assert "--chat_template chatml" in line


def test_a_question_is_a_message_with_a_template_and_a_line_without():
    rows = Dataset.from_list([{"instruction": "Add.", "input": "1 2", "output": "3"}])
    (row,) = recognized(rows, tiny.tokenizer)
    assert (row["prompt"], row["completion"]) == ("Add.\n\n1 2\n", "3")
    (row,) = recognized(rows, lambda: tiny.tokenizer(chat_template="{{ messages }}"))
    assert row["prompt"] == [{"role": "user", "content": "Add.\n\n1 2"}]
    assert row["completion"] == [{"role": "assistant", "content": "3"}]


def test_alpacas_columns_win_over_its_text():
    row = {"instruction": "Add.", "input": "", "output": "3", "text": "Below is an instruction. Add. 3"}
    (row,) = recognized(Dataset.from_list([row]), tiny.tokenizer)
    assert (row["prompt"], row["completion"]) == ("Add.\n", "3")
    rows = Dataset.from_list([{"question": "Add.", "answer": "3", "text": "A text."}])
    assert recognized(rows, tiny.tokenizer) is rows


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Add.", "chosen": "3", "rejected": "4"},
        {
            "conversations": [{"from": "human", "value": "Add."}],
            "chosen": {"from": "gpt", "value": "3"},
            "rejected": {"from": "gpt", "value": "4"},
        },
    ],
)
def test_a_system_column_is_a_system_message(row):
    rows = Dataset.from_list([{**row, "system": "Be brief."}, {**row, "system": ""}, {**row, "system": None}])
    first, *others = recognized(rows, lambda: tiny.tokenizer(chat_template="{{ messages }}"))
    asked = [{"role": "user", "content": "Add."}]
    assert first["prompt"] == [{"role": "system", "content": "Be brief."}, *asked]
    assert [each["prompt"] for each in others] == [asked, asked]


def test_a_system_column_without_a_chat_template_is_refused():
    rows = Dataset.from_list([{"question": "Add.", "answer": "3", "system": "Be brief."}])
    with pytest.raises(ValueError, match=r"system message 'Be brief\.', and the tokenizer has no chat template"):
        recognized(rows, tiny.tokenizer)
    (row,) = recognized(with_columns(rows, {"unused": "system"}), tiny.tokenizer)
    assert row["prompt"] == "Add.\n"


def test_rows_that_trainers_read_stay_as_they_are():
    rows = Dataset.from_list([{"prompt": "a", "completion": "b", "question": "c", "answer": "d"}])
    assert recognized(rows, tiny.tokenizer) is rows


def test_names_of_columns_are_checked():
    rows = Dataset.from_list([{"prompt": "old", "question": "new"}])
    assert list(with_columns(rows, {"prompt": "question"})) == [{"prompt": "new"}]
    assert list(with_columns(rows, {"prompt": "question", "question": "prompt"})) == [
        {"question": "old", "prompt": "new"}
    ]
    with pytest.raises(ValueError, match=r"no column answer\. The dataset has \['prompt', 'question'\]"):
        with_columns(rows, {"completion": "answer"})
    assert columns_of_words("prompt=a, completion=b") == {"prompt": "a", "completion": "b"}
    for words in ("prompt", "prompt=", "a=b=c"):
        with pytest.raises(ValueError, match="write new=old"):
            columns_of_words(words)


def test_chatml_ends_an_answer_with_a_token_of_the_vocabulary(base: str):
    tokenizer = tokenizer_of(base, "chatml")
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert text == "<|im_start|>user\nhi</s>\n<|im_start|>assistant\nyes</s>\n"
    prompt = tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(prompt)
    tokenizer.add_tokens(["<|im_end|>"])
    tokenizer.save_pretrained("with_end")
    assert tokenizer_of("with_end", "chatml").apply_chat_template(TALK[:1], tokenize=False).endswith("hi<|im_end|>\n")


def test_a_template_comes_from_a_file_or_a_model(base: str):
    Path("template.jinja").write_text("{{ messages }}")
    assert tokenizer_of(base, "template.jinja").chat_template == "{{ messages }}"
    tiny.tokenizer(chat_template="{{ tools }}").save_pretrained("other")
    assert tokenizer_of(base, "other").chat_template == "{{ tools }}"
    with pytest.raises(ValueError, match="that model has no chat template"):
        tokenizer_of(base, base)
