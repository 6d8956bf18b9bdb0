"""The page's plots in a browser: every point and block where its numbers say, nothing over anything else, in any window."""

import itertools
import math
import re

import pytest

from compilerllm.explain.report import Report
from compilerllm.explain.text import group_launches
from tests.explain.chromium import Page
from tests.explain.conftest import needs_chromium, show

OVERLAPS = """(() => { const texts = [...document.querySelectorAll('TEXTS')].map(t => [t.textContent, t.getBoundingClientRect()]);
  texts.push(...[...document.querySelectorAll('POINTS')].map(p => ['', p.getBoundingClientRect()]));
  const found = []; texts.forEach(([a, p], i) => a && texts.slice(i + 1).forEach(([b, q]) => {
  const w = Math.min(p.right, q.right) - Math.max(p.left, q.left), h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
  if (w > 1 && h > 3) found.push(`${a} / ${b}`); })); return found; })()"""
OUTSIDE = """(() => { const width = document.documentElement.clientWidth; return [...document.querySelectorAll('main *, header *')]
  .filter(e => !e.closest('svg') && !e.closest('.unseen') && e.getClientRects().length && (e.getBoundingClientRect().right > width + 1
    || (e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !e.matches('input, select') && getComputedStyle(e).textOverflow !== 'ellipsis')))
  .map(e => e.outerHTML.slice(0, 120)); })()"""


@needs_chromium
def test_points_stand_where_their_numbers_say(page: Page, url: str, report: Report) -> None:
    """Against the axis's own labels: the place of 1 and 10 gives every other."""
    show(page, url, "bucket=decode-64")
    ticks = page.run("""['middle', 'end'].map(side => Object.fromEntries([...document.querySelectorAll(
        `#roofline text.tick[text-anchor=${side}]`)].map(t => [t.textContent.replace(',', ''),
        +t.getAttribute(side === 'middle' ? 'x' : 'y') - (side === 'middle' ? 0 : 4)])))""")
    places = page.run(
        "[...document.querySelectorAll('#roofline .point')].map(p => [p.dataset.row, +p.getAttribute('cx'), +p.getAttribute('cy'), "
        "p.classList.contains('hollow')])"
    )
    groups = {str(min(report.bucket("decode-64").launches.index(x) for x in g.launches)): g
              for g in group_launches(report, report.bucket("decode-64"))}  # fmt: skip

    def at(axis: dict[str, float], value: float) -> float:
        (a, pa), (b, pb) = itertools.islice(((float(k), v) for k, v in axis.items() if k != "none"), 2)
        return pa + (pb - pa) * math.log(value / a) / math.log(b / a)

    checked = 0
    right, bottom = max(p[1] for p in places), max(p[2] for p in places)
    for row, x, y, hollow in places:
        nbytes = sum(v.nbytes for v in groups[row].launches)
        flops = sum(v.flops for v in groups[row].launches)
        assert hollow == (not nbytes or not flops)
        if hollow or x >= right - 1 or y >= bottom - 1:  # what is far off stands at the edge
            continue
        assert x == pytest.approx(at(ticks[0], flops / nbytes), abs=1)
        assert y == pytest.approx(at(ticks[1], flops / groups[row].us / 1e6), abs=1)
        checked += 1
    assert checked >= 5


@needs_chromium
def test_the_timeline(page: Page, url: str, report: Report) -> None:
    show(page, url, "bucket=decode-8")
    bucket = report.bucket("decode-8")
    assert bucket.measured is not None
    blocks = "#timeline .block[data-lane='{}']"
    follows = len(report.bucket("sampling-greedy-64").launches)
    assert page.count(blocks.format(0) + ":not(.idle)") == len(bucket.launches)
    assert page.count(blocks.format(0) + ".idle") == len(bucket.launches) - 1
    assert page.count(blocks.format(1)) == len(bucket.launches) + follows
    assert page.count("#timeline .rest") == 1
    assert "unattributed" in page.text("#step")
    x = page.run(
        "[...document.querySelectorAll('#timeline .block[data-lane=\"0\"]')].map(b => +b.getAttribute('x'))"
    )
    assert x == sorted(x)

    assert page.count("#timeline rect.layer") >= report.layers
    for _ in range(3):
        page.wheel("#timeline svg", -120, ctrl=True)
    page.wait(f"document.querySelectorAll('#timeline .block').length < {2 * len(bucket.launches)}")
    page.click("[aria-label='Show the whole step']")
    page.wait(f"document.querySelectorAll('#timeline .block:not(.idle)').length > {2 * len(bucket.launches)}")

    page.hover("#timeline .block[data-lane='0'][data-block='4']")
    page.wait("!document.querySelector('#tip').hidden")
    launch = bucket.launches[2]  # two kernels and two gaps are before it
    assert report.nodes[launch.node].op in page.text("#tip")
    assert page.count("#kernels tr.lit") == 1
    page.run("document.querySelector('#timeline svg').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    assert report.nodes[bucket.launches[1].node].op in page.text("#told")
    page.press("Enter")
    page.wait("document.querySelector('tr.detail')")
    for _ in range(3):
        page.click("[aria-label='Zoom in']")
    page.wait("document.querySelector('#timeline').previousSibling.innerText.match(/^Timeline\\s+[1-9]/)")


@needs_chromium
def test_the_roofline_by_keyboard(page: Page, report: Report) -> None:
    page.run("document.querySelector('#roofline svg').focus()")
    page.press("ArrowRight")
    page.wait("!document.querySelector('#tip').hidden")
    first = page.text("#tip")
    page.press("ArrowRight")
    assert page.text("#tip") != first
    page.press("Enter")
    page.wait("document.querySelector('tr.detail')")
    assert page.run("document.querySelector('#tip').hidden")


@needs_chromium
@pytest.mark.parametrize("width", [400, 1280, 2400])
def test_nothing_overflows_or_overlaps(page: Page, url: str, report: Report, width: int) -> None:
    places = ["view=step&bucket=decode-8&kernel=0", "view=step&bucket=mixed-512", "view=misses"]
    places += [f"view=passes&pass={i}" for i, p in enumerate(report.passes) if p.changed or p.misses]
    for dark, place in itertools.product((False, True), places[:2]):
        show(page, url, place, width=width, dark=dark)
        colors = page.run(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        lightness = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in colors]
        assert (lightness[0] < lightness[1]) == dark
    for place in places:
        show(page, url, place, width=width)
        assert page.run("document.documentElement.scrollWidth") <= width, place
        assert page.run(OUTSIDE) == [], place
        if "step" in place:
            names = OVERLAPS.replace("TEXTS", "#roofline text").replace("POINTS", "#roofline circle")
            assert page.run(names) == []
            assert page.run(OVERLAPS.replace("TEXTS", "#timeline text").replace("POINTS", "none")) == []
            assert page.count("#roofline text.name") >= 2


@needs_chromium
def test_every_control_has_a_name_and_is_reached_by_tab(page: Page) -> None:
    unnamed = """[...document.querySelectorAll('button, input, select, a, [role=img], svg[tabindex]')].filter(e => !(e.getAttribute('aria-label')
        || e.innerText || e.textContent || e.labels?.length).toString().trim()).map(e => e.outerHTML)"""
    assert page.run(unnamed) == []
    page.run("document.activeElement.blur()")
    seen = set()
    for _ in range(40):
        page.press("Tab")
        seen.add(
            page.run(
                "document.activeElement.id || document.activeElement.parentNode.id || document.activeElement.dataset.sort || ''"
            )
        )
    assert {"search", "theme", "bucket", "timeline", "roofline", "share"} <= seen
