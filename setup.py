"""What depends on `address.ini`: the project's links, and those of README on a package index."""

import configparser
import re
from pathlib import Path

from setuptools import setup

FOLDER = Path(__file__).parent
address = configparser.ConfigParser()
address.read(FOLDER / "address.ini", encoding="utf-8")
about = address["address"]
repository = about["repository"]


def absolute(readme):
    """Return README with links to files of the repository, and without comments for its tests."""
    readme = re.sub(r" ?<!-- .*? -->", "", readme)
    files = r"\]\((?!https?:|#)([^)]+)\)"
    pictures = rf"(!\[[^\]]*){files}"
    readme = re.sub(pictures, rf"\1]({repository}/raw/main/\2)", readme)
    return re.sub(files, rf"]({repository}/blob/main/\1)", readme)


setup(
    author=about["author"],
    author_email=about["email"] or None,
    long_description=absolute((FOLDER / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    project_urls={
        "Repository": repository,
        "Documentation": about["documentation"],
        "Changes": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    },
)
