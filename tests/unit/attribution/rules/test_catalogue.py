"""The shipped rules, and how a user's own rules are loaded beside them."""

from __future__ import annotations

import pickle
from pathlib import Path
from time import process_time

import pytest

from nvrx_slurm.attribution.rules.catalogue import Rule, built_in_files, load_catalogue, rules_of, usable_files
from nvrx_slurm.attribution.rules.rulefile import read_rule_file
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.journal.verdicts import Scope, Verdict

RULES = load_catalogue().rules
LONGEST_LINE = 16 * 1024
LONGEST_S = 0.05
HOSTILE = (
    "a",
    " ",
    ":",
    ".",
    "1",
    "a ",
    "a.",
    "]: ",
    "1: ",
    "Z ",
    "x=1, ",
    "[1] ",
    "('",
    "RuntimeError: ",
    "kernel: ",
)


def matching(line: str) -> list[Rule]:
    return [rule for rule in RULES if rule.pattern.search(line.encode())]


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return path


def test_there_are_enough() -> None:
    """The catalogue is broad."""
    assert len(RULES) >= 380


def test_names_are_unique() -> None:
    """No two shipped files have a rule of the same name."""
    names = [name for path in built_in_files() for name in rules_of(read_rule_file(path))]
    assert len(names) == len(set(names)) == len(RULES)


def test_rules_are_whole() -> None:
    """Each rule says what to do and where its text comes from, and shows a line."""
    assert not [rule.name for rule in RULES if not rule.sample]
    assert not [rule.name for rule in RULES if not rule.hint.endswith(".")]
    assert not [rule.name for rule in RULES if not rule.reference.startswith("https://")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_wins_its_samples(rule: Rule) -> None:
    """A rule matches its samples, and no rule of another class that matches one is as near to the cause."""
    for line in rule.sample:
        found = matching(line)
        assert rule in found, line
        rivals = [other for other in found if other.fault != rule.fault and other.severity >= rule.severity]
        assert not rivals, (line, [other.name for other in rivals])


def test_rules_leave_look_alikes() -> None:
    """A rule does not match what only looks like its failure."""
    pairs = [(rule, line) for rule in RULES for line in rule.not_sample]
    assert len(pairs) > 70
    assert not [(rule.name, line) for rule, line in pairs if rule.pattern.search(line.encode())]


def test_samples_hold_a_literal() -> None:
    """Each sample contains one of the literals for which the search looks before it tries the pattern."""
    for rule in RULES:
        for line in rule.sample:
            seen = (line.lower() if rule.ignore_case else line).encode()
            assert any(text in seen for text in rule.literals), line


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_pattern_takes_no_line_for_long(rule: Rule) -> None:
    """No line of 16 KiB, however hostile, keeps a pattern busy: the work grows linearly with the line's length."""
    texts = {literal.decode() for literal in rule.literals}
    for unit in {*HOSTILE, *texts, *(f"{text} " for text in texts)}:
        for line in (unit * LONGEST_LINE, "".join(sorted(texts)) + unit * LONGEST_LINE):
            hostile = line[:LONGEST_LINE].encode()
            quick = (
                _search_s(rule, hostile) < LONGEST_S or _search_s(rule, hostile) < LONGEST_S
            )  # once it may compile
            assert quick, (unit, rule.pattern)


def _search_s(rule: Rule, line: bytes) -> float:
    begun = process_time()  # of this process alone: other work on the machine does not count
    rule.pattern.search(line)
    return process_time() - begun


def test_stops_are_never_the_machine() -> None:
    """No rule stops a job because of its node, the network or a peer: a restart can avoid those."""
    odd = {rule.name for rule in RULES if rule.verdict is Verdict.STOP and rule.role != "cause"}
    odd |= {rule.name for rule in RULES if rule.verdict is Verdict.STOP and rule.scope in (Scope.NODE, Scope.NETWORK)}
    assert odd == set()


def test_noise_goes_before_all() -> None:
    """A line of noise counts for no other rule: none is nearer to a cause."""
    assert {rule.severity for rule in RULES if rule.role == "noise"} == {100}
    assert all(rule.severity < 100 for rule in RULES if rule.role != "noise")


@pytest.mark.parametrize(
    "label", ["", "[rank3]: ", "3: ", "12: [rank12]: ", "[default3]:[rank3]: ", "(RayWorker pid=7) "]
)
def test_exceptions_are_known_behind_a_label(label: str) -> None:
    """The last line of a traceback is known with any label of its rank before it."""
    assert "key_error" in {rule.fault for rule in matching(f"{label}KeyError: 'lr'")}


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-21 18:00:00,123 WARNING train: caught KeyError: 'lr', default taken",
        "INFO: error rate: 0.1, exceptions: 0",
        "| nan_iterations: 0 | loss scale: 1.0 | timeout: 600 |",
        "config: {'on_oom': 'RuntimeError: CUDA out of memory.'}",
        "loss=2.31 step=100 mem=62.0GiB",
        "Loaded checkpoint /scratch/ckpt/step-4000 in 12.1 s",
    ],
)
def test_plain_lines_are_no_failure(line: str) -> None:
    """Lines of a healthy run that hold words of failure are no cause."""
    found = matching(line)
    assert not [rule.name for rule in found if rule.role == "cause"] or any(rule.role == "noise" for rule in found)


