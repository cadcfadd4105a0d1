"""Every small fault that can be planted in a source file, as data; what no test could see is left out.

Left out are docstrings, annotations, decorators, texts of errors and of messages, assertions (they guard our own bugs),
numbers at module and class level (sizes, defaults, time limits), and arguments that change no result.
"""

import ast
import hashlib
import re
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SPOKEN = {"say", "_say", "_say_ended", "print", "warn", "describe", "show", "suggest", "named", "add_task", "update"}
"""Calls whose arguments are words for people."""
QUIET = {"__repr__", "__str__"}
"""Functions that make words for people."""
NO_RESULT = {
    *("strict", "encoding", "errors", "daemon", "name", "flush", "highlight", "markup", "soft_wrap", "help", "prog"),
    *("description", "exist_ok", "missing_ok", "ignore_errors", "indent", "timeout", "block", "text", "repr", "title"),
}
"""Keyword arguments that change words, waiting or checks of our own, but no result."""
WAITING = {"sleep", "wait", "join", "timedelta", "waiting", "select", "settimeout"}
"""Calls whose numbers are times to wait."""
UNORDERED = {"isinstance", "getattr", "cast", "min", "max"}
"""Calls whose arguments cannot be swapped, or may be."""
DIVIDED = "division dropped"


@dataclass(frozen=True)
class Mutant:
    """One fault: `source[start:stop]` of a file replaced by other text."""

    path: str
    """The file, from the project's root."""
    function: str
    """Where it is: the qualified name of the innermost function or class, empty at module level."""
    kind: str
    line: int
    """Where it starts, from 1."""
    start: int
    stop: int
    before: str
    """The line (or lines) as they are, without indentation."""
    after: str
    occurrence: int = 0
    """How many mutants of the same content come before it in the file."""
    replacement: str = ""
    statement: tuple[int, int] = (1, 1)
    """First and last line of the statement, as far as the fault goes."""
    scope: tuple[int, int] = (1, 1)
    """First and last line of the innermost function."""

    @property
    def key(self) -> str:
        """Names it by content, so that it keeps its name when lines move."""
        content = "\n".join((self.path, self.function, self.before, self.after, str(self.occurrence)))
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    def apply(self, source: str) -> str:
        """The file with the fault."""
        return source[: self.start] + self.replacement + source[self.stop :]


