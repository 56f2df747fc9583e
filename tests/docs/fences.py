"""Fenced blocks of the Markdown that people read, and the shell commands in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *DOCS]
SHELL = ("bash", "console", "sh", "")  # README and CONTRIBUTING leave the language out

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_SNIPPET = re.compile(r'--8<-- "(?P<path>[^":]+)[^"]*"')
_WORD = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str

    @property
    def snippet(self) -> str | None:
        """The file that it is extracted from, if it is."""
        match = _SNIPPET.fullmatch(self.text.strip())
        return match["path"] if match else None

    @property
    def commands(self) -> list[str]:
        """Commands in one line each; none if the block is no shell's, or a file's text."""
        if self.language not in SHELL or self.snippet:
            return []
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = [line.strip() for line in joined.splitlines()]
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if line and not line.startswith("#")]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, which is named from the repository's root."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match["language"], match["text"])
        for match in _FENCE.finditer(text)
    ]


def inline_code(page: str) -> list[str]:
    """What stands between backticks outside of fences."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return _WORD.findall(_FENCE.sub("", text))
