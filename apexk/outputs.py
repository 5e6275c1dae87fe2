"""Files and folders that a command writes: looked at before its work is done, written whole or not at all."""

from __future__ import annotations

import argparse
import errno
import fnmatch
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

OF_A_MODEL = ("config.json", "generation_config.json", "*.safetensors", "*.index.json", "tokenizer*")


class Written(type(Path())):
    """A place that a command will write to. `holds`: of a folder, patterns of the names of the files there; `adds`: what a file holds stays in it."""

    holds: tuple[str, ...] = ()
    adds = False


def apart(written: Sequence[tuple[str, Written]], read: Sequence[tuple[str, str]]) -> None:
    """ValueError where two of a command's outputs are one file, or an output one of its inputs, each given with what a person calls it. A pipe or a
    terminal takes any number."""
    files = [(name, path) for name, path in written if not path.exists() or path.is_file() or path.is_dir()]
    for i, (name, path) in enumerate(files):
        for other, second in files[:i]:
            if _meet(path, second) or _meet(second, path):
                raise ValueError(f"{other} is {second} and {name} is {path}: one would be written over the other")
        for other, given in read:
            if not path.adds and (os.path.isfile(given) and _meet(path, Path(given)) or _is_part(path, given)):
                raise ValueError(f"{name} is {path}: what {other} names would be written over")


def _meet(path: Path, other: Path) -> bool:
    """Whether the two are the same place, or `path` is a folder where `other` would be one of its own files."""
    real, second = os.path.realpath(path), os.path.realpath(other)
    return real == second or (os.path.dirname(second) == real and any(fnmatch.fnmatch(os.path.basename(second), one) for one in getattr(path, "holds", ())))


def _is_part(path: Path, folder: str) -> bool:
    """Whether the file `path` is one that makes the folder a model's."""
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(folder) and any(fnmatch.fnmatch(path.name, one) for one in OF_A_MODEL)


def out_file(text: str) -> Written:
    """The type of a flag that names a file to write; nothing is left there. Raises OSError where it could not be written, before anything has run."""
    path = _path(text)
    if path.is_dir() or not path.name:
        raise IsADirectoryError(f"{path} is a folder; wanted a file to write")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written: it is read-only")
    if not path.exists() and not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    with writing(path, keep=False):
        pass
    return path


def added_file(text: str) -> Written:
    """As `out_file`, of a file that is added to."""
    path = out_file(text)
    path.adds = True
    return path


PICTURES = ("eps", "jpeg", "jpg", "pdf", "png", "ps", "svg", "svgz", "tif", "tiff", "webp")


def picture_file(text: str) -> Written:
    """As `out_file`, of a picture, whose form the end of its name says: PNG where it has none. Raises argparse.ArgumentTypeError for others."""
    path = out_file(text)
    if path.suffix and path.suffix[1:].lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r}: pictures are {', '.join(PICTURES)}")
    return path


def out_folder(text: str, holds: Sequence[str] = ()) -> Written:
    """The type of a flag that names a folder to write into, which need not be there yet: files whose names have the patterns `holds`.
    Raises as `out_file` does; makes nothing."""
    path = _path(text)
    there = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        raise NotADirectoryError(f"{path} cannot be made: {there} is no folder")
    with writing(there / f"{path.name}.x", keep=False):
        pass
    path.holds = tuple(holds)
    return path


def _path(text: str) -> Written:
    try:
        os.lstat(text or ".")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except ValueError as error:  # a NUL
        raise FileNotFoundError(f"{text!r} cannot be written: {error}") from error
    return Written(text)


@contextmanager
def writing(path: Path, *, keep: bool = True) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place when the block has ended well, else is gone: a full disk or a
    Ctrl-C leaves no half of a file, and an older one as it was. A pipe or a terminal is written to itself. `keep=False` only
    tries. Raises OSError naming `path`."""
    if path.exists() and not path.is_file():
        yield path
        return
    final = Path(os.path.realpath(path))  # a link stays one
    try:
        # with the last of its name, by which some writers choose a form
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=final.name[-64:], dir=final.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    os.close(descriptor)
    part = Path(name)
    try:
        yield part
        if keep:
            part.chmod(final.stat().st_mode & 0o777 if final.exists() else 0o666 & ~_umask())
            os.replace(part, final)
    except OSError as error:
        if error.errno is None or error.filename not in (None, name):  # worded already, or of another file
            raise
        raise _unwritable(path, error) from error
    finally:
        part.unlink(missing_ok=True)


def _unwritable(path: Path, error: OSError) -> OSError:
    return (FileNotFoundError if misplaced(error) else type(error))(f"{path} cannot be written: {error.strerror}")


def misplaced(error: OSError) -> bool:
    """Whether nothing can be read from or written to what was named, whatever runs: misuse, where a full disk or a port that is taken is a failure."""
    return isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)) or error.errno in (errno.ELOOP, errno.ENAMETOOLONG)


def worded(error: Exception) -> str:
    """An error as a person reads it: the system's own by the file and what is wrong with it."""
    named = isinstance(error, OSError) and error.errno is not None and error.filename is not None
    return f"{error.filename}: {error.strerror}" if named else str(error)


def write_text(path: Path, text: str) -> None:
    """`text` as UTF-8, whole or not at all."""
    with writing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """`value` as JSON; what has no form there as its words."""
    write_text(path, json.dumps(value, indent=1, default=str) + "\n")


def save_figure(figure, path: str | os.PathLike, **how) -> None:
    """A matplotlib figure, whole or not at all, in the form that the name's end says, else as PNG."""
    with writing(Path(path)) as part:
        figure.savefig(part, format=Path(path).suffix[1:] or "png", **how)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
