"""Namespace of the kernels: `apexk.kernels.triton`, `.cpu`, `.bench`, `.aot`.

An installed apexk carries them as sub-packages of this one. In a checkout they stand in `<root>/kernels`, which is put on
this package's path so that tests and profiling runs work without an install. The marker file tells our folder from the
unrelated `kernels` package that may lie beside an installed apexk.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parents[2] / "kernels"
if (_checkout / ".apexk").is_file():
    __path__.append(str(_checkout))
