"""Takes the expected values out of unit tests, so that the code under test cannot read them or stand in for them.

`assert f(2) == 4` becomes a call that reports the value of `f(2)` from the sandbox, and 4 stays outside. So does the 4
of `assert abs(f(2) - 4) < 1e-6`. Only assertions that every passed test has run are replaced.
"""

import ast
import marshal
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_cli.rewards.results import is_finite_number
from rlhf_cli.rewards.sandboxed import REPORT, fingerprint

Check = Callable[[str], bool]  # of what the sandbox reported
UNKNOWN = object()
BELOW: dict[type[ast.cmpop], Callable[[float, float], bool]] = {ast.Lt: operator.lt, ast.LtE: operator.le}


@dataclass(frozen=True)
class UnitTest:
    """A test without its expected values."""

    code: bytes  # marshalled; empty if the test is not Python
    checks: tuple[Check, ...]  # by the number of a replaced assertion


def without_expected_values(test: str) -> UnitTest:
    checks: list[Check] = []
    try:
        tree = ast.parse(test)
        _replace_assertions(tree.body, checks)
        # Not optimized: PYTHONOPTIMIZE would remove the other assertions.
        code = compile(ast.fix_missing_locations(tree), "test", "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return UnitTest(b"", ())
    return UnitTest(marshal.dumps(code), tuple(checks))


def _replace_assertions(body: list[ast.stmt], checks: list[Check], *, of_function: bool = False) -> None:
    """Replace the assertions of a body, and of the functions in it that it calls, up to where it may return."""
    functions: dict[str, ast.FunctionDef] = {}
    replaced: list[ast.stmt] = []
    for place, statement in enumerate(body):
        if of_function and _has(statement, ast.Return):
            replaced += body[place:]
            break
        match statement:
            case ast.Assert():
                replaced += _reports(statement, checks)
                continue
            case ast.FunctionDef(name, decorator_list=[]) if not _has(statement, ast.Yield, ast.YieldFrom):
                functions[name] = statement
            case ast.Expr(ast.Call(ast.Name(name))) if name in functions:
                _replace_assertions(functions.pop(name).body, checks, of_function=True)
        replaced.append(statement)
    body[:] = replaced


def _has(node: ast.AST, *kinds: type[ast.AST]) -> bool:
    return any(isinstance(each, kinds) for each in ast.walk(node))


def _reports(assertion: ast.Assert, checks: list[Check]) -> Iterator[ast.stmt]:
    """Yield what takes the assertion's place; that of `a and b` is two statements."""
    match assertion.test:
        case ast.BoolOp(ast.And(), conditions):
            pass
        case condition:
            conditions = [condition]
    for condition in conditions:
        found = _equality(condition) or _closeness(condition)
        if found:
            arguments = [ast.Constant(len(checks)), found.expression, ast.Constant(found.is_number)]
            yield ast.Expr(ast.Call(ast.Name(REPORT, ast.Load()), arguments, []))
            checks.append(found.check)
        else:
            yield ast.Assert(condition, assertion.msg)


@dataclass(frozen=True)
class Expectation:
    """An expression to evaluate in the sandbox, and the check of what it reports."""

    expression: ast.expr
    is_number: bool
    check: Check


def _equality(condition: ast.expr) -> Expectation | None:
    """Read `value == literal`."""
    match condition:
        case ast.Compare(left, [ast.Eq()], [right]):
            expression, expected = _value_and_literal(left, right)
            if expected is not UNKNOWN:
                return Expectation(expression, False, partial(operator.eq, fingerprint(expected)))
    return None


def _closeness(condition: ast.expr) -> Expectation | None:
    """Read `abs(value - literal) < literal`, or `<=`."""
    match condition:
        case ast.Compare(
            ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right)], []), [ast.Lt() | ast.LtE() as below], [limit]
        ):
            expression, expected = _value_and_literal(left, right)
            most = _literal(limit)
            if is_finite_number(expected) and is_finite_number(most):
                check = partial(_is_close, float(expected), BELOW[type(below)], float(most))
                return Expectation(expression, True, check)
    return None


def _value_and_literal(one: ast.expr, other: ast.expr) -> tuple[ast.expr, Any]:
    """Return the expression that must be evaluated, and the value of the other; UNKNOWN for two or no literals."""
    first = _literal(one)
    second = _literal(other)
    if first is UNKNOWN:
        return one, second
    return other, first if second is UNKNOWN else UNKNOWN


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):  # not a literal, or {[]}
        return UNKNOWN


def _is_close(expected: float, below: Callable[[float, float], bool], most: float, said: str) -> bool:
    try:
        return below(abs(float.fromhex(said) - expected), most)
    except (ValueError, OverflowError):
        return False
