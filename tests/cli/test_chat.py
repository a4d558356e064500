"""`trimtab chat` with piped input: the answers that it prints, and the text that the model reads."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.lm import tiny

from trimtab_cli.chat import Speaker, lines
from trimtab_cli.main import main
from trimtab_lm import AutoModelForCausalLMWithValueHead

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + '.' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a ' }}{% endif %}"
)
GREEDY = ("--temperature=0", "--max-new-tokens=6")


@pytest.fixture
def chat(place, monkeypatch, capsys):
    """Returns a function that returns what the command prints for lines of input."""

    def talk(text, *words, status=0):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        if status:
            with pytest.raises(SystemExit, match=str(status)):
                main(["chat", *words])
        else:
            assert main(["chat", *words]) == 0
        shown = capsys.readouterr()
        return (shown.err if status else shown.out).splitlines()

    return talk


def continuation(model, text, count=6):
    """Returns the greedy continuation, token by token, without transformers' generate."""
    ids = tiny.tokenizer()(text)["input_ids"]
    prompt = len(ids)
    while len(ids) < prompt + count and ids[-1] != tiny.EOS:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tiny.tokenizer().decode(ids[prompt:], skip_special_tokens=True).strip()


def test_each_line_is_continued_by_itself(chat):
    model = tiny.gpt2().eval()
    assert chat("the cat\n\na dog\n", "model", *GREEDY) == [continuation(model, text) for text in ("the cat", "a dog")]


def test_model_and_reference_answer_side_by_side(chat):
    other = tiny.gpt2(seed=1)
    other.save_pretrained("other")
    tiny.tokenizer().save_pretrained("other")
    expected = [f"model: {continuation(other.eval(), 'the cat')}"]
    expected.append(f"reference: {continuation(tiny.gpt2().eval(), 'the cat')}")
    assert chat("the cat\n", "other", "--reference=model", *GREEDY) == expected


def test_an_adapter_and_a_value_head_are_loaded(chat):
    base = tiny.gpt2()
    base.name_or_path = str(Path("model").resolve())
    adapted = get_peft_model(
        base, LoraConfig(target_modules=["c_attn"], init_lora_weights=False, task_type="CAUSAL_LM")
    )
    adapted.save_pretrained("adapter")
    AutoModelForCausalLMWithValueHead.from_pretrained("model").save_pretrained("headed")
    for folder in ("adapter", "headed"):
        tiny.tokenizer().save_pretrained(folder)
    assert chat("the cat\n", "adapter", *GREEDY) == [continuation(adapted.eval(), "the cat")]
    assert chat("the cat\n", "headed", *GREEDY) == [continuation(tiny.gpt2().eval(), "the cat")]


def test_a_model_is_loaded_in_its_own_type(place):
    tiny.gpt2().bfloat16().save_pretrained("half")
    tiny.tokenizer().save_pretrained("half")
    assert Speaker.load("half").model.dtype == torch.bfloat16


def test_a_chat_template_gives_the_model_the_conversation(place):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained("model")
    speaker, greedy = Speaker.load("model", system="be kind"), {"max_new_tokens": 4, "do_sample": False}
    model = tiny.gpt2().eval()
    first = speaker.answer("hi", greedy)
    assert first == continuation(model, "s be kind.u hi.a ", 4)
    assert speaker.answer("why", greedy) == continuation(model, f"s be kind.u hi.a {first}.u why.a ", 4)
    speaker.forget()
    assert speaker.answer("hi", greedy) == first


def test_a_terminal_shows_a_prompt(monkeypatch, capsys):
    typed, prompts = ["the cat", "a dog"], []

    def answer(prompt):
        prompts.append(prompt)
        if not typed:
            raise EOFError
        return typed.pop(0)

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert list(lines()) == ["the cat", "a dog"]
    assert prompts == ["> "] * 3
    assert capsys.readouterr().out == "\n"


def test_a_line_that_is_too_long_leaves_the_talk_open(chat, capsys):
    assert chat(f"{'a' * 80}\nthe cat\n", "model", *GREEDY) == [continuation(tiny.gpt2().eval(), "the cat")]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["runs/none"], "There is no file or folder runs/none."),
        (["scorer"], "scorer is a reward model, which writes no text."),
        (["model", "--system=be kind"], "model has no chat template"),
        (["model", "--max-new-tokens=0"], "use 1 token or more"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_status_2(words, error, chat):
    Path("runs").mkdir()
    tiny.scorer().save_pretrained("scorer")
    (line,) = [line for line in chat("", *words, status=2) if line.startswith("trimtab")]
    assert line.startswith("trimtab chat: error: ")
    assert error in line
