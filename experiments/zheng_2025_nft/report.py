"""Judges DDPO, Flow-GRPO, DiffusionNFT, DRaFT and Diffusion-DPO on a flow, at equal evaluations of the denoiser.

python -m experiments.zheng_2025_nft.report FOLDER ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.claims import Claim
from experiments.clark_2023_draft.report import (
    DDPO,
    DPO,
    DRAFT,
    FLOW_GRPO,
    NFT,
    early,
    fields,
    goes_further,
    keeps_quality,
    learns,
)
from experiments.clark_2023_draft.report import read as read_methods
from experiments.reports import Report, main
from experiments.run_folders import Run

PAPER = "zheng_2025_nft"
TITLE = "Ways to train a flow on a reward, side by side"
CLAIM = (
    "Zheng et al. 2025, arXiv:2509.16117: regression on noised samples (DiffusionNFT) needs far less computation than "
    "policy gradients on the flow's SDE (Flow-GRPO) for as much reward."
)


def read(runs: Sequence[Run]) -> Report:
    """Reads what clark_2023_draft's report does; the claims compare the methods of a flow."""
    return replace(read_methods(runs), claims=[*claims()])


def claims() -> Iterator[Claim]:
    """The paper's claims about DiffusionNFT and Flow-GRPO, and ours."""
    moved, place = fields(PAPER, "reward"), {"place": "abstract", "number": "up to 25 times as efficient"}
    yield from learns(PAPER, (DDPO, FLOW_GRPO, NFT, DRAFT, DPO))
    yield Claim(f"{NFT} gains more than {FLOW_GRPO}", (f"gain by {NFT}", f"gain by {FLOW_GRPO}"), **place, **moved)
    text = f"{NFT} with a quarter of the evaluations changes warmth more than {FLOW_GRPO} with all"
    yield Claim(text, (early(NFT), f"change by {FLOW_GRPO}"), **place, **moved)
    for name, other in ((FLOW_GRPO, DDPO), (DRAFT, FLOW_GRPO), (DPO, FLOW_GRPO), (DRAFT, NFT), (DPO, NFT)):
        compared = f"gain by {name}", f"gain by {other}"
        yield Claim(f"{name} gains more than {other}", compared, origin="ours", **moved)
    yield from keeps_quality(PAPER, (DDPO, FLOW_GRPO, NFT, DRAFT, DPO))
    yield from goes_further(PAPER, (NFT, DRAFT, DPO), FLOW_GRPO)


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
