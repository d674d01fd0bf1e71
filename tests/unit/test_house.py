"""`ci.house` on small packages whose measures are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import house


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "shop"
    (root / "till").mkdir(parents=True)
    return root


def measures(package: Path) -> dict[str, house.Row]:
    return {row.measure: row for row in house.measure(house.read(package))}


def test_private_helpers_used_once(package: Path) -> None:
    """Only a helper used once is counted: not one used twice, a public one, or an unused one."""
    (package / "a.py").write_text(
        "def _once(): ...\ndef _twice(): ...\ndef public():\n    _once()\n    _twice()\n    _twice()\n"
    )
    row = measures(package)["private functions used once"]
    assert row.value == "33 %"
    assert row.places == ("shop.a._once",)


def test_comment_lines_stand_alone_and_outside_strings(package: Path) -> None:
    (package / "a.py").write_text('# one\nX = 1  # beside code\nTEXT = """\n# in a string\n"""\n')
    assert measures(package)["comment lines"].value == "20.0 %"


def test_class_names_in_two_modules(package: Path) -> None:
    (package / "a.py").write_text("class Line:\n    pass\n")
    (package / "till" / "b.py").write_text("class Line:\n    pass\n\nclass Other:\n    pass\n")
    row = measures(package)["class names in two modules"]
    assert row.value == "1"
    assert row.places == ("Line: shop.a, shop.till.b",)


def test_circles_count_at_run_time_only(package: Path) -> None:
    (package / "a.py").write_text("from shop import b\n")
    (package / "b.py").write_text("import shop.till.c\n")
    (package / "till" / "c.py").write_text("def late():\n    from shop.a import X\n")
    (package / "d.py").write_text("if TYPE_CHECKING:\n    import shop.e\n")
    (package / "e.py").write_text("import shop.d\n")
    row = measures(package)["import circles"]
    assert row.value == "1"
    assert row.places == ("shop.a ⇄ shop.b ⇄ shop.till.c",)


def test_a_small_file_of_one_sibling(package: Path) -> None:
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from shop.b import X\nfrom shop.till.c import Y\n")
    (package / "b.py").write_text("X = 1\n")
    (package / "till" / "c.py").write_text("Y = 1\n")
    assert measures(package)["files < 100 lines of one sibling"].places == ("shop.b",)


def test_a_folder_without_python_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["house", str(tmp_path / "missing")])
    assert house.main() == 2
    assert str(tmp_path / "missing") in capsys.readouterr().err
