"""Plots, the HTML page, the memory breakdown and the comparison of results."""

import html
import re
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from example_results import EXAMPLES, gpu
from helpers import a_result, a_trial, page_of, same_as_golden
from processes import REPOSITORY
from test_probe_table import a_table

import oomprobe
from oomprobe import cli
from oomprobe.records.breakdown import ACTIVATIONS, FRAGMENTATION, KINDS, Breakdown, ModuleMemory
from oomprobe.records.epoch import Curve, EpochRecord
from oomprobe.records.savings import Comparison
from oomprobe.records.timeline import Timeline
from oomprobe.records.trials import Verdict
from oomprobe.results.blocks import Block, Row, Table, as_text, block_lines
from oomprobe.results.compare import comparison
from oomprobe.results.facts import breakdown_blocks
from oomprobe.results.plot import bracket_figure

GIB = 2**30


def a_breakdown(**changes):
    parts = dict.fromkeys(KINDS, GIB // 8) | {ACTIVATIONS: 6 * GIB}
    given = {
        "batch_size": 98,
        "parts": parts,
        "peak_in": "backward",
        "modules": (
            ModuleMemory(name="layers.*.mlp", kind="Mlp", count=12, activation_bytes=4 * GIB),
            ModuleMemory(name="head", kind="Linear", count=1, activation_bytes=GIB),
        ),
    } | changes
    total = sum(given["parts"].values())
    return Breakdown(
        peak_allocated_bytes=total - given["parts"][FRAGMENTATION],
        peak_reserved_bytes=total,
        **given,
    )


# --- plots ---


def labels(axes):
    return {line.get_label() for line in axes.lines if not line.get_label().startswith("_")}


def test_a_plot_shows_peaks_lines_and_throughput(tmp_path):
    result = gpu()
    figure = result.plot(tmp_path / "probe.png")
    memory, throughput = figure.axes
    failed = "failed, at its limit"
    assert {
        "peak reserved",
        "peak allocated",
        failed,
        "available 24.00 GiB",
        "budget 21.60 GiB",
    } < labels(memory)
    crosses = (
        next(line for line in memory.lines if line.get_label() == failed).get_xydata().tolist()
    )
    assert crosses
    assert crosses == [
        [t.batch_size, (t.cap_bytes or 24 * GIB) / GIB] for t in result.trials if not t.passed
    ]
    allocated = next(line for line in memory.lines if line.get_label() == "peak allocated")
    assert allocated.get_xydata().tolist() == sorted(
        [t.batch_size, t.peak_allocated_bytes / GIB] for t in result.trials if t.passed
    )
    assert "linear fit" in labels(memory)
    assert [text.get_text() for text in throughput.texts] == ["knee: batch 64, 95 % of the best"]
    figure.draw_without_rendering()
    assert throughput.texts[0].get_window_extent().x0 > throughput.get_window_extent().x0
    assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_has_a_second_part_if_throughput_was_measured():
    assert len(EXAMPLES["ranks"]().plot().axes) == 2
    assert len(EXAMPLES["trouble"]().plot().axes) == 1
    axes = bracket_figure([a_trial(8)], 8).axes[0]
    assert axes.get_xlim() == (0.5, 1.5)  # whole trials


def test_a_plot_marks_replayed_sizes():
    trials = [
        a_trial(8),
        a_trial(16, peak_allocated_bytes=GIB, replayed=True),
        a_trial(32, Verdict.OOM, replayed=True),
    ]
    axes = bracket_figure(trials, 8).axes[0]
    points = {line.get_label(): [*line.get_ydata()] for line in axes.lines}
    ends = {"ran": [8], "passed a replay": [16], "failed a replay": [32]}
    assert points.items() >= ends.items()
    assert "failed" not in points
    memory = replace(gpu(), trials=tuple(trials)).plot().axes[0]
    (replayed,) = (line for line in memory.lines if line.get_label() == "the same, replayed")
    assert replayed.get_xdata().tolist() == [16]
    assert replayed.get_markerfacecolor() == "none"


@pytest.mark.parametrize("model", [{"model": "GPT"}, {"model": "GPT", "command": "GPT"}])
def test_a_plot_says_model_card_and_answer(model):
    result = replace(gpu(), environment=model)
    table = a_table(rows={512: result, 1024: result}, unfit={})
    titles = [" ".join(one.plot().get_suptitle().split()) for one in (result, table)]
    card = "fits in 21.60 GiB (90 % of 24.00 GiB on NVIDIA GeForce RTX 4090)"
    assert titles == [
        f"GPT: batch 98 {card}",
        f"GPT: 2 of 2 values of length {card.replace('fits', 'fit')}",
    ]
    assert replace(gpu(), environment={}).plot().get_suptitle().startswith("batch 98")


def a_trained(**changes):
    """Return a result that orders have lowered from 104 to 98."""
    calm = Curve(calls=(1, 50), reserved_bytes=(10 * GIB, 10 * GIB))
    hard = Curve(calls=(1, 9, 50), reserved_bytes=(10 * GIB, 20 * GIB, 20 * GIB))
    dies = Curve(calls=(1, 7), reserved_bytes=(21 * GIB, 21 * GIB))
    record = EpochRecord(
        batch_size=98, ends=(None,) * 3, deaths=0, reserved=(calm, hard, calm),
        longest_only_batch_size=104, longest_only_ends=(None, 7, 3),
        longest_only_reserved=(hard, dies, replace(dies, calls=(1, 3))),
    )  # fmt: skip
    return replace(gpu(), epoch=replace(record, **changes))


def test_a_plot_of_an_epoch_shows_each_order_the_cap_and_deaths(tmp_path):
    result = a_trained()
    above, answer = result.plot(tmp_path / "epoch.svg").axes
    titles = [axes.get_title() for axes in (above, answer)]
    assert titles == [
        "batch 104: 2 of 3 orders run out of memory",
        "batch 98: 0 of 3 orders run out of memory",
    ]
    for axes, hardest, deaths in ((above, 3, [[7, 21], [3, 21]]), (answer, 50, [])):
        orders = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
        (thick,) = (line for line in orders if line.get_linewidth() > 1)
        assert (len(orders), thick, thick.get_xdata()[-1]) == (3, orders[-1], hardest)
        marked = [line for line in axes.lines if line.get_marker() == "x"]
        crosses = [point for line in marked for point in line.get_xydata().tolist()]
        assert crosses == deaths
        (cap,) = (line for line in axes.lines if line.get_label() == "cap 21.60 GiB")
        assert cap.get_ydata()[0] == pytest.approx(result.budget_bytes / GIB)
    assert page_of(result).count("<svg") == 3
    assert oomprobe.ProbeResult.from_dict(result.to_dict()) == result
    assert len(a_trained(longest_only_reserved=()).plot().axes) == 1
    assert len(a_trained(ends=(None,), reserved=()).plot().axes) == 2  # memory and throughput


def test_without_matplotlib_the_error_says_what_to_type(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (gpu().plot, lambda: gpu().to_html(tmp_path / "page.html")):
        with pytest.raises(oomprobe.InvalidArgumentError, match=r"pip install 'oomprobe\[plot\]'"):
            draw()
    assert "<table>" in gpu()._repr_html_()


# --- the page ---


def test_a_page_has_everything_and_loads_nothing():
    result = gpu()
    text = page_of(result)
    assert text.count("<svg") == 2
    assert len(re.findall(r'<tr class="(?:failed|passed|answer)"', text)) == len(result.trials)
    remark = "backward, model.py:142: CUDA out of memory. Tried to allocate 2.00 GiB"
    for words in (
        "Batch 98 fits in 21.60 GiB",
        remark,
        *result.notes,
        *result.not_covered,
        "Options",
    ):
        assert words in html.unescape(text)
    kinds = re.findall(r'<tr class="(\w+)"><td>(\d+)</td><td class="text">(\w+)</td>', text)
    assert {("passed", "64", "grow"), ("failed", "128", "grow"), ("answer", "98", "confirm")} < set(
        kinds
    )
    assert not re.search(r"<script|<link|<img|@import|url\(\s*['\"]?http", text)
    addresses = set(re.findall(r"https?://[^\"'<> ]+", text))
    assert all(
        address.startswith("http://www.w3.org/") for address in addresses
    )  # XML namespaces, not links


def test_a_dark_page_changes_every_colour_that_would_be_lost():
    text = page_of(gpu())
    dark = text.split("prefers-color-scheme: dark")[1].split("</style>")[0]
    drawn = set(re.findall(r"var\(--c([0-9a-f]{6}), #\1\)", text))
    assert {"000000", "737373", "1b4f8a"} <= drawn <= {"e08a2e", *re.findall(r"--c(\w{6}):", dark)}
    for picture in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
        shown = ElementTree.fromstring(picture)
        assert not re.search(r"(?<!, )#[0-9a-f]{6}\b", picture)
        assert len([*shown.iter("{http://www.w3.org/2000/svg}text")]) > 10  # the page's own font
        assert "font-family" not in picture


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({}, ["batch_size = 98"]),
        (
            {"command": "python train.py --batch-size '{batch}' --out 'a={batch}'"},
            ["python train.py --batch-size 98 --out 'a=98'"],
        ),
        (
            {"allocator_settings": {"PYTORCH_ALLOC_CONF": "a:True,b:[<c>]"}},
            ["export PYTORCH_ALLOC_CONF='a:True,b:[<c>]'", "batch_size = 98"],
        ),
    ],
)
def test_a_page_begins_with_what_to_paste(environment, lines):
    text = page_of(replace(gpu(), environment=environment))
    pasted = [html.unescape(line) for line in re.findall("<pre>(.*?)</pre>", text)]
    assert pasted == lines
    assert text.index("<h1>") < text.index("<svg") < text.index("<pre>") < text.index("<table>")
    assert "user-select: all" in text


