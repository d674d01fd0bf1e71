"""The main thread's place, from the text of a dump."""

from __future__ import annotations

import pytest

from nvrx_slurm.diagnostics.stacks.traces import innermost_frame, lacks_threads

LOADER = 'Thread 0x00007f6eba101700 (most recent call first):\n  File "/home/me/loader.py", line 7 in fetch\n\n'
MAIN = (
    "Current thread 0x00007f6eba0f1740 (most recent call first):\n"
    '  File "/home/me/train.py", line 41 in step\n'
    '  File "/home/me/train.py", line 60 in <module>\n'
)
SPIED = """Process 4711: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4712 (active): "loader"
    fetch (loader.py:7)
Thread 4711 (idle){name}
    pause (libc.so.6)
    step (train.py:41)
    <module> (train.py:60)
"""


@pytest.mark.parametrize(
    "text",
    [
        MAIN,
        LOADER + MAIN,
        LOADER.replace("Thread", "Current thread") + MAIN.replace("Current thread", "Thread"),
        MAIN.replace("1740 (", "1740 [python] ("),
        SPIED.format(name=""),
        SPIED.format(name=': "MainThread"'),
        LOADER + SPIED.format(name=""),
        MAIN.replace("41", "39") + SPIED.format(name=""),
    ],
)
def test_main_threads_innermost_frame(text):
    """It is found in every form of both kinds of stacks, whichever thread printed them; py-spy's stack takes
    precedence."""
    assert innermost_frame(text) == "train.py:41 in step"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Error: no such process",
        "Current thread 0x00007f6eba0f1740 (most recent call first):\n  <no Python frame>\n",
    ],
)
def test_no_frame_is_none(text):
    """A text without a Python stack has no innermost frame."""
    assert innermost_frame(text) is None


def test_text_that_lacks_the_main_thread_gives_no_place():
    """If the oldest threads were left out, another thread's place is not taken for the main thread's."""
    text = MAIN.replace("train", "loader") + "\n" + LOADER + "...\n"
    assert lacks_threads(text)
    assert innermost_frame(text) is None


def test_deep_recursion_lacks_no_thread():
    """A stack that is cut short at its outer end is not a missing thread."""
    text = MAIN + "  ...\n"
    assert not lacks_threads(text)
    assert innermost_frame(text) == "train.py:41 in step"
