"""A browser that shows a report's page, for the tests of the page."""

from collections.abc import Iterator
from typing import Any

import pytest

from compilerllm.explain.page import write_page
from compilerllm.explain.report import Report
from tests.explain.chromium import Page, browser, find_chromium
from tests.explain.page_report import make_report

CHROMIUM = find_chromium()
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on the PATH (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="session")
def report() -> Report:
    return make_report()


@pytest.fixture(scope="session")
def url(report: Report, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "report.html"
    write_page(report, file)
    return file.as_uri()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert CHROMIUM is not None
    with browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(chromium: Page, url: str) -> Iterator[Page]:
    """The page as it opens; afterwards nothing may have complained, been fetched or been run that came with the report."""
    chromium.errors.clear()
    chromium.requests.clear()
    show(chromium, url)
    yield chromium
    assert chromium.errors == []
    assert {r.partition("#")[0] for r in chromium.requests} <= {"about:blank", "data:,", url}
    assert chromium.run("window.hacked === undefined && document.scripts.length") == 2
    assert chromium.count("img") == 0


def show(page: Page, url: str, fragment: str = "", **how: Any) -> None:
    page.open(f"{url}#{fragment}", **how)
    page.wait("document.body.dataset.ready")
