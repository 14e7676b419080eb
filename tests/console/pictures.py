"""Takes the pictures of the documentation, and reduces their colours."""

import random
import threading

from mesh import QUESTIONS
from PIL import Image
from playwright.sync_api import expect

# Colours of a picture: enough for text and charts.
COLOURS = 256
LAMPS = (
    "CREATE TABLE lamps (\n  id INTEGER PRIMARY KEY,\n  room TEXT,\n  watts INTEGER\n);\n\n"
    "What is the average watts of the lamps per room?"
)
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


def nearest(colour, kept):
    """The place of the kept colour that is most like a colour."""
    return min(range(len(kept)), key=lambda place: sum((a - b) ** 2 for a, b in zip(colour, kept[place], strict=True)))


def save(page, path):
    """Takes a picture of what the window shows."""
    page.screenshot(path=path)
    with Image.open(path) as taken:
        picture = taken.convert("RGB")
    # The colours that a picture keeps are exact, and the others become the nearest of them. Strong colours count more
    # than shades of grey, since a dot in one of them means something.
    counted = picture.getcolors(picture.width * picture.height)
    ranked = sorted(counted, key=lambda of: of[0] * (1 + max(of[1]) - min(of[1])), reverse=True)
    kept = [colour for _, colour in ranked[:COLOURS]]
    places = {colour: nearest(colour, kept) for _, colour in counted}
    reduced = Image.new("P", picture.size)
    reduced.putpalette([part for colour in kept for part in colour])
    reduced.putdata([places[colour] for colour in picture.get_flattened_data()])
    reduced.save(path, optimize=True)


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
        test.send(dark)
        expect(dark.locator(".story:not(.live)")).to_have_count(1)
        # No tenant has asked this, so its answer has drafts from several sources.
        dark.get_by_label("Question").fill(LAMPS)
        test.send(dark)
        expect(dark.locator(".story:not(.live)")).to_have_count(2)
        save(dark, folder / "request.png")
        narrow = test.signed_in("tenants", size={"width": 390, "height": 844})
        narrow.wait_for_timeout(3000)
        save(narrow, folder / "tenants.png")
    finally:
        ends.set()
        for thread in threads:
            thread.join()
