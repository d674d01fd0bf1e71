"""Python's collector of cyclic garbage while a program is imported: for modules that run as `__main__`."""

from __future__ import annotations

import gc


def pause() -> None:
    """Collect nothing until `resume`. Called before the other imports: to look for garbage in what has been loaded,
    again and again, takes a quarter of an agent's start."""
    gc.disable()


def resume() -> None:
    """Collect again. What has been imported stays, so no collection walks it."""
    gc.freeze()
    gc.enable()
