"""Files of rules: the quick reader and the general one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.attribution.rules.catalogue import built_in_files
from nvrx_slurm.attribution.rules.rulefile import NotPlain, read_plain, read_rule_file
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.yamlfile import read_yaml

TEXTS = st.text(st.sampled_from("ab1 :#'\"-[]{}&*!|>%@`,?~\\"), max_size=12)


def test_built_in_files_are_plain() -> None:
    """The quick reader can read each shipped file, so that no analysis waits for YAML at its start."""
    for path in built_in_files():
        assert read_plain(path).data


@pytest.mark.parametrize("path", built_in_files()[:3], ids=lambda path: path.name)
def test_both_readers_agree(path: Path) -> None:
    """The quick reader gives the values and lines that the general one gives."""
    assert read_rule_file(path) == read_yaml(path)


@given(st.lists(st.tuples(st.sampled_from(["  key: ", "    - ", "  a:", "name:", "# ", "", "  b: '"]), TEXTS)))
def test_each_plain_file_means_the_same(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, str]]
) -> None:
    """Any file that the quick reader takes is valid YAML of the same meaning."""
    text = "\n".join(start + rest for start, rest in lines) + "\n"
    path = tmp_path_factory.mktemp("rules") / "own.yaml"
    path.write_text(text)
    try:
        plain = read_plain(path)
    except NotPlain:
        return
    general = read_yaml(path)
    assert (general.data, general.lines) == (plain.data, plain.lines)


def test_other_yaml_works(tmp_path: Path) -> None:
    """A file in another style is read as YAML, as job.yaml is."""
    path = tmp_path / "own.yaml"
    path.write_text('own.rule: {fault: own, sample: ["a", "b"]}\n')
    assert read_rule_file(path).data == {"own.rule": {"fault": "own", "sample": ["a", "b"]}}


@pytest.mark.parametrize(("text", "line"), [("a:\n  b: 1\na:\n  c: 2\n", 3), ("- a\n", 1), ("a:\n  b: [\n", 3)])
def test_what_is_wrong_is_reported(tmp_path: Path, text: str, line: int) -> None:
    """The error has the file and the line of a duplicate key, of what is no mapping, and of what is no YAML."""
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_rule_file(path)
    assert (caught.value.file, caught.value.line) == (str(path), line)


def test_an_absent_file(tmp_path: Path) -> None:
    """A file that does not exist is an error that names it."""
    with pytest.raises(ConfigError) as caught:
        read_rule_file(tmp_path / "none.yaml")
    assert caught.value.file == str(tmp_path / "none.yaml")
