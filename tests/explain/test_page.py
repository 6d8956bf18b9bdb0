"""The page in a browser: what it shows is what the report says, every control works, and nothing in a report is markup."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from compilerllm.explain.page import PageNotWritten, render_page, write_page
from compilerllm.explain.report import BucketReport, Report
from compilerllm.explain.text import group_launches
from tests.explain.chromium import Page
from tests.explain.conftest import needs_chromium, show
from tests.explain.page_report import HOSTILE, make_report

BIG_BUCKETS = 60
MOST_BYTES = 8_000_000
UNITS = {
    "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "flop": 1, "kflop": 1e3,
    "Mflop": 1e6, "Gflop": 1e9, "Tflop": 1e12, "µs": 1, "ms": 1e3, "s": 1e6, "%": 0.01,
}  # fmt: skip
ROWS = """[...document.querySelectorAll('#kernels tr.kernel')].map(r => ({id: r.dataset.row,
  cells: Object.fromEntries([...r.cells].map(c => [c.className.split(' ').filter(n => n !== 'num' && n !== 'wide')[0],
  {shown: (c.querySelector('span') || c).innerText.trim(), value: c.dataset.value}]))}))"""


def read(shown: str) -> float:
    """A number as the page writes it, with its unit."""
    number, unit = re.fullmatch(r"([\d,.]+)\s*(\S*)", shown.removeprefix("<")).groups()  # type: ignore[union-attr]
    return float(number.replace(",", "")) * UNITS[unit]


def rows_of(page: Page) -> list[dict[str, Any]]:
    return list(page.run(ROWS))


# -- without a browser ------------------------------------------------------------------------------------------------


def test_a_page_is_one_file_that_holds_the_report(report: Report) -> None:
    page = render_page(report)
    assert page == render_page(report)
    packed = re.search(r'id="report">([^<]*)</script>', page)
    assert packed is not None
    assert json.loads(gzip.decompress(base64.b64decode(packed[1]))) == json.loads(
        json.dumps(report.to_json())
    )
    assert page.count("<script") == page.count("</script>") == 2
    assert "window.hacked" not in page.replace(packed[1], "").partition("<body>")[2]
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", page.partition("<style>")[0])
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")


def test_a_big_model_stays_small() -> None:
    big = make_report(decode=tuple(range(1, BIG_BUCKETS)), layers=40)
    assert len(big.buckets) > BIG_BUCKETS and sum(len(b.launches) for b in big.buckets) > 15_000
    assert len(render_page(big)) < MOST_BYTES


def test_a_file_that_cannot_be_written_is_named(report: Report, tmp_path: Path) -> None:
    with pytest.raises(PageNotWritten, match="no/such"):
        write_page(report, tmp_path / "no/such/folder.html")


# -- numbers ----------------------------------------------------------------------------------------------------------


@needs_chromium
@pytest.mark.parametrize("name", ["decode-1", "decode-8", "mixed-512", "sampling-greedy-64"])
def test_numbers_are_the_reports(page: Page, url: str, report: Report, name: str) -> None:
    show(page, url, f"bucket={name}")
    bucket = report.bucket(name)
    groups = group_launches(report, bucket)
    timed = bucket.launches[0].measured_us is not None
    total = bucket.measured.wall_us if bucket.measured else sum(g.us for g in groups)
    rows = rows_of(page)
    assert len(rows) == len(groups)
    assert page.count("#roofline circle.point") == len(groups)
    for row, group in zip(rows, groups, strict=True):  # both begin with the longest
        want = {
            "launches": len(group.launches),
            "bytes": sum(x.nbytes for x in group.launches),
            "flops": sum(x.flops for x in group.launches),
            "roofline": group.roofline_us,
            "predicted": group.predicted_us,
            "share": group.us / total,
        } | ({"measured": group.measured_us} if timed else {})
        for column, value in want.items():
            cell = row["cells"][column]
            assert float(cell["value"]) == pytest.approx(value, rel=1e-9), (row["id"], column)
            assert read(cell["shown"]) == pytest.approx(
                value, rel=0.006, abs=5.1e-4 if column == "share" else 0
            )
        assert ("measured" in row["cells"]) == timed
    stats = page.run(
        "Object.fromEntries([...document.querySelectorAll('[data-stat]')].map(e => [e.dataset.stat, +e.dataset.value]))"
    )
    assert stats["moves"] == pytest.approx(bucket.nbytes)
    assert stats["computes"] == pytest.approx(bucket.flops)
    assert stats["predicted"] == pytest.approx(bucket.predicted_us)
    assert stats["roofline"] == pytest.approx(bucket.roofline_us)
    assert stats["launches"] == len(bucket.launches)
    if bucket.measured:
        assert stats["measured"] == pytest.approx(bucket.measured.wall_us)
        assert stats["unattributed"] == pytest.approx(bucket.measured.unattributed_us)
        assert [t.split()[0] for t in page.texts("#kernels tfoot tr")] == ["copying", "unattributed,", "step"]


# -- controls ---------------------------------------------------------------------------------------------------------


@needs_chromium
def test_choosing_a_bucket(page: Page, report: Report) -> None:
    assert page.run("document.querySelector('#bucket').value") == "decode-1"
    page.click("[aria-label='The next bucket']")
    assert page.run("document.querySelector('#bucket').value") == "decode-8"
    assert "bucket=decode-8" in page.run("location.hash")
    page.run("document.querySelector('#bucket').focus()")
    page.press("ArrowDown")
    page.wait("location.hash.includes('bucket=decode-64')")
    assert page.run("document.querySelector('#bucket').options.length") == len(report.buckets)
    page.run("history.back()")
    page.wait("document.querySelector('#bucket').value === 'decode-8'")
    page.click("details.all summary")
    page.wait("document.querySelector('.buckets tr')")
    for bucket in report.buckets:
        cells = page.texts(f".buckets tr[data-bucket={bucket.name}] td")
        assert cells[0] == bucket.name and read(cells[5]) == pytest.approx(bucket.nbytes, rel=0.006)
        assert read(cells[8]) == pytest.approx(bucket.predicted_us, rel=0.006)
        assert (cells[9] == "–") == (bucket.measured is None)
    page.click(".buckets tr[data-bucket=mixed-512] button")
    page.wait("document.querySelector('#bucket').value === 'mixed-512'")
    page.run("history.back()")
    page.wait("document.querySelector('#bucket').value === 'decode-8'")
    assert page.text("[aria-pressed=true]") == "measured"
    page.click("[data-basis=predicted]")
    assert page.text("[aria-pressed=true]") == "predicted"
    assert page.count("#kernels tfoot tr") == 1


@needs_chromium
def test_sorting(page: Page, url: str) -> None:
    show(page, url, "bucket=decode-8")
    for column in ("launches", "bytes", "flops", "roofline", "predicted", "measured", "share"):
        orders = []
        for _ in range(2):
            page.click(f"[data-sort={column}]")
            values = [float(r["cells"][column]["value"]) for r in rows_of(page)]
            direction = page.run(f"document.querySelector('th.{column}').getAttribute('aria-sort')")
            assert values == sorted(values, reverse=direction == "descending")
            orders.append(direction)
        assert sorted(orders) == ["ascending", "descending"]
    page.click("[data-sort=node]")
    names = page.texts("#kernels tr.kernel b")
    assert names == sorted(names, key=str.lower) and len(set(names)) > 5


@needs_chromium
def test_a_row_opens_into_all_that_is_known(page: Page, url: str, report: Report) -> None:
    show(page, url, "bucket=decode-8")
    linear = next(
        g for g in group_launches(report, report.bucket("decode-8")) if g.pick and g.pick.us is not None
    )
    row = str(min(report.bucket("decode-8").launches.index(x) for x in linear.launches))
    page.click(f"tr[data-row='{row}'] button.expand")
    assert f"kernel={row}" in page.run("location.hash")
    assert page.count("tr.detail") == 1
    detail = page.text("tr.detail")
    assert page.texts("tr.detail .nodes li")[0] == report.nodes[linear.launches[0].node].text
    for said in (
        "timed",
        "2.25 µs",
        "2.50 µs",
        "3.13 µs",
        "not timed",
        linear.kernel.template,
        f"aten.{report.nodes[linear.launches[0].node].op}",
    ):
        assert said in detail, said
    assert (
        page.count("tr.detail .candidates tr") == 1 + 6 + 1
    )  # the choice, six others, a button for the rest
    page.click("tr.detail .candidates button.more")
    assert page.count("tr.detail .candidates tr") == 1 + len(linear.pick.alternatives)  # type: ignore[union-attr]
    passes = list(dict.fromkeys(p for x in linear.launches for p in report.nodes[x.node].passes))
    assert page.texts("tr.detail .chips li") == passes
    page.click("tr.detail .chips a", index=len(passes) - 1)
    page.wait("!document.querySelector('#passes').hidden")
    assert page.text("#pass h2") == passes[-1]
    page.run("history.back()")
    page.wait(
        "!document.querySelector('#step').hidden && document.querySelectorAll('tr.detail').length === 1"
    )
    page.click(f"tr[data-row='{row}'] button.expand")
    assert page.count("tr.detail") == 0


@needs_chromium
def test_filtering_kernels(page: Page) -> None:
    before = page.count("tr.kernel")
    page.run("document.querySelector('#step .filter').focus()")
    page.type("linear")
    page.wait(f"document.querySelectorAll('tr.kernel').length < {before}")
    assert all("linear" in t for t in page.texts("tr.kernel td.node"))
    assert "of" in page.text("#shown")
    page.type(" zzz")
    page.wait("document.querySelector('#kernels .empty')")


@needs_chromium
def test_searching_by_keyboard(page: Page, report: Report) -> None:
    page.press("/")
    assert page.run("document.activeElement.id") == "search"
    page.type("linear")
    page.wait("document.querySelectorAll('.hit').length > 5")
    assert {"kernel", "node", "ir"} <= set(
        page.run("[...document.querySelectorAll('.hit')].map(e => e.dataset.kind)")
    )
    page.press("ArrowDown")
    assert page.run("document.activeElement.getAttribute('aria-activedescendant')") == "hit1"
    page.press("Enter")
    page.wait("document.querySelector('#hits').hidden && document.querySelector('tr.detail')")
    assert "linear" in page.text("tr.opened")


@needs_chromium
@pytest.mark.parametrize(
    ("words", "kind", "shows"),
    [
        ("</script>", "node", "tr.detail .nodes"),
        ("model.layers", "module", "#kernels td.module"),
        ("rotate_boundary", "pass", "#pass h2"),
        ("other uses", "miss", "#misslist"),
        ("onerror", "miss", "#misslist"),
        ("qkv_rope_write", "ir", "tr.hit"),
        ("BLOCK=1024", "kernel", "tr.detail .code"),
    ],
)
def test_search_finds_every_kind(page: Page, words: str, kind: str, shows: str) -> None:
    page.run("document.querySelector('#search').focus()")
    page.type(words)
    page.wait(f"document.querySelector('.hit[data-kind={kind}]')")
    page.click(f".hit[data-kind={kind}]")
    page.wait(f"document.querySelector('#hits').hidden && document.querySelector('{shows}')")
    assert words.split()[-1] in page.text(shows)
    top, bottom = page.run(
        f"(() => {{ const b = document.querySelector('{shows}').getBoundingClientRect(); return [b.top, b.bottom]; }})()"
    )
    assert bottom > 0 and top < 900, "the hit is not in sight"


# -- passes and near misses -------------------------------------------------------------------------------------------


@needs_chromium
def test_a_diff_has_both_texts_whole(page: Page, url: str, report: Report) -> None:
    changed = [i for i, p in enumerate(report.passes) if p.changed]
    assert len(changed) > 5
    for i in changed:
        show(page, url, f"view=passes&pass={i}")
        assert page.text("#pass h2") == report.passes[i].name
        page.run("document.querySelectorAll('#diffs details').forEach(d => d.open = true)")
        page.wait("[...document.querySelectorAll('#diffs details')].every(d => d.querySelector('table'))")
        while page.count("#diffs .fold button, #diffs .line button"):
            page.run(
                "document.querySelectorAll('#diffs .fold button, #diffs .line button').forEach(b => b.click())"
            )
        shown = page.run("""Object.fromEntries([...document.querySelectorAll('#diffs details')].map(d => [d.dataset.fn,
            ['before', 'after'].map(side => [...d.querySelectorAll('tbody tr')].map(r => {
                const cells = r.querySelectorAll('.' + side).length ? r.querySelectorAll(':scope > .' + side) : r.cells;
                return cells[0].textContent === '' ? null : cells[1].textContent; }).filter(t => t !== null))]))""")
        for side, text in enumerate((report.passes[i].before, report.passes[i].after)):
            want = functions(report.texts[text])
            got = {fn: texts[side] for fn, texts in shown.items() if texts[side]}
            assert got == want, (report.passes[i].name, side)


def functions(text: str) -> dict[str, list[str]]:
    """Lines by function, without origins: the page's split, written anew."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^(?=func @)", text, flags=re.M)[1:]:
        name = part.partition("@")[2].partition("(")[0]
        found[name] = [re.sub(r"\s+#! .*", "", line).rstrip() for line in part.strip().split("\n")]
    return found


