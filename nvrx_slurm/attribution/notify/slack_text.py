"""Text as Slack's `mrkdwn` shows it, whatever stands in it. Pure."""

from __future__ import annotations

import re

from nvrx_slurm.util.sanitize import uncoloured

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_MEMBER = re.compile(r"[UW][A-Z0-9]+")
_GROUP = re.compile(r"S[A-Z0-9]+")


def escaped(text: str) -> str:
    """Nothing of it is a link, a mention, or an entity; control characters are visible, colours left out."""
    return "".join(_shown(char) for char in uncoloured(text))


def fitting(text: str, most: int) -> str:
    """Escaped, and at most `most` characters of it: cut between characters, never inside an entity."""
    whole = escaped(text)
    if len(whole) <= most:
        return whole
    shown, length = [], 1
    for char in map(_shown, uncoloured(text)):
        length += len(char)
        if length > most:
            break
        shown.append(char)
    return "".join(shown) + "…"


def code_block(text: str, most: int) -> str:
    """As a block that ends where it should: backticks inside become look-alikes. At most `most` characters."""
    return f"```\n{fitting(text.replace('`', 'ˋ'), most - 8)}\n```"


def bold(text: str) -> str:
    return f"*{text}*"


def mention_of(whom: str) -> str:
    """`U024BE7LH` → `<@U024BE7LH>`, `@here` → `<!here>`, a group's id likewise; anything else is shown as it is."""
    bare = whom.strip().lstrip("@")
    if bare in ("here", "channel", "everyone"):
        return f"<!{bare}>"
    if _MEMBER.fullmatch(bare):
        return f"<@{bare}>"
    return f"<!subteam^{bare}>" if _GROUP.fullmatch(bare) else escaped(whom)


def _shown(char: str) -> str:
    if char in _ENTITIES:
        return _ENTITIES[char]
    return " " if char == "\t" else char
