"""Prompts from a file. Imports no torch, so that what is wrong with one is told at once.

Files: text (a prompt a line), JSON lines (a string, or an object with "prompt", "text" or "question"), CSV and Parquet. Rows
with a question, four choices and an answer, as MMLU is kept (CSV without a header: question, A, B, C, D, answer; Parquet:
question, choices, answer), become the usual multiple-choice prompt. A folder stands for its files in order of their names.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from apexk.inputs import reading

KINDS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
LETTERS = "ABCD"


def read_prompts(path: Path) -> list[str]:
    """All prompts. Raises ValueError or OSError naming the file and line, ModuleNotFoundError for Parquet without pyarrow."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder of prompts")
    files = sorted(p for p in path.rglob("*") if p.suffix in KINDS) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no file of the kinds {', '.join(KINDS)}")
    prompts = [prompt for file in files for prompt in _prompts(file)]
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def multiple_choice(question: str, choices: list[str]) -> str:
    """The prompt of one MMLU question."""
    lines = [question.strip(), *(f"{letter}. {str(choice).strip()}" for letter, choice in zip(LETTERS, choices, strict=True))]
    return "\n".join([*lines, "Answer:"])


def _prompts(file: Path) -> list[str]:
    with reading(file, "prompts"):
        return list(_read(file))


def _read(file: Path) -> Iterator[str]:
    if file.suffix not in KINDS:
        raise ValueError(f"{file}: unknown kind; wanted {', '.join(KINDS)}")
    if file.suffix == ".parquet":
        yield from (_row(file, n, row) for n, row in enumerate(_parquet(file), 1))
    elif file.suffix == ".csv":
        yield from _csv(file)
    else:
        for n, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                yield line if file.suffix == ".txt" else _json(file, n, line)


def _csv(file: Path) -> Iterator[str]:
    with file.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.reader(lines))
    head = [name.strip().lower() for name in rows[0]] if rows else []
    named = bool({"question", "prompt", "text"} & set(head))
    for n, row in enumerate(rows[named:], 1 + named):
        if named:
            yield _row(file, n, dict(zip(head, row, strict=False)))
        elif len(row) == 6:
            yield multiple_choice(row[0], row[1:5])
        else:
            raise ValueError(f"{file}:{n}: {len(row)} columns; wanted a header with question, prompt or text, or question, A, B, C, D, answer")


def _json(file: Path, n: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file}:{n}: no JSON: {error}") from error
    return value if isinstance(value, str) else _row(file, n, value if isinstance(value, dict) else {})


def _row(file: Path, n: int, row: dict) -> str:
    choices = row.get("choices") if row.get("choices") is not None else [row[k] for k in ("a", "b", "c", "d") if k in row]
    if isinstance(row.get("question"), str) and isinstance(choices, list) and len(choices) == 4:
        return multiple_choice(row["question"], list(choices))
    for key in ("prompt", "text", "question"):
        if isinstance(row.get(key), str):
            return row[key]
    raise ValueError(f"{file}:{n}: wanted prompt, text, or question with four choices; got {', '.join(row) or 'something else'}")


def _parquet(file: Path) -> list[dict]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(file).to_pylist()
