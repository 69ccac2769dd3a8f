"""The page of the Python API: all that the pages and examples tell a user to import, with signatures and docstrings."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from generator.messages import fields_table
from generator.source import ROOT, Definition, prose

IMPORTED = re.compile(r"from (sparkring[\w.]*) import (\w+(?:, \w+)*)")
DOTTED = re.compile(r"\b(sparkring(?:\.[a-z_]\w*)+)[.:]([A-Z]\w+)")


@dataclass(frozen=True, order=True)
class Name:
    """A name that users import, from where they are told to."""

    module: str
    name: str


def names() -> list[Name]:
    """Every public name, sorted."""
    found = set()
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.*")]
    for path in files:
        if path.suffix not in (".md", ".py", ".yaml", ".ipynb"):
            continue
        text = path.read_text()
        found |= {Name(module, name) for module, all_ in IMPORTED.findall(text) for name in all_.split(", ")}
        found |= {Name(module, name) for module, name in DOTTED.findall(text)}
    return sorted(found | {Name(module, name) for name, module in public().items() if not module.endswith(name)})


def public() -> dict[str, str]:
    """The names of `import sparkring`, with the module of each."""
    tree = ast.parse((ROOT / "sparkring/__init__.py").read_text()).body
    values = {ast.unparse(node.targets[0]): node.value for node in tree if isinstance(node, ast.Assign)}
    return dict(ast.literal_eval(values["PUBLIC"]))


def definition(known: list[Definition], name: Name) -> Definition:
    """Where a name is defined: in its module, or in one that the module takes it from. LookupError otherwise."""
    same = [each for each in known if each.name == name.name]
    here = [each for each in same if each.module == name.module] or same
    if len(here) != 1:
        raise LookupError(
            f"{name.module}.{name.name}: a page tells users to import it, and {len(here)} modules define it"
        )
    return here[0]


def signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    """The line of a `def`, or of a class."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(ast.unparse(base) for base in node.bases)})".removesuffix("()")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def methods(node: ast.ClassDef | ast.FunctionDef) -> list[ast.FunctionDef]:
    """Public methods of a class."""
    return [each for each in node.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]


def documented(text: str) -> str:
    """A docstring as Markdown; its `Args:` stay as they are written."""
    head, args, rest = text.partition("\nArgs:\n")
    return prose(head) + (f"\n```text\nArgs:\n{rest}\n```" if args else "")


def page(known: list[Definition]) -> str:
    """The whole page."""
    text = [
        "# Python API\n",
        "Classes and functions that users import: all that these pages and the examples name. Everything else may "
        "change without notice.\n",
    ]
    for name in names():
        each = definition(known, name)
        module = "sparkring" if public().get(name.name) == name.module else name.module
        text += [
            f"## {name.name}\n",
            f"```python\nfrom {module} import {name.name}\n\n{signature(each.node)}\n```\n",
        ]
        text.append(documented(each.doc) + "\n")
        if isinstance(each.node, ast.ClassDef):
            text.append(fields_table(each, known))
            for method in methods(each.node):
                about = documented(ast.get_docstring(method) or "")
                text.append(f"**`{signature(method)}`**\n\n{about}\n")
    return "\n".join(text)
