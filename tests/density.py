"""How much code decides where a reader does not see it: counts over a module's syntax tree."""

import ast
import io
import tokenize

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
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and ast.get_docstring(node) is not None:
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
    inside = [part for part in ast.walk(function) if part is not function and isinstance(part, _FUNCTIONS)]

    def count(node):
        return in_expressions(node) + sum(isinstance(part, _STATEMENTS) for part in ast.walk(node))

    return count(function) - sum(map(count, inside))


def riddles(tree):
    """Yield conditionals inside conditional expressions, and text literals that are multiplied."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            yield from (part for part in ast.walk(node) if part is not node and isinstance(part, ast.IfExp))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            yield from (side for side in sides if isinstance(side, ast.JoinedStr) or _is_text(side))


def _is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def names_that_say_nothing(tree):
    """Yield the variables and parameters with such a name that are not a comprehension's or a lambda's, nor fields of a class."""
    small = {id(part) for node in ast.walk(tree) if isinstance(node, _COMPREHENSIONS) for part in ast.walk(node)}
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
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in SAYING_NOTHING:
            yield node.id
        elif isinstance(node, ast.arg) and node.arg in SAYING_NOTHING:
            yield node.arg


def measured(sources):
    """Return the counts over all these modules."""
    trees = [ast.parse(source) for source in sources]
    lines = sum(map(code_lines, sources))
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    return {
        "lines of code": lines,
        "decisions in expressions per 1,000 lines": 1000 * sum(map(in_expressions, trees)) / lines,
        "functions with more than 14 decisions": sum(decisions(function) > 14 for function in functions),
        "riddles": sum(1 for tree in trees for _ in riddles(tree)),
        "names that say nothing": sum(1 for tree in trees for _ in names_that_say_nothing(tree)),
    }
