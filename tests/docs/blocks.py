"""Code blocks of Markdown pages."""

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
    """A fenced block of a page.

    Attributes:
        page: its path in the repository.
        line: of the page, from 1, at which the code begins.
        language: as the fence says; "" where it says nothing.
        code: without the indentation of the fence.
        reason: why it is not run; None where it is.
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
