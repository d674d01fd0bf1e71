"""Records docs/demo.svg: `python -m ci.recording docs/demo.svg`.

The tool starts a real Slurm of six nodes, submits examples/digits to it and kills one node. Each command runs in a
pseudo-terminal; the picture shows what it printed, with its timing, as an SVG with CSS animation. `demo-still.svg`
beside it holds the last frame alone, for readers who prefer reduced motion.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

COLUMNS, ROWS = 114, 34
SHOWN_ABOVE = 4  # rows that the program does not get: the command, messages of Slurm, the job id
EXAMPLE = Path(__file__).parents[1] / "examples" / "digits"
SUBMIT = "nvrx-slurm submit --spares 2 --watch job.yaml"
EXPLAIN = "nvrx-slurm explain 1"
KILL = "nvrx-slurm cluster kill-node n2"
KILL_AT_STEP = 120
TITLE = "nvrx-slurm"

TYPED_S = 0.04  # between two characters of a command
FRAME_S = 0.4  # the shortest time that a picture is shown; the live screen changes five times a second
READ_S = 2.5  # after the end of a command, before the next one
HOLD_S = 9.0  # the last picture, before the animation starts again

# Pixels. At GitHub's width of some 830 pixels a character is 7 pixels wide.
WIDE, HIGH, PAD, BAR = 8.4, 18, 16, 34
COLOURS = {"31": "#ff7b72", "32": "#56d364", "33": "#e3b341", "34": "#79c0ff", "35": "#d2a8ff", "36": "#56d4dd"}
BACKGROUND = "#151b23"  # dark, and distinct from both of GitHub's own backgrounds

Style = tuple[str, ...]  # the SGR codes in force, sorted
Row = tuple[tuple[str, Style], ...]
_ESCAPE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")


class Screen:
    """A terminal's screen: text, colours, and the few cursor movements that rich's live display uses."""

    def __init__(self) -> None:
        self._rows: list[list[tuple[str, Style]]] = [[]]
        self._row = self._column = 0
        self._style: Style = ()

    def feed(self, text: str) -> None:
        """Print the text. Raises ValueError for a control sequence that this screen does not implement."""
        at = 0
        while at < len(text):
            escape = _ESCAPE.match(text, at)
            if escape:
                self._control(escape[1], escape[2], escape[3])
                at = escape.end()
                continue
            self._put(text[at])
            at += 1

    def rows(self) -> tuple[Row, ...]:
        """The last ROWS lines, as a terminal shows them once its screen has scrolled."""
        return tuple(tuple(row) for row in self._rows[-ROWS:])

    def text(self) -> str:
        return "\n".join("".join(char for char, _ in row) for row in self._rows)

    def _put(self, char: str) -> None:
        if char == "\r":
            self._column = 0
        elif char == "\n":
            self._row += 1
        elif char < " ":
            raise ValueError(f"control character {char!r}")
        else:
            if self._column == COLUMNS:
                self._row, self._column = self._row + 1, 0
            row = self._line()
            row += [(" ", ())] * (self._column + 1 - len(row))
            row[self._column] = (char, self._style)
            self._column += 1
        self._line()

    def _line(self) -> list[tuple[str, Style]]:
        while len(self._rows) <= self._row:
            self._rows.append([])
        return self._rows[self._row]

    def _control(self, private: str, numbers: str, letter: str) -> None:
        codes = [code or "0" for code in numbers.split(";")]
        if letter == "m":
            for code in codes:
                self._style = () if code == "0" else tuple(sorted({*self._style, code}))
        elif letter == "A":
            self._row = max(0, self._row - max(1, int(codes[0])))
        elif letter == "K" and codes == ["2"]:
            self._rows[self._row] = []
        elif not (private and letter in "hl"):  # the cursor is not drawn, so whether it is hidden does not matter
            raise ValueError(f"control sequence {private}{numbers}{letter}")


@dataclass(frozen=True, slots=True)
class Frame:
    """The picture that is shown from `at_s` on."""

    at_s: float
    rows: tuple[Row, ...]
    title: str


class Recorder:
    """Runs commands in a pseudo-terminal and keeps a frame for each change of its screen."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.screen = Screen()
        self.frames: list[Frame] = []
        self.title = TITLE
        self._environment, self._folder = environment, folder
        self._start = time.monotonic()

    def keep(self) -> None:
        self.frames.append(Frame(time.monotonic() - self._start, self.screen.rows(), self.title))

    def prompt(self, command: str) -> None:
        """Show the command as if it were typed."""
        self.screen.feed("\x1b[1;32m$\x1b[0m ")
        for char in command:
            self.screen.feed(char)
            self.keep()
            time.sleep(TYPED_S)
        self.screen.feed("\r\n")

    def run(self, command: str) -> Iterator[str]:
        """Run the command. Yields the screen's text after each output. Raises CalledProcessError where it fails."""
        our_end, program_end = pty.openpty()
        fcntl.ioctl(program_end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS - SHOWN_ABOVE, COLUMNS, 0, 0))
        process = subprocess.Popen(
            shlex.split(command),
            stdin=program_end,
            stdout=program_end,
            stderr=program_end,
            cwd=self._folder,
            env=self._environment,
        )
        os.close(program_end)
        try:
            rest = b""
            while True:
                try:
                    chunk = os.read(our_end, 65536)
                except OSError:  # EIO: the last process that held the terminal has ended
                    chunk = b""
                if not chunk:
                    break
                rest += chunk
                # A redraw comes in several writes: the screen is consistent when the program pauses.
                if not select.select([our_end], [], [], 0.02)[0]:
                    self.screen.feed(rest.decode())
                    rest = b""
                    self.keep()
                    yield self.screen.text()
            self.screen.feed(rest.decode())
            self.keep()
            if process.wait():
                raise subprocess.CalledProcessError(process.returncode, command)
        finally:
            process.kill()  # does nothing after its end; else the recording was interrupted
            process.wait()
            os.close(our_end)


