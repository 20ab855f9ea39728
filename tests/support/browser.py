"""Debian's Chromium, driven by Playwright; its own browser is not downloaded."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, expect, sync_playwright

from support.agent import PATIENCE
from support.needs import needs

expect.set_options(timeout=PATIENCE * 1000)
QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser."""
    needs("chromium")
    words = [
        *QUIET,
        "--disable-background-networking",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=words, timeout=PATIENCE * 1000
        )
        yield browser
        browser.close()


class PageLog:
    """What a page asked for and complained of: its console, its errors, its requests, its
    dialogs.
    """

    def __init__(self, page: Page) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE * 1000)
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request.url))
