"""A condition as pyiceberg's filter of files: true of every file that may hold a row of which the condition is true.

Only files are left out by it, so it may be true too often. The rows are filtered by Spark, with the condition itself.
"""

from __future__ import annotations

import datetime as dt
import operator
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from sparkring.etl.sources.predicate import ColumnRef, Comparison, Constant, Junction, Negation, Same, Test

if TYPE_CHECKING:
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.schema import Schema
    from pyiceberg.types import IcebergType

Compare = Callable[[Any, Any], bool]
OPPOSITE: dict[Compare, Compare] = {
    operator.eq: operator.ne,
    operator.ne: operator.eq,
    operator.lt: operator.ge,
    operator.ge: operator.lt,
    operator.gt: operator.le,
    operator.le: operator.gt,
}
SWAPPED: dict[Compare, Compare] = {
    operator.eq: operator.eq,
    operator.ne: operator.ne,
    operator.lt: operator.gt,
    operator.gt: operator.lt,
    operator.le: operator.ge,
    operator.ge: operator.le,
}


def file_filter(test: Test, schema: Schema, negated: bool = False) -> BooleanExpression:
    """Make the filter of a condition, or of its opposite, over columns as `schema` names them."""
    from pyiceberg.expressions import AlwaysTrue, And, EqualTo, Or

    if isinstance(test, Negation):
        return file_filter(test.part, schema, not negated)
    if isinstance(test, Junction):
        parts = [file_filter(part, schema, negated) for part in test.parts]
        return parts[0] if len(parts) == 1 else (Or if test.decides != negated else And)(*parts)
    if isinstance(test, ColumnRef):
        return EqualTo(test.name, not negated)
    if isinstance(test, Comparison | Same) and isinstance(test.left, Constant) and isinstance(test.right, ColumnRef):
        return _compared(test, test.right.name, test.left.value, schema, negated)
    if isinstance(test, Comparison | Same) and isinstance(test.left, ColumnRef) and isinstance(test.right, Constant):
        return _compared(test, test.left.name, test.right.value, schema, negated)
    return AlwaysTrue()  # two columns


def _compared(test: Comparison | Same, name: str, value: Any, schema: Schema, negated: bool) -> BooleanExpression:
    """Make the filter of a column that is compared with a constant.

    Args:
        test: compares a column with a constant, or the constant with the column.
        name: name of the column.
        value: constant it is compared with.
        schema: schema of the table.
        negated: make the filter of the opposite.
    """
    from pyiceberg import expressions as ice

    if isinstance(test, Same):
        alike = test.wanted != negated
        if value is None:
            return ice.IsNull(name) if alike else ice.NotNull(name)
        literal = _literal(value, schema.find_type(name))
        if literal is None:
            return ice.AlwaysTrue()
        return ice.EqualTo(name, literal) if alike else ice.Or(ice.NotEqualTo(name, literal), ice.IsNull(name))
    if value is None:
        return ice.AlwaysFalse()  # unknown of every row, and so is the opposite
    literal = _literal(value, schema.find_type(name))
    if literal is None:
        return ice.AlwaysTrue()
    compare = SWAPPED[test.compare] if isinstance(test.left, Constant) else test.compare
    made = {
        operator.eq: ice.EqualTo,
        operator.ne: ice.NotEqualTo,
        operator.lt: ice.LessThan,
        operator.le: ice.LessThanOrEqual,
        operator.gt: ice.GreaterThan,
        operator.ge: ice.GreaterThanOrEqual,
    }
    return made[OPPOSITE[compare] if negated else compare](name, literal)


def _literal(value: Any, kind: IcebergType) -> Any:
    """Convert a value for pyiceberg and this column type; None if the type has no such value."""
    from pyiceberg.types import DecimalType

    if not isinstance(value, Decimal):
        return value.isoformat() if isinstance(value, dt.date) else value
    scale = kind.scale if isinstance(kind, DecimalType) else 0
    units = Fraction(value) * 10**scale  # exact: arithmetic of Decimal keeps 28 digits
    if units.denominator != 1:
        return None
    if isinstance(kind, DecimalType):
        return Decimal(f"{units.numerator}e-{scale}")
    return units.numerator if abs(units.numerator) < 1 << 63 else None
