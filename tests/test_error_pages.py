"""docs/errors: each page's texts have the causes that it states, and each text that `explain` reads has a page."""

import re

import error_pages
import pytest

from oomprobe.explaining.messages import KINDS
from oomprobe.records.trials import Verdict
from oomprobe.verdicts.texts import ERROR_TEXTS

TEXT = re.compile(r"^```text\n(.*?)\n```\n\nCause: `(\w+)`$", re.MULTILINE | re.DOTALL)
PAGES = sorted(path for path in error_pages.FOLDER.glob("*.md") if path.name != "README.md")
TEXTS = [text for page in PAGES for text, _ in TEXT.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem[:55])
def test_its_texts_have_the_causes_that_it_states(page):
    stated = TEXT.findall(page.read_text(encoding="utf-8"))
    assert stated
    assert [(text, error_pages.explained(text).cause) for text, _ in stated] == stated


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:55])
def test_what_to_type_names_no_file_of_another(text):
    typed = " ".join(error_pages.explained(text).advice).replace("snapshot.pickle", "")
    assert {*re.findall(r"\w+\.(?:py|log|json|pickle)\b", typed)} <= {"FILE.py"}


def test_the_pages_are_current():
    committed = {
        path.name: path.read_text(encoding="utf-8") for path in error_pages.FOLDER.glob("*.md")
    }
    assert committed == error_pages.pages(), "run python scripts/error_pages.py"
    assert len(committed) == len(error_pages.PAGES) + 1


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.engine}: {kind.words[0].decode()}")
def test_each_kind_of_message_has_a_page(kind):
    assert any(map(kind.pattern.search, TEXTS))


def test_each_sure_text_of_memory_has_a_page():
    rows = [row for row in ERROR_TEXTS if row.verdict is Verdict.OOM and not row.ambiguous]
    assert len(rows) > 15
    for row in rows:
        assert any(row.pattern.search(text.lower()) for text in TEXTS), row.pattern.pattern