def record(folder: Path) -> list[Frame]:
    """Run the session on a Slurm cluster of its own, which is removed afterwards."""
    # Neither a job nor a runner that this process runs in may show in the recording.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NVRX_", "SLURM_", "GITHUB_"))}
    environment = {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),  # neither the user's settings nor their development cluster
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
    }
    environment["PWD"] = str(job := folder / "job")
    shutil.copytree(EXAMPLE, job, ignore=shutil.ignore_patterns("__pycache__", "checkpoints", "nvrx-jobs"))

    def call(command: str) -> str:
        return subprocess.run(
            shlex.split(command), check=True, env=environment, stdout=subprocess.PIPE, text=True
        ).stdout

    call("nvrx-slurm cluster up --nodes 6")
    try:
        shown = call("nvrx-slurm cluster env")
        environment["SLURM_CONF"] = shown.strip().partition("=")[2]
        recorder = Recorder(environment, job)
        recorder.prompt(SUBMIT)
        killed = False
        for text in recorder.run(SUBMIT):
            step = re.search(r"step (\d+)", text)
            if not killed and step and int(step[1]) >= KILL_AT_STEP:
                killed = True
                recorder.title = f"in another terminal: {KILL}"
                call(KILL)
        time.sleep(READ_S)
        recorder.title = TITLE
        recorder.prompt(EXPLAIN)
        for _ in recorder.run(EXPLAIN):
            pass
        if not killed:
            raise RuntimeError("the training ended before the node was killed")
        return recorder.frames
    finally:
        call("nvrx-slurm cluster down")


def thin(frames: list[Frame]) -> list[Frame]:
    """Drop frames equal to their predecessor, and keep at most one per FRAME_S while a live screen redraws."""
    kept: list[Frame] = []
    for frame in frames:
        if kept and (frame.rows, frame.title) == (kept[-1].rows, kept[-1].title):
            continue
        if kept and frame.at_s - kept[-1].at_s < FRAME_S and len(frame.rows) == len(kept[-1].rows) > 1:
            # The newer picture at the older time: a live screen that stops is shown in its last state.
            kept[-1] = Frame(kept[-1].at_s, frame.rows, frame.title)
            continue
        kept.append(frame)
    return kept


SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"
  role="img" aria-labelledby="title description">
