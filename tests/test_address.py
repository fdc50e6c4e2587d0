"""scripts/address, on a copy of the files into which it writes, with an address that nobody has."""

import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from processes import REPOSITORY

FILES = ("pyproject.toml", "README.md", "CITATION.cff", "mkdocs.yml")
HOME, SITE = "https://github.com/no-one/no.where", "https://no-one.github.io/no.where/"


@pytest.fixture
def copy(tmp_path):
    for name in (*FILES, "scripts/address"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def contents(folder):
    return {name: (folder / name).read_text(encoding="utf-8") for name in FILES}


def run(copy, *words):
    command = [sys.executable, copy / "scripts/address", *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_address_is_filled_in_and_the_repository_left_alone(copy):
    before = contents(REPOSITORY)
    assert run(copy, f"{HOME}/").returncode == 0
    after = contents(copy)
    assert contents(REPOSITORY) == before
    urls = tomllib.loads(after["pyproject.toml"])["project"]["urls"]
    assert urls == {
        "Homepage": HOME,
        "Documentation": SITE,
        "Source": HOME,
        "Issues": f"{HOME}/issues",
        "Changelog": f"{HOME}/blob/main/CHANGELOG.md",
    }
    cited = yaml.safe_load(after["CITATION.cff"])
    assert (cited["repository-code"], cited["url"]) == (HOME, SITE)
    [site] = re.findall("^site_url: (.*)", after["mkdocs.yml"], re.MULTILINE)
    assert site == SITE
    title, _, *badges = after["README.md"].splitlines()[:5]
    assert title == "# oomprobe"
    assert [re.match(r"\[!\[(\w+)\]", badge)[1] for badge in badges] == [
        "tests",
        "index",
        "licence",
    ]
    for name in FILES:  # nothing else has changed, but for the comment that asked for it
        lines = set(before[name].splitlines()) - set(after[name].splitlines())
        assert all(line.startswith("# ") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "scripts/address https://github.com/OWNER/NAME"),
        (("github.com/no-one/nowhere",), "is no https://github.com/OWNER/NAME"),
        (("https://github.com/no-one",), "is no https://github.com/OWNER/NAME"),
        (("https://example.org/a/b",), "is no https://github.com/OWNER/NAME"),
    ],
)
def test_what_is_no_address_changes_nothing(words, said, copy):
    ended = run(copy, *words)
    assert (ended.returncode, said in ended.stderr) == (1, True)
    assert contents(copy) == contents(REPOSITORY)


def test_an_address_is_filled_in_once(copy):
    run(copy, HOME)
    once = contents(copy)
    ended = run(copy, HOME.replace("no-one", "some-one"))
    assert "pyproject.toml has an address already" in ended.stderr
    assert contents(copy) == once
