import copy
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import diffusers
import pytest
import torch
import transformers
from matplotlib import pyplot as plt

from experiments.claims import judge
from experiments.clark_2023_draft import train
from experiments.clark_2023_draft.report import DISTANCE, read
from experiments.emoji.judging import IN_TURN, QUALITY, RANGES, contact_sheet, largest_kept
from experiments.emoji.rewards import warmth
from experiments.reports import Report
from experiments.run_folders import Run, finished_runs
from experiments.zheng_2025_nft import report as zheng
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline

TINY = {"sample_num_steps": 2, "eval_pictures": 4, "train_batch_size": 2, "log_with": "none"}
TINY |= {"truncated_backprop_timestep": 1, "flow_grpo.sample_window": 1}
METHODS = ("DDPO", "DRaFT-1", "Diffusion-DPO")
EARLY = "DRaFT-1 with a quarter of the evaluations changes warmth more than DDPO with all"
OF_REWARDS = {"sample_batch_size": 4, "group_size": 2, "train_timestep_fraction": 1.0}
OF_METHOD: dict[str, tuple[dict[str, Any], list[int]]] = {
    # 4 samples of 2 steps, the check of their 8 probabilities, and 3 for each of 8 steps, forward and backward
    "unet ddpo": (OF_REWARDS, [8 + 8 + 24, 72]),
    # as on a U-Net: both steps are random
    "flow ddpo": (OF_REWARDS, [8 + 8 + 24, 72]),
    # 4 samples of 2 steps, of which the first alone is random: 4 probabilities, and 3 for each of 4 steps
    "flow flow_grpo": (OF_REWARDS, [8 + 4 + 12, 44]),
    # 4 samples of 2 steps, and at each of 8 noised ones 3 and the old policy's 1
    "flow nft": (OF_REWARDS, [8 + 32, 80]),
    # 2 samples of 2 steps, and the last step again with a gradient
    "unet draft": ({}, [2 * (2 + 3) * i for i in range(1, 9)]),
    # 8 samples of 2 steps, 4 captions encoded in 2 steps, and both pictures of each pair: 3 and the reference's 1
    "unet diffusion_dpo": ({"pairs": 4}, [16 + 8 + 32, 88]),
}


@pytest.fixture(scope="module", params=["unet", "flow"])
def pipeline(request: pytest.FixtureRequest) -> DDPOStableDiffusionPipeline:
    return train.loaded(request.param, 2)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A run silences the libraries' logging, which tests of other files read."""
    libraries = (diffusers.utils.logging, transformers.logging)
    before = [library.get_verbosity() for library in libraries]
    yield
    for library, verbosity in zip(libraries, before, strict=True):
        library.set_verbosity(verbosity)
        library.enable_progress_bar()


# A run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", OF_METHOD)
def test_a_method_ends_before_it_exceeds_its_evaluations_which_are_counted_by_hand(names: str, tmp_path: Path):
    (base, method), (sizes, counts) = names.split(), OF_METHOD[names]
    budget = {"evaluations": counts[-1] + 9}
    flags = {"base": base, "method": method, "logdir": tmp_path, **TINY, **sizes, **budget}
    train.main(*train.settings([f"--{name}={value}" for name, value in flags.items()]))
    (run,) = finished_runs(tmp_path)
    assert run.curve("step", "evaluations")[1] == counts
    assert run.summary["evaluations"] == counts[-1]
    assert run.summary["evaluations_before"] < counts[0]
    assert run.summary["evaluations_during"] >= (counts[-1] + 9) / 4
    assert run.summary[f"{DISTANCE}_before"] == 0
    assert run.summary[DISTANCE] > 0
    assert {len(numbers) for numbers in run.per_prompt.values()} == {4}
    sheets = [(run.folder / sheet).read_bytes() for sheet in ("before.png", "during.png", "after.png")]
    assert len(set(sheets)) == 3
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words",
    [
        ["--method", "ppo"],
        ["--method", "flow_grpo"],
        ["--base", "vae"],
        ["--reward", "beauty"],
        ["--resume_from", "latest"],
    ],
    ids=" ".join,
)
def test_what_no_run_can_be_is_refused_before_any_work(words: list[str], tmp_path: Path):
    with pytest.raises(SystemExit, match=words[0]):
        train.main(*train.settings([*words, "--logdir", str(tmp_path / "run")]))
    assert not (tmp_path / "run").exists()


def test_no_method_gets_the_beta_of_another():
    assert [config.beta for config in train.settings([]) if hasattr(config, "beta")] == [0.1, 2000]


