"""The native form of a decision: `src/scan.cpp`, what calls it (`scan.py`) and what compiles it (`build.py`)."""
