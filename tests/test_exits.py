"""The exit code of every error."""

import pytest

from oomprobe import errors
from oomprobe.cli import explain, explained
from oomprobe.runners.signals import EXIT_TERMINATED

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
def test_exit_codes_of_commands_and_scripts_are_equal(capsys, kind, required):
    assert set(CODES) == set(errors.OomProbeError.__subclasses__())
    code = 5 if required and kind is errors.NothingFitsError else CODES[kind]
    assert explain(kind("what happened"), required=required) == code
    with pytest.raises(SystemExit) as left, explained(required=required):
        raise kind("what happened")
    assert left.value.code == code
    assert capsys.readouterr() == ("", "oomprobe: what happened\n" * 2)


def test_other_ends_of_a_script_are_its_own():
    with explained():
        pass
    with pytest.raises(KeyError), explained():
        raise KeyError("x")


@pytest.mark.parametrize("own", [KeyError("x"), errors.InvalidArgumentError("of a probe inside the step")])
def test_a_failed_step_is_3_whatever_its_error(capsys, own):
    failed = errors.step_failed(own, batch_size=4)
    failed.__cause__ = own
    assert explain(failed, required=True) == 3
    assert f"{type(own).__name__}: {own}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(EXIT_TERMINATED), 143, "terminated"),
    ],
)
def test_signals_have_their_own_codes(capsys, error, code, said):
    assert explain(error, required=False) == code
    assert said in capsys.readouterr().err
