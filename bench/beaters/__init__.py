"""Processes that beat in a loop. Each prints a line `NAME SECONDS` a run: what a million calls take."""
