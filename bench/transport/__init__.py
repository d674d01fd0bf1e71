"""The payload transport beside what it could be made of: `speed.py`; and with a port that is sick: `sick.py`."""
