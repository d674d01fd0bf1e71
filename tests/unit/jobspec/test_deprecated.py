"""Deprecated keys and flags set what the new ones set, with a warning, and cannot be combined with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.load import load, load_job

Write = Callable[[str], Path]

BASE = "name: a\ncommand: x\n"
BELOW = "fault_tolerance.attribution"
ENDPOINT = ("fault_tolerance.attribution_endpoint", "--ft-attribution-endpoint", "http://e")

# older key and value → the new keys and values
MEANS: dict[tuple[str, Any], dict[str, Any]] = {
    ("attribution_endpoint", "http://e"): {"attrsvc_url": "http://e"},
    ("attribution_backends", "[mcp]"): {"enable_mcp": True},
    ("attribution_backends", "mcp"): {"enable_mcp": True},
    ("attribution_backends", "http://b"): {"http_urls": ("http://b",)},
    ("attribution_backends", "[http://b, mcp, http://c]"): {
        "enable_mcp": True,
        "http_urls": ("http://b", "http://c"),
    },
    ("attribution_loganalysis", "lib"): {"enable_lib": True},
    ("attribution_loganalysis", "mcp"): {"enable_lib": False, "enable_mcp": True},
    ("attribution_loganalysis", "http://e"): {"enable_lib": False, "attrsvc_url": "http://e"},
}


@pytest.mark.parametrize(("older", "new"), MEANS.items(), ids=str)
def test_an_older_key_means_what_the_new_ones_mean(write: Write, older: tuple[str, str], new: dict[str, Any]) -> None:
    """The job is the same, the origin of each new key is the older key's line, and one warning names the new keys."""
    key, value = older
    loaded = load(write(f"{BASE}fault_tolerance:\n  {key}: {value}\n"))
    asked = loaded.spec.fault_tolerance.attribution
    assert {name: getattr(asked, name) for name in new} == new
    assert {str(loaded.origin_of((*BELOW.split("."), name))) for name in new} == {"job.yaml:4"}
    (sentence,) = loaded.deprecated
    assert sentence.startswith(
        f"job.yaml:4: fault_tolerance.{key} is deprecated since 2026-11; it will be removed no earlier than 2027-11"
    )
    assert all(f"{BELOW}.{name}" in sentence for name in new)


def test_the_service_of_an_older_mode_is_the_endpoint(write: Write) -> None:
    """`attribution_loganalysis: url` asks only the service of `attribution_endpoint`, not the built-in rules."""
    keys = "{attribution_loganalysis: url, attribution_endpoint: 'http://e'}"
    asked = load(write(f"{BASE}fault_tolerance: {keys}\n")).spec.fault_tolerance.attribution
    assert (asked.enable_lib, asked.attrsvc_url) == (False, "http://e")
    with pytest.raises(
        ConfigError, match=r"^job.yaml:3: fault_tolerance.attribution_loganalysis: no service is named"
    ):
        load(write(f"{BASE}fault_tolerance: {{attribution_loganalysis: url}}\n"))


def test_a_deprecated_flag_is_named_as_a_flag(write: Write) -> None:
    """The warning for a deprecated flag names flags, not keys."""
    loaded = load(
        write(BASE), [ENDPOINT, ("fault_tolerance.attribution_loganalysis", "--ft-attribution-loganalysis", "mcp")]
    )
    assert loaded.deprecated == (
        "--ft-attribution-endpoint is deprecated since 2026-11; it will be removed no earlier than 2027-11: use"
        " --ft-attrsvc-url",
        "--ft-attribution-loganalysis is deprecated since 2026-11; it will be removed no earlier than 2027-11: use"
        " --ft-attribution-enable-mcp and --no-ft-attribution-enable-lib",
    )


