"""Takes the pictures of the documentation, and reduces their colours."""

import random
import threading

from mesh import QUESTIONS
from PIL import Image
from playwright.sync_api import expect

# Colours of a picture, the most frequent ones: enough for text and charts, and so areas keep theirs.
COLOURS = 256
# Seconds of load before a picture, so that charts have something to show.
LOAD_SECONDS = 150


def load(mesh, ends):
    """Sends questions of three tenants, in turns that come and go, until the end."""
    draw = random.Random(7)
    cities = ["Oslo", "Rome", "Lima", "Cairo", "Perth", "Quito"]
    while not ends.is_set():
        key = draw.choice(["refrain-dev", "refrain-dev", "refrain-dev-2", "refrain-dev-3"])
        question = draw.choice(QUESTIONS)
        kind = draw.random()
        if kind < 0.35:
            question = f"How many orders does {draw.choice(cities)} have above {draw.randint(1, 900)}?"
        # Some are samples of a group, which share drafts while they run.
        mesh.chat(key, question, **({"n": 3, "temperature": 0.6} if kind > 0.85 else {}))
        ends.wait(draw.random() * 0.4)


def save(page, path):
    """Takes a picture of what the window shows."""
    page.screenshot(path=path)
    with Image.open(path) as taken:
        picture = taken.convert("RGB")
    counted = sorted(picture.getcolors(picture.width * picture.height), reverse=True)
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in counted[:COLOURS] for part in colour])
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)


def take(test, folder):
    """Takes three pictures: the overview, the story of a request in the dark, and the tenants on a telephone."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = threading.Event()
    threads = [threading.Thread(target=load, args=(test.mesh, ends)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        page = test.signed_in(size={"width": 1280, "height": 1000})
        page.wait_for_timeout(1000 * LOAD_SECONDS)
        save(page, folder / "overview.png")
        dark = test.signed_in("try", size={"width": 1280, "height": 800}, scheme="dark")
        for count in (1, 2):
            test.send(dark)
            expect(dark.locator(".story")).to_have_count(count)
        save(dark, folder / "request.png")
        narrow = test.signed_in("tenants", size={"width": 390, "height": 844})
        narrow.wait_for_timeout(3000)
        save(narrow, folder / "tenants.png")
    finally:
        ends.set()
        for thread in threads:
            thread.join()