@needs_chromium
def test_a_diff_marks_what_changed(page: Page, url: str, report: Report) -> None:
    at = next(i for i, p in enumerate(report.passes) if p.name == "fuse_add_norm" and p.changed)
    show(page, url, f"view=passes&pass={at}")
    gone, new = (
        page.texts("#diffs .changed > td.before, #diffs .gone > td.before"),
        page.texts("#diffs td.after"),
    )
    assert any("rms_norm(" in t and "add_rms_norm(" not in t for t in gone)
    assert any("add_rms_norm(" in t for t in new)
    assert "add_rms_norm" in page.texts("#diffs td.after span.changed")
    page.click("[aria-label='The next pass that changed something']")
    page.wait("document.querySelector('#pass h2').innerText !== 'fuse_add_norm'")
    following = next(p for p in report.passes[at + 1 :] if p.changed)
    assert page.text("#pass h2") == following.name
    shown = page.count("#passlist a")
    page.click("#changedonly")
    assert page.count("#passlist a") == sum(p.changed for p in report.passes) < shown == len(report.passes)


@needs_chromium
def test_near_misses(page: Page, report: Report) -> None:
    page.click("[data-view=misses]")
    page.wait("document.querySelector('#misslist .missgroup')")
    total = sum(len(p.misses) for p in report.passes)
    assert page.count("#misslist .nodes li") == total
    assert HOSTILE in page.text("#misslist")
    page.run("document.querySelector('#missfilter').focus()")
    page.type("%x_3 uses")
    page.wait("document.querySelectorAll('#misslist .nodes li').length === 1")
    assert page.text("#misslist .nodes code") == "%a_3 = add(%x, %y)"
    page.click("#misslist a.chip")
    page.wait("!document.querySelector('#passes').hidden")
    assert page.text("#pass h2") == report.passes[0].name