def test_a_page_of_cards_has_the_smallest_first_and_one_picture():
    sizes = {"sim:large": (80, 200), "sim:small": (8, 20), "sim:enough": (24, 64), "sim:none": None}
    rows = dict.fromkeys(sizes)
    for name, (gib, size) in list(sizes.items())[:3]:
        answer = a_trial(size, peak_reserved_bytes=GIB)
        rows[name] = replace(
            gpu(), batch_size=size, trials=(answer,), available_bytes=gib * GIB,
            environment={"target": "train.py:build"},
        )  # fmt: skip
    table = oomprobe.ProbeTable(axis="device", rows=rows, required=64)
    text = page_of(table)
    shown = re.findall(r'<td class="text">(?:\* )?sim:(\w+)', text)
    assert shown == ["none", "small", "enough", "large"]
    assert re.findall("<pre>(.*?)</pre>", text) == [
        "oomprobe run train.py:build --device sim:enough"
    ]
    assert text.count("<svg") == 1  # none for each row
    (axes,) = table.plot().axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["none", "small", "* enough", "large"]
    runs = [bar.get_facecolor() == axes.patches[-1].get_facecolor() for bar in axes.patches]
    assert runs == [False, False, True, True]


def test_a_page_of_savings_has_what_to_paste_for_the_cheapest():
    typed = {"bf16_autocast": "with torch.autocast():", "checkpoint": "checkpoint(block, x)"}
    compared = Comparison(batch_size=98, required=True, typed=typed)
    failed = replace(gpu(), batch_size=64, trials=(a_trial(64), a_trial(98, Verdict.OOM)))
    rows = {"as is": failed, "checkpoint": gpu()}
    text = page_of(oomprobe.ProbeTable(axis="saving", rows=rows, savings=compared))
    assert re.findall("<pre>(.*?)</pre>", text) == ["checkpoint(block, x)"]
    lengths = page_of(a_table())
    assert re.findall("<pre>(.*?)</pre>", lengths) == ["batch_sizes = {512: 98, 1024: 32}"]


