"""Episodes: their tokens, who wrote each, when they end, and what seeds determine."""

from functools import partial

import pytest
import torch
from tests.lm import tiny
from tests.lm.data.test_tokenization import CHATML, byte_level
from tests.lm.environments.conversations import Echo, Script, ids_of, rollout, sampler, tensor_of

from trimtab_common.seeding import sampling_seed
from trimtab_lm.data.tokenization import encode_prompt
from trimtab_lm.environments import EnvironmentRollout, Reply, ToolEnvironment
from trimtab_lm.sampling.backends import ContinuousBatchingRollout
from trimtab_lm.sampling.rollout import Rollout, SamplingSettings

PROMPTS = tiny.rows(4, 2, 6)
pytestmark = pytest.mark.filterwarnings("ignore:The sampler is not the policy")


def episodes_of(backend, prompts=PROMPTS, generations=1, seed=0, model=None, **options):
    backend.sync(model or tiny.gpt2(dtype=torch.float64), 1)
    return backend.generate(prompts, num_generations=generations, version=1, seed=seed, **options)


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_two_turns_worked_by_hand():
    """The policy says "ab", hears "ab.", says "c." and is done; in the other episode it is done after one turn."""
    script = Script({"x": ["ab", "d."], "xabab.": ["c."]})

    class Partner(Echo):
        def step(self, text, ids):
            reply = super().step(text, ids)
            return reply._replace(done=text in ("c.", "d."))

    talk = episodes_of(rollout(script, Partner), [tensor_of("x")], generations=2)
    assert equal(talk.completions, [tensor_of("abab.c."), tensor_of("d.")])
    assert talk.ended == [True, True]
    masks, rewards, numbers = talk.episodes
    assert equal(masks, [torch.tensor([1, 1, 0, 0, 0, 1, 1]), torch.tensor([1, 1])])
    assert equal(rewards, [torch.tensor([0.0, 2, 0, 0, 0, 0, 2]), torch.tensor([0.0, 2])])
    assert equal(talk.logprobs, [torch.tensor([-1.0, -2, 0, 0, 0, -1, -2]), torch.tensor([-1.0, -2])])
    assert numbers == {"turns": [2, 1], "errors": [0, 0], "cut": [0, 0]}


def test_a_one_turn_environment_samples_what_its_backend_samples():
    plain = episodes_of(sampler(6), generations=12)
    talk = episodes_of(rollout(sampler(6), partial(Echo, 1)), generations=12)
    assert equal(talk.completions, plain.completions)
    assert talk.ended == plain.ended
    assert any(talk.ended)
    assert not all(talk.ended)


@pytest.mark.parametrize("name", ["transformers", "continuous batching"])
def test_greedy_episodes_are_those_of_a_loop_over_generate(name):
    """Each conversation runs alone, with transformers' own greedy search."""
    model, tokenizer, settings = tiny.llama().eval(), tiny.tokenizer(), SamplingSettings(4, top_k=1)
    backend = sampler(top_k=1) if name == "transformers" else ContinuousBatchingRollout(settings, tokenizer)
    talk = episodes_of(rollout(backend), model=model)
    for prompt, completion, mask in zip(PROMPTS, talk.completions, talk.episodes.masks, strict=True):
        context, wrote = prompt, []
        for turn in range(3):
            inputs = {"input_ids": context[None], "attention_mask": torch.ones_like(context)[None]}
            answer = model.generate(**inputs, do_sample=False, max_new_tokens=4)[0, len(context) :]
            observation = [] if turn == 2 else ids_of(tokenizer.decode(answer, skip_special_tokens=True) + ".")
            context = torch.cat([context, answer, torch.tensor(observation, dtype=torch.long)])
            wrote += [1] * len(answer) + [0] * len(observation)
        assert torch.equal(completion, context[len(prompt) :])
        assert mask.tolist() == wrote
    if name == "continuous batching":
        for logprobs, mask in zip(talk.logprobs, talk.episodes.masks, strict=True):
            assert torch.equal(logprobs[mask == 0], torch.zeros(int((mask == 0).sum())))
            torch.testing.assert_close(logprobs[mask == 1], torch.zeros(int(mask.sum())))  # greedy: probability 1