def find_mutants(path: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of its text; each still compiles."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    found: list[Mutant] = []
    seen: dict[tuple[str, str, str], int] = {}
    for mutant in sorted(finder.found, key=lambda mutant: (mutant.start, mutant.stop, mutant.replacement)):
        content = (mutant.function, mutant.before, mutant.after)
        seen[content] = seen.get(content, -1) + 1
        values = {**vars(mutant), "occurrence": seen[content]}
        numbered = Mutant(**values)
        try:
            compile(numbered.apply(source), path, "exec")
        except SyntaxError:
            continue
        found.append(numbered)
    return found


class _Finder(ast.NodeVisitor):
    """Walks the tree and notes a mutant wherever one can be made."""

    def __init__(self, path: str, source: str) -> None:
        self._path = path
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names: list[str] = []
        self._functions: list[ast.FunctionDef] = []
        self._statement = 1
        self.found: list[Mutant] = []

    def visit(self, node: ast.AST) -> None:
        before = self._statement
        if isinstance(node, ast.stmt):
            self._statement = node.lineno
        super().visit(node)
        self._statement = before

    # Where it does not look.

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and (self._functions or isinstance(node.value, ast.Call)):
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            return
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in QUIET:
            return
        self._names.append(node.name)
        self._functions.append(node)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            # A number as default is a choice; a switch is a behaviour.
            if isinstance(default, ast.Constant) and isinstance(default.value, bool):
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()
        self._names.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        if node.exc is not None:
            self._note(node, "error not raised", "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self._functions:
            return
        is_kept = all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
        if is_kept and self._functions[-1].name != "__init__":
            self._note(node, "assignment dropped", "pass")
        self.visit(node.value)

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        is_call = isinstance(node.value, ast.Call) and not _is_spoken(node.value)
        if is_call and self._functions and _name_of(node.value.func) != "sleep":
            self._note(node, "call dropped", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._note(node, "update dropped", "pass")
        new = ARITHMETIC.get(type(node.op))
        if new is not None and not _is_text(node.value):
            self._note(node, "arithmetic", ast.unparse(ast.AugAssign(node.target, new(), node.value)))
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return
        if self._gives_truth():
            self._note(node, "opposite returned", f"return not ({ast.unparse(node.value)})")
        else:
            self._note(node, "nothing returned", "return None")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._note(test, "filter dropped", "True")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._note(node, "loop left", "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._note(node, "loop goes on", "continue")

    # Expressions.

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self._compare(node, 0)
        else:
            for place in range(len(node.ops)):
                self._compare(node, place)
        self.generic_visit(node)

    def _compare(self, node: ast.Compare, place: int) -> None:
        ops = list(node.ops)
        ops[place] = COMPARISONS[type(ops[place])]()
        self._note(node, "comparison", ast.unparse(ast.Compare(node.left, ops, node.comparators)))

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._note(node, "and / or", f"({ast.unparse(ast.BoolOp(other, node.values))})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self._note(node, "sign dropped", f"({ast.unparse(node.operand)})")
        # -1 as a whole is one constant: its own off-by-one would only repeat the fault.
        if not isinstance(node.operand, ast.Constant):
            self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        new = ARITHMETIC.get(type(node.op))
        if new is not None and not (_is_text(node.left) or _is_text(node.right)):
            self._note(node, "arithmetic", f"({ast.unparse(ast.BinOp(node.left, new(), node.right))})")
            if isinstance(node.op, (ast.Div, ast.FloorDiv)):
                self._note(node, DIVIDED, f"({ast.unparse(node.left)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not self._names:
            return
        if isinstance(node.value, bool):
            self._note(node, "switch", str(not node.value))
        elif isinstance(node.value, int) and self._functions:
            self._note(node, "off by one", str(node.value + 1))
        elif isinstance(node.value, float) and self._functions:
            self._note(node, "number", repr(node.value * 2 if node.value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        if _is_spoken(node):
            return
        name = _name_of(node.func)
        if isinstance(node.func, ast.Name) and name in OPPOSITES:
            self._note(node.func, "opposite function", OPPOSITES[name])
        is_plain = not any(isinstance(argument, ast.Starred) for argument in node.args)
        if len(node.args) >= 2 and is_plain and name not in UNORDERED:
            first, second = ((self._place(argument), ast.unparse(argument)) for argument in node.args[:2])
            if first[1] != second[1]:
                span = (first[0][0], second[0][1])
                self._note_span(node.args[0].lineno, span, "arguments swapped", f"{second[1]}, {first[1]}")
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in NO_RESULT:
                self._note_span(keyword.lineno, self._with_comma(keyword), "argument dropped", "")
        self.visit(node.func)
        if name in WAITING:
            return
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in NO_RESULT:
                self.visit(keyword.value)

    # How a mutant is noted.

    def _negate(self, test: ast.expr) -> None:
        is_order = isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
        is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if is_not or (isinstance(test, ast.Compare) and len(test.ops) == 1 and not is_order):
            return  # its own opposite is a mutant already
        self._note(test, "condition negated", f"(not ({ast.unparse(test)}))")

    def _gives_truth(self) -> bool:
        function = self._functions[-1]
        return isinstance(function.returns, ast.Name) and function.returns.id == "bool"

    def _note(self, node: ast.expr | ast.stmt, kind: str, replacement: str) -> None:
        self._note_span(node.lineno, self._place(node), kind, replacement)

    def _note_span(self, line: int, span: tuple[int, int], kind: str, replacement: str) -> None:
        start, stop = span
        if replacement == self._source[start:stop]:
            return
        first = self._source.rfind("\n", 0, start) + 1
        last = self._source.find("\n", stop)
        last = len(self._source) if last < 0 else last
        before = self._source[first:last].strip()
        after = (self._source[first:start] + replacement + self._source[stop:last]).strip()
        scope = self._functions[-1] if self._functions else None
        self.found.append(
            Mutant(
                path=self._path,
                function=".".join(self._names),
                kind=kind,
                line=line,
                start=start,
                stop=stop,
                before=" ".join(before.split()),
                after=" ".join(after.split()),
                replacement=replacement,
                statement=(min(self._statement, line), line + self._source.count("\n", start, stop)),
                scope=(scope.lineno, scope.end_lineno or scope.lineno) if scope else (line, line),
            )
        )

    def _with_comma(self, keyword: ast.keyword) -> tuple[int, int]:
        """Where an argument is, with the comma after it, or else the one before."""
        start, stop = self._place(keyword)
        after = re.match(r"\s*,[ ]*", self._source[stop:])
        if after is not None:
            return start, stop + after.end()
        before = re.search(r",\s*$", self._source[:start])
        return start if before is None else before.start(), stop

    def _place(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """Columns of a tree count bytes."""
        start, stop = self._starts[line - 1], self._starts[line]
        return start + len(self._source[start:stop].encode()[:column].decode())


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_spoken(call: ast.Call) -> bool:
    return _name_of(call.func) in SPOKEN


def _is_text(node: ast.expr) -> bool:
    """Whether it is text or a list, which have no arithmetic but joining."""
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, (ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple)) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
