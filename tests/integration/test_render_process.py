"""The process that renders the user's templates."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from notbefore.config.template import RenderError
from notbefore.courier import render_process
from notbefore.courier.render_process import RenderProcess
from support.agent import PATIENCE, eventually, has_ended

VALUES: Final[dict[str, Any]] = {
    "title": "Reboot of web_0",
    "body": "",
    "severity": "critical",
    "links": {},
    "record": {"host.name": "web_0", "azure.scheduled_event.resources": ["web_0", "@all"]},
}
SQUARES: Final = (
    "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}"
)
DOUBLES: Final = (
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[RenderProcess]:
    """A process that is not killed for the slowness of a busy machine."""
    monkeypatch.setattr(render_process, "START_SECONDS", PATIENCE)
    monkeypatch.setattr(render_process, "RENDER_SECONDS", PATIENCE)
    process = RenderProcess()
    yield process
    process.close()


def test_template_sees_the_message(process: RenderProcess) -> None:
    source = "{{ title }} {{ record['host.name'] }} {{ links.page }}"
    names = "{{ record['azure.scheduled_event.resources'] | join(' ') }}"

    assert process.render(source, VALUES) == "Reboot of web_0 web_0 "
    assert process.render(names, VALUES) == "web_0 @\u200ball"


def test_failing_template_says_why_and_the_process_continues(process: RenderProcess) -> None:
    with pytest.raises(RenderError, match="ZeroDivisionError"):
        process.render("{{ 1 // 0 }}", VALUES)
    pid = process.pid

    assert process.render("{{ title }}", VALUES) == "Reboot of web_0"
    assert process.pid == pid


@pytest.mark.parametrize("bomb", [SQUARES, DOUBLES, "{{ title.center(99999999999) }}"])
def test_template_that_needs_too_much_ends_soon_and_others_work(
    process: RenderProcess, bomb: str
) -> None:
    process.render("{{ title }}", VALUES)
    started = time.monotonic()

    for _ in range(2):
        with pytest.raises(RenderError):
            process.render(bomb, VALUES)

    assert time.monotonic() - started < PATIENCE  # the process ends itself
    assert process.render("{{ title }}", VALUES) == "Reboot of web_0"


def test_killed_process_is_replaced(process: RenderProcess) -> None:
    process.render("{{ title }}", VALUES)
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: has_ended(process.pid or 0))

    assert process.render("{{ title }}", VALUES) == "Reboot of web_0"


def test_sinks_may_render_side_by_side(process: RenderProcess) -> None:
    texts: list[str] = []

    def render(number: int) -> None:
        texts.append(process.render(f"{number} {{{{ title }}}}", VALUES))

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)

    assert sorted(texts) == [f"{number} Reboot of web_0" for number in range(8)]
