"""The report page: as text, and as headless Chromium shows it."""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpc_dist.cli import EXIT_BAD_INPUT, main
from mpc_dist.planner.plan import Plan
from mpc_dist.report.page import build_page
from mpc_dist.report.plan_panel import best_of_each_kind, outcomes_of
from mpc_dist.report.run import read_run
from mpc_dist.training.config import ConfigParser
from mpc_dist.training.metrics import metrics_path, read_metrics
from mpc_dist.training.planning import apply_plan
from tests.report.test_run import cut_at_step, write_lines

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FIGURES = (
    "loss-by-step",
    "loss-by-time",
    "accuracy-by-boundary",
    "memory-by-rank",
    "throughput",
    "bubble-by-step",
    "timeline",
    "plan",
    "horizon-history",
)
NASTY = '<script>document.title="owned"</script>"\'&'
ASSETS = Path(build_page.__code__.co_filename).parent / "assets"


def figure(page: str, name: str) -> str:
    (found,) = re.findall(rf'<figure id="{name}".*?</figure>', page, flags=re.DOTALL)
    return found


@pytest.fixture(scope="module")
def page_of_all(run_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of run on one page: finished, planned, adaptive, of another task, crashed, and with a nasty name."""
    top = tmp_path_factory.mktemp("report")
    crashed = Path(shutil.copytree(run_folders["backprop"], top / "crashed"))
    cut_at_step(crashed, 15)
    nasty = Path(shutil.copytree(run_folders["horizon1"], top / NASTY.replace("/", "_")))
    for rank in (0, 1):
        lines = read_metrics(nasty, rank)
        lines[0]["config"]["data"]["path"] = NASTY
        for line in lines:
            line["time"] -= 1e6
        write_lines(nasty, rank, lines)
    names = ["horizon1", "backprop", "adaptive", "planned", "regression"]
    out = top / "report.html"
    assert (
        main(["report", *(str(run_folders[name]) for name in names), str(crashed), str(nasty), "--out", str(out)]) == 0
    )
    return out


def test_the_page_loads_nothing_from_elsewhere(page_of_all: Path):
    page = page_of_all.read_text()
    assert not re.findall(
        r"https?:|//[a-z]|@import|<(?:link|img|iframe|object|embed|base)\b(?! rel=\"icon\" href=\"data:,\")", page
    )
    assert re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith(("#", "data:,")) for link in re.findall(r'(?:src|href)="([^"]*)"', page))
    assert "default-src 'none'" in page


def test_what_comes_from_a_folder_is_escaped(page_of_all: Path):
    page = page_of_all.read_text()
    assert page.count("<script>") == 1
    assert "&lt;script&gt;document.title" in page


def test_one_run_gets_its_page_beside_its_metrics_and_several_here(run_folders, copy_of, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copy_of("horizon1")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.replace("\n", "") == f"report: {folder / 'report.html'}"
    assert main(["report", str(folder), str(run_folders["backprop"])]) == 0
    assert {figure for figure in FIGURES if f'id="{figure}"' in Path("report.html").read_text()} == set(FIGURES)


def test_a_figure_without_data_says_why_in_one_line(run_folders: dict[str, Path]):
    page = build_page([read_run(run_folders["horizon1"])])
    assert "horizon1: no plan, trained with a fixed horizon." in figure(page, "plan")
    assert "horizon1: trained with a fixed horizon." in figure(page, "horizon-history")
    for name in ("plan", "horizon-history"):
        assert "<svg" not in figure(page, name)
    for name in set(FIGURES) - {"plan", "horizon-history"}:
        assert 'class="reason"' not in figure(page, name)


def test_a_run_that_has_only_begun_has_a_page(copy_of: Callable[[str], Path]):
    folder = copy_of("horizon1")
    for rank in (0, 1):
        write_lines(folder, rank, read_metrics(folder, rank)[:1])
    page = build_page([read_run(folder, now=read_metrics(folder, 0)[0]["time"])])
    assert "running" in page
    for name in FIGURES:
        assert 'class="reason"' in figure(page, name)


def test_a_diverged_run_has_a_page(copy_of: Callable[[str], Path]):
    folder = copy_of("horizon1")
    lines = read_metrics(folder, 1)
    for line in lines:
        if line["event"] == "step" and line["step"] > 12:
            line["losses"] = {"4": float("nan") if line["step"] % 2 else float("inf")}
        if line["event"] == "evaluation":
            line["scores"]["4"]["loss"] = float("nan")
    write_lines(folder, 1, lines)
    page = build_page([read_run(folder)])
    assert "the loss is not finite at some steps" in figure(page, "loss-by-step")
    assert (
        "nan"
        not in re.sub(r"<(?:title|td|span)[^>]*>[^<]*", "", page)
        .lower()
        .partition("<script>")[0]
        .partition("<main>")[2]
    )


def test_a_regression_shows_the_test_loss_at_every_boundary(run_folders: dict[str, Path]):
    shown = figure(build_page([read_run(run_folders["regression"])]), "accuracy-by-boundary")
    assert "test loss by boundary" in shown
    assert shown.count('class="mark"') == 2 + 1  # two boundaries, and the legend


def test_the_timeline_marks_and_states_the_bubble(run_folders: dict[str, Path]):
    shown = figure(build_page([read_run(run_folders["backprop"])]), "timeline")
    assert re.search(
        r"Step \d+: [\d.]+ ms measured with a bubble of [\d.]+\s%, [\d.]+ ms simulated with [\d.]+\s%", shown
    )
    assert shown.count(">measured<") == shown.count(">simulated<") == 1
    assert 'class="idle"' in shown
    # 4 micro-batches, forward and two halves, and the update, on each of 2 ranks, measured and simulated: halves that
    # ended up side by side are one bar.
    assert 2 * 2 * (4 * 2 + 1) <= shown.count('class="work ') <= 2 * 2 * (4 * 3 + 1)


def test_the_plan_is_drawn_from_its_file(run_folders: dict[str, Path]):
    run = read_run(run_folders["planned"])
    assert run.plan is not None
    shown = figure(build_page([run]), "plan")
    kinds = best_of_each_kind(run.plan)
    assert run.plan.chosen in kinds
    for kind in kinds:
        assert kind.name in shown
    outcomes = outcomes_of(run, run.plan)
    assert [one.name for one in outcomes] == [
        "step time",
        *(f"bytes of stage {stage}" for stage in range(run.num_stages)),
    ]
    assert outcomes[0].predicted == run.plan.chosen.step_seconds
    assert [one.measured for one in outcomes] == [run.step_seconds, *(rank.rank_bytes for rank in run.ranks)]


def test_a_run_with_checkpoints_can_be_gone_on_with_and_exported(run_folders: dict[str, Path]):
    folder = run_folders["horizon1"]
    page = build_page([read_run(folder)])
    line = re.findall(r"<code>(torchrun .*?)</code>", page)[1]
    config, _ = ConfigParser(shlex.split(line)[5:], prog="", description="").parse()
    assert (config.training.folder, config.checkpoints.resume) == (str(folder), "auto")
    assert config.training.steps == 2 * read_run(folder).config["training"]["steps"]
    assert f"mpc-dist export {folder} --to {folder}-weights" in page


@pytest.mark.parametrize("name", ["horizon1", "planned", "adaptive"])
def test_the_printed_command_repeats_the_run(name: str, run_folders: dict[str, Path]):
    folder = run_folders[name]
    line = re.findall(r"<code>(torchrun .*?)</code>", build_page([read_run(folder)]))[0]
    words = shlex.split(line)
    assert words[:5] == ["torchrun", "--standalone", "--nproc-per-node", "2", "launch/train.py"]
    parser = ConfigParser(words[5:], prog="", description="")
    parser.parser.add_argument("--plan")
    config, options = parser.parse()
    if name == "planned":
        config = apply_plan(config, Plan.read(Path(options.plan)))
    ran = read_run(folder).config
    assert config.training.folder == f"{folder}-again"
    again = json.loads(json.dumps(config.as_dict()))
    again["training"]["folder"] = ran["training"]["folder"]
    assert again == ran


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [folder / "nowhere"], "nowhere is no run folder"),
        (lambda folder: [folder], "give a folder that launch/train.py wrote"),
    ],
)
def test_a_folder_that_is_no_run_is_said_in_one_line(make, message, tmp_path: Path, capsys):
    assert main(["report", *map(str, make(tmp_path))]) == EXIT_BAD_INPUT
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_as_the_page_is_refused(run_folders: dict[str, Path], tmp_path: Path, capsys):
    assert main(["report", str(run_folders["horizon1"]), "--out", str(tmp_path)]) == EXIT_BAD_INPUT
    assert f"is a folder; name a file in it, e.g. {tmp_path / 'report.html'}" in capsys.readouterr().err


def test_colours_of_runs_stand_out_in_both_modes():
    """WCAG asks for a contrast of 3 of graphics and 4.5 of text."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        high, low = sorted((luminance(one), luminance(other)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    blocks = re.findall(r"\{([^{}]*--panel:[^{}]*)\}", (ASSETS / "page.css").read_text())
    assert len(blocks) == 3
    assert "".join(blocks[1].split()) == "".join(blocks[2].split())  # the system's dark mode and the button's
    for block in blocks:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        assert len([name for name in colours if name.startswith("run-")]) == 8
        for name in colours:
            if name.startswith("run-"):
                assert contrast(colours[name], colours["panel"]) >= 3, name
        for name in ("ink", "quiet", "accent"):
            assert contrast(colours[name], colours["panel"]) >= 4.5, name


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    if not (CHROMIUM.exists() and DRIVER.exists()):
        pytest.skip(f"no headless browser: {CHROMIUM} and {DRIVER} are not both there")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync"
    ).split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