def test_a_variable_may_have_an_older_name_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deprecated variable overrides a deprecated key in job.yaml, and a deprecated flag overrides both."""
    monkeypatch.setenv("NVRX_SLURM_FAULT_TOLERANCE__ATTRIBUTION_ENDPOINT", "http://v")
    job = write(f"{BASE}fault_tolerance: {{attribution_endpoint: 'http://j'}}\n")
    loaded = load(job)
    assert loaded.spec.fault_tolerance.attribution.attrsvc_url == "http://v"
    assert loaded.deprecated[0].startswith("$NVRX_SLURM_FAULT_TOLERANCE__ATTRIBUTION_ENDPOINT: fault_tolerance.")
    assert load(job, [ENDPOINT]).spec.fault_tolerance.attribution.attrsvc_url == "http://e"


MIXED = {
    "{attribution_endpoint: 'http://e', attribution: {attrsvc_url: 'http://n'}}": "job.yaml:3: fault_tolerance."
    "attribution_endpoint and job.yaml:3: fault_tolerance.attribution.attrsvc_url say the same thing: keep"
    " fault_tolerance.attribution.attrsvc_url (--ft-attrsvc-url)",
    "{attribution_backends: mcp, attribution: {enable_mcp: false}}": "job.yaml:3: fault_tolerance.attribution_back"
    "ends and job.yaml:3: fault_tolerance.attribution.enable_mcp say the same thing",
    "{attribution_loganalysis: 'http://e', attribution_endpoint: 'http://e'}": "job.yaml:3: fault_tolerance."
    "attribution_endpoint and job.yaml:3: fault_tolerance.attribution_loganalysis say the same thing",
}


@pytest.mark.parametrize(("keys", "says"), MIXED.items())
def test_older_and_new_together_are_one_error(write: Write, keys: str, says: str) -> None:
    """The error names both keys and says which one to keep."""
    with pytest.raises(ConfigError) as caught:
        load(write(f"{BASE}fault_tolerance: {keys}\n"))
    assert str(caught.value).startswith(says)


def test_older_and_new_are_one_error_from_layer_to_layer(write: Write) -> None:
    """A new flag beside an older key, and an older flag beside a new key."""
    older = write(f"{BASE}fault_tolerance: {{attribution_endpoint: 'http://e'}}\n")
    with pytest.raises(
        ConfigError, match=r"^job.yaml:3: fault_tolerance.attribution_endpoint and --ft-attrsvc-url say"
    ):
        load(older, [(f"{BELOW}.attrsvc_url", "--ft-attrsvc-url", "http://n")])
    new = write(f"{BASE}fault_tolerance: {{attribution: {{attrsvc_url: 'http://n'}}}}\n")
    with pytest.raises(ConfigError, match=r"^--ft-attribution-endpoint and job.yaml:3: .*attrsvc_url say the same"):
        load(new, [ENDPOINT])


def test_a_bad_older_value_is_reported_at_its_line(write: Write) -> None:
    """The error has the line of the older key."""
    for keys, says in {
        "attribution_endpoint: nowhere": "attribution.attrsvc_url: must look like https://host:8443",
        "attribution_endpoint: {a: b}": "attribution.attrsvc_url: must be text",
        "attribution_backends: [a]": "attribution.http_urls.0: must look like",
        "attribution_loganalysis: perhaps": "attribution_loganalysis: must be lib, mcp, or the service's URL, not",
        "attribution_loganalysis: [lib]": "attribution_loganalysis: must be lib, mcp, or the service's URL, not",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load(write(f"{BASE}fault_tolerance:\n  {keys}\n"))
        assert str(caught.value).startswith(f"job.yaml:4: fault_tolerance.{says}"), keys


def test_python_callers_are_warned(write: Write) -> None:
    """`load_job` warns once for each deprecated name, at the line that called it; a new name causes no warning."""
    with pytest.warns(
        DeprecationWarning, match="attribution_endpoint=: fault_tolerance.attribution_endpoint is deprecated"
    ) as told:
        load_job(write(BASE), fault_tolerance__attribution_endpoint="http://e")
    assert [each.filename for each in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_job(write(BASE), fault_tolerance__attribution__attrsvc_url="http://e")
