"""Every end of a command has its exit code."""

import pytest

from oomprobe import errors
from oomprobe.cli import explain, explained
from oomprobe.signals import EXIT_TERMINATED

CODES = {
    errors.NothingFitsError: 1,
    errors.InvalidArgumentError: 2,
    errors.StepFailedError: 3,
    errors.NoDeviceError: 4,
    errors.TimeLimitError: 6,
    errors.UnreliableError: 6,
    errors.DeviceLostError: 6,
}


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("required", [True, False])
def test_errors_of_ours_in_a_command_and_in_a_script(capsys, kind, required):
    assert set(CODES) == set(errors.OomProbeError.__subclasses__())
    code = 5 if required and kind is errors.NothingFitsError else CODES[kind]
    assert explain(kind("what happened"), required=required) == code
    with pytest.raises(SystemExit) as left, explained(required=required):
        raise kind("what happened")
    assert left.value.code == code
    assert capsys.readouterr() == ("", "oomprobe: what happened\n" * 2)


def test_a_script_with_its_answer_goes_on():
    with explained():
        pass
    with pytest.raises(KeyError), explained():
        raise KeyError("x")


@pytest.mark.parametrize("own", [KeyError("x"), errors.InvalidArgumentError("of a probe inside the step")])
def test_a_failed_step_is_3_whatever_it_failed_with(capsys, own):
    failed = errors.step_failed(own, batch_size=4)
    failed.__cause__ = own
    assert explain(failed, required=True) == 3
    assert f"{type(own).__name__}: {own}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(EXIT_TERMINATED), 143, "terminated"),
        (SystemExit(0), 3, "left the process, sys.exit(0)"),
        (RuntimeError("x"), 70, "unexpected internal error (RuntimeError)"),
    ],
)
def test_all_others(capsys, error, code, said):
    assert explain(error, required=False) == code
    assert said in capsys.readouterr().err
