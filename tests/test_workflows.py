"""The workflows and the action: what they run, and what they may do."""

import os
import re
import subprocess

import pytest
import yaml
from processes import REPOSITORY

FILES = [
    *REPOSITORY.glob(".github/workflows/*.yml"),
    *REPOSITORY.glob(".github/actions/*/action.yml"),
]
BY_FILE = pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")


def steps(path):
    parsed = yaml.safe_load(path.read_text(encoding="utf-8"))
    parts = [parsed["runs"]] if "runs" in parsed else parsed["jobs"].values()
    return [step for part in parts for step in part["steps"]]


@BY_FILE
def test_actions_are_pinned_by_commit_and_name_their_version(path):
    for line in re.findall(r"uses: (?!\./)(.*)", path.read_text(encoding="utf-8")):
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)


@BY_FILE
def test_nothing_is_pasted_into_shell_code(path):
    assert not any("${{" in step.get("run", "") for step in steps(path))


@pytest.mark.parametrize("path", FILES[:-1], ids=lambda path: path.name)
def test_each_job_states_the_little_that_it_may_do(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert job["permissions"] == {"contents": "read"} or name == "publish"
        assert "secrets." not in str(job)


def test_other_platforms_run_the_first_example_of_the_readme(tmp_path):
    [extract] = [
        step["run"]
        for step in steps(REPOSITORY / ".github/workflows/test.yml")
        if "awk" in step.get("run", "")
    ]
    subprocess.run(
        ["bash", "-c", extract],
        cwd=REPOSITORY,
        env={"RUNNER_TEMP": str(tmp_path), "PATH": "/usr/bin:/bin"},
        check=True,
    )
    first = (
        (REPOSITORY / "README.md")
        .read_text(encoding="utf-8")
        .split("```python\n")[1]
        .split("```\n")[0]
    )
    assert (tmp_path / "first.py").read_text(encoding="utf-8") == first
    compile(first, "first.py", "exec")


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        (["docs/faq.md", "README.md"], "tests no"),
        (["docs/recipes.md"], "tests\nbed"),  # a test of the bed opens it
        (["docs/faq.md", "oomprobe/probe.py"], "tests\nbed"),
        (["oomprobe/moved.py"], "tests\nbed"),  # among the pages
    ],
)
def test_the_bed_runs_unless_only_pages_have_changed_since_all_passed(changed, runs, tmp_path):
    files = {
        ".ci/run": (REPOSITORY / ".ci/run").read_text(encoding="utf-8"),
        ".gitignore": ".venv-cuda",
        ".venv-cuda/stub": "",
        "scripts/test": '#!/bin/sh\necho tests $BED; [ ! -e "$FAILS" ]',
        "scripts/test-bed": "#!/bin/sh\necho bed",
        "tests/cuda/test_recipes.py": 'PAGE = "recipes.md"',
        "tests/bed/__init__.py": '"""See tests/bed/README.md."""',
        **dict.fromkeys(changed, "before"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)

    def run(*words, **variables):
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables}
        ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return ended.stdout

    def commit():
        run("git", "add", ".")
        run("git", "-c", "user.name=a", "-c", "user.email=b", "commit", "-m", "c")
        return run("git", "rev-parse", "HEAD").strip()

    run("git", "init")
    commit()
    assert run(".ci/run", FAILS=".gitignore") == "tests\n"
    assert run(".ci/run") == "tests\nbed\n"  # nothing is known of any commit
    passed = (tmp_path / ".venv-cuda/green").read_text(encoding="utf-8").strip()
    for name in changed:
        if "moved" in name:
            (tmp_path / name).rename(tmp_path / "moved.md")
        else:
            (tmp_path / name).write_text("after", encoding="utf-8")
    assert run(".ci/run").endswith(f"{runs}\n")
    assert (tmp_path / ".venv-cuda/green").read_text(encoding="utf-8").strip() == passed
    now = commit()
    said = run(".ci/run")
    assert said.endswith(f"{runs}\n")
    assert (passed in said) == (runs == "tests no")
    assert (tmp_path / ".venv-cuda/green").read_text(encoding="utf-8").strip() == now
