"""`python -m ci.house [FOLDER]`: measures what a newcomer stumbles over in a package, as a table.

It is a report, not a gate: `make lint` prints it and never fails on it. The ranges of the third column come from six
packages that are known to read well: h11, httpcore, honcho, dramatiq, stamina, submitit.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

VAGUE = re.compile(r"\b(nobody|whoever|whatever|somebody|ours|anew)\b", re.IGNORECASE)
"""Words that stand where a sentence should name its actor: the agent, the controller, the reader."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One file of the package, parsed."""

    name: str
    folder: str
    text: str
    tree: ast.Module


class Row(NamedTuple):
    """One measure of the package: its value, what is aimed at, and up to a few places to look at first."""

    measure: str
    value: str
    aim: str
    places: tuple[str, ...] = ()


def read(package: Path) -> list[Module]:
    """All modules below the folder, by name. Raises SyntaxError for a file that is not Python."""
    found = []
    for path in sorted(package.rglob("*.py")):
        within = path.relative_to(package.parent)
        name = ".".join(within.with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text()
        found.append(Module(name, str(within.parent), text, ast.parse(text, str(path))))
    return found


def measure(modules: list[Module], *, most_places: int = 3) -> list[Row]:
    """The table. Empty modules, such as a bare `__init__.py`, count as lines and files but not in the median."""
    sizes = {module.name: module.text.count("\n") for module in modules}
    lines = sum(sizes.values())
    functions = sum(isinstance(node, Function) for module in modules for node in ast.walk(module.tree)) or 1
    once = [place for module in modules for place in _private_used_once(module)]
    homes = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(module.name)
    shared = {name: places for name, places in homes.items() if len(places) > 1}
    comments = sum(_comment_lines(module.text) for module in modules)
    vague = Counter({module.name: len(VAGUE.findall(module.text)) for module in modules})
    imports = import_graph(modules)
    importers = defaultdict(set)
    for importer, imported in imports.items():
        for name in imported:
            importers[name].add(importer)
    # A single importer in the same folder: the file may be a step of its sibling, not a subject of its own.
    folders = {module.name: module.folder for module in modules}
    steps = [
        name
        for name, by in importers.items()
        if len(by) == 1 and sizes[name] < 100 and {folders[each] for each in by} == {folders[name]}
    ]
    arrows = {(folders[a], folders[b]) for a, names in imports.items() for b in names if folders[a] != folders[b]}
    circles = circles_of(imports)

    def first(places: Iterable[str]) -> tuple[str, ...]:
        return tuple(list(places)[:most_places])

    largest = sorted(sizes, key=lambda name: -sizes[name])
    return [
        Row("lines", f"{lines:,}", "about 52,000", first(f"{name} {sizes[name]}" for name in largest)),
        Row("files", str(len(modules)), "about 350"),
        Row("lines of a file, median", f"{statistics.median(n for n in sizes.values() if n):.0f}", "≥ 120"),
        Row("functions per 100 lines", f"{100 * functions / lines:.1f}", "≤ 6.5"),
        Row("private functions used once", f"{100 * len(once) / functions:.0f} %", "≤ 13 %", first(once)),
        Row("comment lines", f"{100 * comments / lines:.1f} %", "≥ 3 %"),
        Row(
            "class names in two modules",
            str(len(shared)),
            "0",
            first(f"{n}: {', '.join(p)}" for n, p in shared.items()),
        ),
        Row("files < 100 lines of one sibling", str(len(steps)), "few", first(steps)),
        Row("folders, arrows between them", f"{len({*folders.values()})}, {len(arrows)}", "about 24, 130"),
        Row("import circles", str(len(circles)), "0", first(" ⇄ ".join(circle) for circle in circles)),
        Row(
            "nobody, whoever, whatever, somebody, ours, anew",
            str(vague.total()),
            "few",
            first(f"{name} {count}" for name, count in vague.most_common() if count),
        ),
    ]


def _private_used_once(module: Module) -> Iterator[str]:
    uses = Counter(node.attr for node in ast.walk(module.tree) if isinstance(node, ast.Attribute))
    uses += Counter(node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name))
    for node in ast.walk(module.tree):
        if isinstance(node, Function) and re.match(r"_[a-z]", node.name) and uses[node.name] == 1:
            yield f"{module.name}.{node.name}"


def _comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    # Alone on its line: a remark at the end of a line of code is counted with that line.
    return sum(token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip() for token in tokens)


def import_graph(modules: list[Module]) -> dict[str, set[str]]:
    """Which module imports which, inside the package and at run time: `if TYPE_CHECKING:` does not count."""
    names = {module.name for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        found = graph[module.name] = set()
        for node in _run_time(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    deeper = f"{node.module}.{alias.name}"
                    found |= {deeper} & names or {node.module} & names
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & names
        found.discard(module.name)
    return graph


def _run_time(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for other in node.orelse:
                yield from _run_time(other)
            continue
        yield node
        yield from _run_time(node)


def circles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that reach each other (Tarjan's strongly connected components), without a recursion."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    for root in graph:
        if root in number:
            continue
        path = [(root, iter(sorted(graph[root])))]
        number[root] = low[root] = len(number)
        stack.append(root)
        while path:
            node, rest = path[-1]
            following = next(rest, None)
            if following is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                # The walk leaves the first node of a component: all that was found since is the rest of it.
                if low[node] == number[node]:
                    component = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    if len(component) > 1:
                        found.append(sorted(component))
            elif following not in number:
                number[following] = low[following] = len(number)
                stack.append(following)
                path.append((following, iter(sorted(graph[following]))))
            elif following in stack:
                low[node] = min(low[node], number[following])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.house", description="Measure what a newcomer to a package stumbles over."
    )
    parser.add_argument("package", nargs="?", type=Path, default=Path("nvrx_slurm"), help="folder of the package")
    parser.add_argument("--places", type=int, default=0, metavar="N", help="name the first N places of each measure")
    args = parser.parse_args()
    modules = read(args.package) if args.package.is_dir() else []
    if not modules:
        print(f"{args.package}: no folder with Python files; name a package's folder", file=sys.stderr)
        return 2
    rows = measure(modules, most_places=args.places)
    wide, narrow = (max(len(row[column]) for row in rows) for column in (0, 1))
    for row in rows:
        print(f"{row.measure:<{wide}}  {row.value:>{narrow}}  aim: {row.aim}")
        for place in row.places:
            print(f"{'':<{wide}}  {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
