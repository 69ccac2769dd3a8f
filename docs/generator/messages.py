"""The page of the control channel's messages, from their dataclasses."""

from __future__ import annotations

import ast

from generator.source import Definition, cell, class_named, code, prose, table

FIRST = "Hello"  # a message: the module that defines it defines all


def messages(known: list[Definition]) -> list[Definition]:
    """Every dataclass of the module of messages, in order."""
    module = class_named(known, FIRST).module
    return [each for each in known if each.module == module and isinstance(each.node, ast.ClassDef)]


def receivers(known: list[Definition]) -> dict[str, list[str]]:
    """Message -> the unions that list it: who accepts it, or `Event`."""
    text = "\n".join(class_named(known, FIRST).lines)
    found: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias" and node.value is not None:
            if not isinstance(node.value, ast.BinOp):
                continue
            for name in (each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)):
                found.setdefault(name, []).append(ast.unparse(node.target))
    return found


def fields_table(each: Definition, bases: list[Definition]) -> str:
    """The fields of a class and of its bases among `bases`; empty if it has none."""
    inherited = [member for base in bases if base.name in each.bases for member in base.members()]
    rows = [
        [
            code(member.name),
            code(member.kind),
            "required" if member.default is None else code(member.default),
            cell(member.comment),
        ]
        for member in [*inherited, *each.members()]
    ]
    return table(["field", "type", "default", "meaning"], rows) if rows else ""


def page(known: list[Definition]) -> str:
    """The whole page."""
    listed, accepted = messages(known), receivers(known)
    module = listed[0].module.removeprefix("sparkring.").replace(".", "/")
    text = [
        "# Messages of the control channel\n",
        f"Dataclasses of `{module}.py`. Each travels as a JSON object of its fields with `kind`, the class name; who "
        "accepts it is the union that lists it. Other kinds, fields, types and values over their bound are refused. "
        "The channel: [launch](../explanation/launch.md).\n",
    ]
    for each in listed:
        text += [f"## {each.name}\n", prose(each.doc) + "\n" if each.doc else ""]
        names = accepted.get(each.name, ())
        text += [f"Listed in {', '.join(code(name) for name in names)}.\n"] if names else []
        text.append(fields_table(each, listed))
    return "\n".join(text)
