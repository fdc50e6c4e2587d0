from dataclasses import replace

import pytest
from example_results import a_trial

from oomprobe.journal import Journal
from oomprobe.record import Record
from oomprobe.result import Phase
from oomprobe.runner import Measured
from oomprobe.trial import Request
from oomprobe.verdict import Verdict

REQUEST = Request(batch_size=8, phase=Phase.GROW, steps=2)


@pytest.fixture
def opened(tmp_path):
    journals = []

    def again(**options):
        for journal in journals:
            journal.close()
        journals.append(Journal.open(tmp_path / "probe.jsonl"))
        journals[-1].ask({"device": "cpu"})
        return Record(journals[-1], **options)

    yield again
    journals[-1].close()


def ran(record, verdict=Verdict.FITS, request=REQUEST):
    with record.of(request) as write:
        write(replace(a_trial(), batch_size=request.batch_size, verdict=verdict), nothing_stepped=True)


def die(record, request=REQUEST):
    """Begin, and be heard of no more."""
    record._journal.begin(
        record_key(request), evidence={"isolated": record._isolated, "oom_kills": None, "boot_id": None}
    )


def record_key(request):
    from oomprobe.record import _key

    return _key(request)


def test_without_a_journal_nothing_is_kept():
    record = Record(None)
    ran(record)
    record.take(Measured(available_bytes=1, outside_bytes=None))
    assert (record.recall(REQUEST, pytest.fail), record.measured, record.notes) == (None, None, ())


def test_what_ended_is_recalled_once(opened):
    first = opened()
    first.take(Measured(available_bytes=7, outside_bytes=3))
    ran(first)
    assert first.recall(REQUEST, pytest.fail) is None  # it is this probe's own
    second, ended = opened(), []
    assert second.measured == Measured(available_bytes=7, outside_bytes=3)
    assert second.recall(REQUEST, ended.append).batch_size == 8
    assert len(ended) == 1
    assert second.nothing_stepped is True
    assert second.recall(REQUEST, pytest.fail) is None
    assert second.recall(replace(REQUEST, phase=Phase.CONFIRM), pytest.fail) is None
    assert "1 trials were recalled" in second.notes[0]


def test_one_death_is_tried_again_and_two_are_the_sizes(opened):
    die(opened())
    second, ended = opened(), []
    assert second.recall(REQUEST, ended.append) is None
    assert [trial.verdict for trial in ended] == [Verdict.CRASHED]
    die(second)
    assert opened().recall(REQUEST, lambda trial: None).verdict is Verdict.CRASHED


def test_a_probe_that_was_killed_says_nothing_of_trials_that_had_their_own_processes(opened):
    for _ in range(5):
        die(opened(isolated=True))
    assert opened(isolated=True).recall(REQUEST, lambda trial: None) is None


def test_the_oom_killer_leaves_its_count(opened, monkeypatch):
    monkeypatch.setattr("oomprobe.record.linux.oom_kills", lambda: 3)
    monkeypatch.setattr("oomprobe.record.linux.boot_id", lambda: "this")
    monkeypatch.setattr(Journal, "abandon", lambda *_: None)
    with pytest.raises(KeyboardInterrupt), opened().of(REQUEST):
        raise KeyboardInterrupt
    assert opened().recall(REQUEST, lambda trial: None) is None
    monkeypatch.setattr("oomprobe.record.linux.oom_kills", lambda: 4)
    assert opened().recall(REQUEST, lambda trial: None).verdict is Verdict.HOST_OOM
    monkeypatch.setattr("oomprobe.record.linux.boot_id", lambda: "another")
    assert opened().recall(REQUEST, lambda trial: None) is None


@pytest.mark.parametrize("verdict", [Verdict.POISONED, Verdict.CRASHED])
def test_a_lost_process_is_tried_again_in_this_one(opened, verdict):
    ran(opened(), verdict)
    assert opened().recall(REQUEST, lambda trial: None) is None


def test_a_time_limit_is_forgotten(opened):
    ran(opened(), Verdict.TIMED_OUT)
    assert opened().recall(REQUEST, pytest.fail) is None


def test_a_trial_that_was_interrupted_is_no_death(opened):
    with pytest.raises(KeyboardInterrupt), opened().of(REQUEST):
        raise KeyboardInterrupt
    assert opened().recall(REQUEST, pytest.fail) is None
