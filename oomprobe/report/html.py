"""A result as one HTML file to send to a colleague: the plot and the report; no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

from oomprobe.report.page import brief, text, verdict_line
from oomprobe.report.plot import result_figure

if TYPE_CHECKING:
    from oomprobe.result import ProbeResult

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; } pre { font-size: .875rem; overflow-x: auto; }
figure { margin: 0; max-width: 30rem; } figure svg { width: 100%; height: auto; }
"""


def page(result: ProbeResult) -> str:
    """Render a result as an HTML document."""
    environment = "\n".join(f"{name}: {value}" for name, value in result.environment.items() if value)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>oomprobe: batch {result.batch_size} on {escape(result.device)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(verdict_line(result))}</h1>
<figure>{_svg(result)}</figure>
<h2>Report</h2>
<pre>{escape(text(result, verbose=True))}</pre>
<h2>Environment</h2>
<pre>{escape(environment)}</pre>
</body>
</html>
"""


def notebook(result: ProbeResult) -> str:
    """The verdict and the table, for a notebook."""
    return f"<pre>{escape(brief(result))}</pre>"


def _svg(result: ProbeResult) -> str:
    """The plot as inline SVG, without the prolog that only a file of its own has."""
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.hashsalt": "oomprobe"}):  # otherwise ids are random, and the same result another file
        result_figure(result).savefig(stream, format="svg", metadata={"Date": None})
    svg = stream.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return svg.replace("<svg ", '<svg role="img" aria-label="peak memory and throughput against batch size" ', 1)