def test_passes_of_a_model_and_of_its_copies_are_counted():
    layer = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(layer)
    model.forward = lambda inputs: (layer(inputs),)  # a tuple, as of a denoiser
    evaluations = train.Evaluations(model)
    with torch.no_grad():
        model(torch.ones(5, 3))
    assert evaluations.count == 5
    (output,) = model(torch.ones(2, 3))
    assert evaluations.count == 7
    output.sum().backward()
    assert evaluations.count == 11
    copy.deepcopy(model)(torch.ones(4, 3))
    assert evaluations.count == 15


# The control, the pairs and the distance -------------------------------------------------------------------------


def test_the_control_has_gradients_of_warmths_size_in_directions_that_say_nothing():
    images = torch.rand(2000, 3, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (wanted,) = torch.autograd.grad(warmth(images, ()).sum(), images)
    (random_ones,) = torch.autograd.grad(train.RandomColours(0)(images, ()).sum(), images)
    assert torch.allclose(random_ones.flatten(1).norm(dim=1), wanted.flatten(1).norm(dim=1))
    cosines = torch.cosine_similarity(random_ones.flatten(1), wanted.flatten(1))
    assert abs(float(cosines.mean())) < 3 / (3 * 2000) ** 0.5  # the cosine of a random direction in three dimensions
    numbers = torch.stack([train.RandomColours(0)(images, ()), warmth(images, ())]).detach()
    assert abs(float(torch.corrcoef(numbers)[0, 1])) < 0.07
    assert torch.equal(train.RandomColours(1)(images, ()), train.RandomColours(1)(images, ()))


def test_the_warmer_picture_of_a_pair_is_chosen(pipeline: DDPOStableDiffusionPipeline):
    run = train.RunConfig(pairs=6, sample_num_steps=2)
    pairs = train.labelled_pairs(pipeline, warmth, run, seed=0)
    chosen, rejected = (torch.stack([pair[name] for pair in pairs]) for name in ("chosen", "rejected"))
    assert (warmth(chosen, ()) > warmth(rejected, ())).all()
    assert len({pair["prompt"] for pair in pairs}) > 1


def test_the_distance_is_the_relative_square_of_what_the_predictions_moved(pipeline: DDPOStableDiffusionPipeline):
    images = torch.rand(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    drift = train.Drift(pipeline, images, IN_TURN[:3], seed=0)
    assert drift(pipeline.denoiser).tolist() == [0, 0, 0]
    changed = copy.deepcopy(pipeline.denoiser)
    last = changed.conv_out if pipeline.name == "unet" else changed.proj_out
    for weight in (last.weight, last.bias):
        weight.data *= 1.5
    assert float(drift(changed).mean()) == pytest.approx(25, rel=1e-3)


# The report ------------------------------------------------------------------------------------------------------


@pytest.fixture
def close_figures() -> Iterator[None]:
    """Closes the figures that read() draws; otherwise only writing a page closes them."""
    yield
    plt.close("all")


def made_up(folder: Path, method: str, reward: str, seed: int, after: float, *, kept: float = 0.7, base: str) -> Run:
    """A finished run whose warmth rises from 0.06 to `after`, half of it early, and whose quality falls from 0.7."""
    place = folder / f"{method}-{reward}-{seed}"
    place.mkdir(parents=True)
    for sheet in ("before.png", "during.png", "after.png"):
        contact_sheet(torch.rand(16, 3, 8, 8)).save(place / sheet)
    noise = random.Random(f"{method}{reward}{seed}")
    ends = {"warmth": (0.06, (0.06 + after) / 2, after), QUALITY: (0.7, 0.7, kept), DISTANCE: (0.0, 1.0, 2.0)}
    names = {name: [f"{name}_before", f"{name}_during", name] for name in ends}
    summary = {key: value for name, values in ends.items() for key, value in zip(names[name], values, strict=True)}
    numbers = {
        key: [value + noise.gauss(0, 0.001) * (not key.endswith("before")) for _ in IN_TURN]
        for key, value in summary.items()
    }
    config = {"base": base, "method": method, "reward": reward, "seed": seed, "evaluations": 4800}
    return Run(place, config, [], summary, numbers)


def of_all(folder: Path, ends: Mapping[str, float], base: str = "unet", **kept: float) -> list[Run]:
    """Runs of eight seeds of each method; their controls stay where they start."""
    runs = [
        made_up(
            folder, method, reward, seed, after if reward == "warmth" else 0.06, kept=kept.get(method, 0.7), base=base
        )
        for method, after in ends.items()
        for reward in ("warmth", "random")
        for seed in range(10, 18)
    ]
    return runs


def outcomes(runs: list[Run], reading: Callable[[list[Run]], Report] = read) -> dict[str, str]:
    report = reading(runs)
    return {verdict.claim.text: verdict.outcome for verdict in judge(report.claims, report.measured)}


@pytest.mark.usefixtures("close_figures")
def test_planted_effects_are_found(tmp_path: Path):
    found = outcomes(of_all(tmp_path, {"ddpo": 0.10, "draft": 0.25, "diffusion_dpo": 0.17}, draft=0.5))
    assert found["DRaFT-1 gains more than DDPO"] == "reproduced"
    assert found[EARLY] == "reproduced"
    assert found["Diffusion-DPO gains more than DDPO"] == "holds"
    assert found["DRaFT-1 keeps more than 90% of the base model's quality"] == "does not hold"
    assert found["DDPO keeps more than 90% of the base model's quality"] == "holds"
    assert {found[f"{name} raises warmth above its control without a reward"] for name in METHODS} == {"holds"}


@pytest.mark.usefixtures("close_figures")
def test_planted_effects_on_a_flow_are_found(tmp_path: Path):
    runs = of_all(
        tmp_path, {"ddpo": 0.04, "flow_grpo": 0.10, "nft": 0.25, "draft": 0.17, "diffusion_dpo": 0.10}, nft=0.5
    )
    found, early = outcomes(runs, zheng.read), "DiffusionNFT with a quarter of the evaluations changes warmth more than"
    assert found["DiffusionNFT gains more than Flow-GRPO"] == found[f"{early} Flow-GRPO with all"] == "reproduced"
    assert found["Flow-GRPO gains more than DDPO"] == "holds"
    assert found["DRaFT-1 gains more than Flow-GRPO"] == "holds"
    assert found["DRaFT-1 gains more than DiffusionNFT"] == "does not hold"
    assert found["Diffusion-DPO gains more than Flow-GRPO"] == "no effect that matters"
    assert found["DiffusionNFT keeps more than 90% of the base model's quality"] == "does not hold"
    assert found["DRaFT-1 goes further from the base model than Flow-GRPO"] == "no effect that matters"


@pytest.mark.usefixtures("close_figures")
def test_gains_on_a_flow_are_in_per_cent_of_its_own_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RANGES, "flow", {"warmth": 0.2})
    runs = of_all(tmp_path, {"flow_grpo": 0.10}, base="flow")
    gains = zheng.read(runs).measured["gain by Flow-GRPO"]
    assert mean(mean(values) for values in gains.values()) == pytest.approx(100 * 0.04 / 0.2, abs=1)


@pytest.mark.usefixtures("close_figures")
def test_methods_that_gain_as_much_differ_by_nothing_that_matters(tmp_path: Path):
    found = outcomes(of_all(tmp_path, dict.fromkeys(("ddpo", "draft", "diffusion_dpo"), 0.12)))
    assert found["DRaFT-1 gains more than DDPO"] == "no effect that matters"
    assert found["Diffusion-DPO gains more than DDPO"] == "no effect that matters"
    assert found[EARLY] == "does not carry over"


@pytest.mark.usefixtures("close_figures")
def test_the_figure_has_a_path_for_each_method_and_its_control(tmp_path: Path):
    report = read(of_all(tmp_path, dict.fromkeys(("ddpo", "draft", "diffusion_dpo"), 0.12)))
    _, right = report.figures["figure"].axes
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels == [*METHODS, "no reward"]
    courses = [line for line in right.lines if len(line.get_xdata()) > 1]
    assert [line.get_linestyle() for line in courses] == ["-", "-", "-", ":", ":", ":"]
    assert [line.get_color() for line in courses[:3]] == [line.get_color() for line in courses[3:]]
    words = [text.get_text() for axis in report.figures["pictures"].axes for text in axis.texts]
    assert words == ["before training", *(f"after {name}" for name in METHODS)]


def test_runs_with_unequal_evaluations_are_refused(tmp_path: Path):
    runs = of_all(tmp_path, {"ddpo": 0.1})
    runs[0] = Run(runs[0].folder, {**runs[0].config, "evaluations": 9600}, [], {})
    with pytest.raises(ValueError, match=r"\[4800, 9600\] evaluations"):
        read(runs)


@pytest.mark.parametrize(("during", "after", "largest"), [(0.66, 0.63, 0.3), (0.66, 0.6, 0.2), (0.6, 0.1, 0.1)])
def test_a_reward_that_destroys_the_pictures_is_not_the_largest_kept(during: float, after: float, largest: float):
    warmths = {"warmth_before": 0.1, "warmth_during": 0.2, "warmth": 0.3}
    means = warmths | {f"{QUALITY}_before": 0.7, f"{QUALITY}_during": during, QUALITY: after}  # 90% are 0.63
    assert largest_kept(means, "warmth") == largest
    del means[f"{QUALITY}_during"], means["warmth_during"]  # a control is not measured there
    assert largest_kept(means, "warmth") == (0.3 if after >= 0.63 else 0.1)
