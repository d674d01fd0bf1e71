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
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources

import msgspec

from nvrx_slurm.util.sanitize import one_line, shown

# A page of 100,000 entries has 3.1 MB; level 5 saves a fifth of it for twice the time.
GZIP_LEVEL = 1

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
    # In this order: escaped afterwards, the references that `_for_runners` writes would be shown as text.
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
    # `mtime`: the same job makes the same bytes. Base64 has no `<`, so no data can end its element.
    packed = gzip.compress(msgspec.json.encode(data), GZIP_LEVEL, mtime=0)
    return _PAGE.format(
        title=text(title),
        style=style,
        script=script,
        style_hash=policy_hash(style),
        script_hash=policy_hash(script),
        body=body,
        data=base64.b64encode(packed).decode(),
    ).encode()


def section(name: str, title: str, inside: str) -> str:
    """A section of the page: the link `#name` leads to it."""
    heading = f'<h2 id="{name}-title">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">\n{heading}\n{inside}</section>'


def about(markup: str) -> str:
    """A paragraph that explains; nothing for no text."""
    return f'<p class="about">{markup}</p>' if markup else ""


def header(
    heading: str,
    facts: Iterable[tuple[str, str]],
    figures: Iterable[tuple[str, str, str]],
    sections: Mapping[str, str],
) -> str:
    """The top of a page. `heading` is markup already. `facts`: label and text. `figures`, the large numbers: label,
    value, and what the value is. `sections`: the name of each → what the link to it says."""
    listed = "".join(f"<div><dt>{text(label)}</dt><dd>{text(fact)}</dd></div>" for label, fact in facts)
    cards = "".join(
        f'<div class="figure"><dt>{text(label)}</dt><dd><b>{text(value)}</b> <span>{text(what)}</span></dd></div>'
        for label, value, what in figures
    )
    links = "".join(f'<a href="#{name}">{label}</a>' for name, label in sections.items())
    return (
        f'<header>\n<p class="what">nvrx-slurm report</p>\n{heading}\n'
        f'<dl class="facts">{listed}</dl>\n<dl class="figures">{cards}</dl>\n'
        f'<nav aria-label="Sections">{links}</nav>\n</header>'
    )


def bar(parts: Iterable[tuple[str, float, str]], height: int) -> str:
    """The rectangles of one bar, which is 1000 wide. `parts`: class, share of the whole, title."""
    x, drawn = 0.0, []
    for kind, share, title in parts:
        size = f'x="{x:.2f}" width="{1000 * share:.2f}" height="{height}"'
        drawn.append(f'<rect class="{text(kind)}" {size}><title>{text(title)}</title></rect>')
        x += 1000 * share
    return "".join(drawn)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Container[int] = (),
    caption: str,
    nothing: str = "",
) -> str:
    """A table that scrolls sideways on its own; cells are markup already. `numbers`: columns that are
    right-aligned. `nothing`: what is said instead where there is no row."""
    if not rows and nothing:
        return about(nothing)
    aligned = [' class="number"' if index in numbers else "" for index in range(len(head))]
    cells = "".join(f'<th scope="col"{align}>{text(name)}</th>' for name, align in zip(head, aligned, strict=True))
    body = ""
    for first, *rest in rows:
        others = "".join(f"<td{align}>{cell}</td>" for cell, align in zip(rest, aligned[1:], strict=True))
        body += f'<tr><th scope="row">{first}</th>{others}</tr>\n'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}: table"><table>'
        f'<caption class="unseen">{text(caption)}</caption>'
        f"<thead><tr>{cells}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


@cache
def _asset(name: str) -> str:
    return (resources.files("nvrx_slurm.report.web") / name).read_text(encoding="utf-8")


def policy_hash(content: str) -> str:
    """The hash by which a page's policy (CSP) lets the browser run a style or a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
