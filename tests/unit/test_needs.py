"""What a machine lacks: the tests that need it are skipped, and a run says what it did not see."""

import pytest

from support import needs as module
from support.needs import Need, needs, not_seen


def test_a_test_is_skipped_for_what_is_missing_alone_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.NEEDS, "one", Need("apt-get install nobody-has-this", "what it shows"))
    monkeypatch.setitem(module.NEEDS, "here", Need("-", "-", lambda: True))
    needs("here")
    with pytest.raises(pytest.skip.Exception) as caught:
        needs("here", "one")
    assert caught.value.msg == "needs one (apt-get install nobody-has-this). Not seen without it: what it shows"


def test_a_run_says_in_one_line_what_it_did_not_see() -> None:
    prometheus = "Skipped: needs prometheus (apt-get install prometheus). Not seen without it: rules"
    browser = "Skipped: needs chromium (apt-get install chromium). Not seen without it: pages"
    assert not_seen([browser, *[prometheus] * 9, "Skipped: another reason"]) == (
        "11 skipped: 9 need prometheus (apt-get install prometheus), 1 needs chromium (apt-get install chromium), "
        "1: another reason"
    )
