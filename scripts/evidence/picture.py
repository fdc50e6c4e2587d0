"""Draw docs/report.svg: the first example of README, run, and its report as a terminal shows it. Needs rich.

python scripts/evidence/picture.py
"""

import contextlib
import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

README = Path(__file__).parents[2] / "README.md"
PICTURE = README.with_name("docs") / "report.svg"
WIDTH = 100  # columns of a report
# rich's own frame, without its name and without fonts that a browser would load from a network.
FRAME = re.sub(r"@font-face \{\{.*?\}\}|<!--.*?-->", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
STYLES = {
    r"(?m)^\$ .*": "bold green",
    r"(?m)^verdict: .*": "bold",
    r"(?m)^ .* out of memory .*": "red",
    r"(?m)^ .* confirm .*": "bold green",
    r"(?m)^  (?!batch)[a-z]+ ?[a-z]+  +(?=\w)|^notes:|^not covered by the trials:": "cyan",
    r"(?m)^trials .*|^  batch  phase .*|^ +\^ .*": "dim",
}


def report():
    """Run the example and return what it prints."""
    example = re.search(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)[1]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(example, README.name, "exec"), {})
    return printed.getvalue()


def drawn(text):
    """Return the picture of a report."""
    terminal = Text(f"$ python train.py\n{text.rstrip()}")
    for pattern, style in STYLES.items():
        terminal.highlight_regex(pattern, style)
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", legacy_windows=False
    )
    console.print(terminal)
    svg = console.export_svg(title="oomprobe", code_format=FRAME, unique_id="report")
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(drawn(report()))
