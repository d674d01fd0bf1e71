"""Deprecated keys below `fault_tolerance`, translated to the new ones.

A deprecated key sets the new keys in its own layer. A deprecated and a new name for one thing are an error, also in
different layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.flags import ATTRIBUTION, BLOCK, FLAGS
from nvrx_slurm.jobspec.reading import dotted, together

if TYPE_CHECKING:
    from nvrx_slurm.jobspec.load import ConfigLayer, Origin
    from nvrx_slurm.jobspec.yamlfile import KeyPath

# The month of the deprecation, and the month from which a release may drop the names.
SINCE, KEPT_UNTIL = "2026-11", "2027-11"

_BELOW: KeyPath = tuple(ATTRIBUTION.split("."))


class _Use(Struct, frozen=True):
    """A deprecated key in one layer, and what it sets: key below `attribution` → value."""

    layer: ConfigLayer
    key: str
    sets: Mapping[str, Any]

    @property
    def origin(self) -> Origin:
        return self.layer.origin((BLOCK, self.key))

    @property
    def place(self) -> str:
        return _placed(self.origin, f"{BLOCK}.{self.key}")

    @property
    def instead(self) -> str:
        """The new names, of the same kind."""
        if not _is_flag(self.origin):
            return " and ".join(map(_dotted, self.sets))
        off = (key for key, value in self.sets.items() if value is False)
        flags = FLAGS | {key: FLAGS[key].replace("--", "--no-", 1) for key in off}
        return " and ".join(flags[key] for key in self.sets)


def translate_deprecated(layers: Sequence[ConfigLayer]) -> tuple[list[ConfigLayer], tuple[str, ...]]:
    """The layers without deprecated names; and for each name in use one sentence that names the new one.

    Raises ConfigError where a deprecated name and a new one set the same key, or a deprecated one has no such value.
    """
    uses: list[_Use] = []
    for layer in layers:
        for key, translation in _TRANSLATIONS.items():
            if layer.has((BLOCK, key)):
                try:
                    uses.append(_Use(layer, key, translation(layer.data[BLOCK][key])))
                except ValueError as error:
                    at = layer.origin((BLOCK, key))
                    raise ConfigError(str(error), file=at.source, line=at.line, key=f"{BLOCK}.{key}") from None
    if mixed := [*_mixed(uses, layers)]:
        raise together(mixed)
    sentences = (
        f"{use.place} is deprecated since {SINCE}; it will be removed no earlier than {KEPT_UNTIL}: use {use.instead}"
        for use in uses
    )
    return [_translated(layer, uses) for layer in layers], tuple(dict.fromkeys(sentences))


def _mixed(uses: Sequence[_Use], layers: Sequence[ConfigLayer]) -> Iterator[ConfigError]:
    """Deprecated names that set the same key as a new one, or as another deprecated one; or that set too little."""
    by_new: dict[str, dict[str, _Use]] = defaultdict(dict)
    for use in uses:
        for key in use.sets:
            # Once for each deprecated name: that it stands in two layers is no contradiction, the stronger one wins.
            by_new[key].setdefault(use.key, use)
    for key, uses_of_key in by_new.items():
        first, *others = uses_of_key.values()
        new = (_placed(layer.origin((*_BELOW, key)), _dotted(key)) for layer in layers if layer.has((*_BELOW, key)))
        if second := next(new, others[0].place if others else None):
            yield ConfigError(f"{first.place} and {second} say the same thing: keep {_dotted(key)} ({FLAGS[key]})")
    # `attribution_loganalysis: url` means the service that another key names.
    is_named = "attrsvc_url" in by_new or any(layer.has((*_BELOW, "attrsvc_url")) for layer in layers)
    for use in uses:
        if use.layer.data[BLOCK][use.key] == "url" and not is_named:
            yield ConfigError(f"{use.place}: no service is named; give its URL: {ATTRIBUTION}.attrsvc_url")


def _translated(layer: ConfigLayer, uses: Sequence[_Use]) -> ConfigLayer:
    # A deprecated key sets the new ones in its own layer, with its own line or flag as their origin.
    own = [use for use in uses if use.layer is layer]
    if not own:
        return layer
    bounds = {key: value for key, value in layer.data[BLOCK].items() if key not in _TRANSLATIONS}
    said = {key: value for use in own for key, value in use.sets.items()}
    if isinstance(beside := bounds.get("attribution", {}), dict):  # else the model refuses it, with its line
        bounds["attribution"] = {**beside, **said}
    places = {(*_BELOW, key): use.origin for use in own for key in use.sets}
    return replace(layer, data={**layer.data, BLOCK: bounds}, places={**layer.places, **places})


def _placed(origin: Origin, key: str) -> str:
    """A name and its place; a flag is both."""
    return str(origin) if _is_flag(origin) else f"{origin}: {key}"


def _is_flag(origin: Origin) -> bool:
    return origin.source.startswith("--ft-")


def _dotted(key: str) -> str:
    return dotted((*_BELOW, key))


def _backends(value: Any) -> Mapping[str, Any]:
    """Each is a URL or `mcp`."""
    several = value if isinstance(value, list) else [value]
    urls = [each for each in several if each != "mcp"]
    return ({"http_urls": urls} if urls else {}) | ({"enable_mcp": True} if "mcp" in several else {})


def _loganalysis(value: Any) -> Mapping[str, Any]:
    """One mode alone; `url`: the service that `attribution_endpoint` names. Raises ValueError."""
    if value == "lib":
        return {"enable_lib": True}
    if value == "mcp":
        return {"enable_mcp": True, "enable_lib": False}
    if value == "url":
        return {"enable_lib": False}
    if isinstance(value, str) and value.startswith("http"):
        return {"attrsvc_url": value, "enable_lib": False}
    raise ValueError(f"must be lib, mcp, or the service's URL, not {value!r}")


_TRANSLATIONS: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "attribution_endpoint": lambda value: {"attrsvc_url": value},
    "attribution_backends": _backends,
    "attribution_loganalysis": _loganalysis,
}