def test_text_from_outside_is_escaped():
    result = a_result(
        device="<script>alert(1)</script>",
        notes=("a & b <b>",),
        trials=(a_trial(step_name="<script>"),),
        environment={"target": "<script>"},
    )
    for text in (page_of(result), result._repr_html_()):
        assert "<script" not in text
        assert "a &amp; b &lt;b&gt;" in text
        assert text.count("&lt;script&gt;alert(1)") == text.count("90 % of 100 B")  # the verdict


# --- a narrow terminal ---


@pytest.mark.parametrize("width", [48, 80])
@pytest.mark.parametrize("record", [*EXAMPLES.values(), a_table])
def test_a_report_fits_a_narrow_terminal_with_all_its_cells(record, width):
    report = record().report(verbose=True)
    text = as_text(report, width)
    assert max(map(len, text.splitlines())) <= width
    tables = [block.content for block in report.blocks if isinstance(block.content, Table)]
    heads, numbers = set(), set()
    for table in tables:
        heads.update(table.heads)
        for row in table.rows:
            numbers.update(row.cells[place] for place in {*range(len(row.cells))} - table.texts)
    assert len(numbers) > 3
    assert [cell for cell in {*heads, *numbers} if cell not in text] == []


def test_each_part_of_a_wide_table_names_its_rows():
    rows = [Row(cells=["a", "1", "22"], remark="why"), Row(cells=["b", "3", "4"], kind="answer")]
    table = Table(heads=["x", "one", "two"], rows=rows, texts={0}, marks=True)
    assert block_lines(Block("", table), 10) == [
        *("  x  one", "  a    1", "* b    3"),
        *("  x  two", "  a   22", "     ^ why", "* b    4"),
    ]