def test_a_chat_with_a_tool_is_the_conversation_that_the_template_writes():
    tokenizer = byte_level(CHATML)
    call = '<tool_call>{"name": "double", "arguments": {"word": "ho"}}</tool_call>'
    turns = [tokenizer(f"{text}<|im_end|>")["input_ids"] for text in (call, "He says hoho.")]

    class Reciting(Script):
        def generate(self, prompts, **options):
            return Rollout([torch.tensor(turns[len(self.turns)])], [self.turns.setdefault(len(self.turns), True)])

    def double(word: str) -> str:
        return 2 * word

    environment = partial(ToolEnvironment, [double])
    talk = EnvironmentRollout(Reciting({}, 200), environment, tokenizer, max_completion_length=999, role="tool")
    question = [{"role": "user", "content": "What does he say?"}]
    prompt = torch.tensor(encode_prompt(tokenizer, question)["input_ids"])
    sampled = episodes_of(talk, [prompt], model=tiny.llama())
    answers = [{"role": "assistant", "content": call}, {"role": "tool", "content": "hoho"}]
    answers.append({"role": "assistant", "content": "He says hoho."})
    whole = tokenizer.apply_chat_template([*question, *answers], tokenize=False)
    assert tokenizer.decode(torch.cat([prompt, sampled.completions[0]])) == whole.removesuffix("\n")
    written = tokenizer.decode(sampled.completions[0][sampled.episodes.masks[0] == 1])
    assert written == f"{call}<|im_end|>He says hoho.<|im_end|>"


def test_settings_of_a_row_reach_the_template_of_an_observation():
    talk = rollout(sampler(), role="user", chat_template_kwargs={"mood": "glad"})
    talk.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ mood }}{% endfor %}"
    rows = [{"chat_template_kwargs": {"mood": mood}} for mood in ("sad", None)]
    sampled = episodes_of(talk, PROMPTS[:2], rows=rows)
    for ids, mask, mood in zip(sampled.completions, sampled.episodes.masks, ("sad", "glad"), strict=True):
        assert tiny.tokenizer().decode(ids[mask == 0]).endswith(f".{mood}")


def test_the_turns_of_a_batch_have_the_seeds_that_are_promised():
    model, backend, seed = tiny.gpt2(dtype=torch.float64), sampler(), 5
    talk = episodes_of(rollout(sampler()), seed=seed, model=model)
    contexts = list(PROMPTS)
    for turn in range(3):
        turn_seed = seed if turn == 0 else sampling_seed(seed, rank=0, draw=turn)
        answers = episodes_of(backend, contexts, seed=turn_seed, model=model).completions
        heard = [tiny.tokenizer().decode(answer, skip_special_tokens=True) + "." for answer in answers]
        heard = ["" for _ in heard] if turn == 2 else heard
        contexts = [
            torch.cat([*pair, tensor_of(text).long()]) for *pair, text in zip(contexts, answers, heard, strict=True)
        ]
    assert equal(talk.completions, [whole[len(prompt) :] for prompt, whole in zip(PROMPTS, contexts, strict=True)])


def test_the_same_seed_gives_the_same_episodes_and_another_gives_others():
    backend = rollout(sampler())
    state = torch.get_rng_state()
    one, again, other = (episodes_of(backend, generations=2, seed=seed) for seed in (1, 1, 2))
    assert equal(one.completions, again.completions)
    assert not all(torch.equal(*pair) for pair in zip(one.completions, other.completions, strict=True))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "turns"),
    [
        ({"max_completion_length": 24}, 3),  # 4 + 5 + 4 + 5 + 4 = 22
        ({"max_completion_length": 22}, 3),
        ({"max_completion_length": 21}, 2),
        ({"max_completion_length": 12}, 1),
        ({"max_completion_length": 4}, 1),
        ({"max_turns": 2}, 2),
    ],
)
def test_a_turn_begins_only_where_it_has_room(options, turns):
    script = Script({"x" + "abcdabcd." * k: ["abcd"] for k in range(3)})
    talk = episodes_of(rollout(script, **options), [tensor_of("x")])
    assert tiny.tokenizer().decode(talk.completions[0]) == "abcdabcd." * (turns - 1) + "abcd"
    assert talk.episodes.numbers["turns"] == [turns]
    assert talk.ended == [False]


