"""Tests the page of `refrain analyze` in Chromium: from a telephone to a wall, light and dark.

    report.py REFRAIN MODEL

REFRAIN is the binary, and MODEL the folder of the shipped model.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from playwright.sync_api import sync_playwright

REFRAIN, MODEL = sys.argv[1:3]
EXAMPLE = Path(__file__).parents[2] / "examples" / "calls.jsonl"
WIDTHS = [320, 1280, 2560]
# The least contrast of text with what is behind it, by the guidelines for accessible pages (WCAG 2, level AA).
CONTRAST_MIN = 4.5
# The texts of the page with less contrast.
FAINT = """(least) => {
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (colour) => {
        const part = (value) => value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4;
        const [red, green, blue] = rgb(colour).map(part);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (rgb(colour)[3] !== 0) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const faint = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim();
        const element = walker.currentNode.parentElement;
        if (!text || element.closest("style")) continue;
        const style = getComputedStyle(element);
        const colours = [element.closest("svg") ? style.fill : style.color, behind(element)];
        const [low, high] = colours.map(light).sort((a, b) => a - b);
        if ((high + 0.05) / (low + 0.05) < least) faint.push([text, ...colours]);
    }
    return faint;
}"""
# The texts of pictures that are smaller than this many pixels, or reach out of their picture.
MISPLACED = """(least) => [...document.querySelectorAll("svg text")].filter((text) => {
    const [inner, outer] = [text, text.ownerSVGElement].map((element) => element.getBoundingClientRect());
    const size = parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a;
    return size < least || inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1;
}).map((text) => text.textContent)"""


class ReportTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp())
        # The same calls three times over: enough data for figures.
        lines = EXAMPLE.read_text().splitlines()
        calls = [json.loads(line) | {"session": f"{round}-{at % 20}"} for round in range(3) for at, line in enumerate(lines)]
        log = cls.folder / "calls.jsonl"
        log.write_text("\n".join(map(json.dumps, calls)))
        cls.page_file = cls.folder / "report.html"
        command = [REFRAIN, "analyze", log, "--tokenizer", f"{MODEL}/tokenizer.json", "--html", cls.page_file]
        cls.said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        cls.playwright = sync_playwright().start()
        # A sandbox of its own is not possible for root in a container.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        cls.browser = cls.playwright.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.playwright.stop()
        shutil.rmtree(cls.folder)

    def page(self, width, scheme):
        context = self.browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.addCleanup(context.close)
        page = context.new_page()
        page.on("request", lambda request: self.assertTrue(request.url.startswith("file:"), request.url))
        page.goto(self.page_file.as_uri())
        if folder := os.environ.get("PICTURES"):
            page.screenshot(path=f"{folder}/report-{width}-{scheme}.png", full_page=True)
        return page

    def test_the_page_answers_first(self):
        page = self.page(1280, "light")
        self.assertEqual(page.locator(".answer").inner_text(), self.said.splitlines()[0])
        self.assertEqual(page.locator("svg").count(), 3)
        self.assertGreater(page.locator("pre mark").count(), 0)

    def test_it_fits_and_is_readable_everywhere(self):
        for width in WIDTHS:
            for scheme in ["light", "dark"]:
                with self.subTest(width=width, scheme=scheme):
                    page = self.page(width, scheme)
                    self.assertLessEqual(page.evaluate("document.documentElement.scrollWidth"), width)
                    self.assertEqual(page.evaluate(FAINT, CONTRAST_MIN), [])
                    self.assertEqual(page.evaluate(MISPLACED, 10), [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
