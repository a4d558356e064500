"""The benchmarks: their counts, the results that they refuse, and the table that they write."""

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tools.bench import __main__ as bench
from tools.bench import process
from tools.bench.__main__ import README, BenchError, check, main
from tools.bench.measuring import Clock, Tokens
from tools.bench.models import TRAINED, write_language_models, write_trained
from tools.bench.profiling import second_step, shares
from tools.bench.sizes import SIZES, token_ids
from tools.bench.table import BEGIN, END, headline, page
from tools.bench.tasks import ddpo_to_reward, ppo, sft
from tools.bench.works import ABLATIONS, WORKS
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextModel, LlamaForCausalLM

SMOKE = SIZES["smoke-cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Writes the models of the smallest size and returns their folder."""
    folder = tmp_path_factory.mktemp("models")
    write_language_models(SMOKE, folder)
    return str(folder)


def report(seconds: float, **facts: float) -> dict[str, Any]:
    """Returns a process's report on one step of 10 tokens."""
    figures = {"memory": 2**20, "matmul": 1e9, "flops": 1e8, "units": 10, "unit": "tokens", "versions": {"torch": "2"}}
    return {"seconds": [seconds], "processor_seconds": [seconds / 2], **figures, "facts": {"positions": 12.0, **facts}}


def test_model_flops_are_what_torch_counts_in_a_forward_pass(folder):
    model = LlamaForCausalLM.from_pretrained(f"{folder}/policy", attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, 7, dtype=torch.long))
    every_pair = Tokens(read=7, pairs=7 * 7, scored=7)  # eager attention also computes the masked half
    assert every_pair.forward_flops(SMOKE) == counter.get_total_flops()


def test_a_shared_prompt_is_read_once():
    pair = Tokens.of(2, [1, 1], scored=2)
    # Positions 0 and 1 see 1 and 2; each answer sees the prompt and itself.
    assert pair == Tokens(read=4, pairs=1 + 2 + 3 + 3, scored=2)


@pytest.mark.parametrize(("packing", "tokens"), [(False, sum(map(len, token_ids(SMOKE, 4, seed=0)[2:]))), (True, 96)])
def test_sft_reads_its_tokens_and_times_the_steps_after_the_first(folder, packing, tokens):
    measurement = sft.run("trimtab_lm", SMOKE, {"packing": packing}, folder)
    assert len(measurement.seconds) == SMOKE.steps
    assert measurement.facts["tokens read"] == measurement.units == tokens  # 96: two rows of 48
    assert measurement.facts["first loss"] == pytest.approx(torch.tensor(1000.0).log().item(), abs=0.5)


def test_ppo_samples_the_tokens_that_it_counts(folder):
    measurement = ppo.run("trimtab_lm", SMOKE, {"phase": "generate"}, folder)
    assert measurement.facts["sampled"] == measurement.units == SMOKE.ppo_batch * SMOKE.ppo_new_tokens


def test_sides_that_computed_something_else_are_not_compared():
    work = next(work for work in WORKS if work.name == "dpo")
    check(work, {"ours": report(1, **{"first loss": 0.69}), "other": report(1, **{"first loss": 0.69005})}, rounding=0)
    with pytest.raises(BenchError, match=r"first loss: 0\.69 here and 0\.691 in trl"):
        check(
            work, {"ours": report(1, **{"first loss": 0.69}), "other": report(1, **{"first loss": 0.691})}, rounding=0
        )


def test_the_table_has_the_ratio_of_neighbouring_processes_and_leaves_the_text_around_it():
    pairs = [{"load": 1.0, "ours": report(2), "other": report(other)} for other in (4, 6, 10)]
    result = {"work": "sft", "device": "cpu", "day": "a day", "machine": "a machine", "commit": "abc", "pairs": pairs}
    text = page(f"before\n{BEGIN}\nold table\n{END}\nafter\n", [result])
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old table" not in text
    (row,) = (line for line in text.splitlines() if line.startswith("| sft |"))
    # The medians are 6 and 2 s; 1e8 FLOPs in 2 s are 5% of 1e9 per second.
    assert "| 6 / 2 | **3.00** (2.00 to 5.00) | 1 / 1 |" in row
    assert row.endswith("| 1.67 / 5 tokens | 2 / 5 | 12 / 12 |")
    assert page(text, [result]) == text


def test_a_row_that_was_disturbed_is_marked_and_counts_processor_time():
    pairs = [{"load": 4.0, "ours": report(2), "other": report(8)}]
    result = {"work": "sft", "device": "cpu", "day": "a day", "machine": "a machine", "commit": "abc", "pairs": pairs}
    assert "| sft* | TRL 1.16.0 / trimtab | 4 / 1 | **4.00** (one pair) |" in page(f"{BEGIN}{END}", [result])