def test_an_episode_stays_within_the_positions_of_the_model():
    """GPT-2 has 64 positions: a prompt of 51 leaves the 13 for two turns and an observation; one of 52 does not."""
    for prompt, turns in (("x" * 51, 2), ("x" * 52, 1)):
        script = Script({prompt: ["abcd"], f"{prompt}abcdabcd.": ["abcd"]})
        assert episodes_of(rollout(script), [tensor_of(prompt)]).episodes.numbers["turns"] == [turns]
    with pytest.raises(ValueError, match="64 positions"):
        episodes_of(rollout(sampler()), [tensor_of("x" * 61)])


def test_a_process_whose_episodes_are_over_samples_from_a_prompt(monkeypatch):
    """While another process goes on. The context of its own episode may fill all positions, as here."""
    monkeypatch.setattr("trimtab_lm.environments.rollout.gather_over_ranks", lambda is_active: [is_active, True])
    prompt, asked = "x" * 51, []

    class Listed(Script):
        def generate(self, prompts, **options):
            asked.append(list(map(len, prompts)))
            return super().generate(prompts, **options)

    turns = {prompt: ["abcd"], f"{prompt}abcdabcd.": ["abcd"]}
    talk = episodes_of(rollout(Listed(turns), max_turns=4), [tensor_of(prompt)])
    assert asked == [[51], [60], [51], [51]]
    assert talk.episodes.numbers["turns"] == [2]
    asked.clear()
    assert episodes_of(rollout(Listed(turns), max_turns=2), []).completions == []
    assert asked == [[], []]


def test_an_episode_whose_last_turn_was_cut_is_cut():
    class Once(Echo):
        def step(self, text, ids):
            return Reply(done=True)

    talk = episodes_of(rollout(Script({"x": ["ab", "ab."]}), Once), [tensor_of("x")], generations=2)
    assert talk.ended == [False, True]


def test_an_environment_gets_the_columns_that_it_names_and_a_seed_of_its_own():
    seen = []

    class Curious(Echo):
        def reset(self, answer, seed, unknown="default"):
            super().reset()
            seen.append((answer, seed, unknown))

    rows = [{"answer": number, "prompt": "no use"} for number in range(2)]
    backend = rollout(sampler(), Curious)
    for seed in (0, 0, 1):
        episodes_of(backend, PROMPTS[:2], 2, seed, rows=rows)
    assert [answer for answer, *_ in seen] == [0, 0, 1, 1] * 3
    assert {unknown for *_, unknown in seen} == {"default"}
    seeds = [seed for _, seed, _ in seen]
    assert seeds[:4] == seeds[4:8]
    assert len(set(seeds)) == 8
    episodes_of(backend, PROMPTS[:1], rows=[{"answer": 0, "seed": 7}])
    assert seen[-1][1] == 7


def test_a_column_that_is_missing_is_named():
    class Needy(Echo):
        def reset(self, answer):
            super().reset()

    with pytest.raises(TypeError, match=r"Needy.reset needs \['answer'\]; there are \['prompt', 'seed'\]"):
        episodes_of(rollout(sampler(), Needy), PROMPTS[:1], rows=[{"prompt": "x"}])


def test_settings_that_leave_no_room_and_models_without_a_place_for_observations_are_refused():
    with pytest.raises(ValueError, match="max_completion_length=3, max_turns=8"):
        rollout(sampler(4), max_completion_length=3)
    with pytest.raises(ValueError, match="max_turns=0"):
        rollout(sampler(), max_turns=0)
    with pytest.raises(ValueError, match="concurrency=0"):
        rollout(sampler(), concurrency=0)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        rollout(sampler()).sync(tiny.t5(), 1)
