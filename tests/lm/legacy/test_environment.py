"""TextEnvironment and TextHistory: conversations with tools, as in scripts of 2024."""

import pytest
import torch
from tests.lm import tiny
from tokenizers import processors
from transformers import GPT2Config, GPT2LMHeadModel

from trimtab_lm.legacy.environment import TextEnvironment, TextHistory

TAGS = ["<request>", "<call>", "<response>", "<submit>", "<double>"]


def world(*tags: str, **settings):
    """Returns an environment whose model knows the tags, and a tokenizer that pads with its end token."""
    tokenizer = tiny.tokenizer(pad_token="</s>")
    tokenizer.add_tokens(TAGS)
    sizes = {"n_embd": tiny.WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = tiny.seeded(GPT2LMHeadModel, GPT2Config(**sizes | tiny.TOKENS | {"vocab_size": len(tokenizer)}))
    defaults = {
        "tools": {"double": lambda text: text * 2},
        "reward_fn": lambda texts: [float(len(text)) for text in texts],
        "prompt": "q ",
        "generation_kwargs": {"max_new_tokens": 8, "do_sample": False},
    }
    return TextEnvironment(tiny.with_value_head(model), tokenizer, **defaults | settings)


def says(environment, *turns):
    """Makes the model write these texts token by token, and never end by itself."""
    written = iter(environment.tokenizer("".join(turns) + "z" * 9, add_special_tokens=False)["input_ids"])

    def hook(module, arguments, output):
        output.logits[:] = -1e4
        output.logits[:, -1, next(written)] = 1e4
        return output

    return environment.model.pretrained_model.register_forward_hook(hook)


def test_a_history_is_query_response_and_mask():
    history = TextHistory("ab", torch.tensor([1, 2]))
    history.append_segment("c", torch.tensor([3]), system=False)
    history.append_segment("de", torch.tensor([4, 5]))
    assert (history.text, history.last_text_segment, history.system_spans) == ("abcde", "de", [True, False, True])
    query, response, mask = history.split_query_response_tokens()
    assert (query.tolist(), response.tolist(), mask.tolist()) == ([1, 2], [3, 4, 5], [1, 0, 0])
    assert TextHistory("a", torch.tensor([1]), system=False).token_masks.tolist() == [1]
    history.complete(truncated=True)
    assert history.completed
    assert history.truncated
    with pytest.raises(ValueError, match="A segment needs text and tokens, got ''"):
        history.append_segment("", torch.tensor([1]))
    history.show_text(show_legend=True)
    history.show_tokens(tiny.tokenizer())


@pytest.mark.filterwarnings("ignore:step .* health/")
def test_the_model_calls_a_tool_reads_the_answer_and_submits():
    environment = world()
    with says(environment, "<request><double>ab<call>", "abab<submit>"):
        queries, responses, masks, rewards, (history,) = environment.run(["a"])
    assert history.text == "q a<request><double>ab<call>abab<response>abab<submit>"
    assert (history.completed, history.truncated) == (True, False)
    decode = environment.tokenizer.decode
    assert decode(responses[0][masks[0] == 1]) == "<request><double>ab<call>abab<submit>"
    assert decode(responses[0][masks[0] == 0]) == "abab<response>"
    assert decode(queries[0]) == "q a"
    assert rewards == [len("abab<submit>")]
    sizes = {"batch_size": 1, "mini_batch_size": 1}
    trainer = tiny.ppo(environment.model, arguments={"tokenizer": environment.tokenizer}, **sizes)
    stats = trainer.step(queries, responses, rewards, masks)
    assert stats["tokens/responses_len_mean"] > 0


def test_only_a_conversation_begins_with_bos():
    environment = world()
    process = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tiny.BOS)])
    environment.tokenizer.backend_tokenizer.post_processor = process
    for prompt in ("q ", "<s>q "):
        environment.prompt = prompt
        with says(environment, "<request><double>ab<call>", "abab<submit>"):
            queries, responses, *_ = environment.run(["a"])
        assert queries[0].tolist().count(tiny.BOS) == 1
        assert tiny.BOS not in responses[0]


def test_rows_of_a_batch_stop_by_themselves():
    environment = world()
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    alone = [environment._generate_batched([row])[0] for row in rows]
    assert [turn.tolist() for turn in environment._generate_batched(rows)] == [turn.tolist() for turn in alone]


@pytest.mark.parametrize("own", ["zz", ["zz"]])
def test_stop_strings_of_the_caller_end_a_turn_too(own):
    environment = world(generation_kwargs={"max_new_tokens": 8, "do_sample": False, "stop_strings": own})
    with says(environment, "abzzcd"):
        (turn,) = environment._generate_batched([torch.tensor([5, 6])])
    assert environment.tokenizer.decode(turn) == "abzz"
    with says(environment, "<call>abcd"):
        (turn,) = environment._generate_batched([torch.tensor([5, 6])])
    assert environment.tokenizer.decode(turn) == "<call>"


def test_calls_are_parsed():
    parse = world().parse_tool_call
    assert parse("so <request><Tool1>a > b<call>") == ("Tool1", "a > b")
    for broken in ("<Tool1>a<call>", "<request><Tool1>a", "<request>|Tool2|a<call>", "<>ab<>c<>"):
        assert parse(broken) == (None, None)


@pytest.mark.parametrize(
    ("call", "limit", "answer"),
    [
        ("<request><double>ab<call>", 100, "abab"),
        ("<request><double>abcdef<call>", 5, "ab..."),
        ("<request><other>ab<call>", 100, "Unknown tool other."),
        ("<request><fail>ab<call>", 100, "Tool error: no ab"),
        ("<request>ab<call>", 100, "Unknown tool call: <request>ab<call>"),
        ("<request><count>ab<call>", 100, "2"),
    ],
)
def test_tools_answer(call, limit, answer):
    def fail(text):
        raise RuntimeError(f"no {text}")

    environment = world(tools={"double": lambda text: text * 2, "fail": fail, "count": len}, max_tool_reponse=limit)
    history = environment.step(TextHistory(call, torch.tensor([5, 6, 7]), system=False))
    assert history.last_text_segment == answer + "<response>"


def test_a_conversation_ends():
    environment = world(max_turns=2, max_length=30)
    ends = {"no call": True, "<request><double>a<call>": False, "a<submit>": True, "a</s>": True}
    for text, is_over in ends.items():
        history = TextHistory(text, torch.tensor([5]), system=False)
        assert environment.task_end_check(history) == (False, is_over)
    assert environment.task_end_check(TextHistory("no call", torch.tensor([5])), model_turn=False) == (False, False)
    assert environment.task_end_check(TextHistory("long", torch.ones(31, dtype=torch.long))) == (True, True)
    with says(environment, *["<request><double>a<call>"] * 3):
        *_, (history,) = environment.run(["a"])
    assert history.text == "q a" + "<request><double>a<call>aa<response>" * 2


def test_tools_of_a_list_have_the_names_of_their_classes_and_rewards_get_keywords():
    class Calculator:
        def __call__(self, text):
            return str(eval(text))

    environment = world(tools=[Calculator()], reward_fn=lambda texts, answers: answers)
    assert list(environment.tools) == ["Calculator"]

    def generate(histories):  # scripts replace the method
        for history in histories:
            history.append_segment("a<submit>", torch.tensor([5]), system=False)
        return histories

    environment.generate = generate
    assert environment.run(["a", "b"], answers=[1, 2])[3] == [1, 2]
    with pytest.raises(ValueError, match="TextEnvironment needs a reward_fn"):
        world(reward_fn=None).compute_reward([])
