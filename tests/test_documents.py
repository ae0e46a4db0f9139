"""What the documents say twice, they say alike."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readme_shows_the_table_that_make_survive_wrote() -> None:
    rows = [line for line in (ROOT / "docs" / "survival.md").read_text().splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert "\n".join(rows) in (ROOT / "README.md").read_text()
    assert all(row.endswith("| 0 |") for row in rows[2:])
