"""Messages: text blocks are used, image blocks are rejected, and the nulls that Arrow adds are dropped."""

import json
import warnings
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from tests.lm import tiny
from tests.lm.test_late_failures import SETTINGS, make
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from trimtab_lm.data.kinds import check_texts

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: "
    "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content or [] %}{{ b.text }}{% endfor %}"
    "{% endif %}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endif %}.{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer(template: str = TEMPLATE) -> Any:
    made = tiny.tokenizer()
    made.chat_template = template
    return made


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def words(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def long_model(kind: str) -> Any:
    sizes = {"n_embd": tiny.WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 512, "num_labels": 1}
    config = GPT2Config(**sizes | tiny.TOKENS)
    return tiny.seeded(GPT2ForSequenceClassification if kind == "reward" else GPT2LMHeadModel, config)


ANSWER = say("assistant", "fine")


def row(kind: str, asked: dict[str, Any], answer: dict[str, Any] = ANSWER) -> dict[str, Any]:
    if kind == "sft":
        return {"messages": [asked, answer]}
    if kind == "grpo":
        return {"prompt": [asked]}
    if kind == "iterative_sft":
        return {"prompt": [asked], "completion": [answer]}
    worse = "no" if isinstance(answer["content"], str) else words("no")
    return {"chosen": [asked, answer], "rejected": [asked, say("assistant", worse)]}


CHATTING = ["sft", "dpo", "reward", "grpo", "iterative_sft"]
BLOCKS = [
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    {"type": "input_image", "text": "x"},
    {"type": "video", "video": "a.mp4"},
    {"type": "input_audio", "input_audio": {"data": "AAAA"}},
    {"image": "a.png"},
]


@pytest.mark.parametrize("kind", CHATTING)
def test_blocks_of_images_are_refused_in_any_row(kind, tmp_path):
    options = {**SETTINGS.get(kind, {}), "processing_class": tokenizer()}
    good = row(kind, say("user", words("hi")), say("assistant", words("yo")))
    bad = row(kind, say("user", [*words("hi"), BLOCKS[0]]), say("assistant", words("yo")))
    with pytest.raises(ValueError, match=r"Row 1: A message of role 'user' holds 'image'\. .*text alone"):
        make(kind, tmp_path, Dataset.from_list([good, bad]), **options)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_of_an_image_a_video_or_a_sound_is_refused(block):
    with pytest.raises(ValueError, match=r"A message of role 'tool' holds '(image|video|audio)"):
        check_texts(messages=[ANSWER, say("tool", [*words("hi"), block])])
    with pytest.raises(ValueError, match="A message of role 'user' holds 'images'"):
        check_texts(messages=[say("user", "hi", images=["a.png"])])
    check_texts(messages=[say("user", [{**words("hi")[0], "image": None}], images=None), say("assistant", None)])


@pytest.mark.parametrize("assistant_only", [False, True])
def test_blocks_of_images_are_refused_under_a_template_with_generation_marks(assistant_only, tmp_path):
    marked = TEMPLATE.replace("{{ m.role }}: ", "{{ m.role }}: {% generation %}x{% endgeneration %}")
    rows = Dataset.from_list([{"messages": [say("user", [{"type": "image"}]), say("assistant", [])]}])
    options = {"assistant_only_loss": assistant_only, "processing_class": tokenizer(marked)}
    with pytest.raises(ValueError, match="holds 'image'"):
        make("sft", tmp_path, rows, **options)


@pytest.mark.parametrize("kind", CHATTING)
def test_blocks_of_text_are_texts(kind, tmp_path):
    options = {**SETTINGS.get(kind, {}), "processing_class": tokenizer()}
    blocks = row(kind, say("user", words("hi")), say("assistant", words("yo")))
    texts = row(kind, say("user", "hi"), say("assistant", "yo"))
    one, other = (make(kind, tmp_path, Dataset.from_list([data] * 2), **options) for data in (blocks, texts))
    names = [name for name in other.train_dataset.column_names if "ids" in name or "labels" in name]
    assert names
    for name in names:
        assert list(one.train_dataset[name]) == list(other.train_dataset[name])


# Nulls ----------------------------------------------------------------------------------------------------------------

ARGUMENTS = [{"a": 1, "deep": {"x": 1}}, {"deep": {"y": [{"p": 1}, {"q": 2}]}, "b": "two"}, {}]


def called(arguments: Any, **more: Any) -> dict[str, Any]:
    return say("assistant", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}])


def recorded() -> tuple[Any, list[str]]:
    """Returns a tokenizer, and a list of the texts that its chat template writes."""
    seen: list[str] = []
    speaks = tokenizer()
    write = speaks.apply_chat_template
    speaks.apply_chat_template = lambda *args, **settings: (seen.append(write(*args, **settings)), seen[-1])[1]
    return speaks, seen


def test_arguments_that_other_calls_have_are_not_learnt_as_null(tmp_path):
    rows = [{"messages": [say("user", "go"), called(arguments), say("assistant", None)]} for arguments in ARGUMENTS]
    table = Dataset.from_list(rows)
    assert table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["b"] is None
    for data in (table, IterableDataset.from_generator(lambda: iter(table))):
        speaks, seen = recorded()
        with pytest.warns(UserWarning, match="Arrow writes null") as caught:
            list(make("sft", tmp_path, data, long_model("sft"), processing_class=speaks).train_dataset)
        assert len([one for one in caught if "Arrow" in str(one.message)]) == 1
        wanted = [f"user: go.assistant: {json.dumps(one)}.assistant: ." for one in ARGUMENTS]
        assert [text for text in seen if text in wanted] == wanted
        assert "null" not in "".join(seen)


@pytest.mark.parametrize("kind", CHATTING)
def test_tools_and_calls_are_those_of_the_row_in_every_trainer(kind, tmp_path):
    """The tokens equal those from single-row datasets, where Arrow fills nothing in."""
    data = []
    for number, arguments in enumerate(ARGUMENTS[:2]):
        one = row(kind, say("user", "go"), called(arguments))
        if kind == "grpo":
            one = {"prompt": [say("user", "go"), called(arguments), say("user", "on")]}
        if kind != "iterative_sft":
            schema = {"properties": {name: {"type": "string"} for name in arguments}}
            one["tools"] = [{"function": {"name": f"f{number}", "parameters": schema}}]
        data.append(one)
    options = {**SETTINGS.get(kind, {}), "processing_class": tokenizer()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Arguments of tool calls")
        together = make(kind, tmp_path, Dataset.from_list(data), long_model(kind), **options).train_dataset
        for number, one in enumerate(data):
            alone = make(kind, tmp_path, Dataset.from_list([one]), long_model(kind), **options).train_dataset[0]
            for name, ids in alone.items():
                if name.endswith(("ids", "labels", "chosen", "rejected")):
                    assert together[number][name] == ids, name


def test_arguments_as_json_keep_their_nulls_without_a_warning(tmp_path):
    rows = [{"messages": [say("user", "go"), called('{"a": null}')]}]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sft = make("sft", tmp_path, Dataset.from_list(rows), processing_class=tokenizer())
    assert "null" in sft.processing_class.decode(sft.train_dataset[0]["input_ids"])
