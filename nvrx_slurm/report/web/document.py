"""One HTML file with everything inside. All that a job wrote is text in it, never markup and never script.

Two ways lead into the page. Text that Python writes goes through `text`, which escapes it and makes control
characters visible. Data for the script is JSON, compressed and in base64: no byte of it can end its element, and the
script puts strings into the page as `textContent` only. And the page's policy (CSP) names the hashes of its own style
and script: the browser runs no other, and asks for nothing from anywhere.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources

import msgspec

from nvrx_slurm.util.sanitize import one_line, shown

GZIP_LEVEL = 1
"""A page of 100,000 entries has 3.1 MB; level 5 saves a fifth of it for twice the time."""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{style_hash}'; \
script-src '{script_hash}'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="text/plain" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def text(value: object) -> str:
    """The value as text of one line."""
    return _for_runners(html.escape(one_line(str(value))))


def lines(value: str) -> str:
    """Text of several lines, for `<pre>`."""
    return _for_runners(html.escape(shown(value)))


def _for_runners(markup: str) -> str:
    """The same text, which a runner of GitHub Actions does not obey where the page goes through its log."""
    return markup.replace("##[", "#&#35;[").replace("::", "&#58;&#58;")


def document(*, title: str, body: str, data: object, scripts: Sequence[str]) -> bytes:
    """The whole file. `body` is markup that was made with `text`; `scripts`: files beside this one, run in order."""
    style, script = _asset("style.css"), "".join(map(_asset, scripts))
    packed = gzip.compress(msgspec.json.encode(data), GZIP_LEVEL, mtime=0)
    return _PAGE.format(
        title=text(title),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        body=body,
        data=base64.b64encode(packed).decode(),
    ).encode()


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: frozenset[int] = frozenset(), caption: str
) -> str:
    """A table that scrolls sideways on its own; cells are markup already. `numbers`: columns that are
    right-aligned."""
    cells = "".join(
        f'<th scope="col"{_number(index in numbers)}>{text(name)}</th>' for index, name in enumerate(head)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{cell}</th>' if not index else f"<td{_number(index in numbers)}>{cell}</td>"
            for index, cell in enumerate(row)
        )
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}: table"><table>'
        f'<caption class="unseen">{text(caption)}</caption>'
        f"<thead><tr>{cells}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def _number(is_one: bool) -> str:
    return ' class="number"' if is_one else ""


@cache
def _asset(name: str) -> str:
    return (resources.files("nvrx_slurm.report.web") / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
