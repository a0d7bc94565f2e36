"""The texts that ship: held-out text has to be unseen."""

from velox_pack.source import data_folder


def test_heldout_text_shares_nothing_with_calibration_text() -> None:
    """No run of 40 characters of the held-out text is in the calibration text."""
    calibration = (data_folder() / "text" / "calibration.txt").read_text(encoding="utf-8")
    heldout = (data_folder() / "text" / "heldout.txt").read_text(encoding="utf-8")
    size = 40
    known = {calibration[i : i + size] for i in range(len(calibration) - size + 1)}
    starts = range(len(heldout) - size + 1)
    assert not [heldout[i : i + size] for i in starts if heldout[i : i + size] in known]
