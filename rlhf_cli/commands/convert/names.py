"""What the names of a Python script stand for, as far as its text tells: constants, and defaults of arguments."""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
LARGEST = 1e15  # of a number in a sum: beyond it is no setting, and may take long
DEEPEST = 20


class NotPlain(Exception):
    """A value that is not to be had without running the script; its text is the expression."""


class Names:
    """The names of a script. `holders` are the classes whose calls hold settings: `config = PPOConfig(...)`."""

    def __init__(self, tree: ast.Module, holders: Iterable[str]) -> None:
        nodes = list(ast.walk(tree))
        stored = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        given = list(_given(nodes))
        fields = [each for node in nodes if isinstance(node, ast.ClassDef) for each in _given(node.body)]
        stored.subtract(field for field, _ in fields)
        twice = Counter(field for field, _ in fields)
        self.targets = {value: target for target, value in given}
        self.constants = {target: value for target, value in _given(tree.body) if stored[target] == 1}
        parameters = [(name, value) for name, value in _parameters(nodes) if not stored[name]]
        names = Counter(name for name, _ in parameters)
        self.constants |= {name: value for name, value in parameters if names[name] == 1}
        self.held = {
            target: value for target, value in given if isinstance(value, ast.Call) and called(value) in holders
        }
        self.defaults = {field: _default(value) for field, value in fields if twice[field] == 1}

    def target(self, node: ast.expr) -> str:
        """The variable that a value is given to, in lower case; "" where there is none."""
        return self.targets.get(node, "").lower()

    def keywords(self, node: ast.Call) -> dict[str, ast.expr]:
        """The arguments of a call that have names, those of a constant dict behind `**` among them."""
        found: dict[str, ast.expr] = {}
        for each in node.keywords:
            value = self.constants.get(each.value.id) if isinstance(each.value, ast.Name) else each.value
            if each.arg:
                found[each.arg] = each.value
            elif isinstance(value, ast.Dict):
                found |= entries(value)
        return found

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """What an expression is. Raises NotPlain with the expression where only a run would tell."""
        inner = depth + 1
        if depth > DEEPEST:
            raise NotPlain(shown(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(each, inner) for each in node.elts]
        if isinstance(node, ast.Dict) and len(found := entries(node)) == len(node.keys):
            return {key: self.value(value, inner) for key, value in found.items()}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -_number(self.value(node.operand, inner), node)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return _computed(node, *(_number(self.value(each, inner), node) for each in (node.left, node.right)))
        if named := self._named(node):
            return self.value(named, inner)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        raise NotPlain(shown(node))

    def _named(self, node: ast.expr) -> ast.expr | None:
        """What a constant's name stands for, or an attribute: a config's argument, or the default of a field."""
        if isinstance(node, ast.Name):
            return self.constants.get(node.id)
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
            return None
        held = self.held.get(node.value.id)
        return self.keywords(held).get(node.attr) if held else self.defaults.get(node.attr)


def called(node: ast.AST) -> str:
    """The last name of what is called; "" where nothing is."""
    name = node.func if isinstance(node, ast.Call) else None
    return name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""


def entries(node: ast.Dict) -> dict[str, ast.expr]:
    """The entries of a dict whose keys are texts."""
    pairs = zip(node.keys, node.values, strict=True)
    return {key.value: value for key, value in pairs if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def shown(node: ast.expr) -> str:
    """An expression, short enough for a line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 50 else f"{text[:47]}..."


def _given(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """(variable, value) of each assignment to one name among the nodes."""
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            yield node.target.id, node.value


def _parameters(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """(parameter, default) of functions, where no call of the script gives another value."""
    for each in nodes:
        if not isinstance(each, ast.FunctionDef):
            continue
        calls = [node for node in nodes if isinstance(node, ast.Call) and called(node) == each.name]
        given = {keyword.arg for node in calls for keyword in node.keywords}
        places = max((len(node.args) for node in calls), default=0)
        names = [argument.arg for argument in each.args.args]
        defaults = list(zip(names[::-1], each.args.defaults[::-1], strict=False))
        yield from ((name, value) for name, value in defaults if name not in given and names.index(name) >= places)


def _default(value: ast.expr) -> ast.expr:
    """The default in a dataclass's `field(default=...)`, or the value itself."""
    if isinstance(value, ast.Call) and called(value) == "field":
        return next((each.value for each in value.keywords if each.arg == "default"), value)
    return value


def _number(value: Any, node: ast.expr) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > LARGEST:
        raise NotPlain(shown(node))
    return value


def _computed(node: ast.BinOp, left: Any, right: Any) -> Any:
    if isinstance(node.op, ast.Pow) and (abs(right) > 20 or abs(left) > 1000):
        raise NotPlain(shown(node))
    try:
        return _number(OPERATORS[type(node.op)](left, right), node)
    except ArithmeticError as error:
        raise NotPlain(shown(node)) from error