def test_xid_groups() -> None:
    """The driver's line names the GPU, the number and the process."""
    (rule,) = (rule for rule in RULES if rule.name == "gpu_application_fault.xid_31")
    match = rule.pattern.search(b"NVRM: Xid (PCI:0000:3b:00): 31, pid=4821, name=python, Ch 00000008")
    assert match is not None
    assert match.groupdict() == {"gpu": b"0000:3b:00", "xid": b"31", "pid": b"4821"}


def test_a_rule_travels_to_another_process() -> None:
    """A rule is the same after pickling."""
    assert pickle.loads(pickle.dumps(RULES)) == RULES


OWN = """\
own.rule:
  fault: bad_stage
  pattern: 'StageError: '
  verdict: STOP
  scope: user_code
  sample:
    - 'StageError: 4 of 3'
"""


def test_own_rules_come_after(tmp_path: Path) -> None:
    """A user's rule comes after the shipped ones, with defaults for what it leaves out."""
    rule = load_catalogue([own(tmp_path, OWN)]).rules[-1]
    assert (rule.name, rule.role, rule.severity, rule.literals) == ("own.rule", "cause", 50, (b"StageError: ",))


def test_own_rules_replace(tmp_path: Path) -> None:
    """A user's rule with a shipped rule's name replaces it."""
    path = own(tmp_path, OWN.replace("own.rule", "cuda_oom.caching_allocator"))
    rules = load_catalogue([path]).rules
    assert len(rules) == len(RULES)
    assert next(rule for rule in rules if rule.name == "cuda_oom.caching_allocator").fault == "bad_stage"
    assert load_catalogue().rules == RULES


@pytest.mark.parametrize(
    ("change", "line", "key", "names"),
    [
        (("  fault:", "  falt:"), 2, "falt", "`fault`"),
        (("verdict: STOP", "verdict: HALT"), 4, "verdict", "'HALT'"),
        (("scope: user_code", "scope: moon"), 5, "scope", "user_code, node, network,"),
        (("  scope: user_code\n", ""), 1, "scope", ""),
        (("fault: bad_stage", "fault: Bad stage"), 2, "fault", "'Bad stage'"),
        (("  sample:", "  severity: 200\n  sample:"), 6, "severity", "0 to 100"),
        (("  sample:", "  widespread: so\n  sample:"), 6, "widespread", "'so'"),
        (("StageError: '", "StageError: (x'"), 3, "pattern", ""),
        (("'StageError: '", "'e: .*'"), 3, "pattern", "'e: .*'"),
        (("StageError: 4", "StagError: 4"), 6, "sample", "'StagError: 4 of 3'"),
        (("  sample:", "  not_sample:"), 6, "not_sample", "'StageError: 4 of 3'"),
        (("\n    - 'StageError: 4 of 3'", " one"), 6, "sample", "'one'"),
    ],
)
def test_what_is_wrong_with_a_rule(tmp_path: Path, change: tuple[str, str], line: int, key: str, names: str) -> None:
    """An error has file, line and key, and names what is wrong or what is valid, such as the nearest valid key."""
    path = own(tmp_path, OWN.replace(*change))
    with pytest.raises(ConfigError) as caught:
        load_catalogue([path])
    assert (caught.value.file, caught.value.line, caught.value.key) == (str(path), line, f"own.rule.{key}")
    assert names in str(caught.value)


def test_a_rule_that_is_no_mapping(tmp_path: Path) -> None:
    """The error for a name without keys lists the keys that belong below it."""
    with pytest.raises(ConfigError, match="fault, pattern, verdict, scope") as caught:
        load_catalogue([own(tmp_path, "own.rule: 3\n")])
    assert (caught.value.line, caught.value.key) == (1, "own.rule")


def test_all_problems_at_once(tmp_path: Path) -> None:
    """Of several wrong rules each is reported."""
    text = OWN.replace("STOP", "HALT") + OWN.replace("own.rule", "own.other").replace("user_code", "moon")
    with pytest.raises(ConfigError, match=r"(?s)own\.rule\.verdict.*own\.other\.scope"):
        load_catalogue([own(tmp_path, text)])


def test_a_wrong_file_costs_only_itself(tmp_path: Path) -> None:
    """The usable files are separated from the others, each of which comes with its problem."""
    good = own(tmp_path, "mine:\n  fault: x\n  pattern: my own words\n  verdict: STOP\n  scope: user_code\n")
    usable, problems = usable_files([tmp_path / "none.yaml", good])
    assert usable == [good]
    assert [problem.file for problem in problems] == [str(tmp_path / "none.yaml")]
