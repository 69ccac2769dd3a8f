"""The page of built-in models: what `model.args` may be, from the constructors and their docstrings."""

from __future__ import annotations

import ast
import re

from generator.source import Definition, cell, code, prose, table

OF_MANIFEST = "from the manifest"  # in the text of a parameter that no recipe gives


def constructor(each: Definition) -> ast.FunctionDef | None:
    """A class's constructor, where its docstring is about a recipe's `model.args`; else None."""
    for node in each.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return node if "`model.args`" in (ast.get_docstring(node) or "") else None
    return None


def models(known: list[Definition]) -> list[Definition]:
    """The built-in models."""
    return [each for each in known if ".training.models." in each.module and constructor(each) is not None]


def documented(docstring: str) -> dict[str, str]:
    """Parameter -> its text, of a docstring's `Args:` section."""
    section = docstring.partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {6,}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def rows(made: ast.FunctionDef) -> list[list[str]]:
    """A row for each parameter that a recipe may give."""
    texts, given = documented(ast.get_docstring(made) or ""), made.args
    defaults = dict(zip((each.arg for each in reversed(given.args)), reversed(given.defaults), strict=False))
    return [
        [
            code(each.arg),
            code(ast.unparse(each.annotation) if each.annotation is not None else ""),
            code(ast.unparse(defaults[each.arg])),
            cell(texts.get(each.arg, "")),
        ]
        for each in given.args
        if each.arg in defaults and OF_MANIFEST not in texts.get(each.arg, "")
    ]


def page(known: list[Definition]) -> str:
    """The whole page."""
    text = [
        "# Built-in models\n",
        "`model.factory` names a model, `model.args` gives the parameters below; all others come from the dataset's "
        "manifest. Capital letters are sizes of the docstring's shapes. A model of your own: "
        "[your own code](../how-to/own_code.md).\n",
    ]
    for each in models(known):
        made = constructor(each)
        assert made is not None, "models() asks for one"
        factory = f"{each.module.removeprefix('sparkring.')}:{each.name}"
        text += [f"## {each.name}\n", f"{code(factory)}. {prose(each.doc)}\n"]
        text.append(table(["parameter", "type", "default", "meaning"], rows(made)))
    return "\n".join(text)
