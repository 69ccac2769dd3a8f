"""Classes and functions of the code, by name, with their docstrings, fields and the comments behind these.

Nothing is imported: a page shows what the source says, and modules may move without a change here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN, CORE = "sparkring", ("conf", "etl", "training", "pipelines")  # in the first folder the others are links
PAGE = re.compile(r"(?<![\w/.(\[-])docs/([\w/-]+)\.md")


@dataclass(frozen=True)
class Member:
    """A field of a class, or a member of an enumeration."""

    name: str
    annotation: str  # "" if it has none
    default: str | None
    comment: str

    @property
    def kind(self) -> str:
        """The annotation without what `Annotated` adds to it."""
        return ast.unparse(Plain().visit(ast.parse(self.annotation, mode="eval"))) if self.annotation else ""


class Plain(ast.NodeTransformer):
    """Make `X` of `Annotated[X, ...]`."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value) == "Annotated" and isinstance(node.slice, ast.Tuple):
            return self.visit(node.slice.elts[0])
        return self.generic_visit(node)


@dataclass(frozen=True)
class Definition:
    """A class or a function of a module."""

    name: str
    module: str  # as it is imported
    node: ast.ClassDef | ast.FunctionDef
    lines: tuple[str, ...]  # of the whole file

    @property
    def doc(self) -> str:
        """The docstring."""
        return ast.get_docstring(self.node) or ""

    @property
    def bases(self) -> list[str]:
        """Names of the base classes."""
        return [ast.unparse(base) for base in getattr(self.node, "bases", [])]

    def members(self) -> list[Member]:
        """Fields in order, with the comment on each one's last line and on comment lines that follow it."""
        found = []
        for node in self.node.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if not isinstance(target, ast.Name) or target.id.startswith("_") or target.id == "model_config":
                continue
            annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
            if annotation.startswith("ClassVar"):
                continue
            default, about = default_of(getattr(node, "value", None))
            found.append(Member(target.id, annotation, default, about or self._comment(node)))
        return found

    def _comment(self, node: ast.stmt) -> str:
        assert node.end_lineno is not None and node.end_col_offset is not None
        line = self.lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        parts = [line.strip().removeprefix("#").strip()]
        for following in self.lines[node.end_lineno :]:
            if not parts[0] or not following.strip().startswith("#"):
                break
            parts.append(following.strip().removeprefix("#").strip())
        return " ".join(filter(None, parts))


def default_of(value: ast.expr | None) -> tuple[str | None, str]:
    """(default, description) of a field's value, which may be a call of `field` or `Field`; None: it is required."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func) not in ("field", "Field"):
        return None if value is None else ast.unparse(value), ""
    given = {each.arg: each.value for each in value.keywords}
    first = value.args[0] if value.args else given.get("default")
    factory = given.get("default_factory")
    default = f"{ast.unparse(factory)}()" if factory is not None else None if first is None else ast.unparse(first)
    about = given.get("description")
    return default, str(about.value) if isinstance(about, ast.Constant) else ""


def python_files() -> list[Path]:
    """Every Python file of the core packages."""
    return [*sorted((ROOT / OWN).glob("*.py")), *(p for core in CORE for p in sorted((ROOT / core).rglob("*.py")))]


def definitions() -> Iterator[Definition]:
    """Yield the classes and functions at the top of every module, in the order of files and lines."""
    for path in python_files():
        text = path.read_text()
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != OWN]
        module = ".".join([OWN, *parts]).removesuffix(".__init__")
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield Definition(node.name, module, node, tuple(text.splitlines()))


def class_named(known: list[Definition], name: str) -> Definition:
    """Return the only class of that name; LookupError if there is not exactly one."""
    found = [each for each in known if each.name == name and isinstance(each.node, ast.ClassDef)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} classes are named {name}, not one: {[each.module for each in found]}")
    return found[0]


def cell(text: str) -> str:
    """A text as a table's cell: on one line, with its pipes escaped."""
    return escaped(" ".join(text.split())).replace("|", "\\|")


def escaped(text: str) -> str:
    """The text with `<` escaped outside of code, where it would begin an HTML tag."""
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(text.split("`")))


def code(text: str) -> str:
    """A text as code in a table's cell; empty for no text."""
    return f"`{' '.join(text.split()).replace('|', chr(92) + '|')}`" if text else ""


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def prose(text: str) -> str:
    """A docstring as Markdown: page names become links, relative to docs/reference."""
    return PAGE.sub(lambda found: f"[{found[1].rpartition('/')[2]}](../{found[1]}.md)", escaped(text))
