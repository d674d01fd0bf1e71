"""Ways to get a payload from one process into another. Each module has a `Producer` and a `Reader` (`base.py`)."""
