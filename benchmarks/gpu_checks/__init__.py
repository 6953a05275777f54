"""The checks of `gpu_check.py`."""
