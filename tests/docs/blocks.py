"""Finds code blocks in Markdown pages."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("docs/gpu.md",)
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "examples" / "README.md",
        *(ROOT / "packages").glob("*/README.md"),
        *(page for page in (ROOT / "docs").rglob("*.md") if str(page.relative_to(ROOT)) not in GENERATED),
    ]
)
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- not run: (.+?) -->\n\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block in a page.

    Attributes:
        page: path of the page in the repository.
        line: line in the page, from 1, where the code begins.
        language: language of the fence; "" if the fence has none.
        code: text without the indentation of the fence.
        reason: why the block is not run; None if it is.
    """

    page: str
    line: int
    language: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        mark = MARK.search(text[: match.start()])
        yield Block(
            page=str(page.relative_to(ROOT)),
            line=text[: match.start(3)].count("\n") + 1,
            language=match[2],
            code=textwrap.dedent(match[3]),
            reason=mark and mark[1],
        )


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
