"""Between two turns the policy reads what its chat template writes there."""

import pytest
from tests.lm.data.test_tokenization import CHATML, LLAMA3, MISTRAL, PLAIN, THINKING, byte_level, sentencepiece

from trimtab_lm.environments.observations import observation_ids

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who sings?"}]
ANSWER = {"role": "assistant", "content": "I ask the birds."}
RESULT = [{"role": "tool", "content": "the birds"}]
STOPS = {"chatml": "<|im_end|>", "llama 3": "<|eot_id|>", "mistral": "</s>", "thinking": "<|im_end|>", "plain": ""}
TEMPLATES = {"chatml": CHATML, "llama 3": LLAMA3, "mistral": MISTRAL, "thinking": THINKING, "plain": PLAIN}


def read(tokenizer, observation, answer, role=None):
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return observation_ids(tokenizer, observation, text=text, ids=ids, role=role)


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_answer_and_observation_are_the_rendered_conversation(name, is_closed):
    tokenizer = byte_level(TEMPLATES[name])

    def render(messages):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    observation = [{"role": "user", "content": "the birds"}] if name == "mistral" else RESULT
    answer = ANSWER["content"] + (STOPS[name] if is_closed else "")
    ids = read(tokenizer, observation, answer)
    before = render(PROMPT).removesuffix("<think>\n") + (" " if name == "mistral" else "")
    assert before + answer + tokenizer.decode(ids) == render([*PROMPT, ANSWER, *observation])


def test_a_text_is_a_message_of_the_role_or_itself():
    tokenizer = byte_level(CHATML)
    answer = "I ask the birds.<|im_end|>"
    assert read(tokenizer, "the birds", answer, role="tool") == read(tokenizer, RESULT, answer)
    assert tokenizer.decode(read(tokenizer, "the birds", answer)) == "the birds"


def test_token_ids_are_read_as_they_are():
    assert read(byte_level(CHATML), [5, 3, 8], "Hm.") == [5, 3, 8]
    assert read(byte_level(CHATML), [], "Hm.") == []
    assert read(byte_level(CHATML), "", "Hm.") == []


def test_the_beginning_of_a_sequence_is_not_written_into_its_middle():
    tokenizer = sentencepiece(LLAMA3)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in read(tokenizer, RESULT, "Hm.<|eot_id|>")


def test_a_template_that_drops_a_thought_once_a_user_speaks_is_refused():
    tokenizer = byte_level(THINKING)
    answer = "<think>\nbirds?\n</think>\n\nI ask them.<|im_end|>"
    assert "the birds" in tokenizer.decode(read(tokenizer, RESULT, answer))  # before a tool's result the thought stays
    with pytest.raises(ValueError, match=r"differently once a message of role 'user' follows it, from .*think"):
        read(tokenizer, "the birds", answer, role="user")