def open_page(browser: Any, page: Path, *, width: int = 1280, theme: str = "light") -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    features = [
        {"name": "prefers-color-scheme", "value": theme},
        {"name": "prefers-reduced-motion", "value": "reduce"},  # a button that is still moving cannot be clicked
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())


def background(browser: Any) -> tuple[int, ...]:
    colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    return tuple(map(int, re.findall(r"\d+", colour)))


def test_chromium_shows_every_figure_without_an_error(browser, page_of_all: Path):
    open_page(browser, page_of_all)
    assert browser.get_log("browser") == []
    found = browser.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('figure')].map(figure => {"
        "  const charts = [...figure.querySelectorAll('svg.chart')];"
        "  const shapes = charts.map(one => one.querySelectorAll('.line, .mark, .bar, .work').length);"
        "  const boxes = charts.map(one => one.getBoundingClientRect());"
        "  return [figure.id, {"
        "    shapes: Math.min(...shapes), width: Math.min(...boxes.map(b => b.width)),"
        "    height: Math.min(...boxes.map(b => b.height)),"
        "    named: charts.every(one => document.getElementById(one.getAttribute('aria-labelledby')).textContent"
        "                              && document.getElementById(one.getAttribute('aria-describedby')).textContent)}];"
        "}))"
    )
    assert set(found) == set(FIGURES)
    for name, figure_found in found.items():
        assert figure_found["shapes"] >= 1, name
        assert figure_found["width"] > 300, name
        assert figure_found["height"] > 80, name
        assert figure_found["named"], name


def test_a_name_with_a_script_is_shown_and_not_run(browser, page_of_all: Path):
    open_page(browser, page_of_all)
    assert browser.title == "7 runs · mpc_dist report"
    names = browser.execute_script("return [...document.querySelectorAll('.card .name')].map(one => one.textContent)")
    assert names[-1] == NASTY.replace("/", "_")


def test_every_run_has_a_card_with_its_end_and_its_windows(browser, page_of_all: Path):
    open_page(browser, page_of_all)
    states = browser.execute_script("return [...document.querySelectorAll('.status')].map(one => one.textContent)")
    assert states[:5] == ["finished"] * 5
    assert states[5] in ("running", "interrupted")  # by its clock: the copy is as young as the run
    maps = browser.execute_script("return [...document.querySelectorAll('.map')].map(one => one.textContent)")
    assert [text.splitlines()[0] for text in maps[:2]] == ["4 blocks, readouts at 2, 4", "4 blocks, readouts at 4"]


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_does_not_overflow_sideways(width: int, browser, page_of_all: Path):
    open_page(browser, page_of_all, width=width)
    inner, outer = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert inner <= outer <= width


def test_labels_are_not_cut_off(browser, page_of_all: Path):
    open_page(browser, page_of_all)
    cut = browser.execute_script(
        "return [...document.querySelectorAll('svg.chart text')].filter(text => {"
        "  const a = text.getBoundingClientRect(), b = text.ownerSVGElement.getBoundingClientRect();"
        "  return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;"
        "}).map(text => text.textContent)"
    )
    assert cut == []


def test_the_systems_dark_mode_and_the_button_change_the_colours(browser, page_of_all: Path):
    open_page(browser, page_of_all, theme="dark")
    browser.execute_script("localStorage.clear()")
    open_page(browser, page_of_all, theme="dark")
    dark = background(browser)
    line = "return getComputedStyle(document.querySelector('#loss-by-step .run-0 .line')).stroke"
    dark_line = browser.execute_script(line)
    assert max(dark) < 64
    browser.find_element("id", "theme").click()
    assert min(background(browser)) > 192
    assert browser.execute_script(line) != dark_line
    browser.find_element("id", "theme").click()
    assert background(browser) == dark
    browser.execute_script("localStorage.clear()")
    open_page(browser, page_of_all, theme="light")
    assert min(background(browser)) > 192


def test_every_command_has_a_button_that_copies(browser, page_of_all: Path):
    open_page(browser, page_of_all)
    assert browser.execute_script(
        "return [...document.querySelectorAll('.command')]"
        ".every(one => one.querySelector('.copy') && one.querySelector('code'))"
    )
    browser.execute_script(
        "window.copied = null; navigator.clipboard.writeText = async text => { window.copied = text; };"
    )
    button = browser.find_element("css selector", ".copy")
    button.click()
    assert browser.execute_script("return window.copied").startswith("torchrun --standalone --nproc-per-node 2 launch/")
    assert button.text == "Copied"


def test_pointing_at_a_curve_shows_its_value(browser, page_of_all: Path, run_folders: dict[str, Path]):
    open_page(browser, page_of_all)
    shown = browser.execute_script(
        "const chart = document.querySelector('#loss-by-step svg.chart');"
        "chart.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const box = chart.getBoundingClientRect();"
        "const first = JSON.parse(chart.dataset.hover).series[0].points[0];"
        "const place = first[0] * box.width / chart.viewBox.baseVal.width;"
        "chart.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + place, clientY: box.top + 50}));"
        "const pointer = document.getElementById('pointer');"
        "return [pointer.hidden, pointer.textContent];"
    )
    loss = read_run(run_folders["horizon1"]).train_losses[0].value
    assert shown[0] is False
    assert shown[1].startswith(f"horizon1, training, step 1{loss:.4g}")


def test_the_browser_checks_can_fail(browser, tmp_path: Path):
    """A page with a script that the policy forbids, and a figure that is too wide, is caught."""
    page = tmp_path / "bad.html"
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    page.write_text(
        f'{policy}<script>1</script><div style="width: 3000px">wide</div>' + "<pre>" + "wide" * 900 + "</pre>"
    )
    open_page(browser, page)
    assert browser.get_log("browser") != []
    assert browser.execute_script("return document.documentElement.scrollWidth") > 1280


def test_metrics_files_are_not_changed_by_a_report(run_folders: dict[str, Path]):
    path = metrics_path(run_folders["horizon1"], 0)
    before = path.read_bytes()
    build_page([read_run(run_folders["horizon1"])])
    assert path.read_bytes() == before
