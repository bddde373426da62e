"""The operators: every small fault that they know, at every place of one file.

Owns the walk over a file's syntax and the operators themselves, in families:

    bound       < and <= exchanged, numbers and ranges one off
    condition   an if always or never taken, an operand of and / or dropped, ``not`` removed
    order       sorted or not, front or back of a queue, a loop the other way round
    count       += dropped, doubled, the other way round
    statement   a call, an assignment, a del, a raise left out; two calls exchanged
    neighbour   a value's neighbour in its place: field, member, parameter, argument
    result      another value returned

Left out: annotations, decorators, docstrings, imports, and texts for people: f-strings, what stands
behind ``raise``, strings that are no identifier. See ``scope`` for functions left out by name.

    for mutant in mutants_of("servers/protocol/chunks/frontier.py", text, neighbours): ...
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from tests.mutation.mutants import Edit, Mutant, in_one_line, numbered, unparsed
from tests.mutation.neighbours import Neighbours, annotations_of, in_a_ring

COMPARISONS: dict[type[ast.cmpop], tuple[str, str, str]] = {
    ast.Lt: ("bound", "<", "<="),
    ast.LtE: ("bound", "<=", "<"),
    ast.Gt: ("bound", ">", ">="),
    ast.GtE: ("bound", ">=", ">"),
    ast.Eq: ("condition", "==", "!="),
    ast.NotEq: ("condition", "!=", "=="),
    ast.Is: ("condition", "is", "is not"),
    ast.IsNot: ("condition", "is not", "is"),
    ast.In: ("condition", "in", "not in"),
    ast.NotIn: ("condition", "not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
METHODS = {
    "append": ("insert", "insert(0, {})"),
    "appendleft": ("append", "append({})"),
    "popleft": ("pop", "pop()"),
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
SYMMETRIC = {"min", "max", "isinstance", "getattr", "range", "super", "sorted"}
SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant)
CLOSED = (*SIMPLE, ast.Call, ast.List, ast.Dict, ast.Set, ast.ListComp, ast.GeneratorExp)
EMPTY = {"list": "[]", "dict": "{}", "set": "set()", "frozenset": "frozenset()", "tuple": "()"}
GENERIC = {*EMPTY, "Annotated", "Callable", "Literal", "Sequence"}
IDENTIFIER = re.compile(r"[a-z][a-z_]*")


def mutants_of(
    path: str, text: str, neighbours: Neighbours, *, leave_out: Collection[str] = ()
) -> list[Mutant]:
    """All mutants of a file, in its order. ``leave_out``: functions and constants
    by their bare name."""
    return numbered(_Walk(path, text, neighbours, leave_out).run())


class _Walk:
    def __init__(
        self, path: str, text: str, neighbours: Neighbours, leave_out: Collection[str]
    ) -> None:
        self._path = path
        self._data = text.encode()
        self._lines = text.splitlines()
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line.encode()))
        self._starts = starts
        self._tree = ast.parse(text)
        self._neighbours = neighbours
        self._leave_out = {*leave_out, "__repr__", "__str__"}
        self._found: list[Mutant] = []
        self._scopes: list[ast.ClassDef | ast.FunctionDef] = []
        self._statement: ast.stmt = self._tree.body[0] if self._tree.body else ast.Pass()
        self._known = {name.id for name in ast.walk(self._tree) if isinstance(name, ast.Name)} | {
            alias.asname or alias.name
            for node in ast.walk(self._tree)
            if isinstance(node, ast.ImportFrom | ast.Import)
            for alias in node.names
        }

    def run(self) -> list[Mutant]:
        self._body(self._tree.body)
        return self._found

    # -- where things stand in the text --------------------------------------------------------

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        if node.end_lineno is None or node.end_col_offset is None:
            raise ValueError(f"{self._path}: a node without an end")
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._data[start:end].decode()

    def _closed(self, node: ast.expr) -> str:
        """The text of an expression, as one that binds as tightly as a name."""
        text = self._text(node)
        return text if isinstance(node, CLOSED) else f"({text})"

    def _edit(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(*self._span(node), text)

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Edit | None:
        """The operator that stands between two expressions."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._data[start:end].decode()
        pattern = r"\s+".join(re.escape(word) for word in old.split())
        match = re.search(pattern, gap)
        if match is None:
            return None
        before = start + len(gap[: match.start()].encode())
        return Edit(before, before + len(match.group().encode()), new)

    def _add(
        self, operator: str, at: ast.expr | ast.stmt, change: str, *edits: Edit | None
    ) -> None:
        if None in edits:
            return
        scopes, statement = self._scopes, self._statement
        head_end = statement.end_lineno or statement.lineno
        body = getattr(statement, "body", None)
        if isinstance(body, list) and body:
            head_end = max(statement.lineno, body[0].lineno - 1)
        self._found.append(
            Mutant(
                path=self._path,
                line=at.lineno,
                column=at.col_offset,
                last_line=min(at.end_lineno or at.lineno, max(head_end, at.lineno)),
                operator=operator,
                change=change,
                function=".".join(scope.name for scope in scopes),
                source_line=self._lines[at.lineno - 1].strip(),
                edits=tuple(sorted(edit for edit in edits if edit is not None)),
                statement=(statement.lineno, head_end),
                is_top_level=not any(isinstance(scope, ast.FunctionDef) for scope in scopes),
            )
        )

    def _replace(self, operator: str, node: ast.expr, text: str, change: str = "") -> None:
        change = change or f"{in_one_line(self._text(node))} -> {in_one_line(text)}"
        self._add(operator, node, change, self._edit(node, text))

    # -- statements ----------------------------------------------------------------------------

    @contextmanager
    def _inside(self, scope: ast.ClassDef | ast.FunctionDef) -> Iterator[None]:
        self._scopes.append(scope)
        yield
        self._scopes.pop()

    def _body(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._visit_statement(statement)
        for first, second in pairwise(body):
            self._exchange(first, second)

    def _exchange(self, first: ast.stmt, second: ast.stmt) -> None:
        """Two changes of one object, one after the other."""
        one, other = _changed_by(first), _changed_by(second)
        if one and one == other and unparsed(first) != unparsed(second):
            self._statement = first
            change = f"{unparsed(first)} <-> {unparsed(second)}"
            self._add(
                "order",
                first,
                change,
                self._edit(first, self._text(second)),
                self._edit(second, self._text(first)),
            )

    def _drop(self, statement: ast.stmt, operator: str = "statement") -> None:
        self._add(operator, statement, f"{unparsed(statement)} -> pass",
                  self._edit(statement, "pass"))  # fmt: skip

    @property
    def _function(self) -> ast.FunctionDef | None:
        innermost = self._scopes[-1] if self._scopes else None
        return innermost if isinstance(innermost, ast.FunctionDef) else None

    @property
    def _is_constructor(self) -> bool:
        return self._function is not None and self._function.name == "__init__"

    def _visit_statement(self, node: ast.stmt) -> None:
        self._statement = node
        if isinstance(node, ast.FunctionDef):
            if node.name in self._leave_out:
                return
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self._visit(default)
            with self._inside(node):
                self._body(node.body)
        elif isinstance(node, ast.ClassDef):
            with self._inside(node):
                self._body(node.body)
        elif isinstance(node, ast.Raise):
            self._drop(node)
        elif isinstance(node, ast.Import | ast.ImportFrom | ast.Assert):
            pass
        elif isinstance(node, ast.Break | ast.Continue):
            other = "continue" if isinstance(node, ast.Break) else "break"
            self._add("condition", node, f"{unparsed(node)} -> {other}", self._edit(node, other))
            self._drop(node, "condition")
        elif isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Call):
                self._drop(node)
            if not isinstance(node.value, ast.Constant):
                self._visit(node.value)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            self._visit_assignment(node)
        elif isinstance(node, ast.AugAssign):
            self._visit_count(node)
        elif isinstance(node, ast.Delete):
            self._drop(node)
        elif isinstance(node, ast.Return):
            if node.value is not None:
                self._visit_result(node.value)
                self._visit(node.value)
        elif isinstance(node, ast.If | ast.While):
            if unparsed(node.test) == "TYPE_CHECKING":
                return
            if isinstance(node, ast.If):
                self._replace("condition", node.test, "True")
            self._replace("condition", node.test, "False")
            self._visit(node.test)
            self._body(node.body)
            self._body(node.orelse)
        elif isinstance(node, ast.For):
            if not _only_reports(node.body):
                self._turn_round(node.iter)
            self._visit(node.iter)
            self._body(node.body)
            self._body(node.orelse)
        elif isinstance(node, ast.With):
            for item in node.items:
                self._visit(item.context_expr)
            self._body(node.body)
        elif isinstance(node, ast.Try):
            self._body(node.body)
            for handler in node.handlers:
                self._body(handler.body)
            self._body(node.orelse)
            self._body(node.finalbody)

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        name = unparsed(targets[0])
        if node.value is None or name.startswith("__") or name in self._leave_out:
            return
        if not self._scopes and _is_type(node.value):
            return
        kinds = (ast.Attribute, ast.Subscript)
        leaves = [leaf for each in targets for leaf in getattr(each, "elts", [each])]
        if any(isinstance(leaf, kinds) for leaf in leaves) and not self._is_constructor:
            self._drop(node)
        for leaf in leaves:
            if isinstance(leaf, ast.Subscript):
                self._visit(leaf.slice)
        self._visit(node.value)

    def _visit_count(self, node: ast.AugAssign) -> None:
        text = self._text(node)
        self._drop(node, "count")
        self._add("count", node, f"{in_one_line(text)} twice", self._edit(node, f"{text}; {text}"))
        if isinstance(node.op, ast.Add | ast.Sub) and not isinstance(node.value, ast.List):
            old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            edit = self._between(node.target, node.value, old, new)
            self._add("count", node, f"{old} -> {new}", edit)
        self._visit(node.value)

    def _visit_result(self, value: ast.expr) -> None:
        function = self._function
        returns = "" if function is None or function.returns is None else unparsed(function.returns)
        base = returns.partition("[")[0]
        if returns == "bool" and not isinstance(value, ast.Constant):
            self._replace("result", value, f"not ({self._text(value)})")
        elif returns == "int" and not isinstance(value, ast.Constant):
            self._replace("result", value, f"{self._closed(value)} + 1")
        elif base in EMPTY and unparsed(value) != EMPTY[base]:
            self._replace("result", value, EMPTY[base])
        if returns.endswith("| None") and unparsed(value) != "None":
            self._replace("result", value, "None")

    def _turn_round(self, items: ast.expr) -> None:
        """A loop the other way round; not where the loop only looks for what is wrong."""
        is_sorted = isinstance(items, ast.Call) and unparsed(items.func) == "sorted"
        is_look = any(scope.name == "check_invariants" for scope in self._scopes)
        if not is_sorted and not is_look:
            text = self._text(items)
            self._replace("order", items, f"list({text})[::-1]")

    # -- expressions ---------------------------------------------------------------------------

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.BoolOp):
            self._visit_operands(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._replace("condition", node, self._closed(node.operand))
        elif isinstance(node, ast.Compare):
            self._visit_comparison(node)
        elif isinstance(node, ast.BinOp):
            self._visit_arithmetic(node)
        elif isinstance(node, ast.IfExp):
            self._replace("condition", node.test, "True")
            self._replace("condition", node.test, "False")
        elif isinstance(node, ast.Constant):
            self._visit_constant(node)
        elif isinstance(node, ast.Call):
            if self._visit_call(node):
                return
        elif isinstance(node, ast.Attribute):
            self._visit_attribute(node)
        elif isinstance(node, ast.Name):
            self._visit_name(node)
        elif isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper):
                if isinstance(bound, ast.Name | ast.Attribute | ast.Call):
                    self._one_off(bound)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            for part in node.generators:
                for test in part.ifs:
                    self._replace("condition", test, "True")
                    self._replace("condition", test, "False")
            if isinstance(node, ast.ListComp):
                self._turn_round(node.generators[0].iter)
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            return
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _visit_operands(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        for dropped in node.values:
            rest = [value for value in node.values if value is not dropped]
            text = word.join(self._closed(value) for value in rest)
            change = f"{in_one_line(self._text(node))}: without {unparsed(dropped)}"
            self._replace("condition", node, f"({text})" if len(rest) > 1 else text, change)

    def _visit_comparison(self, node: ast.Compare) -> None:
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            operator, old, new = COMPARISONS[type(op)]
            edit = self._between(left, right, old, new)
            self._add(operator, node, f"{unparsed(node)}: {old} -> {new}", edit)
            left = right

    def _visit_arithmetic(self, node: ast.BinOp) -> None:
        if type(node.op) not in ARITHMETIC:
            return
        old, new = ARITHMETIC[type(node.op)]
        sides = (node.left, node.right)
        is_of_lists = any(isinstance(side, ast.List | ast.ListComp | ast.Call) for side in sides)
        if isinstance(node.op, ast.Add) and is_of_lists:
            for side in sides:
                self._replace("statement", node, self._closed(side))
            return
        edit = self._between(node.left, node.right, old, new)
        self._add("bound", node, f"{unparsed(node)}: {old} -> {new}", edit)

    def _visit_constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace("neighbour", node, str(not value))
        elif isinstance(value, int | float):
            self._replace("bound", node, repr(value + 1))
            self._replace("bound", node, repr(value - 1) if value >= 1 else f"({value - 1!r})")
        elif isinstance(value, str) and IDENTIFIER.fullmatch(value):
            self._replace("neighbour", node, '"other"')

    def _one_off(self, node: ast.expr) -> None:
        self._replace("bound", node, f"{self._closed(node)} + 1")
        self._replace("bound", node, f"{self._closed(node)} - 1")

    def _visit_call(self, node: ast.Call) -> bool:
        """Whether its parts are done with."""
        name = unparsed(node.func)
        if name.endswith("Error") or name in ("isinstance", "super", "getattr", "cast"):
            return True
        if name == "sorted":
            items = self._text(node.args[0])
            is_bracketed = isinstance(node.args[0], ast.GeneratorExp) and items.startswith("(")
            self._replace("order", node, f"list{items}" if is_bracketed else f"list({items})")
            self._replace("order", node, f"{self._text(node)}[::-1]")
        elif name in FUNCTIONS:
            self._replace("neighbour", node.func, FUNCTIONS[name])
        elif name == "range":
            for argument in node.args:
                if not isinstance(argument, ast.Constant):
                    self._one_off(argument)
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if method in METHODS and isinstance(node.func, ast.Attribute):
            _, pattern = METHODS[method]
            arguments = ", ".join(self._text(each) for each in node.args)
            text = f"{self._text(node.func.value)}.{pattern.format(arguments)}"
            self._replace("order", node, text)
        if name not in SYMMETRIC:
            self._exchange_arguments(node.args)
            self._exchange_arguments([each.value for each in node.keywords if each.arg])
        return False

    def _exchange_arguments(self, values: Sequence[ast.expr]) -> None:
        for one, other in pairwise(values):
            are_simple = isinstance(one, SIMPLE) and isinstance(other, SIMPLE)
            if are_simple and unparsed(one) != unparsed(other):
                self._add(
                    "neighbour",
                    one,
                    f"arguments {unparsed(one)} <-> {unparsed(other)}",
                    self._edit(one, self._text(other)),
                    self._edit(other, self._text(one)),
                )

    def _visit_attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load) or not isinstance(node.value, ast.Name):
            return
        base = node.value.id
        rings = [self._neighbours.members.get(base, {})]
        if (kind := self._class_of(base)) is not None:
            rings.append(self._neighbours.fields.get(kind, {}))
        for ring in rings:
            if node.attr in ring:
                self._replace("neighbour", node, f"{base}.{ring[node.attr]}")

    def _class_of(self, name: str) -> str | None:
        """The class of a parameter by its annotation, of ``self``, of a name that is a class's."""
        if name == "self":
            classes = [scope.name for scope in self._scopes if isinstance(scope, ast.ClassDef)]
            return classes[-1] if classes else None
        for scope in reversed(self._scopes):
            if isinstance(scope, ast.FunctionDef):
                annotation = annotations_of(scope).get(name)
                if annotation is not None:
                    return annotation.removesuffix(" | None")
        return next((each for each in self._neighbours.fields if each.lower() == name), None)

    def _visit_name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            return
        for other in self._neighbours.constants.get(node.id, ()):
            if other in self._known:
                self._replace("neighbour", node, other)
                return
        function = self._function
        if function is None:
            return
        annotations = annotations_of(function)
        kind = annotations.get(node.id)
        ring = in_a_ring(name for name, each in annotations.items() if each == kind)
        if kind is not None and node.id in ring:
            self._replace("neighbour", node, ring[node.id])


def _changed_by(statement: ast.stmt) -> str:
    """The object that a statement changes in place by a call or +=; "" for others."""
    if isinstance(statement, ast.AugAssign):
        return unparsed(statement.target)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        changed = unparsed(called.value) if isinstance(called, ast.Attribute) else ""
        return "" if changed in _FINDINGS else changed  # which line comes first is for people
    return ""


_FINDINGS = ("findings", "broken")
"""Names of what collects violations."""


def _only_reports(body: Sequence[ast.stmt]) -> bool:
    """Whether a loop does nothing but tell people what is wrong: the order is a matter of words."""
    return all(
        _only_reports([*each.body, *each.orelse])
        if isinstance(each, ast.If)
        else unparsed(each).startswith((*(f"{name}.add" for name in _FINDINGS), "findings["))
        for each in body
    )


def _is_type(value: ast.expr) -> bool:
    """``A | B``, ``tuple[int, int]``: an alias, which no program runs on."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return _is_type(value.left) and _is_type(value.right)
    if isinstance(value, ast.Subscript):
        return isinstance(value.value, ast.Name) and value.value.id in GENERIC
    return isinstance(value, ast.Name) and not value.id.isupper()