# --- notebooks ---


def test_a_notebook_shows_every_note_and_what_limits():
    result = replace(
        gpu(),
        notes=("weak: no optimizer stepped", "a < b"),
        breakdown=a_breakdown(),
        contaminated=True,
    )
    text = html.unescape(result._repr_html_())
    for words in (
        *result.notes,
        "memory; batch 98 ran for 5 calls; batch 99 failed",
        "WARNING: memory outside",
    ):
        assert words in text
    for words in (
        "the longest sequence of your data",
        "Where the memory went",
        "12 = ",
        "... 4 of 16 trials left out",
    ):
        assert words in text
    assert text.index("weak: no optimizer") < text.index("<table>")


def test_a_notebook_shows_the_plot_without_magic():
    formatters = pytest.importorskip("IPython.core.formatters")
    shown, _ = formatters.DisplayFormatter().format(gpu().plot())
    assert shown["image/png"].startswith(b"\x89PNG")
    assert shown.keys() == {"image/png", "text/plain"}


def test_the_picture_of_a_report_shows_the_command_above_it():
    """If this fails, draw it again: python scripts/evidence/picture.py."""
    drawn = (REPOSITORY / "docs/report.svg").read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\"')]*", drawn) == ["http://www.w3.org/2000/svg"]
    text = html.unescape("".join(re.findall(r"<text[^>]*>([^<]*)<", drawn)))
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    above = readme.partition("(docs/report.svg)")[0]
    command = re.search(r"^(oomprobe run .*?)  #", above, re.MULTILINE)[1]
    for shown in (f"$ {command}", "verdict: batch 176 fits in 20.72 GiB", "confirm fits"):
        assert "".join(shown.split()) in "".join(text.split())


# --- where the memory went ---


def test_a_breakdown_equals_its_golden_file_and_survives_json():
    result = a_result(breakdown=a_breakdown())
    assert oomprobe.ProbeResult.from_dict(result.to_dict()) == result
    same_as_golden(
        "\n\n".join("\n".join(block_lines(block)) for block in breakdown_blocks(a_breakdown()))
        + "\n",
        "breakdown.txt",
    )


def test_a_plot_of_a_breakdown_shows_each_kind_over_the_step():
    live_bytes = {ACTIVATIONS: (0, 6 * GIB, GIB), "parameters": (GIB, GIB, GIB)}
    timeline = Timeline(events=(0, 40, 90), live_bytes=live_bytes)
    result = replace(gpu(), breakdown=a_breakdown(timeline=timeline))
    (axes,) = result.report().pictures["memory over a step, by kind"]().axes
    peak = "peak reserved 6.88 GiB"
    assert axes.get_legend_handles_labels()[1] == [ACTIVATIONS, "parameters", peak]
    top = max(place for path in axes.collections[1].get_paths() for _, place in path.vertices)
    assert top == 7
    assert oomprobe.ProbeResult.from_dict(result.to_dict()) == result
    assert page_of(result).count("<svg") == 3


# --- two results ---


def test_a_comparison_equals_its_golden_file():
    trials = tuple(t for t in gpu().trials if t.batch_size <= 64)
    other = a_result(
        trials=trials,
        batch_size=64,
        device="H100",
        environment={"torch": "2.14.1"},
        breakdown=a_breakdown(),
    )
    same_as_golden(
        comparison(gpu(), other, ("before.json", f"{'x' * 30}/after.json")), "comparison.txt"
    )


def test_the_command_line_compares_and_writes_a_page(tmp_path, capsys):
    kept = str(tmp_path / "probe.json")
    gpu().to_json(kept)
    assert cli.main(["show", kept, "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text() == page_of(gpu())
    assert cli.main(["compare", kept, kept]) == 0
    assert "other differences" not in capsys.readouterr().out
    assert cli.main(["compare", kept, "nowhere.json"]) == 2
