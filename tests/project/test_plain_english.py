"""Plain English: how often phrases that stop a native reader are used, with ceilings that may only be lowered.

Documents, comments, docstrings, messages and help texts of the whole project are counted. Each word also has a good
use ("the place where", "stands for"), so the ceilings of the code are not zero. ``python -m
tests.project.test_plain_english [CHECKOUT]`` prints the counts. With ``... [CHECKOUT] WORD`` it prints the lines that
have the word.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

#: word -> (its pattern, ceiling in documents, ceiling elsewhere, uses in both at commit 8e7163e). The usual words are,
#: in this order: next to; only; is; is; again; resumes or continues; is not one; if there is; if.
CEILINGS = {
    "beside": (r"\bbeside\b", 0, 0, 60),
    "alone": (r"\balone\b", 0, 3, 59),
    "stands": (r"\b(stands?|stood)\b(?!-in| for\b)", 0, 0, 39),
    "lies": (r"\b(lies?|lay)\b", 0, 0, 19),
    "anew": (r"\banew\b", 0, 0, 16),
    "goes on": (r"\b(go|goes|going|gone|went) on\b", 0, 0, 52),
    "is none": (r"\b(is|are|were|was) none\b", 0, 7, 21),
    "where there is": (r"\bwhere there (is|are|was|were)\b", 0, 0, 19),
    "where": (r"\bwhere\b", 4, 44, 263),
}
FOLDERS = (".ci", "baselines", "docs", "examples", "nestpipe", "results", "slurm", "suites", "tests", "tools")
#: Files that are text from end to end; of Python files only comments and strings are.
TEXT = (".md", ".toml", ".c", ".txt", ".jinja", ".yaml", "")


def texts(root: Path) -> Iterator[tuple[str, str]]:
    """(File, the text in it that people read) for every file of the project."""
    folders = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*"))]
    for path in (*sorted(root.glob("*")), *folders):
        name = path.relative_to(root)
        skipped = {"out", "__pycache__"} & set(name.parts) or name.name in ("LICENSE", Path(__file__).name)
        if skipped or not path.is_file():
            continue
        if path.suffix == ".py":
            yield str(name), "\n".join(comments_and_strings(path.read_text(encoding="utf-8")))
        elif path.suffix in TEXT:
            yield str(name), path.read_text(encoding="utf-8")


def comments_and_strings(source: str) -> list[str]:
    comments = [t.string for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    constants = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return comments + [value for value in constants if isinstance(value, str)]


def lines_with(pattern: str, root: Path, documents: bool) -> list[str]:
    """The line of each use of ``pattern``, with its file, in Markdown files if ``documents``, else in all others."""
    found = []
    for name, text in texts(root):
        if name.endswith(".md") == documents:
            for line in text.splitlines():
                found += [f"{name}: {line.strip()}"] * len(re.findall(pattern, line, re.IGNORECASE))
    return found


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("word", CEILINGS)
def test_no_phrase_exceeds_its_ceiling(word: str, documents: bool) -> None:
    pattern, in_documents, elsewhere, _ = CEILINGS[word]
    found = lines_with(pattern, ROOT, documents)
    ceiling = in_documents if documents else elsewhere
    assert len(found) <= ceiling, f"'{word}' is used {len(found)} times, at most {ceiling}:\n" + "\n".join(found)


def test_comments_docstrings_and_messages_are_read() -> None:
    source = 'def f():\n    """It stands."""\n    where = 1  # it lies\n    raise ValueError(f"{where} alone")\n'
    read = " ".join(comments_and_strings(source))
    assert [word for word in ("stands", "lies", "alone", "where") if word in read] == ["stands", "lies", "alone"]


def _print_counts(root: Path) -> None:
    for word, (pattern, *_) in CEILINGS.items():
        counts = [len(lines_with(pattern, root, documents)) for documents in (True, False)]
        print(f"{word:<15} {counts[0]:>4} in documents {counts[1]:>4} elsewhere")


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word in CEILINGS]
    roots = [Path(word) for word in sys.argv[1:] if word not in CEILINGS] or [ROOT]
    for word in words:
        print("\n".join(lines_with(CEILINGS[word][0], roots[0], True) + lines_with(CEILINGS[word][0], roots[0], False)))
    if not words:
        _print_counts(roots[0])