<title id="title">A training continues after the loss of a node</title>
<desc id="description">{description}</desc>
<style>
text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;fill:#d7dce2}}
{colours}
.b{{font-weight:bold}} .d{{fill:#8b949e}} .i{{fill:{background}}}
.t{{text-anchor:middle;fill:#8b949e}} .k{{fill:#ff7b72;font-weight:bold}}
.f{{visibility:hidden}} .f:last-of-type{{visibility:visible}}
@media (prefers-reduced-motion:no-preference){{.f{{animation:{total_s:.2f}s step-end infinite}}}}
{keyframes}
</style>
<defs>
{rows}
</defs>
<rect width="{width:g}" height="{height:g}" rx="8" fill="{background}" stroke="#3d444d"/>
<circle cx="20" cy="17" r="5" class="c31"/><circle cx="38" cy="17" r="5" class="c33"/>
<circle cx="56" cy="17" r="5" class="c32"/>
{frames}
</svg>
"""
DESCRIPTION = (
    f"{SUBMIT} shows a live screen of six nodes. Then {KILL} kills one of them, a hot spare takes its ranks, "
    f"and {EXPLAIN} shows the decision and the evidence."
)


def draw(frames: list[Frame]) -> str:
    """The SVG. Frames share the rows that they have in common; a viewer without animation shows the last frame."""
    width, height = COLUMNS * WIDE + 2 * PAD, ROWS * HIGH + BAR + PAD
    total_s = frames[-1].at_s + HOLD_S
    rows: dict[Row, int] = {}
    shown, keyframes = [], []
    for number, frame in enumerate(frames):
        used = [
            f'<use href="#r{rows.setdefault(row, len(rows))}" y="{place * HIGH}"/>'
            for place, row in enumerate(frame.rows)
            if row
        ]
        shown.append(
            f'<g class="f" style="animation-name:f{number}">'
            f'<text class="{"t" if frame.title == TITLE else "t k"}" x="{width / 2:g}" y="22">{frame.title}</text>'
            f'<g transform="translate({PAD} {BAR})">{"".join(used)}</g></g>'
        )
        # step-end: a value holds from its keyframe to the next one.
        begin = f"0%{{visibility:hidden}}{100 * frame.at_s / total_s:.2f}%" if number else "0%"
        ends_s = frames[number + 1].at_s if number + 1 < len(frames) else None
        end = f"{100 * ends_s / total_s:.2f}%{{visibility:hidden}}" if ends_s is not None else ""
        keyframes.append(f"@keyframes f{number}{{{begin}{{visibility:visible}}{end}}}")
    return SVG.format(
        width=width,
        height=height,
        description=html.escape(DESCRIPTION),
        colours="".join(f".c{code}{{fill:{colour}}}" for code, colour in COLOURS.items()),
        background=BACKGROUND,
        total_s=total_s,
        keyframes="".join(keyframes),
        rows="\n".join(_row(number, row) for row, number in rows.items()),
        frames="\n".join(shown),
    )


def _row(number: int, row: Row) -> str:
    """One line: a <text> of fixed width for each run of one style, so that columns align in any monospace font."""
    parts = []
    column = 0
    for style, run in groupby(row, key=lambda cell: cell[1]):
        text = "".join(char for char, _ in run)
        left, column = column, column + len(text)
        plain = text.strip()
        colour = next((code for code in style if code in COLOURS), "")
        if "7" in style:  # reverse: a box in the text's colour
            box = f'x="{left * WIDE:.1f}" y="1" width="{len(text) * WIDE:.1f}" height="{HIGH}"'
            parts.append(f'<rect class="c{colour}" {box}/>')
        if not plain:
            continue
        names = [f"c{colour}"] * bool(colour) + ["b"] * ("1" in style) + ["d"] * ("2" in style and not colour)
        names = ["i", "b"] if "7" in style else names
        kind = f' class="{" ".join(names)}"' if names else ""
        left += len(text) - len(text.lstrip())
        exact = f' textLength="{len(plain) * WIDE:.1f}"' if len(plain) > 1 else ""
        parts.append(f'<text x="{left * WIDE:.1f}" y="14"{kind}{exact}>{html.escape(plain, quote=False)}</text>')
    return f'<g id="r{number}">{"".join(parts)}</g>'


def main() -> int:
    """Returns 0, also where this machine has no Slurm: the existing picture is then kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    picture: Path = parser.parse_args().picture
    if not shutil.which("sbatch"):
        print(f"no Slurm here (make slurm-packages): {picture} is not recorded again", file=sys.stderr)
        return 0
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        frames = thin(record(Path(folder)))
    picture.write_text(draw(frames))
    picture.with_name(f"{picture.stem}-still.svg").write_text(draw(frames[-1:]))
    print(f"{picture}: {len(frames)} frames, {frames[-1].at_s:.0f} s, {picture.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
