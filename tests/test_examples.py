"""The examples on simulated cards, typed as their docstrings say, and the notebooks; tests/cuda and tests/integrations have more."""

import ast
import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
import torch
from processes import REPOSITORY, environment, start
from typed import EXAMPLES, commands, typed

import oomprobe

FILES = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb", ".slurm"))
NOTEBOOKS = [path for path in FILES if path.suffix == ".ipynb"]
TESTS = [
    Path(__file__).parent / folder / "test_examples.py" for folder in ("", "cuda", "integrations")
]


def cells(path):
    """Return the code of a notebook's cells, without what installs oomprobe."""
    code = [
        cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"
    ]
    return [re.sub("^%pip .*", "", one, flags=re.MULTILINE) for one in code]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_is_short_and_run_by_a_test(path):
    assert any(f'"{path.name}"' in test.read_text() for test in TESTS)
    assert f"]({path.name})" in (EXAMPLES / "README.md").read_text()
    assert path.suffix == ".ipynb" or len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.suffix != ".slurm"], ids=lambda path: path.name
)
def test_only_public_names_are_used(path):
    code = path.read_text() if path.suffix == ".py" else "\n".join(cells(path))
    for node in ast.walk(ast.parse(re.sub("^[%!].*", "", code, flags=re.MULTILINE))):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "oomprobe":
            assert node.attr in oomprobe._HOMES
        elif isinstance(node, ast.Import):
            assert all(
                alias.name == "oomprobe"
                for alias in node.names
                if alias.name.startswith("oomprobe")
            )
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("oomprobe"):
            assert re.fullmatch(r"oomprobe\.integrations\.\w+", node.module)
            assert {alias.name for alias in node.names} <= {"find_max_batch", "model_and_step"}


# --- scripts ---


IN_SECONDS = commands("plain_loop.py", "ddp.py", simulated=True)
ON_REQUEST = commands("varying_lengths.py", "length_table.py", "savings.py", simulated=True)


@pytest.mark.parametrize(
    "words",
    [*IN_SECONDS, *(pytest.param(words, marks=pytest.mark.slow) for words in ON_REQUEST)],
    ids=" ".join,
)
def test_on_a_simulated_card(words):
    status, out, err = start(typed, words).result(limit_s=180)
    assert status == 0, err
    assert out.startswith("verdict: ")
    assert "identical\n" in out  # the state was restored
    assert "max_batch" not in out
    assert "not restored:" not in out


# --- the job ---


def submit(tmp_path, **programs):
    """Run the job with other programs in front of its path; return its exit status, and its output with what they were given."""
    for name, code in programs.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/given"\n{code}\n')
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", EXAMPLES / "job.slurm"],
        cwd=REPOSITORY,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, (tmp_path / "given").read_text().splitlines()


def test_the_job_trains_with_the_number(tmp_path):
    status, out, given = submit(tmp_path, oomprobe="echo 48", srun='exec "$@"', torchrun="exit 0")
    assert (status, out) == (0, "batch size of each GPU: 48\n")
    assert given[1:] == [
        f"{words}torchrun --nproc-per-node gpu examples/ddp.py --batch-size 48".strip()
        for words in ("srun ", "")
    ]


def test_a_job_without_a_number_ends_with_the_status_of_oomprobe(tmp_path):
    status, out, given = submit(tmp_path, oomprobe="exit 6", srun="exit 0")
    assert (status, out, len(given)) == (6, "", 1)


# --- notebooks ---


def executed(path, folder):
    """Return a notebook's code cells with their outputs, run in the notebook's own folder."""
    from nbclient import NotebookClient

    os.environ.update(environment(IPYTHONDIR=str(folder), JUPYTER_RUNTIME_DIR=str(folder)))
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(one) for one in cells(path)]
    )
    NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        resources={"metadata": {"path": str(EXAMPLES)}},
    ).execute()
    return notebook.cells


def outputs_of(code_cells):
    return [output for cell in code_cells for output in cell.outputs]


def without_times(outputs):
    """Return what outputs say, as one text: without times; of a picture, that it is one."""
    said = ""
    for output in outputs:
        data = output.get("data", {"text/plain": output.get("text", "")})
        for kind, text in sorted(data.items()):
            said += f"{output.output_type} {kind}: {'' if kind == 'image/png' else text}\n"
    # The kernel's own folder of cells, on which lines of the report wrap.
    said = " ".join(re.sub(r"(/tmp/)?ipykernel_\d+/", "", said).split())
    return re.sub(r"[\d.]+ (?:s|ms|min)\b|\d+ % of it inside| at 0x\w+", "#", said)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_installs_first_and_is_stored_with_outputs_only_if_a_test_makes_them(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    has_outputs = path.name == "quickstart.ipynb"
    assert [bool(cell.execution_count) for cell in code] == [has_outputs] * len(code)
    assert has_outputs or not outputs_of(code)
    assert code[0].source.startswith('SOURCE = ".."  # ')
    assert notebook.metadata.keys() == {"kernelspec"}
    assert '\n%pip install --quiet "{SOURCE}' in "\n".join(cell.source for cell in code)


@pytest.mark.usefixtures("warm_python")
@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a card")
def test_quickstart_shows_a_report_a_table_and_their_plots(tmp_path):
    """Its stored outputs are those of its cells; OVERWRITE_GOLDEN stores them anew."""
    path = EXAMPLES / "quickstart.ipynb"
    run = start(executed, path, tmp_path).result(limit_s=120)
    outputs = outputs_of(run)
    shown = [output.data for output in outputs if output.output_type == "execute_result"]
    report, plot, table, table_plot = shown
    assert "on simulated Tesla T4" in report["text/html"]
    assert "<td>512</td>" in table["text/html"]
    assert plot["image/png"]
    assert table_plot["image/png"]
    [printed] = [output.text for output in outputs if output.get("name") == "stdout"]
    assert printed.startswith("verdict: ")
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if os.environ.get("OVERWRITE_GOLDEN"):
        for cell, ran in zip(code, run, strict=True):
            cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
        nbformat.write(notebook, path)
    stored = outputs_of(code)
    if f"torch {torch.__version__}" in str(stored):  # another one may take other memory
        assert without_times(stored) == without_times(outputs)


@pytest.mark.usefixtures("warm_python")
@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a card")
def test_gpu_check_ends_with_its_own_sentence_without_a_card(tmp_path):
    outputs = outputs_of(
        start(executed, EXAMPLES / "gpu_check.ipynb", tmp_path).result(limit_s=120)
    )
    said = "".join(output.text for output in outputs)
    assert re.fullmatch(
        r"gpu-check: no CUDA device here \(torch .*\); nothing was checked\r?\n", said
    )
