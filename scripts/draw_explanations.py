"""Draw the pictures of docs/explanation and write the tables of its pages; the project computes every number.

Usage: scripts/draw_explanations.py
"""

from pathlib import Path

from explained import ROOT
from explanation_pictures import PICTURES
from explanation_tables import BLOCKS, MAKER
from matplotlib import pyplot as plt
from picture_card import LIGHT, save
from publish_results import renewed

FOLDER = ROOT / "docs" / "explanation"


def page_of(name: str, page: str) -> str:
    """Return a page's text with its tables renewed."""
    for mark, write in BLOCKS[name].items():
        page = renewed(page, mark, write(), MAKER)
    return page


def main(folder: Path = FOLDER) -> None:
    """Write all pictures and all tables."""
    for name, draw in PICTURES.items():
        figure = draw(LIGHT)
        save(figure, folder / f"{name}.svg", MAKER)
        plt.close(figure)
    for name in BLOCKS:
        path = folder / f"{name}.md"
        path.write_text(page_of(name, path.read_text()))
    print(f"written: {len(PICTURES)} pictures, and the tables of {len(BLOCKS)} pages")


if __name__ == "__main__":
    main()
