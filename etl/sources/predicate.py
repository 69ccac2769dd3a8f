"""A SQL condition on partition columns: it keeps the partitions that Spark would keep, or its text is refused.

sqlglot parses it. Of its tree only what is named below is understood: `=`, `<>`, `<`, `<=`, `>`, `>=`, `<=>`, BETWEEN,
IN, IS [NOT] NULL, TRUE or FALSE, AND, OR, NOT, over columns and literals whose types leave Spark nothing to convert but
a text to a date or an instant. No Spark is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from sqlglot import Dialect, exp
from sqlglot.errors import SqlglotError

from sparkring.conf.errors import first_line
from sparkring.etl.errors import EtlError
from sparkring.etl.sources.values import DECIMAL, scalar

Values = Mapping[str, Any]  # partition column -> value as `values.scalar` gives it, None for null
Truth = bool | None  # SQL's three values: None is "unknown"
Test = Callable[[Values], Truth]
Operand = Callable[[Values], Any]

COMPARISONS: dict[type[exp.Expr], Callable[[Any, Any], bool]] = {
    exp.EQ: operator.eq,
    exp.NEQ: operator.ne,
    exp.LT: operator.lt,
    exp.LTE: operator.le,
    exp.GT: operator.gt,
    exp.GTE: operator.ge,
}
DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 20}  # as decimals, which Spark makes of both sides
MOST_DIGITS = 38
RULE = "`where` of a source compares columns with literals, other conditions belong in etl.views"
TYPE = exp.DataType.Type
# Type of the column -> the types of literals it is compared with; a text is read as the column's type.
MOMENTS = {
    "date": {TYPE.DATE: "date"},
    "timestamp": {TYPE.DATE: "date", TYPE.TIMESTAMPTZ: "timestamp"},
    "timestamp_ntz": {TYPE.DATE: "date", TYPE.TIMESTAMPNTZ: "timestamp_ntz"},
}
COMPARABLE = {"string", "boolean", *DIGITS, *MOMENTS}  # and decimals; floating-point numbers are not


@dataclass(frozen=True)
class Predicate:
    """A condition, and the partition columns it names. `parts` are what its outermost AND joins."""

    text: str
    columns: frozenset[str]
    test: Test = field(repr=False, compare=False)
    parts: tuple[tuple[frozenset[str], Test], ...] = field(repr=False, compare=False)

    def matches(self, values: Values) -> bool:
        """Return whether to keep a partition: the condition is true, not false and not unknown."""
        return self.test(values) is True

    def may_match(self, values: Values) -> bool:
        """Return whether a partition known in part may match: no known term of the AND fails."""
        return all(test(values) is True for columns, test in self.parts if columns <= values.keys())


def parse(key: str, text: str, types: Mapping[str, str], kind: str = "partition column") -> Predicate:
    """Parse the condition that `key` declares over columns of these Spark types; `kind` is what errors call them.

    Raises EtlError for a text that is no condition, for another column, and for what is not understood.
    """
    compiler = _Compiler(f"{key} = {text!r}", types, kind)
    try:
        return _parsed(compiler, text)
    except RecursionError as error:
        raise compiler.error(
            "conditions are nested too deeply in it; leave out parentheses and NOTs, or filter in etl.views"
        ) from error


def _parsed(compiler: _Compiler, text: str) -> Predicate:
    if "\\" in text:
        raise compiler.error("a backslash is not understood: what it means in a string depends on Spark's settings")
    try:
        trees = Dialect.get_or_raise("spark").parse_into(exp.Condition, text)
    except SqlglotError as error:
        found = getattr(error, "errors", None)
        what = f"{found[0]['description']} near {found[0]['highlight']!r}" if found else first_line(error)
        raise compiler.error(f"not a SQL condition: {what}") from error
    if len(trees) != 1 or trees[0] is None:
        raise compiler.error(f"must be one SQL condition, not {len(trees) if trees[0] else 0}")
    tree = trees[0].unnest()
    parts = tuple((compiler.columns(part), compiler.test(part)) for part in _parts_of_and(tree))
    return Predicate(text, compiler.columns(tree), compiler.test(tree), parts)


def _parts_of_and(tree: exp.Expr) -> list[exp.Expr]:
    return list(tree.flatten()) if isinstance(tree, exp.And) else [tree]


@dataclass(frozen=True)
class _Compiler:
    """Turns a parsed condition into a function; `where` is the key and its text, for errors."""

    where: str
    types: Mapping[str, str]
    kind: str  # of the columns, in words

    def error(self, what: str) -> EtlError:
        return EtlError(f"{self.where}: {what}; {self.kind}s are {dict(self.types)}")

    def test(self, node: exp.Expr) -> Test:
        """Make the function that says whether a condition is true of a partition."""
        if isinstance(node, exp.Paren):
            return self.test(node.this)
        if isinstance(node, exp.And | exp.Or):
            decides = isinstance(node, exp.Or)  # one true part decides OR, one false part decides AND
            return Junction(tuple(self.test(part) for part in node.flatten()), decides)
        if isinstance(node, exp.Not):
            return Negation(self.test(node.this))
        if type(node) in COMPARISONS:
            return Comparison(COMPARISONS[type(node)], *self.operands(node.this, node.expression))
        if isinstance(node, exp.Is | exp.NullSafeEQ | exp.NullSafeNEQ):
            return Same(not isinstance(node, exp.NullSafeNEQ), *self.operands(node.this, node.expression))
        if isinstance(node, exp.Between) and not node.args.get("symmetric"):
            value, low, high = self.operands(node.this, node.args["low"], node.args["high"])
            return Junction((Comparison(operator.ge, value, low), Comparison(operator.le, value, high)), False)
        if isinstance(node, exp.In) and node.expressions:
            value, *members = self.operands(node.this, *node.expressions)
            return Junction(tuple(Comparison(operator.eq, value, member) for member in members), True)
        if isinstance(node, exp.Column) and self.types[self.column(node)] == "boolean":
            return self.operands(node)[0]
        raise self.error(f"{node.sql('spark')} is not understood; {RULE}")

    def columns(self, node: exp.Expr) -> frozenset[str]:
        """Return the partition columns that a condition names."""
        return frozenset(map(self.column, node.find_all(exp.Column)))

    def column(self, node: exp.Column) -> str:
        """Return the partition column of that name, ignoring case as Spark does."""
        for name in self.types:
            if len(node.parts) == 1 and name.lower() == node.name.lower():
                return name
        raise self.error(f"{node.sql('spark')} is not a {self.kind}")

    def operands(self, *nodes: exp.Expr) -> list[Operand]:
        """Make the functions that give what is compared: columns of one type, and literals of that type."""
        bare = [node.unnest() for node in nodes]
        names = [self.column(node) for node in bare if isinstance(node, exp.Column)]
        kinds = {self.types[name] for name in names}
        if not kinds:
            odd = [node.sql("spark") for node in bare if not isinstance(node, exp.Literal)]
            raise self.error(f"{odd[0]} is not understood; {RULE}" if odd else f"{bare[0].sql('spark')} is no column")
        kind = "bigint" if kinds <= DIGITS.keys() and len(kinds) > 1 else next(iter(kinds))
        if len(kinds) > 1 and kind != "bigint":
            raise self.error(f"{' and '.join(names)} have different types")
        if not (kind in COMPARABLE or DECIMAL.fullmatch(kind)):
            raise self.error(f"{names[0]!r} is {kind}, which no condition is understood of")
        return [
            ColumnRef(self.column(node))
            if isinstance(node, exp.Column)
            else Constant(self.literal(node, kind, names[0]))
            for node in bare
        ]

    def literal(self, node: exp.Expr, kind: str, name: str) -> Any:
        """Return the Python value of a literal compared with column `name` of type `kind`."""
        if isinstance(node, exp.Null):
            return None
        text = node.name if isinstance(node, exp.Literal) and node.is_string else None
        if isinstance(node, exp.Boolean) and kind == "boolean":
            return node.this
        if kind == "string" and text is not None:
            return text
        if kind in MOMENTS:
            wanted = kind if text is not None else None
            if type(node) is exp.Cast and isinstance(node.this, exp.Literal) and node.this.is_string:
                text, wanted = node.this.name, MOMENTS[kind].get(node.to.this)
            if text is not None and wanted is not None:
                return self.moment(text, wanted, kind)
        if (kind in DIGITS or DECIMAL.fullmatch(kind)) and text is None:
            return self.number(node, kind)
        if isinstance(node, exp.Concat):
            raise self.error('a quote within a string is not understood; use the other kind: "O\'Brien"')
        raise self.error(f"{node.sql('spark')} cannot be compared with {name!r}, which is {kind}")

    def moment(self, text: str, written: str, kind: str) -> Any:
        """Parse a literal of type `written` to a date or instant of type `kind`."""
        try:
            scalar(text, written)
            return scalar(text, kind)
        except (ValueError, ArithmeticError) as error:
            raise self.error(f"{text!r} is no {written}; write it whole, as 2024-01-31") from error

    def number(self, node: exp.Expr, kind: str) -> Decimal:
        """Return a number's exact value; refuse one too long or large for Spark's exact comparison."""
        digits = node.this if isinstance(node, exp.Neg) else node
        if not isinstance(digits, exp.Literal) or digits.is_string or not set(digits.name) <= set("0123456789."):
            raise self.error(f"{node.sql('spark')} is not a plain number, and is compared with one")
        whole, _, fraction = digits.name.partition(".")
        declared = DECIMAL.fullmatch(kind)
        precision, scale = map(int, declared.groups()) if declared else (DIGITS[kind], 0)
        if max(len(whole), precision - scale) + max(len(fraction), scale) > MOST_DIGITS:
            raise self.error(f"{digits.name} has more digits than Spark can compare with {kind}")
        value = Decimal(digits.name) if digits is node else Decimal(digits.name).copy_negate()
        if kind in DIGITS and not -(2**63) <= value < 2**63:  # Spark 4.3 says `null <= 9223372036854775808` is true
            raise self.error(f"{node.sql('spark')} is beyond bigint, and compared with {kind}")
        return value


# --- what a condition is made of. Each part, called with a partition's values, gives the truth or the value.


@dataclass(frozen=True)
class ColumnRef:
    name: str

    def __call__(self, values: Values) -> Any:
        return values[self.name]


@dataclass(frozen=True)
class Constant:
    value: Any

    def __call__(self, values: Values) -> Any:
        return self.value


@dataclass(frozen=True)
class Junction:
    """OR (`decides` is True) or AND (False) of any number of parts; one unknown leaves unknown what none decides."""

    parts: tuple[Test, ...]
    decides: bool

    def __call__(self, values: Values) -> Truth:
        found = [part(values) for part in self.parts]
        return self.decides if self.decides in found else None if None in found else not self.decides


@dataclass(frozen=True)
class Negation:
    part: Test

    def __call__(self, values: Values) -> Truth:
        found = self.part(values)
        return None if found is None else not found


@dataclass(frozen=True)
class Comparison:
    """One of COMPARISONS, unknown where a side is null."""

    compare: Callable[[Any, Any], bool]
    left: Operand
    right: Operand

    def __call__(self, values: Values) -> Truth:
        one, other = self.left(values), self.right(values)
        return None if one is None or other is None else self.compare(one, other)


@dataclass(frozen=True)
class Same:
    """Null-safe equality, or its opposite: two nulls are the same."""

    wanted: bool
    left: Operand
    right: Operand

    def __call__(self, values: Values) -> Truth:
        return (self.left(values) == self.right(values)) is self.wanted
