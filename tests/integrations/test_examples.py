"""The examples that use a framework, on simulated cards, typed as their docstrings say."""

import pytest
from processes import start
from typed import commands, typed

pytest.importorskip("transformers")
pytest.importorskip("lightning.pytorch")
NAMES = ("transformers_trainer.py", "lightning_module.py", "inference.py")


@pytest.mark.parametrize(
    "words", commands(*NAMES, simulated=True), ids=lambda words: " ".join(words)
)
def test_on_a_simulated_card(words):
    status, out, err = start(typed, words).result()
    assert status == 0, err
    assert out.startswith("verdict: ")
    assert "limited by  memory" in out
    assert "identical\n" in out  # the state was restored
    if "transformers_trainer.py" in words[1]:
        micro, accumulated = [int(line.rpartition(":")[2]) for line in out.splitlines()[-2:]]
        assert micro <= int(out.split()[2]) < 32 == micro * accumulated
