"""A mkdocs hook that adds files outside docs/ to the site if a page links to them.

Pages in docs/ and READMEs link to one another as repository files, so the links work on GitHub too. A Markdown file
becomes a page under its repository path; the hook copies a picture or a PDF; any other file becomes a page that shows
it. A page with a wide table has no table of contents, which leaves room for the table.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
WIDE = re.compile(r"^(\|[^|\n]*){8,}\|$", re.MULTILINE)  # a table of eight columns or more
COPIED = {".png", ".svg", ".jpg", ".pdf", ".zip"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the menu's pages from outside docs/, and every file that pages link to, directly or indirectly."""
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    waiting += [ROOT / uri for uri in _leaves(config.nav) if not (DOCS / uri).exists() and (ROOT / uri).is_file()]
    seen = set(waiting)
    for path in waiting:  # the loop below appends to it
        if not path.is_relative_to(DOCS):
            files.append(_file(path, config))
        if path.suffix != ".md":
            continue
        for target, _ in LINK.findall(CODE.sub("", path.read_text(encoding="utf-8"))):
            linked = (path.parent / target).resolve()
            if linked.is_relative_to(ROOT) and not linked.is_relative_to(DOCS) and linked not in seen:
                seen.add(linked)
                waiting += [linked] if linked.exists() else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links between repository files into links between pages of the site, and makes room for wide tables."""
    if WIDE.search(markdown):
        page.meta["hide"] = ["toc"]
    uri = Path(page.file.src_uri)
    source = DOCS / uri if (DOCS / uri).exists() else ROOT / uri
    if not source.exists():
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        linked = (source.parent / match[1]).resolve()
        if not linked.is_relative_to(ROOT) or not linked.exists():
            return match[0]
        target = os.path.relpath(_uri(linked), uri.parent)
        return target + (match[2] or "")

    return _outside_code(markdown, lambda text: LINK.sub(rewritten, text))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = CODE.split(markdown)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def _uri(path: Path) -> str:
    """Returns the path of a repository file among the sources of the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = path.relative_to(ROOT).as_posix()
    return uri if path.suffix == ".md" or path.suffix in COPIED else f"{uri}.md"


def _file(path: Path, config: MkDocsConfig) -> File:
    if path.suffix == ".md" or path.suffix in COPIED:
        return File.generated(config, _uri(path), abs_src_path=str(path))
    return File.generated(config, _uri(path), content=_shown(path))


def _shown(path: Path) -> str:
    """Returns a page that shows a file or a folder's list of files; a notebook is shown with its outputs."""
    if path.suffix == ".ipynb":
        return "\n\n".join(part for cell in json.loads(path.read_text())["cells"] for part in _cell(cell))
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    heads = [f'```{LANGUAGES.get(file.suffix, "text")} title="{file.name}"' for file in files]
    blocks = [f"{head}\n{file.read_text()}\n```" for head, file in zip(heads, files, strict=True)]
    return "\n\n".join([f"# {path.relative_to(ROOT)}", *blocks])


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    """Yields the Markdown of a notebook's cell, and of what the cell printed and drew."""
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    printed = [output["text"] for output in cell.get("outputs", []) if "text" in output]
    results = [output["data"] for output in cell.get("outputs", []) if "data" in output]
    printed += [data["text/plain"] for data in results if "image/png" not in data]
    if printed:
        yield "```text\n" + "".join("".join(lines) for lines in printed).rstrip() + "\n```"
    for data in results:
        if "image/png" in data:
            yield f"![](data:image/png;base64,{data['image/png'].strip()})"


def _leaves(nav: object) -> list[str]:
    """Returns the sources that a menu names."""
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav or ()
    return [leaf for item in items for leaf in _leaves(item)]  # type: ignore[attr-defined]