# -- links and other reports ------------------------------------------------------------------------------------------


@needs_chromium
def test_a_link_leads_to_what_was_looked_at(page: Page, url: str, report: Report) -> None:
    show(page, url, "view=step&bucket=decode-64&kernel=0&sort=-bytes&time=predicted")
    assert page.run("document.querySelector('#bucket').value") == "decode-64"
    assert page.count("tr.opened[data-row='0']") == 1
    assert page.run("document.querySelector('th.bytes').getAttribute('aria-sort')") == "ascending"
    assert page.run("document.querySelector('tr.opened').getBoundingClientRect().top") < 900
    for stranger in (
        "bucket=none&kernel=999&pass=77",
        "view=nothing&sort=nothing",
        "kernel=%22%5D",
        "view=passes&pass=-1",
    ):
        show(page, url, stranger)
        assert page.count("main section:not([hidden]) .panel") >= 1


@needs_chromium
def test_a_report_without_kernels(page: Page, url: str, report: Report, tmp_path: Path) -> None:
    """Level 0: passes alone."""
    bare = Report(**{**report.__dict__, "buckets": (), "kernels": (), "nodes": (), "picks": ()})
    write_page(bare, tmp_path / "bare.html")
    show(page, (tmp_path / "bare.html").as_uri())
    assert "no kernels" in page.text("#step")
    page.click("[data-view=passes]")
    page.wait("document.querySelector('#diffs .diff')")
    page.requests.clear()  # another file than the fixture's


@needs_chromium
def test_a_machine_of_unknown_speed(page: Page, report: Report, tmp_path: Path) -> None:
    machine = type(report.machine)("cpu-avx2", "CPU", 0.0, 0.0, 0.0, "not known", 2)
    write_page(Report(**{**report.__dict__, "machine": machine}), tmp_path / "unknown.html")
    show(page, (tmp_path / "unknown.html").as_uri())
    bucket: BucketReport = report.buckets[0]
    assert page.count("#roofline .point") == len(group_launches(report, bucket))
    assert "NaN" not in page.run("document.querySelector('#step').innerHTML")
    page.requests.clear()
