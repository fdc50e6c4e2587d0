"""What the examples say to type, and how tests type it."""

import ast
import re
import shlex

from processes import REPOSITORY, in_child

EXAMPLES = REPOSITORY / "examples"


def commands(*names, simulated=False):
    """Return the commands in the docstrings of examples, as lists of words: those for a simulated card, or the others."""
    docstrings = [
        ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8")))
        for name in names
    ]
    found = re.findall(r"^(?:python|oomprobe run|torchrun) .*", "\n".join(docstrings), re.MULTILINE)
    lines = [shlex.split(line, comments=True) for line in found]
    return [words for words in lines if simulated == any(word.startswith("sim:") for word in words)]


def typed(words):
    """Run a command of Python or oomprobe in this process, a child; return its exit status, stdout and stderr."""
    program, *rest = words
    script, *arguments = rest if program == "python" else ["oomprobe/__main__.py", *rest]
    return in_child(REPOSITORY / script, *arguments, folder=REPOSITORY)
