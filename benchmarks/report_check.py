"""Open a report in headless Chromium, on a phone and on a desk, light and dark.

    pip install playwright; python benchmarks/report_check.py PAGE.html --out FOLDER

Fails on a console message of warning or error, on any request but the page's own, and on a body
that scrolls sideways. Writes a screenshot of every variant, to be looked at.
"""

import argparse
import sys
from pathlib import Path

from playwright.sync_api import ConsoleMessage, Page, Request, sync_playwright

WIDTHS = {"phone": 390, "desktop": 1280}
SCHEMES = ("light", "dark")


def check(page: Page, url: str, complaints: list[str]) -> None:
    """Open the page, and note what it should not do."""

    def note_message(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def note_request(request: Request) -> None:
        if request.url != url and not request.url.startswith("data:"):
            complaints.append(f"request: {request.url}")

    page.on("console", note_message)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", note_request)
    page.goto(url)
    page.evaluate("document.fonts.ready")
    wide = page.evaluate("document.documentElement.scrollWidth")
    if wide > page.viewport_size["width"]:
        complaints.append(f"the body is {wide} px wide")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=options.chromium)
        for path in options.pages:
            for name, width in WIDTHS.items():
                for scheme in SCHEMES:
                    complaints: list[str] = []
                    page = browser.new_page(
                        viewport={"width": width, "height": 900}, color_scheme=scheme
                    )
                    check(page, path.resolve().as_uri(), complaints)
                    shot = options.out / f"{path.stem}-{name}-{scheme}.png"
                    page.screenshot(path=shot, full_page=True)
                    page.close()
                    failed |= bool(complaints)
                    print(f"{shot}: {'; '.join(complaints) or 'nothing to complain of'}")
        browser.close()
    sys.exit(failed)


if __name__ == "__main__":
    main()
