"""The cache of rendered scripts: what hits, what misses, and that a broken one is no more than slow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import nvrx_slurm
from nvrx_slurm.api.prepared import PreparedJob
from nvrx_slurm.api.script_cache import MOST_ENTRIES, ScriptCache, key_of
from nvrx_slurm.jobspec import env

JOB = PreparedJob(name="a", folder="/jobs", script='#!/bin/bash\necho "ü\udcff"\n', plan_json="{}")
JOB_YAML = "name: kept\ncommand: [echo, hello]\nnodes: 2\n"
KEY, OTHER_KEY = "0" * 64, "1" * 64
HEAVY = {"pydantic", "ruamel", "jinja2", "submitit", "rich", "msgspec", "stamina", "redis"}


@pytest.fixture
def cache(tmp_path: Path) -> ScriptCache:
    return ScriptCache(tmp_path / "cache" / "scripts")


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a job.yaml; site files and cache lie below it."""
    for name in ("XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    (tmp_path / "job.yaml").write_text(JOB_YAML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- entries


def test_what_was_put_is_found_as_it_was(cache: ScriptCache) -> None:
    """Whatever text the script holds."""
    assert cache.get(KEY) is None
    cache.put(KEY, JOB)
    assert cache.get(KEY) == JOB
    assert cache.get(OTHER_KEY) is None


def test_the_cache_is_its_users_alone(cache: ScriptCache, tmp_path: Path) -> None:
    """A job's environment may hold what others should not read, and nobody else may say what runs."""
    cache.put(KEY, JOB)
    folder = tmp_path / "cache" / "scripts"
    assert [folder.stat().st_mode & 0o777, (folder / KEY).stat().st_mode & 0o777] == [0o700, 0o600]
    assert [path.name for path in folder.iterdir()] == [KEY]


def test_a_folder_that_others_can_write_is_not_used(cache: ScriptCache, tmp_path: Path) -> None:
    """What lies there may not be ours."""
    cache.put(KEY, JOB)
    (tmp_path / "cache" / "scripts").chmod(0o770)
    assert cache.get(KEY) is None
    cache.put(OTHER_KEY, JOB)
    assert not (tmp_path / "cache" / "scripts" / OTHER_KEY).exists()


@pytest.mark.parametrize(
    "torn",
    [lambda data: b"", lambda data: data[:-9], lambda data: data.replace(b"echo", b"evil"), lambda data: b"\xff\n{}"],
    ids=["empty", "cut off", "changed", "no text"],
)
def test_a_corrupted_entry_is_a_miss_and_is_replaced(
    cache: ScriptCache, tmp_path: Path, torn: Callable[[bytes], bytes]
) -> None:
    """Nothing but what was written is ever submitted."""
    cache.put(KEY, JOB)
    path = tmp_path / "cache" / "scripts" / KEY
    path.write_bytes(torn(path.read_bytes()))
    assert cache.get(KEY) is None
    cache.put(KEY, JOB)
    assert cache.get(KEY) == JOB


def test_an_entry_under_anothers_name_is_a_miss(cache: ScriptCache, tmp_path: Path) -> None:
    """The key is part of the seal."""
    cache.put(KEY, JOB)
    folder = tmp_path / "cache" / "scripts"
    (folder / KEY).rename(folder / OTHER_KEY)
    assert cache.get(OTHER_KEY) is None


@pytest.mark.parametrize("place", ["/proc/nvrx", "/dev/null/nvrx", "relative"])
def test_a_folder_that_cannot_be_made_is_no_error(place: str, workplace: Path) -> None:
    """There is no entry then, and nothing was said."""
    cache = ScriptCache(Path(place))
    cache.put(KEY, JOB)
    assert cache.get(KEY) is None


def test_the_entries_used_last_are_kept(cache: ScriptCache, tmp_path: Path) -> None:
    """The cache does not grow, and a job that is submitted every day stays in it."""
    for number in range(MOST_ENTRIES):
        cache.put(f"{number:064}", JOB)
        os.utime(tmp_path / "cache" / "scripts" / f"{number:064}", (number, number))
    assert cache.get(f"{0:064}") == JOB
    cache.put(KEY[:-1] + "x", JOB)
    kept = {path.name for path in (tmp_path / "cache" / "scripts").iterdir()}
    assert len(kept) == MOST_ENTRIES
    assert f"{0:064}" in kept
    assert f"{1:064}" not in kept


def test_a_job_with_the_sites_own_store_is_not_kept(cache: ScriptCache, tmp_path: Path) -> None:
    """That store is knocked at each time."""
    cache.put(KEY, PreparedJob(name="a", folder="/jobs", script="", plan_json="{}", uses_site_store=True))
    assert not (tmp_path / "cache").exists()


# ---- keys


def key(
    job_file: str = "job.yaml", folder: str = "jobs", cluster: str = "slurm", flags: Sequence[object] = (None, None)
) -> str:
    found = key_of(Path(job_file), Path(folder), cluster, flags)
    assert found is not None
    return found


def test_the_same_job_has_the_same_key(workplace: Path) -> None:
    """However its file is called."""
    assert key() == key() == key(str(workplace / "job.yaml"), str(workplace / "jobs"))


@pytest.mark.parametrize(
    "other",
    [{"folder": "jobs2"}, {"cluster": "local"}, {"flags": (2, None)}, {"flags": (None, 2)},
     {"flags": (None, None, "nodes=2")}, {"job_file": "copy.yaml"}],
    ids=str,
)  # fmt: skip
def test_another_flag_is_another_job(workplace: Path, other: dict[str, str]) -> None:
    """A copy of job.yaml too, since relative paths count from where it lies."""
    (workplace / "copy.yaml").write_text(JOB_YAML)
    assert key(**other) != key()  # type: ignore[arg-type]


def test_an_edited_job_file_is_another_job(workplace: Path) -> None:
    """Its bytes count, not its times."""
    before = key()
    (workplace / "job.yaml").write_text(JOB_YAML.replace("2", "3"))
    assert key() != before
    (workplace / "job.yaml").write_text(JOB_YAML)
    assert key() == before


@pytest.mark.parametrize("layer", ["xdg_config_home", "xdg_config_dirs"])
def test_a_site_file_that_comes_changes_or_goes_is_another_job(workplace: Path, layer: str) -> None:
    """The user's and the machine's."""
    site = workplace / layer / "nvrx-slurm" / "config.yaml"
    site.parent.mkdir(parents=True)
    keys = [key()]
    for text in ("spares: 1\n", "spares: 2\n"):
        site.write_text(text)
        keys.append(key())
    assert len(set(keys)) == 3
    site.unlink()
    assert key() == keys[0]


def test_a_variable_that_sets_a_key_is_another_job_but_a_password_is_none(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even its hash is kept."""
    before = key()
    for variable in env.SECRETS:
        monkeypatch.setenv(variable, "secret")
    assert key() == before
    monkeypatch.setenv("NVRX_SLURM_SPARES", "1")
    assert key() != before


def test_another_current_folder_is_another_job(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start there."""
    arguments = (str(workplace / "job.yaml"), str(workplace / "jobs"))
    before = key(*arguments)
    (workplace / "below").mkdir()
    monkeypatch.chdir(workplace / "below")
    assert key(*arguments) != before


def test_another_interpreter_is_another_job(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script starts it."""
    before = key()
    monkeypatch.setattr(sys, "executable", "/elsewhere/python")
    assert key() != before


def test_an_installed_library_is_another_job(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new pydantic may judge otherwise."""
    libraries = workplace / "site-packages"
    libraries.mkdir()
    os.utime(libraries, (0, 0))
    monkeypatch.syspath_prepend(libraries)
    before = key()
    (libraries / "pydantic-9.dist-info").mkdir()
    assert key() != before


@pytest.mark.parametrize(
    "changed",
    [
        "sbatch/job.sh.template",
        "nvrx_slurm/jobspec/plan.py",
        "nvrx_slurm/jobspec/script.py",
        "nvrx_slurm/journal/records.py",
    ],
)
def test_in_a_development_checkout_an_edited_module_is_another_job(workplace: Path, changed: str) -> None:
    """Nobody looks for the reason why an edit of the template changes nothing."""
    checkout = workplace / "checkout"
    package = Path(nvrx_slurm.__file__).parent
    for folder in ("nvrx_slurm", "sbatch"):
        shutil.copytree(package.parent / folder, checkout / folder)
    before = _key_in(checkout)
    with (checkout / changed).open("a") as file:
        file.write("\n")
    assert _key_in(checkout) != before


def _key_in(checkout: Path) -> str:
    code = (
        "import sys; from pathlib import Path; from nvrx_slurm.api import script_cache as c;"
        "assert c.__file__.startswith(sys.argv[1]), c.__file__;"
        "print(c.key_of(Path('../job.yaml'), Path('../jobs'), 'slurm', ()))"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, str(checkout)], cwd=checkout, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("job_file", ["missing.yaml", ".", "pipe"])
def test_a_job_file_that_is_no_plain_file_has_no_key(workplace: Path, job_file: str) -> None:
    """A pipe can be read once only, and that is not here."""
    os.mkfifo(workplace / "pipe")
    assert key_of(Path(job_file), Path("jobs"), "slurm", ()) is None


# ---- the command


def dry_run(*flags: str, options: Sequence[str] = (), text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-m", "nvrx_slurm", "submit", "--dry-run", *flags]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True)


def test_a_script_that_is_found_is_the_script_that_was_made(workplace: Path) -> None:
    """To the byte."""
    made, found = dry_run().stdout, dry_run().stdout
    assert made == found
    assert made.startswith("#!/bin/bash")
    assert len(_entries(workplace)) == 1


def test_an_edit_is_never_missed(workplace: Path) -> None:
    """The next submission is of what job.yaml says now."""
    dry_run()
    (workplace / "job.yaml").write_text(JOB_YAML.replace("hello", "goodbye"))
    assert "goodbye" in dry_run().stdout


def test_what_makes_a_script_is_not_loaded_where_one_is_found(workplace: Path) -> None:
    """`--set` is no exception."""
    command = ("--spares", "1", "--set", "slurm.time=1h")
    made, found = (_packages(dry_run(*command, options=["-X", "importtime"]).stderr) for _ in range(2))
    assert made & HEAVY == {"ruamel", "msgspec"}
    assert found & HEAVY == set()
    assert "click" in found


def _packages(importtime: str) -> set[str]:
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in importtime.splitlines()}


def test_what_submits_loads_none_of_it_either() -> None:
    """Everything between the script and the job's id."""
    code = "import sys, nvrx_slurm.api.submission; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(loaded)


def test_a_flag_of_failure_attribution_is_another_job(workplace: Path) -> None:
    """Each of them, its value too."""
    scripts = {
        dry_run(*flags).stdout
        for flags in (
            (),
            ("--ft-attrsvc-url", "http://a"),
            ("--ft-attrsvc-url", "http://b"),
            ("--no-ft-attribution-dry-run",),
            ("--ft-attribution-http-url", "http://a"),
        )
    }
    assert len(scripts) == len(_entries(workplace)) == 5


def test_a_job_with_older_names_is_not_kept(workplace: Path) -> None:
    """Whoever uses them is told each time, not only the first."""
    told = [dry_run("--ft-attribution-endpoint", "http://a").stderr for _ in range(2)]
    assert told[0] == told[1]
    assert told[0].startswith("nvrx-slurm: DeprecationWarning: --ft-attribution-endpoint is an older name")
    assert _entries(workplace) == []


def test_a_job_that_comes_through_a_pipe_is_read(workplace: Path) -> None:
    """Nothing is kept of it."""
    assert "from a pipe" in dry_run("/dev/stdin", text=JOB_YAML.replace("hello", "from a pipe")).stdout
    assert _entries(workplace) == []


def test_a_bad_job_file_is_not_kept(workplace: Path) -> None:
    """It is judged anew each time."""
    (workplace / "job.yaml").write_text("nodez: 2\n")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        dry_run()
    assert caught.value.returncode == 2
    assert _entries(workplace) == []


def test_the_password_of_a_store_is_nowhere_in_the_cache(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is kept does not hold it."""
    monkeypatch.setenv("NVRX_SLURM_STORE_PASSWORD", "correct-horse")
    dry_run()
    (entry,) = _entries(workplace)
    assert "correct-horse" not in entry.read_text()
    assert json.loads(entry.read_text().partition("\n")[2])["name"] == "kept"


def _entries(workplace: Path) -> list[Path]:
    return sorted((workplace / "xdg_cache_home" / "nvrx-slurm").glob("scripts/*"))
