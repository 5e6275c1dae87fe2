"""GPU kernels of apexk, written in Triton, with one plain torch reference each (`reference.py`)."""
