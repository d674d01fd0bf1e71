"""ci/recording.py: the screen that it emulates, and the picture that it draws."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from ci.recording import COLUMNS, FRAME_S, ROWS, Frame, Screen, draw, thin


def screen(text: str) -> Screen:
    made = Screen()
    made.feed(text)
    return made


def test_a_redraw_replaces_the_lines_it_erases() -> None:
    """The movements of rich's live display: return, erase the line, one line up."""
    assert screen("kept\r\nold 1\r\nold 2\r\x1b[2K\x1b[1A\x1b[2Knew").text() == "kept\nnew\n"


def test_a_long_line_continues_on_the_next_row() -> None:
    """As in a terminal of COLUMNS columns."""
    assert screen("x" * (COLUMNS + 3)).text() == "x" * COLUMNS + "\nxxx"


def test_the_screen_scrolls() -> None:
    """Only the last ROWS lines are seen."""
    rows = screen("".join(f"{number}\r\n" for number in range(ROWS)) + "last").rows()
    assert (len(rows), rows[0][0][0], "".join(char for char, _ in rows[-1])) == (ROWS, "1", "last")


@pytest.mark.parametrize("text", ["\x1b[5;5H", "\x1b[1J", "\x1b[0K", "\a"])
def test_an_unknown_control_sequence_is_refused(text: str) -> None:
    """Otherwise the picture would differ from what the terminal shows."""
    with pytest.raises(ValueError, match="control"):
        screen(text)


def test_frames_that_follow_each_other_closely_are_merged() -> None:
    """The later frame is shown from the earlier frame's time on; a frame equal to the one before is dropped."""
    one, two, three = (screen(f"above\r\n{text}").rows() for text in "123")
    frames = [Frame(0, one, ""), Frame(FRAME_S / 2, two, ""), Frame(5, two, ""), Frame(6, three, "")]
    assert thin(frames) == [Frame(0, two, ""), Frame(6, three, "")]


def test_the_picture_shows_text_style_and_time() -> None:
    """Each frame is visible from its own time until the next one's; characters of XML are escaped."""
    first, second = screen("\x1b[1;31m<b> & co\x1b[0m").rows(), screen("\x1b[7;32m ok \x1b[0m").rows()
    svg = draw([Frame(0, first, "nvrx-slurm"), Frame(1, second, "kill")])
    texts = {element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert texts == {"<b> & co", "ok", "nvrx-slurm", "kill"}
    assert 'class="c31 b"' in svg
    assert re.search(r"@keyframes f0\{0%\{visibility:visible\}10\.00%\{visibility:hidden\}\}", svg)
    assert "@keyframes f1{0%{visibility:hidden}10.00%{visibility:visible}}" in svg
