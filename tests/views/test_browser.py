"""A real browser shows the page, with everything on it used, and its console has no complaint."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.views.runs import Made, make_run
from titan_grpo.views import page
from titan_grpo.views.page import decoder
from titan_grpo.views.run import read_run

numbers = decoder([])

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

DRIVE = """<script>
document.querySelectorAll("details").forEach(node => { node.open = true; });
setTimeout(() => {
  const canvases = [...document.querySelectorAll("canvas")];
  for (const node of canvases)
    for (const type of ["mousemove", "mousedown", "mouseup", "mouseleave"])
      for (const clientX of [300, 500])
        node.dispatchEvent(new MouseEvent(type, {clientX, clientY: 60, bubbles: true}));
  document.querySelectorAll("button").forEach(node => node.click());
  document.body.dataset.driven = canvases.filter(node => node.width > 100).length;
}, 200);
</script>"""
"""Uses everything on the page that can be used."""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium on this machine (Debian: chromium-headless-shell)")
    return found


def opened(browser: str, html: Path) -> tuple[str, list[str]]:
    """The document after its scripts ran, and what its console says."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--virtual-time-budget=5000", "--window-size=1300,1000"]
    command += [f"--user-data-dir={html.parent / 'browser'}", "--dump-dom", html.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize(
    "made",
    [
        Made(steps=20, servers=3, slow_server=1, faulty_server=2),
        Made(steps=1, servers=1, finished=False),
        Made(steps=900, servers=4, faulty_server=0),
        Made(steps=0, servers=0, finished=False),
    ],
    ids=["short", "one step", "long", "nothing yet"],
)
def test_a_browser_shows_the_page_without_a_complaint(
    tmp_path: Path, browser: str, made: Made
) -> None:
    make_run(tmp_path, made)
    html = tmp_path / "driven.html"
    html.write_text(page.render(read_run(tmp_path), numbers).replace("</body>", DRIVE + "</body>"))
    document, console = opened(browser, html)
    assert console == []
    data = page.page_data(read_run(tmp_path), numbers)
    canvases = len(data["charts"]) + len(data["others"]) + (made.servers > 0)
    assert f'data-driven="{canvases}"' in document
    assert document.count("<li class=") == len(data["findings"])


def test_the_browser_check_hears_a_complaint(tmp_path: Path, browser: str) -> None:
    html = tmp_path / "broken.html"
    html.write_text(page.TEMPLATE.read_text().replace(page.MARK, "{}"))
    _, console = opened(browser, html)
    assert any("Uncaught" in line for line in console)