def test_the_headline_has_the_ratios_of_the_fair_rows_and_of_no_other():
    def result(work: str, other: float) -> dict[str, Any]:
        origin = {"work": work, "device": "cpu", "day": "a day", "machine": "a machine", "commit": "abc"}
        return origin | {"pairs": [{"load": 1.0, "ours": report(2), "other": report(other)}]}

    results = [result("sft", 100), result("sft-positions", 5), result("grpo-short", 3), result("grpo-long", 9)]
    (text,) = headline(results)
    assert text.endswith("SFT **2.5** (`sft-positions`), GRPO **1.5 to 4.5** (`grpo-short`, `grpo-long`).")
    assert text in page(f"{BEGIN}{END}", results)
    assert headline(results[:1]) == []


def test_a_process_takes_the_sizes_of_its_row(folder, monkeypatch):
    seen = []
    monkeypatch.setattr(sft, "run", lambda package, size, settings, folder: seen.append((size, settings)))
    order = {"task": "sft", "package": "trl", "size": "smoke-cpu", "pair": 1, "folder": folder, "is_profiled": False}
    with pytest.raises(TypeError):  # there is no measurement to report
        process.main(order | {"settings": {"sizes": {"median": 7}, "packing": True}})
    assert seen == [(replace(SMOKE, pair=1, median=7), {"packing": True})]


def test_the_shares_of_a_profile_add_up_and_name_what_ran():
    weight = torch.nn.Parameter(torch.randn(256, 256))
    clock = Clock("cpu")
    with second_step() as profiler:
        clock.profiler = profiler
        clock.time(lambda: (weight @ weight).sum().backward(), 1)
        clock.time(lambda: torch.conv2d(torch.ones(1, 1, 64, 64), torch.ones(1, 1, 3, 3)), 3)  # not profiled
    parts = shares(profiler)
    assert sum(parts.values()) == pytest.approx(1)
    assert parts["matrix products"] > max(parts["attention"], parts["optimizer"]) == parts["convolutions"] == 0


def test_a_profile_has_a_row_of_its_own_beside_the_pairs_of_its_work():
    pairs = [{"load": 1.0, "ours": report(2), "other": report(4)}]
    result = {"work": "ddpo", "device": "cpu", "day": "a day", "machine": "a machine", "commit": "abc", "pairs": pairs}
    text = page(f"{BEGIN}{END}", [{**result, "profile": {"attention": 0.25, "Python": 0.75}}])
    assert "| work | attention | Python |\n| --- | --- | --- |\n| ddpo | 25% | 75% |" in text
    assert "| ddpo | TRL 0.23.1 / trimtab |" in text


def test_no_two_rows_have_one_name():
    names = [work.name for work in [*WORKS, *ABLATIONS]]
    assert len(set(names)) == len(names)


@pytest.mark.slow  # two processes import torch and transformers
def test_two_processes_of_ours_are_measured_beside_each_other(capsys, monkeypatch):
    monkeypatch.setattr(bench, "python_of", lambda _: sys.executable)  # no environment is installed
    before = README.read_text()
    assert main(["--smoke", "--repeats", "1", "--only", "sft: no padding"]) == 0
    assert "| sft: no padding" in capsys.readouterr().out
    assert README.read_text() == before


@pytest.mark.parametrize("name", TRAINED)
def test_transformers_4_finds_the_text_encoder_under_its_names(name: str, tmp_path: Path) -> None:
    write_trained(name, tmp_path, samples=1)
    assert all(name.startswith("text_model.") for name in load_file(tmp_path / "text_encoder/model.safetensors"))
    encoder, original = (
        CLIPTextModel.from_pretrained(folder, subfolder="text_encoder") for folder in (tmp_path, TRAINED[name])
    )
    for name, weight in original.state_dict().items():
        torch.testing.assert_close(encoder.state_dict()[name], weight, rtol=0, atol=0)


@pytest.mark.slow  # two short trainings
def test_ddpo_trains_on_emoji_to_a_goal_and_a_classifier_reads_its_images(tmp_path: Path) -> None:
    write_trained("emoji", tmp_path / "emoji", samples=1)
    size = replace(SMOKE, base="emoji")
    settings = {"sample_num_steps": 2, "group_size": 2}
    measurement = ddpo_to_reward.run("trimtab_lm", size, settings, str(tmp_path))
    assert measurement.facts["epochs"] >= 2
    assert measurement.facts["recognised before"] > 0.5
    assert 0 < measurement.facts["recognised"] <= 1


def test_captions_are_drawn_in_rows_of_the_same() -> None:
    first = [*islice(ddpo_to_reward.drawn(["a", "b", "c"], times=4, seed=3), 40)]
    assert first == [*islice(ddpo_to_reward.drawn(["a", "b", "c"], times=4, seed=3), 40)]
    assert all(len(set(first[start : start + 4])) == 1 for start in range(0, 40, 4))
    assert set(first) == {"a", "b", "c"}
