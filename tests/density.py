"""What makes code hard to read, counted over the syntax trees of modules."""

import ast
import io
import re
import tokenize
from collections import Counter

SAYING_NOTHING = {"one", "other", "found", "told", "held"}
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_STATEMENTS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


def code_lines(source):
    """Count lines of code: without blank lines, comments and docstrings."""
    documented, lines = set(), set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS))
            and ast.get_docstring(node) is not None
        ):
            documented |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - documented)


def in_expressions(node):
    """Count decisions in expressions: each ``x if y else z``, ``and``, ``or``, and ``for`` and ``if`` of a comprehension."""
    count = 0
    for part in ast.walk(node):
        if isinstance(part, ast.IfExp):
            count += 1
        elif isinstance(part, ast.BoolOp):
            count += len(part.values) - 1
        elif isinstance(part, ast.comprehension):
            count += 1 + len(part.ifs)
    return count


def decisions(function):
    """Count a function's decisions of both kinds, without those of functions inside it."""
    inside = [
        part for part in ast.walk(function) if part is not function and isinstance(part, _FUNCTIONS)
    ]

    def count(node):
        return in_expressions(node) + sum(isinstance(part, _STATEMENTS) for part in ast.walk(node))

    return count(function) - sum(map(count, inside))


def riddles(tree):
    """Yield conditionals inside conditional expressions, and text literals that are multiplied."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            yield from (
                part for part in ast.walk(node) if part is not node and isinstance(part, ast.IfExp)
            )
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            yield from (side for side in sides if isinstance(side, ast.JoinedStr) or _is_text(side))


def _is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def names_that_say_nothing(tree):
    """Yield the variables and parameters with such a name that are not a comprehension's or a lambda's, nor fields of a class."""
    small = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, _COMPREHENSIONS)
        for part in ast.walk(node)
    }
    small |= {
        id(field.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if id(node) in small:
            continue
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in SAYING_NOTHING
        ):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg in SAYING_NOTHING:
            yield node.arg


def slivers(trees, sources):
    """Yield private functions of at most four statements that are named once beside their definition: of one caller."""
    named = Counter(re.findall(r"\b_\w+\b", "\n".join(sources)))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if not isinstance(node, _FUNCTIONS) or not node.name.startswith("_"):
            continue
        if node.name.startswith("__") or named[node.name] != 2:
            continue
        body = node.body[ast.get_docstring(node) is not None :]
        if sum(isinstance(part, ast.stmt) for one in body for part in ast.walk(one)) <= 4:
            yield node.name


def names_at_the_top(tree):
    """Return the functions and classes of a module, less those that Python gives a meaning."""
    kinds = (*_FUNCTIONS, ast.ClassDef)
    names = {node.name for node in tree.body if isinstance(node, kinds)}
    return {name for name in names if not name.startswith("__")}


def measured(sources):
    """Return the counts over all these modules."""
    trees = [ast.parse(source) for source in sources]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    lines = sum(map(code_lines, sources))
    in_statements = sum(isinstance(node, _STATEMENTS) for node in nodes)
    functions = [node for node in nodes if isinstance(node, _FUNCTIONS)]
    tops = Counter(name for tree in trees for name in names_at_the_top(tree))
    wide = [line for source in sources for line in source.splitlines() if len(line) > 100]
    return {
        "decisions per 1,000 lines": 1000
        * (in_statements + sum(map(in_expressions, trees)))
        / lines,
        "slivers": sum(1 for _ in slivers(trees, sources)),
        "names at the top of several modules": sum(count > 1 for count in tops.values()),
        "modules that name replays": sum("replays" in source for source in sources),
        "lines over 100 columns": len(wide),
        "functions with more than 14 decisions": sum(decisions(node) > 14 for node in functions),
        "riddles": sum(1 for tree in trees for _ in riddles(tree)),
        "names that say nothing": sum(1 for tree in trees for _ in names_that_say_nothing(tree)),
    }
