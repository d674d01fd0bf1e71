"""docs/rules.md: the classes of failure and the built-in rules."""

from __future__ import annotations

from collections import defaultdict

from nvrx_slurm.attribution.rules.catalogue import Rule, built_in_files, rules_of
from nvrx_slurm.attribution.rules.rulefile import read_rule_file


def parts() -> dict[str, str]:
    """The parts of the page."""
    files = {path: list(rules_of(read_rule_file(path)).values()) for path in built_in_files()}
    everything = [rule for rules in files.values() for rule in rules]
    by_fault: dict[str, list[Rule]] = defaultdict(list)
    for rule in sorted(everything, key=lambda rule: (rule.fault, rule.name)):
        by_fault[rule.fault].append(rule)
    lines = [f"{len(everything)} rules for {len(by_fault)} classes of failure.\n"]
    lines += ["## Classes", "", "| class | verdict | scope | rules |", "|---|---|---|---|"]
    for fault, rules in by_fault.items():
        verdicts = ", ".join(sorted({rule.verdict for rule in rules}))
        scopes = ", ".join(sorted({rule.scope for rule in rules}))
        lines.append(f"| `{fault}` | {verdicts} | {scopes} | {', '.join(f'`{rule.name}`' for rule in rules)} |")
    for path, rules in files.items():
        text = path.read_text(encoding="utf-8").splitlines()
        about = [line.removeprefix("# ") for line in text[: text.index("")]]  # the comment that the file begins with
        lines += ["", f"## {path.name}", "", *about, ""]
        lines += [
            "| rule | class | verdict | scope | what to do |",
            "|---|---|---|---|---|",
        ]
        for rule in rules:
            role = "" if rule.role == "cause" else f", {rule.role}"
            hint = rule.hint.replace("|", "\\|")
            verdict = f"{rule.verdict}, STOP where widespread" if rule.widespread else rule.verdict
            cells = f"`{rule.name}` | `{rule.fault}` | {verdict}{role} | {rule.scope}"
            lines.append(f"| {cells} | {hint} [Source]({rule.reference}) |")
    return {"rules": "\n".join(lines)}
