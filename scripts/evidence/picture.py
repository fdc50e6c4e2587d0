"""Draw docs/report.svg: README's first command, run on the script of docs/my-script.md. Needs rich.

python scripts/evidence/picture.py
"""

import io
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

README = Path(__file__).parents[2] / "README.md"
PICTURE = README.with_name("docs") / "report.svg"
SCRIPT = PICTURE.with_name("my-script.md")
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


def session():
    """Run README's first command on the script of docs/my-script.md, and return both as a terminal shows them."""
    command = re.search(r"^(oomprobe run .*?)  #", README.read_text(), re.MULTILINE)[1]
    script = re.search(r"^```py\n(.*?)^```", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)[1]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script)
        words = [sys.executable, "-m", *shlex.split(command)]
        ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return f"$ {command}\n{ran.stdout.rstrip()}"


def drawn(text):
    """Return the picture of a session."""
    terminal = Text(text)
    for pattern, style in STYLES.items():
        terminal.highlight_regex(pattern, style)
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", legacy_windows=False
    )
    console.print(terminal)
    svg = console.export_svg(title="oomprobe", code_format=FRAME, unique_id="report")
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(drawn(session()))
