"""The devices that the engine drives: one small interface (`base.py`), one file each."""
