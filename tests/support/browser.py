"""Debian's Chromium, driven by Playwright. Playwright downloads no browser."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, expect, sync_playwright

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
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request.url))
