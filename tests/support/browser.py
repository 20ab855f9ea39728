"""Debian's Chromium, driven by Playwright. Playwright downloads no browser."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Dialog,
    Error,
    Page,
    Request,
    expect,
    sync_playwright,
)

from support.agent import PATIENCE
from support.needs import needs

expect.set_options(timeout=PATIENCE * 1000)
OPTIONS = (  # no GPU and no requests of the browser's own
    "--disable-background-networking",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a headless browser."""
    needs("chromium")
    options = list(OPTIONS)
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium's sandbox refuses to run as root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=options, timeout=PATIENCE * 1000
        )
        yield browser
        browser.close()


class PageLog:
    """Records a page's requests, and its complaints: console messages, errors and dialogs."""

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE * 1000)
        page.on("console", self._add_message)
        page.on("pageerror", self._add_error)
        page.on("dialog", self._add_dialog)
        page.on("request", self._add_request)

    def _add_message(self, message: ConsoleMessage) -> None:
        self.complaints.append(message.text)

    def _add_error(self, error: Error) -> None:
        self.complaints.append(str(error))

    def _add_dialog(self, dialog: Dialog) -> None:
        self.complaints.append(dialog.message)

    def _add_request(self, request: Request) -> None:
        self.requests.append(request.url)
