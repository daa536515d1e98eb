"""Static evaluation of expressions in a Python script: constants, defaults of parameters and fields."""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
LARGEST = 1e15  # operand of an expression; larger ones are not settings, and may be slow
MAX_DEPTH = 20


class DynamicValueError(Exception):
    """A value that requires running the script; the message is the expression."""


class ScriptNames:
    """The names of a script and their values. `holders` are classes whose instances hold settings, e.g. PPOConfig."""

    def __init__(self, tree: ast.Module, holders: Iterable[str]) -> None:
        nodes = list(ast.walk(tree))
        stored = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        assignments = list(_given(nodes))
        fields = [field for node in nodes if isinstance(node, ast.ClassDef) for field in _given(node.body)]
        stored.subtract(field for field, _ in fields)
        field_counts = Counter(field for field, _ in fields)
        self.targets = {value: target for target, value in assignments}
        self.constants = {target: value for target, value in _given(tree.body) if stored[target] == 1}
        parameters = [(name, value) for name, value in _parameters(nodes) if not stored[name]]
        names = Counter(name for name, _ in parameters)
        self.constants |= {name: value for name, value in parameters if names[name] == 1}
        self.configs = {
            target: value for target, value in assignments if isinstance(value, ast.Call) and called(value) in holders
        }
        self.defaults = {field: _default(value) for field, value in fields if field_counts[field] == 1}

    def target(self, node: ast.expr) -> str:
        """Return the variable that a value is assigned to, in lower case; empty if there is none."""
        return self.targets.get(node, "").lower()

    def keywords(self, node: ast.Call) -> dict[str, ast.expr]:
        """Return the keyword arguments of a call, including those of a constant dict after `**`."""
        arguments: dict[str, ast.expr] = {}
        for keyword in node.keywords:
            value = self.constants.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else keyword.value
            if keyword.arg:
                arguments[keyword.arg] = keyword.value
            elif isinstance(value, ast.Dict):
                arguments |= entries(value)
        return arguments

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Evaluate an expression. Raises DynamicValueError if that requires running the script."""
        inner = depth + 1
        if depth > MAX_DEPTH:
            raise DynamicValueError(shown(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, inner) for item in node.elts]
        if isinstance(node, ast.Dict) and len(items := entries(node)) == len(node.keys):
            return {key: self.value(value, inner) for key, value in items.items()}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -_number(self.value(node.operand, inner), node)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return _computed(node, *(_number(self.value(operand, inner), node) for operand in (node.left, node.right)))
        if definition := self._named(node):
            return self.value(definition, inner)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        raise DynamicValueError(shown(node))

    def _named(self, node: ast.expr) -> ast.expr | None:
        """Return the expression that defines a constant, an argument of a config, or the default of a field."""
        if isinstance(node, ast.Name):
            return self.constants.get(node.id)
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            return None
        call = self.configs.get(node.value.id)
        return self.keywords(call).get(node.attr) if call else self.defaults.get(node.attr)


def called(node: ast.AST) -> str:
    """Return the last part of the name of a called function; empty if the node is not a call."""
    name = node.func if isinstance(node, ast.Call) else None
    return name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""


def entries(node: ast.Dict) -> dict[str, ast.expr]:
    """Return the entries of a dict with string keys."""
    pairs = zip(node.keys, node.values, strict=True)
    return {key.value: value for key, value in pairs if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def shown(node: ast.expr) -> str:
    """Return the source of an expression, shortened to 50 characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 50 else f"{text[:47]}..."


def _given(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (variable, value) of each assignment to a single name."""
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            yield node.target.id, node.value


def _parameters(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (parameter, default) of functions, unless a call in the script sets the parameter."""
    for function in nodes:
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [node for node in nodes if isinstance(node, ast.Call) and called(node) == function.name]
        passed = {keyword.arg for node in calls for keyword in node.keywords}
        positional = max((len(node.args) for node in calls), default=0)
        names = [argument.arg for argument in function.args.args]
        defaults = list(zip(names[::-1], function.args.defaults[::-1], strict=False))
        yield from ((name, value) for name, value in defaults if name not in passed and names.index(name) >= positional)


def _default(value: ast.expr) -> ast.expr:
    """Return the default in a dataclass's `field(default=...)`, or the value itself."""
    if isinstance(value, ast.Call) and called(value) == "field":
        return next((keyword.value for keyword in value.keywords if keyword.arg == "default"), value)
    return value


def _number(value: Any, node: ast.expr) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > LARGEST:
        raise DynamicValueError(shown(node))
    return value


def _computed(node: ast.BinOp, left: Any, right: Any) -> Any:
    if isinstance(node.op, ast.Pow) and (abs(right) > 20 or abs(left) > 1000):
        raise DynamicValueError(shown(node))
    try:
        return _number(OPERATORS[type(node.op)](left, right), node)
    except ArithmeticError as error:
        raise DynamicValueError(shown(node)) from error
