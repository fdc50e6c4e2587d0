"""Pages of the site that are not in docs/: README and its neighbours, the examples, the public names, the command line.

mkdocs calls the functions whose names begin with ``on_`` (https://www.mkdocs.org/user-guide/configuration/#hooks).
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import oomprobe  # noqa: E402
from oomprobe.cli import parser  # noqa: E402
from oomprobe.results.base import Reported  # noqa: E402

CHAPTERS = {
    "Search": (
        "find_max_batch",
        "find_max_batches",
        "find_max_tokens",
        "find_savings",
        "check",
        "probe_target",
        "check_target",
        "probe_command",
        "check_command",
        "Step",
        "Epoch",
    ),
    "Results": (
        *("ProbeResult", "ProbeTable", "EpochRecord"),
        *("Trial", "Phase", "Verdict", "LinearFit", "PlanEntry"),
    ),
    "Real runs": ("PeakMonitor", "explain", "Explanation"),
    "Data": ("worst_case_batches", "WorstCaseBatches"),
    "Devices": ("Device", "SimulatedDevice"),
    "Errors": (
        *(
            "OomProbeError",
            "InvalidArgumentError",
            "NoDeviceError",
            "NothingFitsError",
            "StepFailedError",
        ),
        *("DeviceLostError", "TimeLimitError", "UnreliableError", "classify_error", "Evidence"),
    ),
}
# Their other methods are called by a probe.
CALLED_BY_USERS = {"SimulatedDevice": ("building",), "Trial": ("passed",)}
FRAMEWORKS = {
    "transformers": ("find_max_batch", "model_and_step", "PeakMonitorCallback"),
    "lightning": ("find_max_batch", "model_and_step", "PeakMonitorCallback"),
    "accelerate": ("find_executable_batch_size", "unchanged"),
    "ultralytics": ("install", "find_max_batch"),
}


def on_files(files, config):
    """Add the pages, and the files to which they link."""
    from mkdocs.structure.files import File

    texts = {"index.md": ROOT / "README.md", "examples/README.md": ROOT / "examples" / "README.md"}
    texts |= {
        name: ROOT / name
        for name in ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
    }
    contents = {name: path.read_text(encoding="utf-8") for name, path in texts.items()}
    contents |= {"python.md": python_page(), "command-line.md": command_line_page()}
    examples = (
        path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb", ".slurm")
    )
    contents |= {f"examples/{path.name}": path.read_text(encoding="utf-8") for path in examples}
    for name, content in contents.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links lead to the places of their targets in the site, and break lines as Python-Markdown does."""
    markdown = re.sub(r"\]\(\.\./README\.md", "](index.md", markdown).replace(")\\\n", ")  \n")
    if page.file.src_uri.startswith("errors/"):
        return markdown
    if page.file.src_uri.startswith("examples/"):
        return markdown.replace("](../docs/", "](../")
    return re.sub(
        r"\]\((?:\.\./|docs/)(?!examples/)", "](", markdown.replace("](../examples/", "](examples/")
    )


def python_page():
    """Return the page of the public names, which mkdocstrings fills from their docstrings."""
    if problems := [*undocumented()]:
        raise SystemExit("\n".join(problems))
    parts = [
        "# Public names",
        "Import them from `oomprobe`; `help()` shows the same text. The last chapters are modules of their own.",
    ]
    for chapter, names in CHAPTERS.items():
        parts.append(f"## {chapter}")
        parts += [
            block(f"oomprobe.{oomprobe._HOMES[name]}.{name}", CALLED_BY_USERS.get(name))
            for name in names
        ]
    for module, names in FRAMEWORKS.items():
        parts.append(f"## oomprobe.integrations.{module}")
        parts += [block(f"oomprobe.integrations.{module}.{name}") for name in names]
    return (
        "\n\n".join([*parts, "Next: [the command line](command-line.md), [options](reference.md)"])
        + "\n"
    )


def block(path, members=None):
    return f"::: {path}" + (
        f"\n    options: {{ members: [{', '.join(members)}] }}" if members else ""
    )


def undocumented():
    """Yield what is wrong with the public names: not listed, or without a docstring of its own."""
    listed = {name for names in CHAPTERS.values() for name in names}
    yield from (
        f"{name}: no chapter lists it, or it is not public"
        for name in listed ^ set(oomprobe._HOMES)
    )
    for name, thing in public():
        # A dataclass without a docstring has its signature for one.
        if not thing.__doc__ or thing.__doc__.startswith(f"{name.rpartition('.')[2]}("):
            yield f"{name} has no docstring"


def public():
    """Yield the public names with what they name, methods of classes included."""
    for name in oomprobe._HOMES:
        thing = getattr(oomprobe, name)
        yield name, thing
        if inspect.isclass(thing):
            yield from ((f"{name}.{member}", method) for member, method in methods(name, thing))
    for module, names in FRAMEWORKS.items():
        home = importlib.import_module(f"oomprobe.integrations.{module}")
        yield from ((f"{module}.{name}", getattr(home, name)) for name in names)


def methods(name, kind):
    """Yield the public methods and properties that a class defines, or that results have in common, and users call."""
    members = dict(vars(kind))
    if issubclass(kind, Reported):
        members |= {
            member: value for member, value in vars(Reported).items() if member not in members
        }
    for member, value in members.items():
        is_method = inspect.isroutine(value) or isinstance(value, property | classmethod)
        if (
            is_method
            and not member.startswith("_")
            and member in CALLED_BY_USERS.get(name, (member,))
        ):
            yield member, value


def command_line_page():
    """Return the page of the command line, from its parser."""
    whole = parser()
    commands = next(
        action.choices
        for action in whole._actions
        if action.choices and hasattr(action.choices, "items")
    )
    parts = [
        "# The command line",
        "Made from the parser; `oomprobe --help` prints the same. "
        "The environment variables are in the [reference](reference.md#environment).",
        fenced(whole.format_help()),
    ]
    for name, command in commands.items():
        parts += [f"## oomprobe {name}", fenced(command.format_help())]
    return (
        "\n\n".join(
            [*parts, "Next: [options, exit statuses](reference.md), [any command](commands.md)"]
        )
        + "\n"
    )


def fenced(text):
    return f"```text\n{text.rstrip()}\n```"
