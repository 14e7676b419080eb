"""Tests the console in Chromium.

    check.py REFRAIN PICTURES

REFRAIN is the binary. With UPDATE_DOCS=1, pictures of the page are put into the folder PICTURES.
"""

import os
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

from mesh import PATIENCE_SECONDS, QUESTIONS, Mesh, wait_until
from pictures import take
from playwright.sync_api import expect, sync_playwright

REFRAIN, PICTURES = sys.argv[1:3]
UPDATES_DOCS = bool(os.environ.get("UPDATE_DOCS"))
WIDE = {"width": 1280, "height": 800}
NARROW = {"width": 390, "height": 844}
VIEWS = ["overview", "workers", "tenants", "store", "try"]
KEY = "refrain-dev"

expect.set_options(timeout=1000 * PATIENCE_SECONDS)


def number(text):
    """A number as the page writes it."""
    return float(text.replace(",", ""))


class ConsoleTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        cls.mesh = Mesh(REFRAIN, cls.folder)
        cls.mesh.admin("POST", "tenants", {"name": "acme", "limits": {"tokens_per_day": 100000, "requests_per_minute": 60}})
        made = cls.mesh.admin("POST", "tenants/acme/keys", {"name": "ci"})
        cls.key, cls.key_id = made["key"], made["id"]
        wait_until("the key is known", lambda: cls.mesh.chat(cls.key, QUESTIONS[0]) == 200)
        for question in QUESTIONS:
            for key in [KEY, cls.key]:
                assert cls.mesh.chat(key, question) == 200
        cls.playwright = sync_playwright().start()
        # A sandbox of its own is not possible for root in a container.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        cls.browser = cls.playwright.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.playwright.stop()
        cls.mesh.stop()
        shutil.rmtree(cls.folder)

    def setUp(self):
        self.faults = []
        self.asked = set()

    def tearDown(self):
        self.assertEqual(self.faults, [])
        for url in self.asked:
            self.assertTrue(url.startswith(self.mesh.operations + "/"), f"the page asked a foreign host: {url}")

    def page(self, size=WIDE, scheme="light"):
        """A new window, before the operator signs in."""
        context = self.browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        self.addCleanup(context.close)
        page = context.new_page()
        page.on("console", lambda said: self.faults.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", lambda request: self.asked.add(request.url))
        page.goto(f"{self.mesh.operations}/console")
        return page

    def signed_in(self, view="overview", size=WIDE, scheme="light"):
        page = self.page(size, scheme)
        page.get_by_label("Token of an operator").fill(self.mesh.token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("Ready, 1 worker")).to_be_visible()
        page.evaluate(f"location.hash = '#/{view}'")
        return page

    def news(self, page):
        """Waits for new figures."""
        with page.expect_response("**/admin/figures"):
            pass

    def row(self, page, caption, head):
        """The texts of a table's row, by the heads of its columns."""
        table = page.get_by_role("table", name=caption, exact=False)
        heads = table.locator("thead th").all_inner_texts()
        cells = table.locator("tbody tr", has_text=head).first.locator("th, td").all_inner_texts()
        return dict(zip(heads, cells, strict=True))

    def test_nothing_is_shown_without_a_token(self):
        page = self.page()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        self.assertFalse(any("/admin/" in url for url in self.asked))
        page.get_by_label("Token of an operator").fill("rfo-wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("token is missing or unknown")
        self.assertIsNone(page.evaluate("sessionStorage.getItem('refrain-operator-token')"))
        # The browser itself reports the status of the refused call.
        self.faults = [fault for fault in self.faults if "401" not in fault]

    def test_figures_agree_with_the_metrics(self):
        page = self.signed_in()
        table = "What each source of drafts brought"
        expect(page.get_by_role("table", name=table, exact=False)).to_be_visible()

        def agree():
            row = self.row(page, table, "Tenant's earlier outputs")
            of = {"source": "suffix", "scope": "tenant"}
            drafted = self.mesh.metric("refrain_spec_drafted_tokens_total", **of)
            accepted = self.mesh.metric("refrain_spec_accepted_tokens_total", **of)
            steps = self.mesh.metric("refrain_spec_steps_total", **of)
            shown = [number(row[head]) for head in ("Steps", "Drafted", "Accepted")]
            return accepted > 0 and shown == [steps, drafted, accepted]

        wait_until("the page shows what /metrics has", agree)
        page.evaluate("location.hash = '#/store'")
        documents = page.locator("[data-figure=documents]")

        def same_documents():
            return number(documents.inner_text()) == self.mesh.metric("refrain_draft_store_documents") > 0

        wait_until("the page shows the documents of the store", same_documents)

    def test_a_gain_of_few_steps_is_no_figure(self):
        page = self.signed_in()
        tile = page.get_by_role("listitem").filter(has_text="Goodput by drafts").locator(".figure")

        def shows(expected, *series):
            """The tile with these series of the only worker."""
            def answer(route):
                answered = route.fetch()
                figures = answered.json()
                for part in figures["parts"]:
                    lines = [line for line in part["metrics"].splitlines() if not line.startswith("refrain_spec_gain_")]
                    part["metrics"] = "\n".join(lines + (list(series) if part["role"] == "gateway" else []))
                route.fulfill(response=answered, json=figures)

            page.route("**/admin/figures", answer)
            expect(tile).to_have_text(expected)
            page.unroute("**/admin/figures")

        def series(batch, plain, drafted, **ratios):
            labels = f'model="m",batch="{batch}"'
            for side, steps in ("plain", plain), ("drafted", drafted):
                yield f'refrain_spec_gain_steps{{{labels},side="{side}"}} {steps}'
            for name, value in ratios.items():
                yield f"refrain_spec_gain_{name}{{{labels}}} {value}"

        shows("–no steps of late to compare")
        shows("few data120 steps", *series(1, 20, 100))
        shows("few data± 45 %, 120 steps", *series(1, 20, 100, error_ratio=0.45))
        sure = [*series(1, 200, 1000, ratio=2, error_ratio=0.06), *series(4, 100, 3000, ratio=1.2, error_ratio=0.1)]
        shows("1.40×of plain decoding, ± 6.8 %, 4,300 steps", *sure)
        shows("1.40×of plain decoding, ± 6.8 %, 4,300 steps", *sure, *series(16, 9, 90, error_ratio=0.4))

    def test_the_rate_of_tokens_follows_the_load(self):
        page = self.signed_in()
        tile = page.get_by_role("listitem").filter(has_text="Output tokens per second").locator("strong")

        def rises():
            self.mesh.chat(KEY, QUESTIONS[0])
            shown = tile.inner_text()
            return shown not in ("–", "0") and float(shown.rstrip("k")) > 0

        wait_until("the rate of tokens rises", rises)
        chart = page.get_by_role("img", name="Throughput")
        chart.focus()
        page.keyboard.press("ArrowLeft")
        figure = page.locator(".figure", has=chart)
        self.assertRegex(figure.locator("output").inner_text(), r"^at \d\d:\d\d:\d\d$")
        figure.locator("summary").click()
        # The page fills the table after it has opened it.
        expect(figure.locator("tbody tr")).not_to_have_count(0)

    def test_a_worker_drains_and_comes_back(self):
        page = self.signed_in("workers")
        page.get_by_role("button", name="Drain …").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("No other worker serves refrain-tiny")
        dialog.get_by_role("button", name="Drain").click()
        expect(dialog.get_by_role("status")).to_contain_text("drains")
        dialog.get_by_role("button", name="Close").click()
        expect(page.get_by_role("table", name="Workers")).to_contain_text("Drained")
        self.assertTrue(self.mesh.admin("GET", "figures")["workers"][0]["draining"])
        page.get_by_role("button", name="Put back to work").click()
        dialog.get_by_role("button", name="Put back to work").click()
        dialog.get_by_role("button", name="Close").click()
        expect(page.get_by_role("table", name="Workers")).to_contain_text("Works")
        wait_until("the worker answers", lambda: self.mesh.chat(KEY, QUESTIONS[0]) == 200)
        self.assertLess(self.mesh.audit().index("worker worker-0 drained"),
                        self.mesh.audit().index("worker worker-0 put back to work"))

    def test_a_worker_shows_its_weights_and_its_pause(self):
        page = self.signed_in("workers")
        table = page.get_by_role("table", name="Workers")
        expect(table).to_contain_text("as started")
        self.mesh.order("update_weight_version", {"new_version": "6"})
        expect(table).to_contain_text("version 6")
        self.mesh.order("pause?mode=keep")
        expect(table).to_contain_text("Paused, 0 held")
        self.mesh.order("resume")
        expect(table).to_contain_text("Works")

    def test_a_tenant_shows_its_use_and_a_key_is_rotated(self):
        page = self.signed_in("tenants")
        expect(page.get_by_role("table", name="Tenants", exact=False)).to_contain_text("of 100k")

        def agrees():
            day = self.row(page, "Tenants", "acme")["Tokens today"].split(" of ")[0]
            report = self.mesh.admin("GET", "usage?group_by=tenant&tenant=acme")["data"]
            used = sum(line["input_tokens"] + line["output_tokens"] for line in report)
            return used > 0 and number(day) == used

        wait_until("the page shows the use of the day", agrees)
        keys = page.get_by_role("table", name="Keys")
        keys.locator("tr", has_text=self.key_id).get_by_role("button", name="Rotate …").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Hours for which the old key goes on").fill("0")
        dialog.get_by_role("button", name="Rotate").click()
        shown = dialog.get_by_label("The new key")
        expect(shown).to_contain_text("rfk-")
        successor = shown.inner_text()
        dialog.get_by_role("button", name="Close").click()
        # The page takes a dialog away once its event of closing has arrived. A hidden one has no role.
        expect(page.locator("dialog")).to_have_count(0)
        self.assertNotIn(successor, page.content())
        wait_until("the new key opens", lambda: self.mesh.chat(successor, QUESTIONS[0]) == 200)
        wait_until("the old key ends", lambda: self.mesh.chat(self.key, QUESTIONS[0]) == 401)
        type(self).key, type(self).key_id = successor, successor.split("-")[1]

    def test_documents_of_a_tenant_are_erased_with_a_proof(self):
        tenant = "dev-5"
        for question in QUESTIONS:
            self.assertEqual(self.mesh.chat("refrain-dev-5", question), 200)
        wait_until("the store has the outputs", lambda: self.mesh.metric("refrain_draft_store_pending_tokens") == 0
                   and self.mesh.metric("refrain_upload_pending_tokens") == 0)
        page = self.signed_in("tenants")
        line = page.get_by_role("table", name="Tenants", exact=False).locator("tr", has=page.get_by_text(tenant, exact=True))
        line.get_by_role("button", name="Erase …").click()
        dialog = page.get_by_role("dialog")
        confirm = dialog.get_by_role("button", name="Erase")
        expect(confirm).to_be_disabled()
        dialog.get_by_label("Also erase its usage").check()
        dialog.get_by_label(f"Type {tenant} to confirm").fill(tenant)
        confirm.click()
        expect(dialog.get_by_role("status")).to_contain_text("no file of the draft store holds these tokens any more")
        proof = dialog.get_by_label("The proof of the erasure").inner_text()
        self.assertRegex(proof, r'"documents": [1-9]')
        self.assertRegex(proof, r'"documents_left": 0')
        self.assertRegex(proof, r'"rows": [1-9]')
        self.assertIn(f"everything of tenant {tenant} erased", self.mesh.audit())

    def test_the_store_is_compacted(self):
        page = self.signed_in("store")
        page.get_by_role("button", name="Compact …").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="Compact").click()
        expect(dialog.get_by_role("status")).to_contain_text("Given back")
        dialog.get_by_role("button", name="Close").click()
        self.assertIn("draft store compacted", self.mesh.audit())

    def send(self, page, key=KEY):
        page.get_by_label("Key of a tenant").fill(key)
        page.get_by_role("button", name="Send").click()

    def test_a_request_tells_its_story(self):
        page = self.signed_in("try")
        self.send(page, "no key")
        expect(page.get_by_role("alert").filter(has_text="key")).to_be_visible()
        # The browser itself reports the status of the refused call.
        self.faults = [fault for fault in self.faults if "401" not in fault]
        stories = page.locator(".story:not(.live)")
        # The observer keeps each state of the growing answer.
        page.evaluate("""() => {
          window.grown = [];
          new MutationObserver(() => {
            for (const text of document.querySelectorAll(".story.live pre.tokens")) grown.push(text.innerText);
          }).observe(document.querySelector(".stories"), { childList: true, subtree: true });
        }""")
        for count in (1, 2):
            self.send(page)
            expect(stories).to_have_count(count)
            expect(page.locator(".story.live")).to_have_count(0)
        whole = stories.first.locator("pre.tokens").inner_text()
        grown = page.evaluate("grown")
        self.assertIn(whole, grown)
        self.assertTrue(all(whole.startswith(text) for text in grown), grown)
        newest = stories.first
        told = int(newest.get_attribute("data-steps")), int(newest.get_attribute("data-tokens"))
        self.assertLess(told[0], told[1], "drafts of the first answer bring several tokens per step")
        tokens = newest.locator("pre.tokens span")
        self.assertEqual(tokens.count(), told[1])
        # Equal prompts of a minute are a group, and it may be credited.
        earlier = "pre.tokens :is(.of-suffix-tenant, .of-suffix-group)"
        self.assertGreater(newest.locator(earlier).count(), told[1] // 2)
        self.assertIn("SELECT", newest.locator("pre.tokens").inner_text())
        self.assertEqual(newest.locator(".strip [data-step]").count(), told[0])
        tokens.first.hover()
        expect(newest.locator(".about")).to_contain_text("Step 1, after")
        page.get_by_role("combobox", name="Drafts").select_option("off")
        self.send(page)
        expect(stories.first).to_contain_text("nothing was drafted")
        self.assertEqual(stories.first.locator("pre.tokens").inner_text(), newest.locator("pre.tokens").inner_text())
        # The key is in its field, and nowhere else.
        self.assertNotIn(KEY, page.evaluate("document.body.innerText"))
        self.assertEqual(page.evaluate("Object.keys(localStorage).length"), 0)

    def test_everything_can_be_reached_by_keyboard(self):
        page = self.page()
        # The field of the token has the focus.
        page.keyboard.type(self.mesh.token)
        page.keyboard.press("Enter")
        expect(page.get_by_text("Ready, 1 worker")).to_be_visible()
        expect(page.locator("#view")).to_be_focused()
        page.reload()
        expect(page.get_by_text("Ready, 1 worker")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Workers")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Workers")).to_be_visible()
        expect(page.locator("#view")).to_be_focused()
        page.keyboard.press("Tab")
        button = page.get_by_role("button", name="Drain …")
        expect(button).to_be_focused()
        # New figures leave the focus where it is.
        self.news(page)
        self.news(page)
        expect(button).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog").get_by_role("button", name="Cancel")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(button).to_be_focused()

    def test_a_lost_connection_is_told_and_ends(self):
        page = self.signed_in()
        page.route("**/admin/figures", lambda route: route.abort())
        expect(page.get_by_role("alert")).to_contain_text("The figures are those of")
        page.unroute("**/admin/figures")
        expect(page.get_by_text("Ready, 1 worker")).to_be_visible()
        expect(page.locator("#notice")).to_be_hidden()
        # The browser itself reports the calls that failed.
        self.faults = [fault for fault in self.faults if "ERR_FAILED" not in fault]

    def test_every_view_fits_wide_and_narrow_windows_light_and_dark(self):
        for size in (WIDE, NARROW):
            for scheme in ("light", "dark"):
                page = self.signed_in(size=size, scheme=scheme)
                for view in VIEWS:
                    with self.subTest(size=size, scheme=scheme, view=view):
                        page.evaluate(f"location.hash = '#/{view}'")
                        expect(page.locator("nav a[aria-current]")).to_have_attribute("href", f"#/{view}")
                        self.news(page)
                        over = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                        self.assertLessEqual(over, 0, "the page is wider than its window")
                dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(247, 247, 245)"
                self.assertEqual(dark, scheme == "dark")
                page.context.close()

    def test_signing_out_forgets_the_token(self):
        page = self.signed_in()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        page.reload()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()

    @unittest.skipUnless(UPDATES_DOCS, "pictures are taken only with UPDATE_DOCS=1")
    def test_pictures(self):
        take(self, Path(PICTURES))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
