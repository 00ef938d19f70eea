"""Script names that tools could mistake for folders the product writes."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITTEN = {"runs", "data", "build", "dist"}
"""Folders in the checkout that commands of the README create. ruff takes them for first-party packages."""


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_no_script_shares_its_name_with_a_folder_that_the_product_writes(folder):
    names = {path.stem for path in (ROOT / folder).glob("*.py")}
    assert names
    assert names & WRITTEN == set()
